"""Append to a paged KV cache: pages[slots[n]] = row n, in place; a negative slot writes nothing. No gradient.

Shapes: N rows, W = HK*D, P tokens a page; slot = page * P + offset.
"""

from __future__ import annotations

import numpy as np

from cupyllm.errors import InputError


def forward(
    k: np.ndarray, v: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, slots: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[()]]:
    """k and v [N,W], pages [num_pages,P,W] (written), slots int [N] -> ((k_pages, v_pages), ()).

    Raises InputError on a slot behind the last page, or one slot twice.
    """
    num_slots = k_pages.shape[0] * k_pages.shape[1]
    written = slots >= 0
    chosen = slots[written]
    if chosen.size and int(chosen.max()) >= num_slots:
        raise InputError(f"kv_append: got slot {chosen.max()}, expected less than {num_slots}")
    if len(np.unique(chosen)) != len(chosen):
        raise InputError("kv_append: got one slot for two rows, expected every slot once")
    for rows, pages in ((k, k_pages), (v, v_pages)):
        pages[chosen // pages.shape[1], chosen % pages.shape[1]] = rows[written]
    return (k_pages, v_pages), ()
