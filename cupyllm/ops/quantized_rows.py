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
from cupyllm.quant.layout import FORMATS, GROUP, MAP, format_number

SOURCE, SUM_SOURCE = "quantized_rows.cu", "linear_sum.cu"
STEP = 128  # k of a warp's step
BLOCK = 16  # rows of the weight that are multiplied at once
MAX_ROWS = 16
MAX_EXTENT = 1 << 30
TABLE_BYTES = 256 * 32 * 4  # nf4's pairs
SUM_THREADS = 128
SUM_COST = 12 << 10  # bytes of codes that an SM could have read during another launch
PASS_COST = 1 << 10  # and while a CTA adds up a pass
SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}  # of a CTA; others: 99 KB


@dataclass(frozen=True)
class Design:
    """`blocks` x 16 rows of the weight a pass, each by `warps` warps, `stages` steps of each in flight."""

    blocks: int
    warps: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * self.blocks * self.warps

    def chunks(self, depth: int, slices: int = 1) -> int:
        """Steps of a warp in the largest slice."""
        whole = -(-depth // (STEP * self.warps))
        return -(-whole // slices)

    def shared_bytes(self, number: int, rows: int, depth: int, slices: int) -> int:
        """Dynamic shared memory of a CTA: sums, tables, its slice of x."""
        sums = self.blocks * self.warps * row_groups(rows) * 160 * 4
        tables = (TABLE_BYTES if number >= FORMATS.index("nf4") else 0) + (MAP * 4 if number == len(FORMATS) else 0)
        return sums + tables + rows * (self.chunks(depth, slices) * self.warps * STEP * 2 + 16)

    def kernel(self, number: int, rows: int, dtype: str) -> KernelSpec:
        return kernel(
            SOURCE,
            "quantized_rows",
            dtypes={"Y_T": dtype},
            FORMAT=number,
            NT=row_groups(rows),
            WN=self.blocks,
            WK=self.warps,
            D=self.stages,
        )

    def __str__(self) -> str:
        return f"{self.blocks}x{self.warps}*{self.stages}"


# By FORMAT (quantized.cuh): a step of int8 has twice the bytes of the others.
DESIGNS = {
    0: (Design(5, 4, 1), Design(4, 4, 1)),
    1: (Design(5, 4, 2), Design(4, 4, 3)),
    2: (Design(5, 4, 2), Design(4, 4, 3)),
    3: (Design(4, 4, 2), Design(2, 8, 2)),
}


@dataclass(frozen=True)
class Choice:
    design: Design
    slices: int
    groups: int


def row_groups(rows: int) -> int:
    """Groups of 8 rows of x."""
    return -(-rows // 8)


def makes(form: str, format: str, a: Spec, params: Sequence[Spec], c: Spec) -> bool:
    """Whether this variant can make the product: bfloat16 x of 1 to 16 rows with pitches of 16 bytes."""
    if form not in ("forward", "head") or c.dtype != ("bfloat16" if form == "forward" else "float32"):
        return False
    (rows, depth), cols = a.shape, c.shape[1]
    whole = depth > 0 and depth % GROUP.get(format, 8) == 0
    return a.dtype == "bfloat16" and 1 <= rows <= MAX_ROWS and cols > 0 and whole and max(depth, cols) < MAX_EXTENT


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked."""
    return not rec.batch_invariant


def choose(number: int, rows: int, cols: int, depth: int, num_sms: int, capability: int) -> Choice:
    """The design and slices whose busiest CTA reads the least; ties to the first."""
    limit = SHARED_BYTES.get(capability, 99 << 10)
    blocks = -(-cols // BLOCK)
    step_bytes = 2048 if number == 0 else 1024 + (64 if number < 3 else 32)
    best: tuple[int, Choice] | None = None
    for design in DESIGNS[number]:
        for slices in range(1, min(num_sms, design.chunks(depth)) + 1):
            if design.shared_bytes(number, rows, depth, slices) > limit:
                continue
            groups = min(blocks, max(1, num_sms // slices))
            most = -(-blocks // groups)  # blocks of a group
            passes = -(-most // design.blocks)
            steps = passes * design.chunks(depth, slices) * design.blocks * design.warps
            read = steps * step_bytes + passes * PASS_COST
            read += rows * design.chunks(depth, slices) * design.warps * STEP * 2
            if slices > 1:
                read += SUM_COST + 8 * slices * rows * cols // num_sms
            if best is None or read < best[0]:
                best = read, Choice(design, slices, groups)
    assert best is not None, (number, rows, cols, depth, capability)
    return best[1]


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
    design, slices = taken.design, taken.slices
    assert 1 <= slices <= design.chunks(depth), taken
    codes, scales, nested = (*params, None)[:3]
    assert codes is not None
    parts = rec.empty((slices, rows, cols), "float32", "parts") if slices > 1 else None
    run = design.kernel(number, rows, c.dtype)
    args = (a, codes, scales, nested, None if parts else c, parts, rows, cols, depth, slices, taken.groups)
    shared = design.shared_bytes(number, rows, depth, slices)
    rec.launch(run, slices * taken.groups, design.threads, *args, shared_bytes=shared, weights=codes)
    if parts is not None:
        # Programmatic, too: it waits before it does anything, and C is no argument of the launch before.
        size, width = rows * cols, 4 if cols % 4 == 0 else 1
        add = kernel(SUM_SOURCE, "linear_sum", dtypes={"C_T": c.dtype}, WIDTH=width)
        rec.launch(
            add, -(-size // (SUM_THREADS * width)), SUM_THREADS, parts, None, c, size, cols, slices, 0, weights=c
        )
