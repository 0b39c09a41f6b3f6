"""AdamW (Loshchilov and Hutter 2019) as torch.optim.AdamW orders it.

    p *= 1 - lr weight_decay
    m += (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

with g = grad_scale * gradient (the clip coefficient, so that clipping costs no pass of its own). Decay is decoupled:
it never enters m and v. The arrays go through in pieces, so that temporaries stay small beside a large tensor.
"""

from __future__ import annotations

import math

import numpy as np

from cupyllm.errors import InputError

PIECE = 1 << 20  # elements at a time


def update(
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """One update of p, m and v in place; g is read only. All of one shape, C-contiguous. `step` counts from 1."""
    if step < 1:
        raise InputError(f"adamw: got step {step}, expected 1 for the first update")
    for name, array in (("p", p), ("g", g), ("m", m), ("v", v)):
        if array.shape != p.shape or not array.flags.c_contiguous:
            raise InputError(f"adamw: got {name} of shape {array.shape}, expected C-contiguous {p.shape}")
    step_size = lr / (1 - beta1**step)
    root_correction = math.sqrt(1 - beta2**step)
    flat_p, flat_g, flat_m, flat_v = (a.reshape(-1) for a in (p, g, m, v))
    one = p.dtype.type
    for start in range(0, p.size, PIECE):
        piece = slice(start, start + PIECE)
        param, m1, m2 = flat_p[piece], flat_m[piece], flat_v[piece]
        grad = flat_g[piece] * one(grad_scale)
        param *= one(1 - lr * weight_decay)
        m1 += one(1 - beta1) * (grad - m1)
        m2 *= one(beta2)
        m2 += one(1 - beta2) * grad * grad
        param -= one(step_size) * m1 / (np.sqrt(m2) / one(root_correction) + one(eps))
