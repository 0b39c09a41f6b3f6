"""Quantised linear's `rows` variant: products of up to 16 rows, which take as long as reading the codes. Kernel, maths
and numerics: cu/quantized_rows.cu, and cu/linear_sum.cu where K is split.

Forms: forward and head (quantized_linear.py). A launch has groups of CTAs for ranges of the weight's blocks of 16
rows, and slices for ranges of K; each CTA keeps its slice of x in shared memory. `choose` takes the number of slices
whose busiest CTA has the least to read: so bits may depend on the number of rows, and nothing is made here where
that is refused (Recorder.batch_invariant).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupyllm.backend.base import KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.linear_mma import add_up
from cupyllm.quant.layout import FORMATS, GROUP, MAP, format_number

SOURCE = "quantized_rows.cu"
STEP = 128  # k of a warp's step
BLOCK = 16  # rows of the weight that are multiplied at once
MAX_ROWS = 16
MAX_EXTENT = 1 << 30
TABLE_BYTES = 256 * 32 * 4  # nf4's pairs
STEP_BYTES = (2048, 1024 + 64, 1024 + 128, 1024 + 32)  # by FORMAT: codes and scales of a warp's step
SUMS_BYTES = 26 << 10  # that the exchange of warps' sums may take, where one block at a time does not take more
CLUSTERS = (2,)  # slices that are added in a cluster; of 4 and 8, a second launch adds them in less time
CLUSTER_CAPABILITIES = (90, 100, 103, 120, 121)
# Bytes of codes that an SM could have read meanwhile, fitted to times of an H200:
SUM_COST = 50 << 10  # another launch
CLUSTER_COST = 48 << 10  # a cluster, and for each block and row of x ..
EXCHANGE_COST = 160  # .. its slices' sums
PASS_COST = 2 << 10  # a pass
FRAGMENTS_COST = 8  # a step's x from shared memory, for 8 rows
SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}  # of a CTA; others: 99 KB


@dataclass(frozen=True)
class Design:
    """`wide` x `tall` blocks of 16 rows of the weight a pass, each `tall` by `warps` warps; `ahead` steps in flight."""

    wide: int
    warps: int
    tall: int
    ahead: int

    @property
    def threads(self) -> int:
        return 32 * self.wide * self.warps

    def chunks(self, depth: int, slices: int = 1) -> int:
        """Steps of a warp in the largest slice."""
        whole = -(-depth // (STEP * self.warps))
        return -(-whole // slices)

    def rounds(self, rows: int) -> int:
        """Blocks of a warp whose sums are exchanged at a time."""
        return max(1, min(self.tall, SUMS_BYTES // (self.wide * self.warps * rows * 80)))

    def shared_bytes(self, number: int, rows: int, depth: int, slices: int, cluster: bool = False) -> int:
        """Dynamic shared memory of a CTA: tables, sums, rings, its slice of x."""
        num_warps, steps = self.wide * self.warps, self.chunks(depth, slices) * self.warps
        sums = num_warps * self.rounds(rows) * rows * 80
        if cluster:
            sums += 2 * slices * -(-self.wide * self.tall * rows // slices) * BLOCK * 4
        tables = (TABLE_BYTES if number >= FORMATS.index("nf4") else 0) + (MAP * 4 if number == len(FORMATS) else 0)
        x_sums = steps * 8 * row_groups(rows) * 4 if number == FORMATS.index("int4") else 0
        ring = num_warps * self.tall * self.ahead * STEP_BYTES[number]
        return sums + tables + x_sums + ring + rows * (steps * STEP * 2 + 16)

    def kernel(self, number: int, rows: int, dtype: str, cluster: int = 1) -> KernelSpec:
        return kernel(
            SOURCE,
            "quantized_rows",
            dtypes={"Y_T": dtype},
            FORMAT=number,
            NT=row_groups(rows),
            WN=self.wide,
            WK=self.warps,
            MI=self.tall,
            AHEAD=self.ahead,
            CLUSTER=cluster,
        )

    def __str__(self) -> str:
        return f"{self.wide}x{self.warps}x{self.tall}*{self.ahead}"


# By FORMAT (quantized.cuh) and groups of 8 rows; the last of each fits everywhere. A step of int8 has twice the bytes.
DESIGNS = {
    (0, 1): (Design(5, 4, 1, 3), Design(4, 4, 1, 2)),
    (1, 1): (Design(5, 4, 1, 4), Design(2, 10, 3, 1), Design(4, 4, 1, 3)),
    (2, 1): (Design(5, 4, 1, 4), Design(2, 10, 3, 1), Design(4, 4, 1, 2)),
    (3, 1): (Design(5, 4, 1, 4), Design(2, 10, 3, 1), Design(4, 4, 1, 2)),
    (0, 2): (Design(5, 4, 1, 2), Design(2, 4, 1, 3)),
    (1, 2): (Design(5, 4, 1, 3), Design(4, 4, 1, 3)),
    (2, 2): (Design(4, 4, 1, 4), Design(2, 4, 1, 4)),
    (3, 2): (Design(4, 4, 1, 4), Design(2, 4, 1, 4)),
}


@dataclass(frozen=True)
class Choice:
    design: Design
    slices: int
    groups: int
    cluster: bool = False  # the slices of a group are one, and no launch follows that adds them


def row_groups(rows: int) -> int:
    """Groups of 8 rows of x."""
    return -(-rows // 8)


def makes(form: str, format: str, a: Spec, params: Sequence[Spec], c: Spec) -> bool:
    """Whether this variant can make the product: bfloat16 x of 1 to 16 rows with pitches of 16 bytes."""
    if form not in ("forward", "head") or c.dtype != ("bfloat16" if form == "forward" else "float32"):
        return False
    (rows, depth), cols = a.shape, c.shape[1]
    whole = depth > 0 and depth % GROUP.get(format, 8) == 0 and cols * depth < 1 << 38
    return a.dtype == "bfloat16" and 1 <= rows <= MAX_ROWS and cols > 0 and whole and max(depth, cols) < MAX_EXTENT


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked."""
    return not rec.batch_invariant


def choose(number: int, rows: int, cols: int, depth: int, num_sms: int, capability: int) -> Choice:
    """The design and slices whose busiest CTA takes the least time; ties to the first."""
    able = designs(number, rows, capability)
    for group in (able[:-1], able[-1:]):  # the last has the fewest copies in flight, for where no other fits
        choices = [
            Choice(design, slices, min(blocks_of(cols), max(1, num_sms // slices)), cluster)
            for design in group
            for slices in range(1, min(num_sms, design.chunks(depth)) + 1)
            for cluster in (False, True)
            if fits(design, slices, cluster, number, rows, depth, capability)
        ]
        if choices:
            return min(choices, key=lambda choice: cost(choice, number, rows, cols, depth, num_sms))
    raise AssertionError((number, rows, cols, depth, capability))


def designs(number: int, rows: int, capability: int) -> list[Design]:
    """Those of DESIGNS that spill no registers: nf4 in warps of several blocks does so on all but 9.0."""
    able = DESIGNS[number, row_groups(rows)]
    return [design for design in able if design.tall == 1 or number < FORMATS.index("nf4") or capability == 90]


def fits(design: Design, slices: int, cluster: bool, number: int, rows: int, depth: int, capability: int) -> bool:
    if cluster and (slices not in CLUSTERS or capability not in CLUSTER_CAPABILITIES):
        return False
    limit = SHARED_BYTES.get(capability, 99 << 10)
    return design.shared_bytes(number, rows, depth, slices, cluster) <= limit


def blocks_of(cols: int) -> int:
    return -(-cols // BLOCK)


def cost(choice: Choice, number: int, rows: int, cols: int, depth: int, num_sms: int) -> int:
    """Of a product, as bytes of codes that an SM could have read."""
    design, slices = choice.design, choice.slices
    most = -(-blocks_of(cols) // choice.groups)  # blocks of a group
    passes, k = -(-most // (design.wide * design.tall)), design.chunks(depth, slices) * design.warps  # steps of 128
    read = most * k * STEP_BYTES[number] + rows * k * STEP + passes * PASS_COST
    read += most * k * row_groups(rows) * FRAGMENTS_COST // design.tall + most * rows * design.warps * BLOCK * 4
    if choice.cluster:
        return read + CLUSTER_COST + most * rows * EXCHANGE_COST
    return read + (SUM_COST + 8 * slices * rows * cols // num_sms if slices > 1 else 0)


def product(
    rec: Recorder,
    form: str,
    format: str,
    a: Tensor,
    params: Sequence[Tensor],
    c: Tensor,
    *,
    choice: Choice | None = None,
) -> None:
    """Record y = x weight^T: a = x [N,K], c = y [N,M]. `choice`: for tests."""
    assert makes(form, format, a, params, c), (form, format, a, c)
    (rows, depth), cols = a.shape, c.shape[1]
    number = format_number(format, params)
    taken = choice or choose(number, rows, cols, depth, rec.num_sms, rec.capability)
    design, slices, cluster = taken.design, taken.slices, taken.cluster
    assert 1 <= slices <= design.chunks(depth) and taken.groups <= blocks_of(cols), taken
    codes, scales, nested = (*params, None)[:3]
    assert codes is not None
    parts = rec.empty((slices, rows, cols), "float32", "parts") if slices > 1 and not cluster else None
    run = design.kernel(number, rows, c.dtype, slices if cluster else 1)
    pointers, extents = (a, codes, scales, nested, None if parts else c, parts), (rows, cols, depth, slices)
    shared, rounds = design.shared_bytes(number, rows, depth, slices, cluster), design.rounds(rows)
    grid = slices * taken.groups
    rec.launch(run, grid, design.threads, *pointers, *extents, taken.groups, rounds, shared_bytes=shared, weights=codes)
    if parts is not None:
        add_up(rec, parts, None, c, accumulate=False)
