"""INT8 per channel: weight[m,k] = q[m,k] scale[m], q in -127..127, symmetric.

One scale a row, so that a product needs it once, behind the sum: y[n,m] = scale[m] sum_k x[n,k] q[m,k]. scale is the
row's largest magnitude / 127. Rounding is to nearest, so the error is at most scale / 2 (and a rounding of the
division, 3 u32 of the magnitude). -128 is left out: with it the range would not be symmetric, and zero not exact in
the middle. A row of zeros has scale 0. Zero points were rejected: rows of weights are centred (their mean is a few
percent of their spread), and a zero point costs a sum over x.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.quant.checks import matrix

LIMIT = 127


@dataclass(frozen=True)
class Int8:
    codes: np.ndarray  # int8 [M,K]
    scales: np.ndarray  # float32 [M]


def quantize(weight: np.ndarray) -> Int8:
    """weight [M,K], any float dtype. Raises InputError on values that are not finite."""
    values = matrix(weight, "int8")
    largest = np.abs(values).max(axis=1, initial=0.0)
    scales = (largest / np.float32(LIMIT)).astype(np.float32)
    divisors = np.where(scales > 0, scales, np.float32(1))
    codes = np.clip(np.rint(values / divisors[:, None]), -LIMIT, LIMIT)
    codes[scales == 0] = 0  # of a row whose scale underflows, too
    return Int8(codes.astype(np.int8), scales)


def dequantize(quantized: Int8) -> np.ndarray:
    """float32 [M,K]."""
    return quantized.codes.astype(np.float32) * quantized.scales[:, None]
