"""INT8 per channel: weight[m,k] = q[m,k] scale[m], q in -127..127, symmetric.

One scale a row, so that a product needs it once, behind the sum: y[n,m] = scale[m] sum_k x[n,k] q[m,k]. scale is the
row's largest magnitude / 127. Rounding is to nearest, so the error is at most scale / 2 (and a rounding of the
division, 3 u32 of the magnitude). That is so of rows whose largest magnitude is at least 1.5e-36, 127 times the
smallest normal float32; below, scale is subnormal, its own rounding adds up to 9e-44 (127 2^-150) to the error, and
rows under 9e-44 become zeros. Magnitudes above LARGEST are refused: 127 scale, with scale rounded up, may be infinite
(float32's largest value is one of those). -128 is left out: with it the range would not be
symmetric, and zero not exact in the middle. A row of zeros has scale 0. Zero points were rejected: rows of weights are
centred (their mean is a few percent of their spread), and a zero point costs a sum over x.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.quant.checks import matrix

LIMIT = 127
LARGEST = 3.4e38  # times 1 + 2^-24, scale's rounding, is still below float32's 3.40282e38


@dataclass(frozen=True)
class Int8:
    codes: np.ndarray  # int8 [M,K]
    scales: np.ndarray  # float32 [M]


def quantize(weight: np.ndarray) -> Int8:
    """weight [M,K] of FLOATS. Raises InputError on another dtype, on values that are not finite or above LARGEST."""
    values = matrix(weight, "int8", limit=LARGEST)
    largest = np.abs(values).max(axis=1, initial=0.0)
    scales = (largest / np.float32(LIMIT)).astype(np.float32)
    divisors = np.where(scales > 0, scales, np.float32(1))
    codes = np.clip(np.rint(values / divisors[:, None]), -LIMIT, LIMIT)
    codes[scales == 0] = 0  # of a row whose scale underflows, too
    return Int8(codes.astype(np.int8), scales)


def dequantize(quantized: Int8) -> np.ndarray:
    """float32 [M,K]."""
    return quantized.codes.astype(np.float32) * quantized.scales[:, None]
