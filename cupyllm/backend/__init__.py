"""Machines that run recorded launches: base.py is the contract, cuda.py the GPU, null.py measures host cost."""
