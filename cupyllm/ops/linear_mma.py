"""Linear's `mma` variant: which tile a product gets, and its launches. Kernels, maths and numerics: cu/linear_mma.cu,
cu/linear_sum.cu.

Forms and letters are those of linear_sm90.py: C [M,N] = A B^T, a sum over K. Most products have a tile of 128 x 128
or, where those would fill few SMs, 64 x 64. Skinny products, which LoRA has six of, are bound by the memory that their
one large matrix takes, and have tiles that waste neither shared memory nor multiplications on what is outside:

    narrow  C has at most 64 columns   h = x A^T, d_h = d_y B, dB = d_y^T h
    low     C has at most 64 rows      dA = d_h^T x
    flat    the sum has at most 64 k   y = h B^T, d_x = d_h A

Where the tiles are few, k is split into `slices`, ranges of whole steps whose sums, float32 in a workspace, a second
kernel adds up in order. Neither the tile nor the bytes of a copy change a result, slices do: forward, head and dgrad
are not split where a row's bits must not depend on the number of rows. A table of measured products was left out: the
rule takes the faster of the two square tiles at each of 108 products (H200).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupyllm.backend.base import KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.linear_sm90 import FORMS

SOURCE = "linear_mma.cu"
STEP = 64  # k of a stage; of products whose whole sum is one stage, 16, 32 or 64
GROUP = 8  # rows of tiles that are taken together, which decides what the L2 keeps
MAX_EXTENT = 1 << 30
COPIES = (16, 4, 2)  # bytes
MAX_SLICES = 64
MAX_SKINNY = 64
LONG = 4096  # k from which wgrad takes long tiles
LONG_STEPS = 32  # of a slice, where k is long
MIN_STEPS = 8  # of a slice
SUM_THREADS = 128  # of linear_sum.cu


@dataclass(frozen=True)
class Tile:
    """`rows` x `cols` of C by warps of `warp_rows` x `warp_cols`."""

    rows: int
    cols: int
    warp_rows: int
    warp_cols: int
    stages: int  # 1: the whole sum is one step
    step: int = STEP
    ctas: int = 2  # that an SM has registers for
    sliced: bool = True  # whether k may be split
    eight: bool = False  # the operand with a tile of 16 has room for 8

    @property
    def threads(self) -> int:
        return 32 * (self.rows // self.warp_rows) * (self.cols // self.warp_cols)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, at most the 99 KB that every GPU from sm_80 has."""
        rows, cols = (min(extent, most) for extent, most in zip((self.rows, self.cols), self.most, strict=False))
        operands = self.stages * (rows + cols) * self.step * 2
        return operands if self.stages > 1 else max(operands, self.rows * (self.cols * 2 + 16))

    @property
    def most(self) -> tuple[int, int, int]:
        """Rows and columns of C and terms of the sum that a product may have."""
        rows, cols = (8 if self.eight and extent == 16 else MAX_EXTENT for extent in (self.rows, self.cols))
        return rows, cols, self.step if self.stages == 1 else MAX_EXTENT

    def count(self, rows: int, cols: int) -> int:
        """Tiles that cover C."""
        return -(-rows // self.rows) * -(-cols // self.cols)

    def kernel(self, form: str, copy: int, *, parts: bool = False) -> KernelSpec:
        """`parts`: C is float32 sums of slices, whatever the form's dtype."""
        a_mn, b_mn, dtype = FORMS[form]
        return kernel(
            SOURCE,
            "linear_mma",
            dtypes={"C_T": "float32" if parts else dtype},
            A_MN=int(a_mn),
            B_MN=int(b_mn),
            BM=self.rows,
            BN=self.cols,
            BK=self.step,
            WM=self.warp_rows,
            WN=self.warp_cols,
            STAGES=self.stages,
            COPY=copy,
            SLICED=int(self.sliced),
            EIGHT=int(self.eight),
            MIN_CTAS=self.ctas,
        )

    def __str__(self) -> str:
        step = f"k{self.step}" if self.stages == 1 else ""
        return f"{self.rows}x{self.cols}{step}" + ("e" if self.eight else "")


LARGE, SMALL = Tile(128, 128, 64, 64, 3, sliced=False), Tile(64, 64, 32, 32, 6)
# By what C's rows, its columns or the sum have at most.
NARROW = {16: Tile(64, 16, 16, 16, 8), 32: Tile(64, 32, 16, 32, 7), 64: SMALL}
LOW = {16: Tile(16, 64, 16, 16, 8), 32: Tile(32, 64, 16, 32, 8), 64: SMALL}
FLAT = {
    16: Tile(32, 128, 16, 64, 1, step=16, ctas=4, sliced=False),
    32: Tile(32, 128, 16, 64, 1, step=32, ctas=4, sliced=False),
    64: Tile(64, 128, 32, 64, 1, step=64, ctas=3, sliced=False),
}
# wgrad's where d_weight is wider than there are SMs or k is long.
LONG_NARROW = {16: Tile(128, 16, 32, 16, 5), 32: Tile(128, 32, 32, 32, 4)}
LONG_LOW = {16: Tile(16, 128, 16, 32, 5), 32: Tile(32, 128, 32, 32, 4)}
# Extents of 8.
FLAT_EIGHT = Tile(64, 128, 32, 64, 1, step=16, ctas=3, sliced=False)  # of the forward
NARROW_EIGHT = replace(NARROW[16], eight=True)  # of dgrad
EIGHTS = tuple(replace(tiles[16], eight=True) for tiles in (LONG_LOW, LONG_NARROW, LOW, NARROW))  # of wgrad
SQUARE = ((LARGE, 16), (SMALL, 16), (SMALL, 4), (SMALL, 2))


def designs(form: str) -> tuple[tuple[Tile, int], ...]:
    """(tile, bytes of a copy): what is compiled for a form."""
    skinny: dict[str, tuple[Tile, ...]] = {
        "forward": (*NARROW.values(), *FLAT.values(), FLAT_EIGHT),
        "head": (),
        "dgrad": (*NARROW.values(), *FLAT.values(), NARROW_EIGHT),
        "wgrad": (*NARROW.values(), *LOW.values(), *LONG_NARROW.values(), *LONG_LOW.values(), *EIGHTS),
    }
    return SQUARE + tuple((tile, 16) for tile in skinny[form] if tile != SMALL)


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


def skinny(form: str, rows: int, cols: int, depth: int, num_sms: int) -> Tile | None:
    """The tile of a skinny product."""
    low = form == "wgrad" and rows <= MAX_SKINNY
    flat = form in ("forward", "dgrad") and depth <= MAX_SKINNY
    extent = rows if low else depth if flat else cols
    if form == "head" or extent > MAX_SKINNY or copy_bytes(form, rows, cols, depth) != 16:
        return None
    room = next(n for n in (16, 32, 64) if extent <= n)
    if flat:
        return FLAT_EIGHT if extent <= 8 and form == "forward" else FLAT[room]
    if form != "wgrad":
        return NARROW_EIGHT if extent <= 8 and form == "dgrad" else NARROW[room]
    tile = (LOW if low else NARROW)[room]
    if room < 64 and (tile.count(rows, cols) > num_sms or depth > LONG):
        tile = (LONG_LOW if low else LONG_NARROW)[room]
    return replace(tile, eight=extent <= 8)


def choose(form: str, rows: int, cols: int, depth: int, num_sms: int) -> tuple[Tile, int]:
    """(tile, bytes of a copy): a skinny one, else large tiles where they fill at least half of the SMs."""
    copy = copy_bytes(form, rows, cols, depth)
    tile = skinny(form, rows, cols, depth, num_sms)
    if tile is None:
        tile = LARGE if copy == 16 and 2 * LARGE.count(rows, cols) >= num_sms else SMALL
    return tile, copy


def choose_slices(tile: Tile, rows: int, cols: int, depth: int, num_sms: int) -> int:
    """Ranges of k, none shorter than MIN_STEPS: as many as give each SM a CTA, or two where one would leave a quarter
    of the SMs idle and k is long enough to pay for more parts."""
    if not tile.sliced:
        return 1
    tiles, steps = tile.count(rows, cols), -(-depth // STEP)
    slices, twice = num_sms // tiles, 2 * num_sms // tiles
    if 4 * slices * tiles < 3 * num_sms and steps >= LONG_STEPS * twice:
        slices = twice
    return max(1, min(slices, steps // MIN_STEPS, MAX_SLICES))


def overlaps(tile: Tile, ctas: int, num_sms: int) -> bool:
    """Whether a launch may start before the one before it has ended. Its CTAs then take the places that are free, and
    where the other's leave some SMs one and others two, fewer SMs end up with work: up to 1.16 times as long (H200)."""
    return tile.stages == 1 or not num_sms < ctas <= tile.ctas * num_sms


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
    slices: int | None = None,
    group: int = GROUP,
) -> None:
    """Record C = A B^T + bias, or (wgrad) C += A B^T. Shapes as in linear_sm90's table; bias [N] in forward and head.

    `choice`, `slices` and `group`: for tests.
    """
    a_mn, b_mn, c_dtype = FORMS[form]
    (rows, cols), depth = c.shape, a.shape[0 if a_mn else 1]
    assert a.shape == ((depth, rows) if a_mn else (rows, depth)) and a.dtype == "bfloat16", (form, a)
    assert b.shape == ((depth, cols) if b_mn else (cols, depth)) and b.dtype == "bfloat16", (form, b)
    assert c.dtype == c_dtype and max(rows, cols, depth) < MAX_EXTENT and (bias is None or not b_mn), (form, c, bias)
    tile, copy = choice or choose(form, rows, cols, depth, rec.num_sms)
    assert copy <= copy_bytes(form, rows, cols, depth) and (tile, copy) in designs(form), (form, tile, copy)
    assert all(extent <= most for extent, most in zip((*c.shape, depth), tile.most, strict=True)), (tile, c, depth)
    if slices is None:
        whole = choice is not None or (rec.batch_invariant and form != "wgrad")
        slices = 1 if whole else choose_slices(tile, rows, cols, depth, rec.num_sms)
    grid, shared = tile.count(rows, cols), tile.shared_bytes
    shape = (rows, cols, depth)
    if slices == 1:
        args = (a, b, bias, c, *shape, int(accumulate), group)
        early = c if overlaps(tile, grid, rec.num_sms) else None
        rec.launch(tile.kernel(form, copy), grid, tile.threads, *args, shared_bytes=shared, weights=early)
        return
    assert tile.sliced and 1 < slices <= MAX_SLICES, (tile, slices)
    parts = rec.empty((slices, rows, cols), "float32", "parts")
    run = tile.kernel(form, copy, parts=True)
    args = (a, b, None, parts, *shape, 0, group)
    early = parts if overlaps(tile, grid * slices, rec.num_sms) else None
    rec.launch(run, (grid, slices), tile.threads, *args, shared_bytes=shared, weights=early)
    add_up(rec, parts, bias, c, accumulate)


def add_up(rec: Recorder, parts: Tensor, bias: Tensor | None, c: Tensor, accumulate: bool) -> None:
    """Record C = (or +=) the sum of parts [slices,M,N] + bias."""
    slices, (rows, cols) = parts.shape[0], c.shape
    width = 4 if cols % 4 == 0 else 1
    run = kernel("linear_sum.cu", "linear_sum", dtypes={"C_T": c.dtype}, WIDTH=width)
    args = (parts, bias, c, rows * cols, cols, slices, int(accumulate))
    # Programmatic: it waits before it reads or writes anything, so any tensor that no launch before it names will do.
    rec.launch(run, -(-rows * cols // (SUM_THREADS * width)), SUM_THREADS, *args, weights=c)
