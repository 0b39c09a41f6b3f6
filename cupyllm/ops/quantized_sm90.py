"""Quantised linear's `wgmma` variant: which tile a product gets, and its launch. Kernel and numerics:
cu/quantized_sm90.cu.

Letters: C [M,N] = A B^T, a sum over K; these are the product's, not the layer's.

    form     A, stored   weight, dequantised   C           layer
    forward  x [M,K]     [N,K]                 y [M,N]     M rows, N out, K in (head: y is float32)
    dgrad    d_y [M,K]   [K,N]                 d_x [M,N]   M rows, N in, K out

A weight is its parameters (quant/layout.py): codes, scales and, of double-quantised nf4, `nested`. Every design sums in
the same order, so the number of rows may choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupyllm.backend.base import ITEMSIZE, KernelSpec, Spec, Tensor, TensorMap, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.linear_sm90 import FORMS as PRODUCTS
from cupyllm.quant.layout import FORMATS, GROUP, MAP, ROWS, STEP, codes_shape, format_number

SOURCE = "quantized_sm90.cu"
FORMS = ("forward", "head", "dgrad")
SHARED_BYTES = (227 << 10) - 1024  # of a CTA, without its barriers, which alignment rounds up to 1024
TABLE_BYTES = 8192  # of nf4
CONSUMERS, MAKERS = 2, 2  # warpgroups
THREADS, BOXES, MAX_STAGES = (CONSUMERS + MAKERS) * 128, 2, 8
MIN_ROWS = 64
MAKING = 64  # rows that take as long to multiply as a step's weights to dequantise, where that is waited for
ORDER = (8, 0)  # tiles of a band, whether bands go by columns


@dataclass(frozen=True)
class Design:
    """A tile, and the CTAs of a cluster, which share A; "256x128c2"."""

    bm: int
    bn: int
    cn: int

    def tiles(self, rows: int, cols: int) -> int:
        """Tiles of clusters that cover C."""
        return -(-rows // self.bm) * -(-cols // (self.bn * self.cn))

    def box_cols(self, form: str) -> int:
        """Columns of a box of C, which has 64 rows of 128 bytes."""
        return 128 // ITEMSIZE[PRODUCTS[form][2]]

    def stages(self, number: int) -> tuple[int, int]:
        """Of A and of B, for a FORMAT: four of B where four of A fit as well, else three."""
        left = SHARED_BYTES - CONSUMERS * BOXES * 8192 - table_bytes(number)
        of_b = 4 if 4 * 128 * (self.bn + self.bm) <= left else 3
        return min(MAX_STAGES, (left - of_b * 128 * self.bn) // (128 * self.bm)), of_b

    def shared_bytes(self, number: int) -> int:
        """Dynamic shared memory of a CTA."""
        of_a, of_b = self.stages(number)
        return 128 * (of_a * self.bm + of_b * self.bn) + CONSUMERS * BOXES * 8192 + table_bytes(number)

    def kernel(self, form: str, number: int) -> KernelSpec:
        of_a, of_b = self.stages(number)
        return kernel(
            SOURCE,
            "quantized_sm90",
            dtypes={"C_T": PRODUCTS[form][2]},
            FORMAT=number,
            B_MN=int(form == "dgrad"),
            BM=self.bm,
            BN=self.bn,
            CN=self.cn,
            A_STAGES=of_a,
            B_STAGES=of_b,
            EPILOGUE_BOXES=BOXES,
        )

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}" + (f"c{self.cn}" if self.cn > 1 else "")


LARGE, SMALL = Design(256, 128, 1), Design(128, 128, 2)
DESIGNS = (LARGE, SMALL)  # what is compiled for each form and format


def table_bytes(number: int) -> int:
    """Shared bytes of nf4's levels and of the map of its absmax."""
    return TABLE_BYTES if number >= FORMATS.index("nf4") else 0


def makes(form: str, format: str, a: Spec, params: Sequence[Spec], c: Spec) -> bool:
    """Whether this variant can make the product: bfloat16 activations, row pitches of 16 bytes, a sum of something."""
    if form not in FORMS or a.dtype != "bfloat16" or c.dtype != PRODUCTS[form][2] or a.size == 0:
        return False
    return a.shape[1] % 8 == 0 and c.shape[1] % 8 == 0 and weight_shape(form, a, c)[1] % GROUP.get(format, 1) == 0


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked: few rows waste most of a tile. Others may give other bits."""
    return rows > MIN_ROWS or rec.batch_invariant


def weight_shape(form: str, a: Spec, c: Spec) -> tuple[int, int]:
    """(rows, columns) of the weight in the product C of A: of the layer, out and in."""
    return (a.shape[1], c.shape[1]) if form == "dgrad" else (c.shape[1], a.shape[1])


def choose(rows: int, cols: int, num_sms: int) -> Design:
    """Large tiles where they fill the SMs as well: fewer weights are dequantised for a product."""

    def work(made: Design) -> int:
        waves = -(-made.tiles(rows, cols) // max(num_sms // made.cn, 1))
        return waves * (made.bm + MAKING)

    return min(DESIGNS, key=work)


def product(
    rec: Recorder,
    form: str,
    format: str,
    a: Tensor,
    params: Sequence[Tensor],
    c: Tensor,
    *,
    choice: Design | None = None,
    order: tuple[int, int] = ORDER,
) -> None:
    """Record C = A B^T. Shapes as in the table above.

    `choice` and `order`: for tuning and tests.
    """
    (rows, cols), depth = c.shape, a.shape[1]
    num_out, num_in = weight_shape(form, a, c)
    codes, scales, nested = (*params, None)[:3]
    assert a.shape == (rows, depth) and makes(form, format, a, params, c), (form, format, a, c)
    assert codes is not None and codes.shape == codes_shape(format, num_out, num_in), (codes, num_out, num_in)
    made = choice or choose(rows, cols, rec.num_sms)
    maps = (
        TensorMap(a, (made.bm // made.cn, STEP)),
        TensorMap(c, (64, made.box_cols(form))),
    )
    blocks = (-(-num_out // ROWS), -(-num_in // STEP))
    count = nested.size - MAP - 1 if nested is not None else 0
    grid = min(rec.num_sms // made.cn, made.tiles(rows, cols)) * made.cn
    args = (*maps, codes, scales, nested, rows, cols, depth, num_out, *blocks, count, *order)
    number = format_number(format, params)
    rec.launch(made.kernel(form, number), grid, THREADS, *args, shared_bytes=made.shared_bytes(number))
