"""AdamW on device arrays, in torch.optim.AdamW's order: cu/adamw.cu, reference/adamw.py in NumPy.

    p *= 1 - lr weight_decay;   m += (1 - beta1) (g - m);   v = beta2 v + (1 - beta2) g^2
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps),   g = grad_scale * gradient

The step's numbers (bias corrections among them, computed in float64) lie in a small device array, so that one bound
program serves every step: upload `pack_scalars(...)` and run it again. Passing them as launch arguments was rejected:
the launch would have to be bound anew at every step for every parameter. Parameters with another weight_decay (norm
weights, by custom 0) get an array of their own.
"""

from __future__ import annotations

import math

import numpy as np

from cupyllm.backend.base import Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops.op import Cost, check

THREADS = 256
SCALARS = Spec((8,), "float32")  # what pack_scalars gives


def adamw(
    rec: Recorder, p: Tensor, g: Tensor, m: Tensor, v: Tensor, scalars: Tensor, p16_out: Tensor | None = None
) -> None:
    """Record one update of p, m and v (in place) from g; all float32 of one shape. `scalars`: SCALARS.

    p16_out, bfloat16 or float16 of the same shape, is written (=) with the new p rounded to nearest even: the weight
    that the next forward reads. No two arrays may overlap. Raises InputError.
    """
    for name, x in (("p", p), ("g", g), ("m", m), ("v", v)):
        check(x.shape == p.shape, "adamw", f"{name}'s shape", x.shape, f"p's, {p.shape}")
        check(x.dtype == "float32", "adamw", f"{name}'s dtype", x.dtype, "float32")
    got = Spec(scalars.shape, scalars.dtype)
    check(
        got == SCALARS, "adamw", "scalars", (got.dtype, got.shape), (SCALARS.dtype, SCALARS.shape), "use pack_scalars"
    )
    if p16_out is not None:
        check(p16_out.shape == p.shape, "adamw", "p16_out's shape", p16_out.shape, f"p's, {p.shape}")
        check(
            p16_out.dtype in ("bfloat16", "float16"), "adamw", "p16_out's dtype", p16_out.dtype, "bfloat16 or float16"
        )
    dtype = "bfloat16" if p16_out is None else p16_out.dtype
    rec.launch(
        kernel("adamw.cu", "adamw", dtypes={"P16_T": dtype}),
        -(-p.size // THREADS),
        THREADS,
        *(p, g, m, v, p16_out, scalars, p.size),
    )


def pack_scalars(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> np.ndarray:
    """float32 [8] for `adamw`; `step` counts from 1, `grad_scale` multiplies the gradient (the clip coefficient).

    Raises InputError on a step below 1, a beta outside [0, 1), or a number that is not finite.
    """
    check(step >= 1, "adamw", "step", step, "1 for the first update")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        check(0 <= beta < 1, "adamw", name, beta, "at least 0 and below 1")
    values = [
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**step),
        math.sqrt(1 - beta2**step),
        eps,
        grad_scale,
    ]
    if not all(math.isfinite(value) for value in values):
        raise InputError(
            f"adamw: lr {lr}, eps {eps}, weight_decay {weight_decay}, grad_scale {grad_scale}, expected finite "
            "numbers; skip a step whose gradient norm is not finite"
        )
    return np.array(values, np.float32)


def cost(num_elements: int, sixteen_bit_copy: bool = False) -> Cost:
    """Work of one update of `num_elements` parameters."""
    return Cost(14.0 * num_elements, num_elements * (28.0 + 2.0 * sixteen_bit_copy))
