"""Linear's `skinny` variant: products of the mma variant that Hopper takes before wgmma's, whose tiles are too large.

What bounds a skinny product is the memory of its one large matrix (linear_mma.py); LoRA has six of them. On other GPUs
the mma variant makes them anyway, by the same kernels.
"""

from __future__ import annotations

from cupyllm.backend.record import Recorder
from cupyllm.ops.linear_mma import SOURCE, makes, product, skinny

__all__ = ["SOURCE", "makes", "prefers", "product"]

MIN_LARGE = 1 << 19  # elements of the large matrix


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked. Where a row's bits must not depend on the number of rows only
    wgrad is: the others sum in another order than wgmma's."""
    large = max(rows * cols, rows * depth, cols * depth)
    invariant = rec.batch_invariant and form != "wgrad"
    return not invariant and large >= MIN_LARGE and skinny(form, rows, cols, depth, rec.num_sms) is not None
