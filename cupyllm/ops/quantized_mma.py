"""Quantised linear's `mma` variant: which tile a product gets, and its launch. Kernel and numerics:
cu/quantized_mma.cu.

Forms and letters are those of quantized_sm90.py: C [M,N] = A B^T, a sum over K, B the dequantised weight. The tiles are
linear_mma's: 128 x 128 and, for products that would fill few SMs with it, 64 x 64. The order of each sum is the same in
both, so the number of rows may choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupyllm.backend.base import KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.quantized_sm90 import FORMS, PRODUCTS, weight_shape
from cupyllm.quant.layout import FORMATS, GROUP, MAP, ROWS, STEP, codes_shape, format_number

SOURCE = "quantized_mma.cu"
BAND = 8  # rows of tiles that are taken together, which decides what the L2 keeps
MAX_EXTENT = 1 << 30
TABLE_BYTES = 5120  # of nf4


@dataclass(frozen=True)
class Tile:
    """`size` x `size` of C by warps of `warp` x `warp`."""

    size: int
    warp: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * (self.size // self.warp) ** 2

    def stage_bytes(self, form: str, number: int) -> int:
        """Shared bytes of 64 k of A, of codes, and of the scales that are needed before the product."""
        blocks = self.size // ROWS
        codes = 1024 if number == 0 else 512
        scales = 0 if number == 0 and form != "dgrad" else 80 if number == len(FORMATS) else 64
        return 2 * STEP * self.size + blocks * (codes + scales)

    def shared_bytes(self, form: str, number: int) -> int:
        """Dynamic shared memory of a CTA."""
        table = TABLE_BYTES if number >= FORMATS.index("nf4") else 0
        return self.stages * self.stage_bytes(form, number) + table

    def count(self, rows: int, cols: int) -> int:
        """Tiles that cover C."""
        return -(-rows // self.size) * -(-cols // self.size)

    def kernel(self, form: str, number: int) -> KernelSpec:
        return kernel(
            SOURCE,
            "quantized_mma",
            dtypes={"C_T": PRODUCTS[form][2]},
            FORMAT=number,
            B_MN=int(form == "dgrad"),
            BM=self.size,
            BN=self.size,
            WM=self.warp,
            WN=self.warp,
            STAGES=self.stages,
        )

    def __str__(self) -> str:
        return f"{self.size}x{self.size}"


LARGE, SMALL = Tile(128, 64, 3), Tile(64, 32, 4)
DESIGNS = (LARGE, SMALL)  # what is compiled for each form and format


def makes(form: str, format: str, a: Spec, params: Sequence[Spec], c: Spec) -> bool:
    """Whether this variant can make the product: bfloat16 activations, A's pitch of 16 bytes, a sum of something."""
    if form not in FORMS or a.dtype != "bfloat16" or c.dtype != PRODUCTS[form][2] or a.size == 0:
        return False
    whole = a.shape[1] % 8 == 0 and weight_shape(form, a, c)[1] % GROUP.get(format, 1) == 0
    return whole and max(*a.shape, *c.shape) < MAX_EXTENT


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked."""
    return True


def choose(rows: int, cols: int, num_sms: int) -> Tile:
    """Large tiles where they fill at least half of the SMs."""
    return LARGE if 2 * LARGE.count(rows, cols) >= num_sms else SMALL


def product(
    rec: Recorder,
    form: str,
    format: str,
    a: Tensor,
    params: Sequence[Tensor],
    c: Tensor,
    *,
    choice: Tile | None = None,
    band: int = BAND,
) -> None:
    """Record C = A B^T. Shapes as in quantized_sm90's table. `choice` and `band`: for tests."""
    (rows, cols), depth = c.shape, a.shape[1]
    num_out, num_in = weight_shape(form, a, c)
    codes, scales, nested = (*params, None)[:3]
    assert a.shape == (rows, depth) and makes(form, format, a, params, c), (form, format, a, c)
    assert codes is not None and codes.shape == codes_shape(format, num_out, num_in), (codes, num_out, num_in)
    tile, number = choice or choose(rows, cols, rec.num_sms), format_number(format, params)
    blocks = (-(-num_out // ROWS), -(-num_in // STEP))
    count = nested.size - MAP - 1 if nested is not None else 0
    args = (a, codes, scales, nested, c, rows, cols, depth, num_out, *blocks, count, band)
    run, shared = tile.kernel(form, number), tile.shared_bytes(form, number)
    rec.launch(run, tile.count(rows, cols), tile.threads, *args, shared_bytes=shared)
