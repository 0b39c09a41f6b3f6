"""Linear's `skinny` variant: products of the mma variant that Hopper takes before wgmma's, whose tiles are too large.

What bounds a skinny product is the memory of its one large matrix (linear_mma.py); LoRA has six of them. On other GPUs
the mma variant makes them anyway, by the same kernels. Where wgmma is the faster one, mostly from rank 33 on, where
there are so few rows that a cluster has to share a sum, and where rank 32 makes many tiles of y or d_x,
linear_sm90.skinny says so.

Measured against cuBLAS (H200, 2026-11-30; the six products of ranks 8 to 64, 512 to 8192 rows of 5120 and 512 or 2048
of 25600; by whichever variant): geometric means over rows and columns of 1.02 to 1.08 for h = x A^T, 1.19 to 1.39 for
y = h B^T, 1.06 to 1.21 for d_h, 1.21 to 1.47 for d_x; dA and dB 1.06 at ranks 8 and 16, 0.95 at 32, 0.97 at 64. By
times of the same designs 16 of the 144 have since got faster ones, and h and d_h of rank 32 and 4096 rows others that
are not measured. Left out: wgmma tiles of 16 and 32 columns, two CTAs to a sum, 1.09 to 1.17 times as fast at h of
ranks 8 to 32 and 2048 rows, slower at d_h of ranks 8 and 16.
"""

from __future__ import annotations

from cupyllm.backend.record import Recorder
from cupyllm.ops import linear_sm90
from cupyllm.ops.linear_mma import SOURCE, makes, product, skinny

__all__ = ["SOURCE", "makes", "prefers", "product"]

MIN_LARGE = 1 << 19  # elements of the large matrix


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked. Where a row's bits must not depend on the number of rows only
    wgrad is: the others sum in another order than wgmma's."""
    shape = rows, cols, depth
    large = max(rows * cols, rows * depth, cols * depth)
    invariant = rec.batch_invariant and form != "wgrad"
    if invariant or large < MIN_LARGE or linear_sm90.skinny(form, *shape, rec.num_sms) is not None:
        return False
    return skinny(form, *shape, rec.num_sms) is not None
