"""Linear's `mma` variant: which tile a product gets, and its launch. Kernel, maths and numerics: cu/linear_mma.cu.

Forms and letters are those of linear_sm90.py: C [M,N] = A B^T, a sum over K. There are two tiles, 128 x 128 and, for
products that would fill few SMs with it, 64 x 64. Neither the tile nor the bytes of a copy change a result: the order
of each sum is the same, so the number of rows may choose. A table of measured products was left out: the rule takes
the faster tile at each of 108 products (H200).
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyllm.backend.base import KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.linear_sm90 import FORMS

SOURCE = "linear_mma.cu"
STEP = 64  # k of a stage, BK in the kernel
GROUP = 8  # rows of tiles that are taken together, which decides what the L2 keeps
MAX_EXTENT = 1 << 30
COPIES = (16, 4, 2)  # bytes


@dataclass(frozen=True)
class Tile:
    """`size` x `size` of C by warps of `warp` x `warp`."""

    size: int
    warp: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * (self.size // self.warp) ** 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: 96 KB in both tiles, of the 99 KB that every GPU from sm_80 has."""
        return self.stages * 2 * self.size * STEP * 2

    def count(self, rows: int, cols: int) -> int:
        """Tiles that cover C."""
        return -(-rows // self.size) * -(-cols // self.size)

    def kernel(self, form: str, copy: int) -> KernelSpec:
        a_mn, b_mn, dtype = FORMS[form]
        return kernel(
            SOURCE,
            "linear_mma",
            dtypes={"C_T": dtype},
            A_MN=int(a_mn),
            B_MN=int(b_mn),
            BM=self.size,
            BN=self.size,
            WM=self.warp,
            WN=self.warp,
            STAGES=self.stages,
            COPY=copy,
        )

    def __str__(self) -> str:
        return f"{self.size}x{self.size}"


LARGE, SMALL = Tile(128, 64, 3), Tile(64, 32, 6)
DESIGNS = ((LARGE, 16), (SMALL, 16), (SMALL, 4), (SMALL, 2))  # tile, bytes of a copy: what is compiled for each form


def makes(form: str, a: Spec, b: Spec, c: Spec) -> bool:
    """Whether this variant can make the product: bfloat16 operands of any shape."""
    _, _, dtype = FORMS[form]
    return a.dtype == b.dtype == "bfloat16" and c.dtype == dtype and max(*a.shape, *b.shape) < MAX_EXTENT


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked."""
    return True


def copy_bytes(form: str, rows: int, cols: int, depth: int) -> int:
    """Bytes of a copy that the contiguous axes of A and B allow."""
    a_mn, b_mn, _ = FORMS[form]
    axes = (rows if a_mn else depth, cols if b_mn else depth)
    return next(copy for copy in COPIES if all(axis * 2 % copy == 0 for axis in axes))


def choose(form: str, rows: int, cols: int, depth: int, num_sms: int) -> tuple[Tile, int]:
    """(tile, bytes of a copy): large tiles where they fill at least half of the SMs."""
    copy = copy_bytes(form, rows, cols, depth)
    return (LARGE if copy == 16 and 2 * LARGE.count(rows, cols) >= num_sms else SMALL), copy


def product(
    rec: Recorder,
    form: str,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bias: Tensor | None = None,
    *,
    accumulate: bool = False,
    choice: tuple[Tile, int] | None = None,
    group: int = GROUP,
) -> None:
    """Record C = A B^T + bias, or (wgrad) C += A B^T. Shapes as in linear_sm90's table; bias [N] in forward and head.

    `choice` and `group`: for tests.
    """
    a_mn, b_mn, c_dtype = FORMS[form]
    (rows, cols), depth = c.shape, a.shape[0 if a_mn else 1]
    assert a.shape == ((depth, rows) if a_mn else (rows, depth)) and a.dtype == "bfloat16", (form, a)
    assert b.shape == ((depth, cols) if b_mn else (cols, depth)) and b.dtype == "bfloat16", (form, b)
    assert c.dtype == c_dtype and max(rows, cols, depth) < MAX_EXTENT and (bias is None or not b_mn), (form, c, bias)
    tile, copy = choice or choose(form, rows, cols, depth, rec.num_sms)
    assert copy <= copy_bytes(form, rows, cols, depth) and (tile, copy) in DESIGNS, (form, tile, copy)
    args = (a, b, bias, c, rows, cols, depth, int(accumulate), group)
    rec.launch(tile.kernel(form, copy), tile.count(rows, cols), tile.threads, *args, shared_bytes=tile.shared_bytes)
