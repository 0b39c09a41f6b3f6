"""Linear's `cublas` variant: products by NVIDIA's cuBLAS, taken only when it is named. The library: backend/cublas.py.

Forms and letters are those of linear_sm90.py: C [M,N] = A B^T, a sum over K. bfloat16 or float32, any shape that is not
empty, sums in float32 without TF32. Which of its kernels the library takes depends on the shape, M among it, so the
bits of a row may depend on how many rows there are. There is no bias: the sum would be rounded twice.
"""

from __future__ import annotations

from cupyllm.backend import cublas
from cupyllm.backend.base import Spec, Tensor
from cupyllm.backend.record import Recorder

SOURCE = cublas.SOURCE
LAYOUTS = {  # form -> whether another axis than k is contiguous in A and in B
    "forward": (False, False),
    "head": (False, False),
    "dgrad": (False, True),
    "wgrad": (True, True),
}


def makes(form: str, a: Spec, b: Spec, c: Spec) -> bool:
    """Whether cuBLAS can make the product: operands of one dtype, C of theirs or float32, extents in 31 bits."""
    if a.dtype != b.dtype or a.dtype not in ("bfloat16", "float32") or form not in LAYOUTS:
        return False
    wanted = "float32" if form in ("head", "wgrad") else a.dtype
    extents = (*a.shape, *b.shape, *c.shape)
    return c.dtype == wanted and min(extents) > 0 and max(extents) < cublas.MAX_EXTENT


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Never unasked."""
    return False


def product(
    rec: Recorder, form: str, a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None = None, *, accumulate: bool = False
) -> None:
    """Record C = A B^T, or (wgrad) C += A B^T. Shapes as in linear_sm90.py's table."""
    a_mn, b_mn = LAYOUTS[form]
    (rows, cols), depth = c.shape, a.shape[0 if a_mn else 1]
    assert a.shape == ((depth, rows) if a_mn else (rows, depth)), (form, a)
    assert b.shape == ((depth, cols) if b_mn else (cols, depth)), (form, b)
    assert makes(form, a, b, c) and bias is None, (form, a, b, c, bias)
    run = cublas.kernel(form, a.dtype, c.dtype)
    rec.launch(run, 1, 1, a, b, c, rows, cols, depth, int(a_mn), int(b_mn), int(accumulate))
