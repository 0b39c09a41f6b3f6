"""Scaled dot-product attention: out_i = sum_j p_ij v_j, p_i = softmax_j(scale q_i . k_j) over the visible keys.

Key j is visible to query i (with o = Tk - Tq, so that the last query sits at the last key) when all hold:
    same segment, and not a negative one (padding);  causal: j <= i + o;  window W: j > i + o - W.
A query that sees no key gives exactly 0 and takes part in no gradient. Which rows those are is decided by the mask,
never by the scores: an inf or NaN in a visible score must surface in the output.
Query head h reads KV head h // (HQ/HK).

Backward as FlashAttention-2 (Dao 2023): saved are q, k, v, out and the log-sum-exp of each row, and the
probabilities are computed again, block by block:
    p = exp(s - lse)          d_v = p^T d_out          d_p = d_out v^T
    d_s = p (d_p - rowsum(d_out * out))                d_q = scale d_s k          d_k = scale d_s^T q
where the row sum equals sum_j p_ij d_p_ij, the softmax's own term.

Scores live one block of queries at a time (BLOCK_SCORES elements), so T = 8192 needs no T*T*HQ array; a block reads
only the keys that causality and window leave it. The online softmax over key blocks that the kernels use was
rejected here: a plain softmax over a whole row is the simpler oracle.

Shapes: B batch, Tq and Tk queries and keys, HQ HK heads, D head size, G = HQ/HK.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyllm.errors import InputError

BLOCK_SCORES = 1 << 20  # scores of one block: 4 MiB in fp32, which stays in a core's cache


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_segments: np.ndarray | None = None,
    k_segments: np.ndarray | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """q [B,Tq,HQ*D], k and v [B,Tk,HK*D], segments int [B,Tq] and [B,Tk] or None -> out [B,Tq,HQ*D].

    saved = (q, k, v, q_segments, k_segments, out, lse [B,HQ,Tq], attrs); lse is -inf where no key is visible.
    Raises InputError when HQ is no multiple of HK or only one of the segments is given.
    """
    if num_heads % num_kv_heads:
        raise InputError(
            f"attention: got {num_heads} query heads and {num_kv_heads} KV heads, expected a whole multiple"
        )
    if (q_segments is None) != (k_segments is None):
        raise InputError("attention: got only one of q_segments and k_segments, expected both or neither")
    batch, tokens, width = q.shape
    scale = 1 / math.sqrt(width // num_heads) if scale is None else scale
    attrs = (num_heads, num_kv_heads, scale, causal, window)
    out = np.zeros_like(q)
    lse = np.full((batch, num_heads, tokens), -np.inf, q.dtype)
    q_heads, k_heads, v_heads, out_heads = (
        _split(a, h) for a, h in ((q, num_heads), (k, num_kv_heads), (v, num_kv_heads), (out, num_heads))
    )
    group = num_heads // num_kv_heads
    for b, rows, keys, visible in _blocks(q, k, q_segments, k_segments, group, causal, window):
        seen = np.any(visible, axis=1, keepdims=True)  # [R,1]
        for h in range(num_kv_heads):
            heads = slice(h * group, (h + 1) * group)
            scores = _scores(q_heads[b, heads, rows], k_heads[b, h, keys], scale, visible)
            row_max = np.where(seen, scores.max(axis=-1, keepdims=True), 0)
            with np.errstate(invalid="ignore"):  # inf - inf: the NaN is the answer
                np.exp(scores - row_max, out=scores)
            row_sum = scores.sum(axis=-1, keepdims=True)
            row_sum_or_1 = np.where(seen, row_sum, 1)
            scores /= row_sum_or_1
            out_heads[b, heads, rows] = np.where(seen, _product(scores, v_heads[b, h, keys]), 0)
            lse[b, heads, rows] = np.where(seen, row_max + np.log(row_sum_or_1), -np.inf)[..., 0]
    return out, (q, k, v, q_segments, k_segments, out, lse, attrs)


def backward(saved: tuple[Any, ...], d_out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, None, None]:
    """d_out [B,Tq,HQ*D] -> (d_q, d_k, d_v, None, None). Sets, does not accumulate."""
    q, k, v, q_segments, k_segments, out, lse, attrs = saved
    num_heads, num_kv_heads, scale, causal, window = attrs
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    q_heads, out_heads, d_out_heads, d_q_heads = (_split(a, num_heads) for a in (q, out, d_out, d_q))
    k_heads, v_heads, d_k_heads, d_v_heads = (_split(a, num_kv_heads) for a in (k, v, d_k, d_v))
    group = num_heads // num_kv_heads
    for b, rows, keys, visible in _blocks(q, k, q_segments, k_segments, group, causal, window):
        for h in range(num_kv_heads):
            heads = slice(h * group, (h + 1) * group)
            q_block, d_out_block = q_heads[b, heads, rows], d_out_heads[b, heads, rows]
            k_block, v_block = k_heads[b, h, keys], v_heads[b, h, keys]
            probs = _scores(q_block, k_block, scale, visible)
            with np.errstate(invalid="ignore"):
                probs -= lse[b, heads, rows, None]
            np.copyto(probs, -np.inf, where=~visible)  # also the rows whose lse is -inf
            np.exp(probs, out=probs)
            d_scores = _product(d_out_block, v_block.T)
            d_scores -= np.sum(d_out_block * out_heads[b, heads, rows], axis=-1, keepdims=True)
            d_scores *= probs
            d_scores *= q.dtype.type(scale)
            np.copyto(d_scores, 0, where=~visible)
            d_q_heads[b, heads, rows] = _product(d_scores, k_block)
            # The G query heads of this KV head add up: one product over the group's rows.
            d_k_heads[b, h, keys] += _rows(d_scores).T @ _rows(q_block)
            d_v_heads[b, h, keys] += _rows(probs).T @ _rows(d_out_block)
    return d_q, d_k, d_v, None, None


def _split(x: np.ndarray, heads: int) -> np.ndarray:
    """View [B,T,H*D] as [B,H,T,D]."""
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(0, 2, 1, 3)


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x [G,R,K], y [K,M] -> [G,R,M] as one product: a block of few rows is several times faster than head by head."""
    return (_rows(x) @ y).reshape(*x.shape[:-1], y.shape[-1])


def _scores(q: np.ndarray, k: np.ndarray, scale: float, visible: np.ndarray) -> np.ndarray:
    """q [G,R,D], k [S,D], visible [R,S] -> scale q k^T, -inf where hidden, [G,R,S]."""
    scores = _product(q, k.T)
    scores *= q.dtype.type(scale)
    np.copyto(scores, -np.inf, where=~visible)
    return scores


def _blocks(
    q: np.ndarray,
    k: np.ndarray,
    q_segments: np.ndarray | None,
    k_segments: np.ndarray | None,
    group: int,
    causal: bool,
    window: int | None,
) -> Iterator[tuple[int, slice, slice, np.ndarray]]:
    """(row of the batch, query slice, slice of the keys they may see, visible [R,S]) for every block with keys."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    offset = num_keys - num_queries
    block = max(1, BLOCK_SCORES // max(1, group * num_keys))
    for b in range(q.shape[0]):
        for start in range(0, num_queries, block):
            stop = min(start + block, num_queries)
            first = max(0, start + offset - window + 1) if window is not None else 0
            last = min(num_keys, stop + offset) if causal else num_keys
            if last <= first:
                continue
            i = np.arange(start, stop)[:, None] + offset
            j = np.arange(first, last)[None, :]
            visible = np.ones((stop - start, last - first), bool)
            if causal:
                visible &= j <= i
            if window is not None:
                visible &= j > i - window
            if q_segments is not None and k_segments is not None:
                q_seg, k_seg = q_segments[b, start:stop, None], k_segments[b, None, first:last]
                visible &= (q_seg == k_seg) & (q_seg >= 0)
            yield b, slice(start, stop), slice(first, last), visible
