"""The launches that mutants are judged on: the ops' own cases, through their launchers, with what memory held.

Each launch is kept with the bytes of its tensors before it ran and after, and which of them had been written. So a
mutant of one kernel can run alone, on the inputs that its predecessors had made: what it breaks is not blamed on a
later launch, and nothing is computed twice. A recording is itself a check: the kernels as they are give no report.

Cases: all small ones of an op in float32, forward and backward; one of them with accumulated gradients, and without
each gradient that may be left out; and what is in EXTRA. Variants on tensor cores have bfloat16. Other dtypes have no
other conditions, but in conversions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from cupyllm import ops
from cupyllm.backend.base import NUMPY_DTYPE, KernelSpec, Launch, Spec, Tensor
from cupyllm.backend.eager import Session, spoil
from cupyllm.backend.record import Recorder, arena_layout, place
from cupyllm.backend.sim import SimBackend
from cupyllm.ops import linear_mma, linear_rows, linear_tf32, quantized_mma, quantized_rows, rope
from cupyllm.ops.cases import draw, draw_cotangents, op_attrs
from cupyllm.ops.op import WEIGHT_DTYPES, Case, Op
from cupyllm.sim.memory import DEVICE_BASE
from cupyllm.simcheck.ops import record_adamw, record_grad_norm
from tests.ops import quantized

AMPERE = str(Path(__file__).parent.parent / "kernels" / "ampere.cu")
Call = Callable[[Session, Recorder], None]  # puts arrays on the device and records


def _paged(name: str, table: str, length: int) -> Case:
    """One sequence of one query, whose table has 2 of 3 pages."""
    pages = (3, 32, 16)
    kinds = ("normal", "normal", "normal", f"values:{table}", "values:0,1", f"values:{length}")
    inputs = ((1, 16), pages, pages, (1, 2), (2,), (1,))
    return Case(name, inputs, (), {"num_heads": 1, "num_kv_heads": 1}, kinds)


ROWS, PAGES = ((3, 8), (3, 8)), ((2, 4, 8), (2, 4, 8))

# Beside the ops' own cases: a bias gradient with more rows than warps, a sum that goes round the stages of shared
# memory, rows of tiles in two groups, and what launchers keep away from kernels, which bound it all the same.
EXTRA = {
    "linear": [
        Case("bias, 9 rows", ((9, 4),), ((33, 4), (33,))),
        Case("long", ((3, 520),), ((8, 520),)),
        Case("ten rows of tiles", ((1, 72),), ((600, 72),)),
        Case("split sum", ((66, 520),), ((40, 520), (40,))),
        Case("split gradient", ((520, 24),), ((40, 24),)),
        Case("split, odd", ((66, 513),), ((5, 513), (5,))),
    ],
    "cross_entropy": [Case("labels out of range", ((4, 7), (4,)), kinds=("normal", "values:-5,6,-100,7"))],
    "kv_append": [
        Case(
            "slots out of range", (*ROWS, *PAGES, (3,)), kinds=("normal", "normal", "normal", "normal", "values:8,2,-7")
        )
    ],
    "paged_attention": [
        _paged("no such page", "0,3", 40),
        _paged("a negative page", "-1,2", 40),
        _paged("longer than its table", "2,1", 70),
    ],
}


@dataclass
class Recorded:
    """A launch that ran, and the bytes of its tensors. `before` has the shadow, too: which bytes were written."""

    launch: Launch
    case: str
    before: list[tuple[slice, np.ndarray, np.ndarray]]
    after: list[np.ndarray]


@dataclass
class Trace:
    """The launches of one call, and what memory held around each; that is recorded when it is first needed."""

    case: str
    launches: list[Launch]
    recorded: list[Recorded] = field(default_factory=list)


class Replayer:
    """Records the launches of a source file's cases, and brings back the state that each started from."""

    def __init__(self, backend: SimBackend) -> None:
        self.backend = backend
        self._session = Session(backend)

    def traces(self, source: str) -> list[Trace]:
        """Every call that launches kernels of `source`; nothing has run yet."""
        found = []
        for case, call in calls(source):
            rec = Recorder(self.backend.capability)
            call(self._session, rec)
            found.append(Trace(case, self._placed(rec)))
        return found

    def record(self, trace: Trace) -> list[Recorded]:
        """Its launches, run at the first call. Raises SimError where a kernel as it is gives a report."""
        if not trace.recorded:
            trace.recorded = [self._run(launch, trace.case) for launch in trace.launches]
        return trace.recorded

    def restore(self, recorded: Recorded) -> None:
        """Bring back what memory held before the launch."""
        memory = self.backend.memory
        for where, data, shadow in recorded.before:
            self.backend.forget(where.start + DEVICE_BASE, len(data))
            memory.arena[where], memory.shadow[where] = data, shadow

    def same_bits(self, recorded: Recorded) -> bool:
        """Whether the tensors hold now what they held after the launch."""
        arena = self.backend.memory.arena
        return all(
            np.array_equal(arena[where], data)
            for (where, _, _), data in zip(recorded.before, recorded.after, strict=True)
        )

    def _placed(self, rec: Recorder) -> list[Launch]:
        offsets, total = arena_layout(rec.launches)
        arena = self.backend.allocate(max(total, 1), "arena")
        self._session.buffers.append(arena)
        spoil(self.backend, arena.address, arena.nbytes)
        return place(rec.launches, offsets, arena.address)

    def _run(self, launch: Launch, case: str) -> Recorded:
        memory = self.backend.memory
        regions = {(arg.address, arg.nbytes) for arg in launch.args if isinstance(arg, Tensor) and arg.nbytes}
        slices = [slice(a - DEVICE_BASE, a - DEVICE_BASE + n) for a, n in sorted(regions)]
        before = [(where, memory.arena[where].copy(), memory.shadow[where].copy()) for where in slices]
        self.backend.run(self.backend.load([launch]))
        return Recorded(launch, case, before, [memory.arena[where].copy() for where in slices])


def calls(source: str) -> Iterator[tuple[str, Call]]:
    """(label, call) of everything that launches kernels of `source`, a name in cupyllm/cu or AMPERE."""
    if source == AMPERE:
        yield from _ampere()
    if source == "adamw.cu":
        yield from ((f"{n} {p16}", _adamw(n, p16)) for n in (1, 257) for p16 in (None, "bfloat16"))
    if source == "grad_norm.cu":
        yield from ((f"{n}", _grad_norm(n)) for n in (1, 257, 8192, 8193))
    if source == "rope.cu":
        yield from ((f"table {rows}x{half}", _rope_table(rows, half)) for rows, half in ((5, 3), (4, 64)))
    if source == linear_rows.SOURCE:
        short, paired = linear_rows.Design(2, 1, 8, 3), linear_rows.Design(4, 2, 4, 3)
        yield "two passes, around the ring", _rows(11, 50, 2632, linear_rows.Choice(short, 1, 2))
        yield "two slices, blocks in pairs", _rows(29, 90, 776, linear_rows.Choice(paired, 2, 2))
    if source == linear_mma.SOURCE:
        yield "a short sum, odd columns", _mma("forward", 70, 33, 24, linear_mma.FLAT[32])
        yield "eight rows", _mma("wgrad", 8, 136, 456, linear_mma.EIGHTS[0])
    if source == linear_tf32.SOURCE:
        yield from ((f"infinite sums, {dtype} weight", _tf32(70, 72, 328, dtype)) for dtype in WEIGHT_DTYPES)
        yield "elements of 16 bits, one by one", _tf32(9, 7, 35, "bfloat16")
    if source == quantized_rows.SOURCE:
        tall, ring = quantized_rows.Design(2, 4, 3, 1), quantized_rows.Design(2, 2, 2, 2)
        yield "two slices, two passes", _quantized_rows("int8", 3, 170, 1032, quantized_rows.Choice(ring, 2, 2))
        yield "sums in rounds", _quantized_rows("nf4 double", 16, 200, 1088, quantized_rows.Choice(tall, 1, 2))
        odd = quantized_rows.Design(2, 1, 2, 2)
        yield "half a warp of x", _quantized_rows("int4", 9, 100, 1152, quantized_rows.Choice(odd, 1, 1))
    if source == quantized_mma.SOURCE:
        for form, format in itertools.product(("forward", "dgrad"), quantized.FORMATS):
            yield f"{form} of {format}", _quantized(quantized_mma.SMALL, form, format)
        yield "large tiles", _quantized(quantized_mma.LARGE, "forward", "int4")
        yield "half a tile of columns", _quantized(quantized_mma.LARGE, "dgrad", "nf4", 5, 40, 192)
        yield "absmax past the last", _quantized(quantized_mma.SMALL, "forward", "nf4 double", 3, 17, 1536)
        yield "odd columns, an odd row", _quantized(quantized_mma.SMALL, "forward", "int8", 65, 33, 328)
        yield "odd columns, float32", _quantized(quantized_mma.SMALL, "head", "int8", 65, 33, 328)
    if source == "linear_sum.cu":
        yield "three slices", _sum(7, 36, "bfloat16")
        yield "three slices, bias", _sum(7, 36, "bfloat16", biased=True)
        yield "three slices of odd columns", _sum(5, 33, "bfloat16", biased=True)
        yield "three slices, accumulated", _sum(7, 36, "float32", accumulate=True)
        yield "three slices, float32", _sum(5, 33, "float32")
    for name in ops.GRAPH_OPS:
        op = ops.get(name)
        variant = next((variant for variant in op.variants if variant.source == source), None)
        if variant is not None:
            of_float32 = not variant.tensor_cores or source == linear_tf32.SOURCE
            forced = {op.name: variant.name} if of_float32 else {}  # else whatever the launcher would take
            yield from _op_calls(op, "float32" if of_float32 else "bfloat16", forced)


def _op_calls(op: Op, dtype: str, forced: dict[str, str] | None = None) -> Iterator[tuple[str, Call]]:
    small = [case for case in op.cases() if case.size == "small"]
    for case in [*small, *EXTRA.get(op.name, [])]:
        yield case.name, _op_call(op, case, dtype, forced)
    if op.inference_only:
        return
    case = next((case for case in small if len(case.params) > 1), small[1])
    for added in dict.fromkeys((case.name, small[1].name)) if case.params else ():
        chosen = next(one for one in small if one.name == added)
        yield f"{added}, accumulated", _op_call(op, chosen, dtype, forced, accumulate=True)
    gradients = [f"d_input{i}" for i, wanted in enumerate(op.differentiable) if wanted]
    for left_out in [*gradients, *(f"d_param{i}" for i in range(len(case.params)))]:
        yield f"{case.name}, no {left_out}", _op_call(op, case, dtype, forced, left_out=left_out)


def _op_call(
    op: Op,
    case: Case,
    dtype: str,
    forced: dict[str, str] | None = None,
    accumulate: bool = False,
    left_out: str = "",
) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        rec.forced = forced or {}
        drawn, attrs = draw(case, dtype), op_attrs(op.name, case, dtype)
        x = [None if a is None else session.put(a, f"input{i}") for i, a in enumerate(drawn.inputs)]
        w = [session.put(a, f"param{i}") for i, a in enumerate(drawn.params)]
        y = [session.empty(spec, f"output{i}") for i, spec in enumerate(op.infer(x, w, attrs))]
        saved = op.forward(rec, x, w, y, attrs)
        if op.inference_only:
            return
        d_y = [None if a is None else session.put(a, f"d_output{i}") for i, a in enumerate(draw_cotangents(y))]
        wanted = [d and left_out != f"d_input{i}" for i, d in enumerate(op.differentiable)]
        d_x = [
            session.empty(t, f"d_input{i}") if t is not None and d else None
            for i, (t, d) in enumerate(zip(x, wanted, strict=True))
        ]
        d_w: list[Tensor | None] = []
        for i, t in enumerate(w):
            zeros = np.zeros(t.shape, np.float32)
            made = session.put(zeros, f"d_param{i}") if accumulate else session.empty(Spec(t.shape, "float32"))
            d_w.append(None if left_out == f"d_param{i}" else made)
        op.backward(rec, saved, d_y, d_x, d_w, attrs, accumulate)

    return call


def _floats(shape: int | Sequence[int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _adamw(size: int, p16: str | None) -> Call:
    return lambda session, rec: record_adamw(session, rec, size, p16)


def _grad_norm(size: int) -> Call:
    return lambda session, rec: record_grad_norm(session, rec, size)


def _rows(rows: int, cols: int, depth: int, choice: linear_rows.Choice) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        x, weight, bias = (
            session.put(_floats(shape, seed).astype(ml_dtypes.bfloat16))
            for seed, shape in enumerate(((rows, depth), (cols, depth), (cols,)))
        )
        y = session.empty(Spec((rows, cols), "bfloat16"))
        linear_rows.product(rec, "forward", x, weight, y, bias, choice=choice)

    return call


def _sum(rows: int, cols: int, dtype: str, biased: bool = False, accumulate: bool = False) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        parts, spec = session.put(_floats((3, rows, cols)), "parts"), Spec((rows, cols), dtype)
        c = session.put(_floats((rows, cols), 1), "c") if accumulate else session.empty(spec)
        bias = session.put(_floats(cols, 2).astype(NUMPY_DTYPE["bfloat16"]), "bias") if biased else None
        linear_mma.add_up(rec, parts, bias, c, accumulate)

    return call


def _mma(form: str, rows: int, cols: int, depth: int, tile: linear_mma.Tile) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        a_mn, b_mn, dtype = linear_mma.FORMS[form]
        shapes = ((depth, rows) if a_mn else (rows, depth), (depth, cols) if b_mn else (cols, depth))
        a, b = (session.put(_floats(shape, i).astype(ml_dtypes.bfloat16)) for i, shape in enumerate(shapes))
        linear_mma.product(rec, form, a, b, session.empty(Spec((rows, cols), dtype)), choice=(tile, 16))

    return call


def _quantized(
    tile: quantized_mma.Tile, form: str, format: str, rows: int = 70, out: int = 136, in_: int = 384
) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        weight = quantized.draw(format, out, in_)
        a = quantized.activations(form, weight, rows)
        c = Spec((rows, in_ if form == "dgrad" else out), "float32" if form == "head" else "bfloat16")
        params = [session.put(part) for part in weight.params]
        quantized_mma.product(
            rec, form, weight.format, session.put(a), params, session.empty(c), choice=tile, band=1 + rows % 2
        )

    return call


def _quantized_rows(format: str, rows: int, out: int, in_: int, choice: quantized_rows.Choice) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        weight = quantized.draw(format, out, in_)
        x, params = session.put(quantized.activations("forward", weight, rows)), [session.put(p) for p in weight.params]
        y = session.empty(Spec((rows, out), "bfloat16"))
        quantized_rows.product(rec, "forward", weight.format, x, params, y, choice=choice)

    return call


def _tf32(rows: int, cols: int, depth: int, dtype: str) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        shapes = ((rows, depth), (cols, depth), (rows, cols))
        a, b, d_y = (_floats(shape, seed) for seed, shape in enumerate(shapes))
        a[3, 9] = np.inf
        x, weight, grad = session.put(a), session.put(b.astype(NUMPY_DTYPE[dtype])), session.put(d_y)
        linear_tf32.product(rec, "forward", x, weight, session.empty(Spec((rows, cols), "float32")))
        linear_tf32.product(rec, "dgrad", grad, weight, session.empty(Spec((rows, depth), "float32")))
        linear_tf32.product(rec, "wgrad", grad, x, session.empty(Spec((cols, depth), "float32")))

    return call


def _rope_table(rows: int, half: int) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        cos, sin = (session.empty(Spec((rows, half), "float32")) for _ in range(2))
        positions = session.put(np.arange(rows, dtype=np.int32))
        rope.rope_table(rec, positions, session.put(np.abs(_floats(half))), 1.0, cos, sin)

    return call


def _ampere() -> Iterator[tuple[str, Call]]:
    for m, n, k in ((1, 8, 8), (64, 64, 96), (65, 72, 40), (130, 136, 200)):
        yield f"{m}x{n}x{k}", _gemm("gemm_nt", m, n, k)
        yield f"{m}x{n}x{k}", _gemm("gemm_nn", m, n, k)
    for n in (1, 128, 1000):
        yield f"{n}", _runs("stencil", 2, 128, n, (n,), shared_bytes=1040)
    for n in (4, 5):
        yield f"{n}", _runs("warp_transpose", -(-n // 4), 128, n, (n, 32, 32))
    for n in (256, 700):
        yield f"{n}", _runs("scan", -(-n // 256), 256, n, (n,))
    yield "300", _histogram(300)


def _gemm(name: str, m: int, n: int, k: int) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        a = session.put(_floats((m, k)).astype(ml_dtypes.bfloat16))
        b = session.put(_floats((n, k) if name == "gemm_nt" else (k, n), 1).astype(ml_dtypes.bfloat16))
        c = session.empty(Spec((m, n), "float32"))
        rec.launch(KernelSpec(AMPERE, name), (-(-n // 64), -(-m // 64)), 128, a, b, c, m, n, k)

    return call


def _runs(name: str, grid: int, block: int, n: int, shape: tuple[int, ...], shared_bytes: int = 0) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        x, y = session.put(_floats(shape)), session.empty(Spec(shape, "float32"))
        rec.launch(KernelSpec(AMPERE, name), grid, block, x, y, n, shared_bytes=shared_bytes)

    return call


def _histogram(n: int) -> Call:
    def call(session: Session, rec: Recorder) -> None:
        ids = session.put(np.random.default_rng(0).integers(-1, 65, n).astype(np.int32))
        rec.launch(KernelSpec(AMPERE, "histogram"), 2, 128, ids, session.put(np.zeros(64, np.int32)), n)

    return call
