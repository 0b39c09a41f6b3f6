"""Global gradient norm and the clip coefficient of torch.nn.utils.clip_grad_norm_.

The squares are added in float64: a float32 sum overflows at a norm of 1.8e19, where the gradient can still be clipped.
"""

from __future__ import annotations

import math

import numpy as np

from cupyllm.errors import InputError

PIECE = 1 << 20  # elements at a time


def sum_of_squares(g: np.ndarray) -> float:
    """float64 sum of squares of a gradient of any shape; inf or nan when an element is."""
    flat = g.reshape(-1)
    total = 0.0
    for start in range(0, flat.size, PIECE):
        piece = flat[start : start + PIECE].astype(np.float64)
        total += float(piece @ piece)
    return total


def clip_coefficient(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)); 1 for a zero norm.

    Raises InputError on a norm that is inf or nan: scaling by it would turn every finite gradient into 0 or nan, so
    the caller must skip the step.
    """
    if not math.isfinite(norm):
        raise InputError(f"clip: got a gradient norm of {norm}, expected a finite number; skip this step")
    return min(1.0, max_norm / (norm + 1e-6))
