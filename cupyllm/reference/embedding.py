"""Embedding: y[n] = weight[ids[n]].

The gradient of a gather is a scatter-add: d_weight[v] = sum of d_y[n] over the n with ids[n] = v. Rows are added in
order of position, so the same input gives the same bits. A one-hot matrix product was rejected: [N,V] is unbounded.

Shapes: N rows, V vocabulary, C hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.errors import InputError


def forward(
    ids: np.ndarray, weight: np.ndarray, *, padding_idx: int | None = None
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """ids int [N], weight [V,C] -> y [N,C] in weight's dtype (a new array). Raises InputError on an id outside [0,V).

    `padding_idx` changes the gradient only (torch.nn.Embedding's rule): that row of d_weight is zero.
    """
    num_rows = weight.shape[0]
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= num_rows):
        bad = ids[(ids < 0) | (ids >= num_rows)][0]
        raise InputError(f"embedding: got token id {bad}, expected 0 <= id < {num_rows}; check the tokenizer")
    return weight[ids], (ids, weight.shape, padding_idx)


def backward(saved: tuple[Any, ...], d_y: np.ndarray) -> tuple[None, np.ndarray]:
    """d_y [N,C] -> (None, d_weight [V,C] in d_y's dtype). Sets, does not accumulate."""
    ids, shape, padding_idx = saved
    d_weight = np.zeros(shape, d_y.dtype)
    for n, token in enumerate(ids):  # ten times faster than np.add.at, which adds element by element
        d_weight[token] += d_y[n]
    if padding_idx is not None:
        d_weight[padding_idx] = 0
    return None, d_weight
