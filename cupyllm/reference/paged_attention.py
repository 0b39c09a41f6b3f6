"""Attention over a paged KV cache: each sequence's keys and values are gathered by its block table, up to its length
and from its window on, and go through plain attention. What lies in no visible slot is never touched, NaN included.
No gradient: this is for generation.

Shapes: N rows of all sequences, S sequences, M table entries, HQ HK heads, D head size, P tokens a page.
"""

from __future__ import annotations

import numpy as np

from cupyllm.errors import InputError
from cupyllm.reference import attention


def forward(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    block_table: np.ndarray,
    q_starts: np.ndarray,
    kv_lengths: np.ndarray,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[np.ndarray, tuple[()]]:
    """q [N,HQ*D], pages [num_pages,P,HK*D], block_table int [S,M], q_starts int [S+1], kv_lengths int [S] ->
    (out [N,HQ*D], ()). Rows of no sequence give 0.

    Raises InputError when a sequence has more rows than keys, or a visible key lies in no page.
    """
    out = np.zeros_like(q)
    for s, num_keys in enumerate(int(n) for n in kv_lengths):
        rows = slice(int(q_starts[s]), int(q_starts[s + 1]))
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            continue
        if num_rows > num_keys:
            raise InputError(f"paged_attention: sequence {s} has {num_rows} rows and {num_keys} keys, expected no more")
        # Attention aligns the tails of queries and keys, so leaving out keys that no query sees changes nothing else.
        first = 0 if window is None else max(0, num_keys - num_rows - window + 1)
        k, v = (_gather(pages, block_table[s], s, first, num_keys) for pages in (k_pages, v_pages))
        found, _ = attention.forward(
            *(q[None, rows], k[None], v[None]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            scale=scale,
            window=window,
        )
        out[rows] = found[0]
    return out, ()


def _gather(pages: np.ndarray, table: np.ndarray, sequence: int, first: int, stop: int) -> np.ndarray:
    """Rows of the token positions from first to stop, [stop - first, HK*D]."""
    num_pages, page_tokens, _ = pages.shape
    positions = np.arange(first, stop)
    if (stop - 1) // page_tokens >= len(table):
        raise InputError(f"paged_attention: sequence {sequence} has {stop} keys, expected a block table that long")
    chosen = table[positions // page_tokens]
    if int(chosen.min()) < 0 or int(chosen.max()) >= num_pages:
        raise InputError(f"paged_attention: sequence {sequence} sees a page that is not there; its table is {table}")
    return pages[chosen, positions % page_tokens]
