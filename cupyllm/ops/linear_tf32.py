"""Linear's `tf32x3` variant: float32 products on tensor cores. Kernel, maths and numerics: cu/linear_tf32.cu; Hopper
has one of its own, cu/linear_tf32_sm90.cu.

Letters are those of linear_sm90.py: C [M,N] = A B^T, a sum over K. x, d_y and every result are float32; the weight is
float32, or bfloat16 or float16, whose values take two products of tensor cores instead of three. There are two tiles,
128 x 128 and, for products that would fill few SMs with it, 64 x 64; on Hopper 128 x 64, too, and the one is taken
whose waves take the shortest time. Neither the tile nor the copies change a result: the order of each sum is the same,
so the number of rows may choose the tile. It may not choose the variant.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyllm.backend.base import ITEMSIZE, KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder

SOURCE, HOPPER_SOURCE = "linear_tf32.cu", "linear_tf32_sm90.cu"
HOPPER = 90  # the capability
FORMS = {  # form -> whether another axis than k is contiguous in A and in B, dtypes of B
    "forward": (False, False, ("float32", "bfloat16", "float16")),
    "dgrad": (False, True, ("float32", "bfloat16", "float16")),
    "wgrad": (True, True, ("float32",)),
}
STEP = 32  # k of a stage, BK in both kernels
GROUP = 8  # rows of tiles that are taken together, which decides what the L2 keeps
MAX_EXTENT = 1 << 30
# Where a third of the tensor cores' tf32 rate is more than the fp32 rate: GPUs of data centres. Others have twice the
# fp32 rate or less.
CAPABILITIES = (80, 90, 100, 103)
# Shorter sums are linear.cu's: what a product loses here (lo lo and the last bit of lo, 7e-8 of it) does not grow with
# the depth and is more than all that few additions lose.
MIN_DEPTH = 64


@dataclass(frozen=True)
class Tile:
    """`rows` x `cols` of C by warps of `warp_rows` x 32; `ctas` share an SM's registers."""

    rows: int
    cols: int
    warp_rows: int
    stages: int
    ctas: int

    @property
    def threads(self) -> int:
        return self.rows // self.warp_rows * self.cols

    def shared_bytes(self, b_dtype: str) -> int:
        """Dynamic shared memory of a CTA: at most 96 KB, of the 99 KB that every GPU from sm_80 has."""
        return self.stages * STEP * (self.rows * 4 + self.cols * ITEMSIZE[b_dtype])

    def count(self, rows: int, cols: int) -> int:
        """Tiles that cover C."""
        return -(-rows // self.rows) * -(-cols // self.cols)

    def vectors(self, form: str, rows: int, cols: int, depth: int, b_dtype: str) -> bool:
        """Whether the contiguous axes of A and B are of whole 16 bytes."""
        a_mn, b_mn, _ = FORMS[form]
        return (rows if a_mn else depth) % 4 == 0 and (cols if b_mn else depth) * ITEMSIZE[b_dtype] % 16 == 0

    def kernel(self, form: str, b_dtype: str, vector: bool) -> KernelSpec:
        a_mn, b_mn, _ = FORMS[form]
        return kernel(
            SOURCE,
            "linear_tf32",
            dtypes={"B_T": b_dtype},
            A_MN=int(a_mn),
            B_MN=int(b_mn),
            BM=self.rows,
            BN=self.cols,
            WM=self.warp_rows,
            WN=32,
            STAGES=self.stages,
            CTAS=self.ctas,
            VECTOR=int(vector),
        )

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


@dataclass(frozen=True)
class HopperTile:
    """`rows` x `cols` of C: a warpgroup for each 64 rows and one that loads; `ctas` share an SM."""

    rows: int
    cols: int
    ctas: int
    stages: int = 4

    @property
    def threads(self) -> int:
        return 2 * self.rows + 128

    def shared_bytes(self, b_dtype: str) -> int:
        """Dynamic shared memory of a CTA: A raw, B as one or two planes of 4 bytes."""
        return self.stages * STEP * 4 * (self.rows + self.cols * (2 if b_dtype == "float32" else 1))

    def count(self, rows: int, cols: int) -> int:
        """Tiles that cover C."""
        return -(-rows // self.rows) * -(-cols // self.cols)

    def vectors(self, form: str, rows: int, cols: int, depth: int, b_dtype: str) -> bool:
        """Whether A's contiguous axis is of whole 16 bytes, and B's k, where it is contiguous, of 4 elements."""
        a_mn, b_mn, _ = FORMS[form]
        return (rows if a_mn else depth) % 4 == 0 and (b_mn or depth % 4 == 0)

    def kernel(self, form: str, b_dtype: str, vector: bool) -> KernelSpec:
        a_mn, b_mn, _ = FORMS[form]
        return kernel(
            HOPPER_SOURCE,
            "linear_tf32_sm90",
            dtypes={"B_T": b_dtype},
            A_MN=int(a_mn),
            B_MN=int(b_mn),
            BM=self.rows,
            BN=self.cols,
            STAGES=self.stages,
            CTAS=self.ctas,
            VECTOR=int(vector),
        )

    def __str__(self) -> str:
        return f"wgmma {self.rows}x{self.cols}"


Design = tuple[Tile | HopperTile, bool]  # tile, copies of 16 bytes
LARGE, SMALL = Tile(128, 128, 64, 3, 1), Tile(64, 64, 32, 4, 2)
HOPPER_TILES = HopperTile(128, 128, 1), HopperTile(128, 64, 1), HopperTile(64, 64, 2)
# What is compiled for each form.
DESIGNS: tuple[Design, ...] = ((LARGE, True), (SMALL, True), (SMALL, False))
HOPPER_DESIGNS: tuple[Design, ...] = (*((tile, True) for tile in HOPPER_TILES), (HOPPER_TILES[-1], False))
# Of an SM, nanoseconds a k: each of HOPPER_TILES, the last one's twice as two CTAs share the SM, and that one alone; by
# B's k being contiguous or not. Measured with a float32 weight (H200, 2026-11-30): of Qwen3's projections, forward,
# dgrad and wgrad of 512, 2048 and 4096 rows, each gets the tile that was fastest, 1.98, 1.66 and 1.58 times as fast as
# torch in fp32 in the geometric mean, and 1.22, 1.35 and 1.46 times at least.
HOPPER_TIMES = {False: (41.8, 25.8, 26.7, 18.5), True: (50.5, 27.8, 30.4, 20.0)}


def makes(form: str, a: Spec, b: Spec, c: Spec) -> bool:
    """Whether this variant can make the product: float32 but for the weight, of any shape."""
    known = form in FORMS and a.dtype == c.dtype == "float32" and b.dtype in FORMS[form][2]
    return known and max(*a.shape, *b.shape) < MAX_EXTENT


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked. The rows have no say: they must not change a row's bits."""
    return rec.capability in CAPABILITIES and depth >= MIN_DEPTH


def designs(capability: int) -> tuple[Design, ...]:
    """What the launcher chooses from."""
    return HOPPER_DESIGNS if capability == HOPPER else DESIGNS


def choose(form: str, rows: int, cols: int, depth: int, b_dtype: str, num_sms: int) -> Design:
    """(tile, copies of 16 bytes): large tiles where they fill at least half of the SMs."""
    vector = LARGE.vectors(form, rows, cols, depth, b_dtype)
    return (LARGE if vector and 2 * LARGE.count(rows, cols) >= num_sms else SMALL), vector


def choose_on_hopper(form: str, rows: int, cols: int, depth: int, b_dtype: str, num_sms: int) -> Design:
    """The same: the tile whose waves take the shortest time. Of 64 x 64, the last may be half a wave."""
    if not HOPPER_TILES[0].vectors(form, rows, cols, depth, b_dtype):
        return HOPPER_DESIGNS[-1]
    large, middle, pair, alone = HOPPER_TIMES[FORMS[form][1]]
    waves = [-(-tile.count(rows, cols) // num_sms) for tile in HOPPER_TILES]
    times = (waves[0] * large, waves[1] * middle, waves[2] // 2 * pair + waves[2] % 2 * alone)
    return HOPPER_TILES[times.index(min(times))], True


def product(
    rec: Recorder,
    form: str,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bias: Tensor | None = None,
    *,
    accumulate: bool = False,
    choice: Design | None = None,
    group: int = GROUP,
) -> None:
    """Record C = A B^T + bias, or (wgrad) C += A B^T. Shapes as in linear_sm90's table; bias [N] of B's dtype, forward
    only.

    `choice` and `group`: for tests.
    """
    a_mn, b_mn, _ = FORMS[form]
    (rows, cols), depth = c.shape, a.shape[0 if a_mn else 1]
    assert a.shape == ((depth, rows) if a_mn else (rows, depth)), (form, a)
    assert b.shape == ((depth, cols) if b_mn else (cols, depth)), (form, b)
    assert makes(form, a, b, c) and max(rows, cols) < MAX_EXTENT, (form, a, b, c)
    assert bias is None or (form == "forward" and bias.dtype == b.dtype), (form, bias)
    chooser = choose_on_hopper if rec.capability == HOPPER else choose
    tile, vector = choice or chooser(form, rows, cols, depth, b.dtype, rec.num_sms)
    assert (tile, vector) in DESIGNS + designs(rec.capability), (tile, vector)
    assert vector <= tile.vectors(form, rows, cols, depth, b.dtype), (form, tile, vector)
    args = (a, b, bias, c, rows, cols, depth, int(accumulate), group)
    run, shared_bytes = tile.kernel(form, b.dtype, vector), tile.shared_bytes(b.dtype)
    rec.launch(run, tile.count(rows, cols), tile.threads, *args, shared_bytes=shared_bytes)
