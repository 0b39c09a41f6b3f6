"""RMSNorm (Zhang and Sennrich 2019): n = x r, r = (mean(x^2) + eps)^(-1/2), y = n weight.

A row of H*D elements is normalised in H chunks of D = weight.size: with H = 1 the usual norm over the hidden size,
else the norm over each head (Qwen3's q_norm and k_norm). Hugging Face's order: normalise in fp32, round to the
activation type, then multiply by the weight; in fp32 and fp64 the rounding is the identity.

Backward, with g = d_y weight: r depends on every x of its chunk, d_r/d_x = -r^3 x / D, hence
    d_x      = r g - x r^3 mean(g x) = r (g - n mean(g n))
    d_weight = sum over chunks of d_y n
"""

from __future__ import annotations

from typing import Any

import numpy as np


def forward(x: np.ndarray, weight: np.ndarray, *, eps: float) -> tuple[np.ndarray, tuple[Any, ...]]:
    """x [N,H*D], weight [D] -> y [N,H*D] (a new array)."""
    chunks = x.reshape(-1, weight.size)
    rstd = 1 / np.sqrt(np.mean(chunks * chunks, axis=1, keepdims=True) + x.dtype.type(eps))
    normed = chunks * rstd
    return (normed * weight).reshape(x.shape), (normed, rstd, weight)


def backward(saved: tuple[Any, ...], d_y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """d_y [N,H*D] -> (d_x [N,H*D], d_weight [D]). Sets, does not accumulate."""
    normed, rstd, weight = saved
    d_chunks = d_y.reshape(normed.shape)
    # The column sum runs over N*H rows: in float64, since NumPy adds along axis 0 one row after the other.
    d_weight = np.sum(d_chunks * normed, axis=0, dtype=np.float64).astype(d_y.dtype)
    g = d_chunks * weight
    d_x = rstd * (g - normed * np.mean(g * normed, axis=1, keepdims=True))
    return d_x.reshape(d_y.shape), d_weight
