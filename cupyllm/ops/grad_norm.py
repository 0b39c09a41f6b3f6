"""Global gradient norm and clipping on device arrays: cu/grad_norm.cu, reference/grad_norm.py in NumPy.

Each tensor's sum of squares is a float64 number of its own, added on the host: an fp32 sum overflows at a norm of
1.8e19, where a gradient can still be clipped, and a number per tensor lets an error name the parameter that holds an
inf or NaN. One running sum over all tensors was rejected: gradients come layer by layer, and an atomic sum has no
fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from cupyllm.backend.base import Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops.op import Cost, check

THREADS = 256
CTA_ELEMENTS = 8192  # 256 threads of 32 elements in grad_norm.cu
FACTOR = Spec((1,), "float32")


def sum_of_squares(rec: Recorder, g: Tensor, out: Tensor, slot: int = 0) -> None:
    """Record out[slot] = sum of squares of g (float32, any shape); inf or nan when g holds any.

    `out` is float64 [S], one slot a tensor, so that one download brings every tensor's number; other slots stay
    untouched. (A slot is an index and not a view, since kernels take 16-byte aligned arrays only.)
    """
    check(g.dtype == "float32", "sum_of_squares", "g's dtype", g.dtype, "float32")
    check(
        len(out.shape) == 1 and out.dtype == "float64", "sum_of_squares", "out", (out.dtype, out.shape), "float64 [S]"
    )
    check(0 <= slot < out.size, "sum_of_squares", "slot", slot, f"0 to {out.size - 1}")
    num_partial = -(-g.size // CTA_ELEMENTS)
    partial = rec.empty((num_partial,), "float64", "partial")
    dtypes = {"G_T": g.dtype}
    rec.launch(
        kernel("grad_norm.cu", "sum_of_squares_partial", dtypes=dtypes), num_partial, THREADS, g, partial, g.size
    )
    rec.launch(
        kernel("grad_norm.cu", "sum_of_squares_total", dtypes=dtypes), 1, THREADS, partial, out, num_partial, slot
    )


def scale(rec: Recorder, g: Tensor, factor: Tensor) -> None:
    """Record g *= factor[0] in place; g and factor [1] float32. On the device, the factor may change per run."""
    check(g.dtype == "float32", "scale", "g's dtype", g.dtype, "float32")
    got = Spec(factor.shape, factor.dtype)
    check(got == FACTOR, "scale", "factor", (got.dtype, got.shape), (FACTOR.dtype, FACTOR.shape))
    rec.launch(
        kernel("grad_norm.cu", "scale", dtypes={"G_T": g.dtype}), -(-g.size // THREADS), THREADS, g, factor, g.size
    )


def global_norm(sums: Iterable[float]) -> float:
    """Square root of the sum of per-tensor sums of squares, added in the order given (float64)."""
    total = 0.0
    for value in sums:
        total += float(value)
    return math.sqrt(total) if total >= 0 else total  # NaN stays NaN


def clip_coefficient(norm: float, max_norm: float) -> float:
    """torch.nn.utils.clip_grad_norm_'s factor: min(1, max_norm / (norm + 1e-6)), 1 for a zero norm.

    Raises InputError on a norm that is not finite (the caller must skip the step) or a max_norm that is not positive.
    """
    check(max_norm > 0, "clip", "the largest norm", max_norm, "a positive number")
    if not math.isfinite(norm):
        raise InputError(f"clip: gradient norm is {norm}, expected a finite number; skip this step")
    return float(min(1.0, max_norm / (norm + 1e-6)))


def cost(num_elements: int) -> Cost:
    """Work of sum_of_squares over float32 elements."""
    return Cost(2.0 * num_elements, 4.0 * num_elements)


def as_factor(coefficient: float) -> np.ndarray:
    """FACTOR's array for `scale`."""
    return np.array([coefficient], np.float32)
