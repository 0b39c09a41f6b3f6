"""The PTX simulator: runs kernels with NumPy, on machines without a GPU, and checks what they do (machine.py)."""
