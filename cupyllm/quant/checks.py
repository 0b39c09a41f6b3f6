"""What every codec asks of the weights that it gets."""

from __future__ import annotations

import numpy as np

from cupyllm.errors import InputError


def finite_float32(weight: np.ndarray, codec: str) -> np.ndarray:
    """`weight` in float32. Raises InputError where it is not finite: a NaN or an infinity would take its whole block
    along, which nobody sees afterwards."""
    with np.errstate(over="ignore"):  # what overflows is found below
        values = np.asarray(weight).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values).ravel())
    if bad.size:
        index = tuple(int(i) for i in np.unravel_index(bad[0], values.shape))
        raise InputError(
            f"{codec}: weight has {bad.size} values that are not finite in float32, the first at {index}, expected "
            "finite values; a weight like this is damaged"
        )
    return values


def matrix(weight: np.ndarray, codec: str, group: int = 1) -> np.ndarray:
    """`finite_float32` of a matrix [M,K] whose K is a multiple of `group`. Raises InputError."""
    if weight.ndim != 2:
        raise InputError(f"{codec}: weight shape is {weight.shape}, expected [out, in]")
    if weight.shape[1] % group:
        raise InputError(
            f"{codec}: weight has {weight.shape[1]} columns, expected a multiple of {group}; groups lie inside rows"
        )
    return finite_float32(weight, codec)
