"""The simulator as a tool: any CUDA C, and every case of our own ops, run and checked (`cupyllm sim-check`)."""
