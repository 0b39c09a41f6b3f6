"""Train and run Qwen3 models of up to 32B parameters on one GPU: CUDA C through CuPy, every gradient by hand.

Importing this package loads no NumPy, no CuPy and touches no device; each command imports what it needs.
"""

__version__ = "0.1.0"
