"""What every codec asks of the weights that it gets."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cupyllm.errors import InputError

FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def finite_float32(weight: np.ndarray, codec: str, limit: float = np.inf) -> np.ndarray:
    """`weight` in float32. `limit`: the largest magnitude that dequantises to finite float32 whatever is beside it.

    Raises InputError on what is no array of floats, and on values that are not finite or above the limit: a NaN or an
    infinity would take its whole block along, which nobody sees afterwards.
    """
    check_floats(weight, codec)
    with np.errstate(over="ignore"):  # what overflows is found below
        values = weight.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values).ravel())
    if bad.size:
        index = tuple(int(i) for i in np.unravel_index(bad[0], values.shape))
        raise InputError(
            f"{codec}: weight has {bad.size} values that are not finite in float32, the first at {index}, expected "
            "finite values; a weight like this is damaged"
        )
    largest = np.abs(values).max(initial=0.0)
    if largest > np.float32(limit):
        raise InputError(
            f"{codec}: weight's largest magnitude is {largest:.9g}, expected at most {limit:.9g}, above which "
            "dequantised values may overflow float32; scale the weight down"
        )
    return values


def check_floats(weight: object, codec: str) -> None:
    """Raises InputError on what is no NumPy array of floats; either byte order will do."""
    if not isinstance(weight, np.ndarray) or weight.dtype.type not in FLOATS:
        got = weight.dtype if isinstance(weight, np.ndarray) else type(weight).__name__
        raise InputError(
            f"{codec}: weight is {got}, expected a NumPy array of float16, bfloat16, float32 or float64; convert "
            "it first"
        )


def matrix(weight: np.ndarray, codec: str, group: int = 1, limit: float = np.inf) -> np.ndarray:
    """`finite_float32` of a matrix [M,K] whose K is a multiple of `group`. Raises InputError."""
    check_floats(weight, codec)
    if weight.ndim != 2:
        raise InputError(f"{codec}: weight shape is {weight.shape}, expected [out, in]")
    if weight.shape[1] % group:
        raise InputError(
            f"{codec}: weight has {weight.shape[1]} columns, expected a multiple of {group}; groups lie inside rows"
        )
    return finite_float32(weight, codec, limit)
