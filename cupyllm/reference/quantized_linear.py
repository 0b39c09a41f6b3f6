"""Linear with a quantised, frozen weight: y = x W^T with W decoded from the device layout. Backward: d_x = d_y W.

The layout is the one that cupyllm/quant/layout.py describes; it is decoded here a second time, by an index formula for
the byte of each weight instead of that module's axis permutations, so that neither can hide the other's mistake.
W is decoded in float64 for float64 x (absmax included, which kernels round as bitsandbytes does), else in float32.

Shapes: N rows, K in, M out; MB = ceil(M / 16); codes uint8 [MB, KT, 512].
"""

from __future__ import annotations

from typing import Any

import numpy as np

LEVELS = (  # nf4
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def forward(
    x: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    nested: np.ndarray | None = None,
    *,
    format: str,
    out_features: int,
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """x [N,K] -> y [N,M] (a new array). scales: int8 [M], else [MB, groups, 16]; nested: of double-quantised nf4."""
    weight = decode(codes, scales, nested, format, out_features, x.shape[1]).astype(x.dtype)
    return x @ weight.T, (weight, 3 if nested is not None else 2)


def backward(saved: tuple[Any, ...], d_y: np.ndarray) -> tuple[np.ndarray | None, ...]:
    """d_y [N,M] -> (d_x [N,K], and None for each parameter)."""
    weight, num_params = saved
    return d_y @ weight, *(None,) * num_params


def decode(
    codes: np.ndarray, scales: np.ndarray, nested: np.ndarray | None, format: str, num_rows: int, depth: int
) -> np.ndarray:
    """The weight [M,K], float64."""
    m, k = np.arange(num_rows)[:, None], np.arange(depth)[None, :]
    tile_depth = 32 if format == "int8" else 64
    lane = m % 8 * 4 + k % 8 // 2
    step, second = k % tile_depth // 16, k % 2
    half_row, half_k = m // 8 % 2, k // 8 % 2
    if format == "int8":
        place, shift = 8 * step + 4 * half_k + 2 * second + half_row, 0 * m
    elif format == "int4":
        place, shift = 4 * step + 2 * second + half_k, 4 * half_row
    else:
        place, shift = 4 * step + 2 * half_k + half_row, 4 * second
    stored = codes[m // 16, k // tile_depth, 16 * lane + place]
    if format == "int8":
        return stored.view(np.int8) * scales.astype(np.float64)[:, None]
    index = (stored >> shift) & 15
    group = 128 if format == "int4" else 64
    scale = scales[m // 16, np.arange(-(-depth // group))[None, :], m % 16]  # [M, groups]
    if format == "int4":
        bits = scale.view(np.uint32)
        zero = np.repeat((bits & 255).astype(np.float64), group, axis=1)
        steps = (bits & np.uint32(0xFFFFFF00)).view(np.float32).astype(np.float64)
        return (index - zero) * np.repeat(steps, group, axis=1)
    absmax = scale.astype(np.float64)
    if nested is not None:
        block = np.arange(absmax.size).reshape(absmax.shape)
        absmax = nested[scale].astype(np.float64) * nested[257 + block // 256] + nested[256]
    return np.array(LEVELS, np.float32).astype(np.float64)[index] * np.repeat(absmax, group, axis=1)
