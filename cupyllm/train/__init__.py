"""Training: host-resident state, clipping, the optimizer step."""
