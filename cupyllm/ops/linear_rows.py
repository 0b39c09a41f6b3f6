"""Linear's `rows` variant: products with few rows of x, which take as long as reading the weight. Kernel, maths and
numerics: cu/linear_rows.cu, and cu/linear_sum.cu where k is split.

Forms and letters are those of linear_sm90.py: forward and head, C [M,N] = A B^T, a sum over K, M up to 64. A launch has
groups of CTAs for ranges of columns and slices for ranges of k. `choose` takes the fastest design and number of slices
by a cost model fitted to measurements: where what it takes was measured (12 of Qwen3's projections, 1 to 8 rows), it
is at most 1.5 % slower than the best of all (H200, 2026-11-30). One slice wherever x then fits into each CTA's shared
memory, few where it does not. So a row's bits depend on the number of rows, and nothing is made here where that is
refused (Recorder.batch_invariant).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupyllm.backend.base import KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops import linear_mma
from cupyllm.ops.linear_sm90 import FORMS

SOURCE = "linear_rows.cu"
BLOCK = 16  # rows of weight that are multiplied at once
MAX_ROWS = 64
PREFERRED_ROWS = {90: 2}  # up to here it is the fastest, where wgmma is the next
OTHERS_PREFERRED_ROWS = 16  # where mma is
MAX_EXTENT = 1 << 30
# In bytes that an SM could have read meanwhile.
SUM_COST = 40 << 10  # of a launch that adds up slices
PART_COST = 28  # of a sum that is written and read
X_COST = 0.25  # of a byte of x, which the L2 has
PASS_COST = 160  # of the exchange of a warp's sums behind a pass, where no other CTA is beside this one meanwhile
RING_COST = 0.075  # of a byte of the ring: the first tile waits behind all the others
UNEVEN = 0.25  # of what the busiest CTA reads above the mean: the others leave it bandwidth
READING = ((40 << 10, 1.13), (90 << 10, 1.0), (math.inf, 0.995))  # times its bytes, by those that are in flight
WIDE = 0.98  # times that, with 16 warps
SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}  # of a CTA; others: 99 KB
# Two CTAs, of this launch and the next, share an SM where both fit, but smaller ones behaved as if alone: as if an SM
# had only 100 KB of shared memory where one CTA needs no more.
COMPANY_BYTES = ((100 << 10) - 1024, (114 << 10) - 1024)


@dataclass(frozen=True)
class Design:
    """A warp multiplies `row_groups` x 8 rows of x with `blocks` x 16 of weight; `stages` tiles of weight in flight."""

    row_groups: int
    blocks: int
    warps: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def chunk(self) -> int:
        """k of a tile."""
        return 64 * self.warps

    @property
    def pass_rows(self) -> int:
        """Rows of weight that fit into a pass."""
        return self.blocks * BLOCK

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.pass_rows * self.chunk * 2

    @property
    def flying_bytes(self) -> int:
        """On their way while one stage is multiplied."""
        return (self.stages - 1) * self.pass_rows * self.chunk * 2

    @property
    def sums_bytes(self) -> int:
        return 2 * self.warps * 8 * 20 * 4

    def chunks(self, depth: int, slices: int) -> int:
        """Of the largest slice."""
        return math.ceil(math.ceil(depth / self.chunk) / slices)

    def shared_bytes(self, rows: int, depth: int, slices: int) -> int:
        """Dynamic shared memory of a CTA: weight's tiles, sums, its slice of x."""
        return self.ring_bytes + self.sums_bytes + rows * self.chunks(depth, slices) * self.chunk * 2

    def kernel(self, form: str) -> KernelSpec:
        _, _, dtype = FORMS[form]
        return kernel(
            SOURCE,
            "linear_rows",
            dtypes={"C_T": dtype},
            NT=self.row_groups,
            MI=self.blocks,
            WK=self.warps,
            STAGES=self.stages,
        )

    def __str__(self) -> str:
        return f"{8 * self.row_groups}x{self.pass_rows}x{self.chunk}*{self.stages}"


# For each number of row groups. More bytes in flight read faster; fewer start earlier and leave more of the shared
# memory to x. 99 KB hold those of 4 stages and fewer.
DESIGNS = (
    Design(1, 1, 16, 4),
    Design(1, 1, 16, 3),
    Design(1, 1, 8, 6),
    Design(1, 1, 8, 4),
    Design(1, 1, 8, 3),
    Design(2, 1, 8, 6),
    Design(2, 1, 8, 3),
    Design(4, 2, 4, 3),
    Design(8, 2, 4, 3),
)


@dataclass(frozen=True)
class Choice:
    design: Design
    slices: int
    groups: int


def makes(form: str, a: Spec, b: Spec, c: Spec) -> bool:
    """Whether this variant can make the product: bfloat16, 1 to 64 rows, pitches of 16 bytes, a sum of something."""
    if form not in ("forward", "head"):
        return False
    _, _, dtype = FORMS[form]
    (rows, depth), cols = a.shape, b.shape[0]
    typed = a.dtype == b.dtype == "bfloat16" and c.dtype == dtype
    return typed and 1 <= rows <= MAX_ROWS and depth > 0 and depth % 8 == 0 and max(depth, cols) < MAX_EXTENT


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked."""
    return rows <= preferred_rows(rec.capability) and not rec.batch_invariant


def preferred_rows(capability: int) -> int:
    return PREFERRED_ROWS.get(capability, OTHERS_PREFERRED_ROWS)


def choose(rows: int, cols: int, depth: int, num_sms: int, capability: int) -> Choice:
    """The cheapest of those whose x fits into shared memory; of equal ones the one with more stages, fewer slices."""
    limit = SHARED_BYTES.get(capability, 99 << 10)
    row_groups = next(d.row_groups for d in DESIGNS if d.row_groups * 8 >= rows)
    choices = [
        Choice(design, slices, min(cols, max(1, num_sms // slices)))
        for design in DESIGNS
        if design.row_groups == row_groups
        for slices in range(1, min(num_sms, design.chunks(depth, 1)) + 1)
        if design.shared_bytes(rows, depth, slices) <= limit
    ]
    assert choices, (rows, cols, depth, capability)
    return min(choices, key=lambda choice: cost(choice, rows, cols, depth, num_sms))


def cost(choice: Choice, rows: int, cols: int, depth: int, num_sms: int) -> float:
    """Of a product, as bytes that an SM could have read."""
    design, slices = choice.design, choice.slices
    share, k = math.ceil(cols / choice.groups), design.chunks(depth, slices) * design.chunk  # of the busiest CTA
    mean = 2 * cols * depth / num_sms
    reading = mean + UNEVEN * max(2 * share * k - mean, 0)
    reading *= next(factor for most, factor in READING if design.flying_bytes < most)
    if design.warps == 16:
        reading *= WIDE
    low, high = COMPANY_BYTES
    alone = not low < design.shared_bytes(rows, depth, slices) <= high
    passes = alone * PASS_COST * design.warps * math.ceil(share / design.pass_rows)
    adding = SUM_COST + PART_COST * slices * rows * cols / num_sms if slices > 1 else 0
    return reading + RING_COST * design.ring_bytes + X_COST * 2 * rows * k + passes + adding


def product(
    rec: Recorder,
    form: str,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bias: Tensor | None = None,
    *,
    accumulate: bool = False,
    choice: Choice | None = None,
) -> None:
    """Record C = A B^T + bias. Shapes as in linear_sm90's table; bias [N]. `choice`: for tests."""
    _, _, c_dtype = FORMS[form]
    (rows, depth), cols = a.shape, b.shape[0]
    assert b.shape == (cols, depth) and c.shape == (rows, cols) and c.dtype == c_dtype, (form, a, b, c)
    assert makes(form, a, b, c) and not accumulate, (form, a, b, c)
    taken = choice or choose(rows, cols, depth, rec.num_sms, rec.capability)
    design, slices = taken.design, taken.slices
    assert rows <= 8 * design.row_groups and slices <= design.chunks(depth, 1), taken
    run, shared = design.kernel(form), design.shared_bytes(rows, depth, slices)
    grid, extents = taken.groups * slices, (rows, cols, depth, slices)
    if slices == 1:
        rec.launch(run, grid, design.threads, a, b, bias, c, None, *extents, shared_bytes=shared, weights=b)
        return
    parts = rec.empty((slices, rows, cols), "float32", "parts")
    rec.launch(run, grid, design.threads, a, b, None, None, parts, *extents, shared_bytes=shared, weights=b)
    linear_mma.add_up(rec, parts, bias, c, accumulate=False)
