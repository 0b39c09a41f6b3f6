"""Codecs of quantised weights in NumPy: int8 per row, int4 in groups, bitsandbytes' NF4; and their device layouts.

Each codec module has `quantize` (float [M,K] -> codes and scales) and `dequantize` (back, float32), with the largest
error stated and tested. layout.py turns codes into what the kernels of ops/quantized_linear.py read, and back.
"""
