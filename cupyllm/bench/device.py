"""Cases on a GPU: operands in two pools, one of random inputs that nothing writes to, one of outputs; a graph a sample.

Pools are allocated once and hold as many sets of operands as the largest case rotates through, so a case costs
recording, loading and capturing, a few milliseconds, beside its samples. What a contender is: `Contender`; ours is
here, others in peers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cupyllm import ops
from cupyllm.backend import cublas
from cupyllm.backend.base import NUMPY_DTYPE, Buffer, KernelSpec, Launch, Spec, Tensor, fixed
from cupyllm.backend.record import Recorder, arena_layout, place
from cupyllm.bench import OPS
from cupyllm.bench.cases import UNPACKED, Case, Record, aligned
from cupyllm.bench.measure import SAMPLES, Batch, Times, measure, num_calls, num_sets, turns
from cupyllm.errors import CupyllmError, OutOfMemory

READ = Path(__file__).with_name("read.cu")
READ_BYTES = 2 << 30
RESERVED_BYTES = 2 << 30  # left free: for arenas, workspaces and what a peer allocates
BLOCK_ELEMENTS = (1 << 23) + 8 * 4099  # of random values; a pool repeats them
COMPARED_ELEMENTS = 1 << 16  # at the start of an output, and as many at its end
CANARY = 0xFF


@dataclass(frozen=True)
class Operands:
    """One set: tensors that lie in the pools."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass
class Ready:
    """A contender that has a case prepared. `close` gives back what it holds."""

    variant: str
    note: str  # what it does differently, so that its output is not compared; "" for nothing
    once: Callable[[], None]  # the work on the first set
    batches: Callable[[Sequence[Sequence[int]]], list[Batch]]  # for each list of sets, a batch
    close: Callable[[], None]


class Contender(Protocol):
    """Who does the work: ours, or a peer."""

    name: str

    def prepare(self, bench: Bench, case: Case, sets: Sequence[Operands]) -> Ready: ...

    def kernels(self, backend: Any, case: Case) -> list[KernelSpec]:
        """What is to be compiled for a case."""
        ...


@dataclass
class Row:
    """A case and its times. `skipped` says why there are none."""

    case: Case
    sets: int = 0
    calls: int = 0
    times: dict[str, Times] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)  # contender -> relative L2, from the first one's output
    skipped: str = ""

    @property
    def agrees(self) -> bool:
        return all(difference <= self.case.tolerance for difference in self.differences.values())


class CudaClock:
    """Clock (measure.py) of events on one stream."""

    def __init__(self, backend: Any, stream: Any) -> None:
        self._backend, self._stream, self._events = backend, stream, []  # type: ignore[var-annotated]

    def time(self, batches: Sequence[Batch]) -> list[float]:
        while len(self._events) < 2 * len(batches):
            self._events.append(self._backend.event())
        pairs = list(zip(self._events[::2], self._events[1::2], strict=False))[: len(batches)]
        for batch, (start, stop) in zip(batches, pairs, strict=True):
            self._backend.record(start, self._stream)
            batch.start()
            self._backend.record(stop, self._stream)
        self._backend.wait_host(pairs[-1][1])
        return [1e3 * self._backend.elapsed_ms(start, stop) for start, stop in pairs]


class Bench:
    """An open GPU with pools for these cases. `backend` has `capture`, `compile`, `l2_bytes` beside Backend's."""

    def __init__(
        self, backend: Any, cases: Sequence[Case], contenders: Sequence[Contender], samples: int = SAMPLES
    ) -> None:
        self.backend, self.samples = backend, samples
        self.contenders = {contender.name: contender for contender in contenders}
        assert len(self.contenders) == len(contenders), contenders
        self.stream = backend.stream()
        self.clock: Any = CudaClock(backend, self.stream)
        self._open = ExitStack()
        wanted = [kernel for case in cases for contender in contenders for kernel in contender.kernels(backend, case)]
        read = KernelSpec(str(READ), "bench_read")
        backend.compile([read, *dict.fromkeys(wanted)])  # all at once: in parallel
        self._allocate(cases)
        self.read_gb_per_s = self._measure_read(read)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- memory ----

    def _allocate(self, cases: Sequence[Case]) -> None:
        free = max(self.backend.free_bytes() - RESERVED_BYTES, 0)
        needs = [(self._num_sets(case, free), case) for case in cases]
        ins = max([1 << 20, *(count * case.input_bytes for count, case in needs)])
        outs = max([1 << 20, *(count * (case.set_bytes - case.input_bytes) for count, case in needs)])
        if ins + outs > free:  # the cases with most inputs and with most outputs are two
            ins, outs = (int(part * free / (ins + outs)) // 256 * 256 for part in (ins, outs))
        ins = max(ins, min(READ_BYTES, (free - outs) // 256 * 256))
        if min(ins, outs) < 1 << 20:
            raise OutOfMemory(f"GPU memory: {free + RESERVED_BYTES} bytes are free, expected 2.1 GB or more; free some")
        self._inputs, self._outputs = self.buffer(ins, "inputs"), self.buffer(outs, "outputs")
        block = np.random.default_rng(0).standard_normal(min(BLOCK_ELEMENTS, ins // 2), np.float32)
        data = block.astype(NUMPY_DTYPE["bfloat16"])  # two of them are a float32 of about that size, too
        self.backend.upload(self._inputs.address, data.view(np.uint8))
        done = data.nbytes
        while done < ins:
            step = min(done, ins - done)
            self.backend.copy(self._inputs.address + done, self._inputs.address, step, self.stream)
            done += step

    def buffer(self, nbytes: int, name: str) -> Buffer:
        """Device bytes until the bench is closed."""
        buffer: Buffer = self.backend.allocate(nbytes, name)
        self._open.callback(buffer.free)
        return buffer

    def _num_sets(self, case: Case, memory_bytes: int) -> int:
        return num_sets(case.rotated_bytes, case.set_bytes, self.backend.l2_bytes, memory_bytes)

    def operands(self, case: Case) -> list[Operands]:
        """As many sets as are to be rotated and have room; none where there is not even room for two."""
        room = min(
            self._inputs.nbytes // case.input_bytes,
            self._outputs.nbytes // max(case.set_bytes - case.input_bytes, 1),
        )
        count = min(self._num_sets(case, 1 << 62), room)
        places = [self._inputs.address, self._outputs.address]
        found = []
        for _ in range(count if count > 1 else 0):
            made: tuple[list[Tensor], list[Tensor]] = ([], [])
            for which, specs in enumerate((case.inputs, case.outputs)):
                for spec in specs:
                    made[which].append(fixed(places[which], spec.shape, spec.dtype))
                    places[which] += aligned(spec)
            found.append(Operands(tuple(made[0]), tuple(made[1])))
        return found

    # ---- measuring ----

    def _measure_read(self, read: KernelSpec) -> float:
        nbytes = min(READ_BYTES, self._inputs.nbytes) // 16 * 16
        rec = Recorder.of(self.backend)
        source, target = (
            fixed(pool.address, (nbytes if pool is self._inputs else 16,), "uint8") for pool in self._pools()
        )
        rec.launch(read, 4 * self.backend.num_sms, 512, source, target, nbytes // 16)
        program = self.backend.load(rec.launches)
        batch = Batch(lambda: self.backend.run(program, self.stream), 1)
        return nbytes / 1e3 / measure({"read": [batch]}, self.clock, self.samples)["read"].median

    def _pools(self) -> tuple[Buffer, Buffer]:
        return self._inputs, self._outputs

    def run(self, cases: Sequence[Case]) -> Iterator[Row]:
        for case in cases:
            yield self.row(case)

    def row(self, case: Case, only: Sequence[str] = ()) -> Row:
        """Times of every contender (or those of `only`), the first one's output compared with the others'."""
        sets, row = self.operands(case), Row(case)
        if not sets:
            row.skipped = f"two sets of operands take {2 * case.set_bytes / 1e9:.1f} GB, which are not free"
            return row
        with ExitStack() as stack:
            ready: dict[str, Ready] = {}
            for name, contender in self.contenders.items():
                if not only or name in only:
                    ready[name] = contender.prepare(self, case, sets)
                    stack.callback(ready[name].close)
            self._compare(row, ready, sets[0])
            single = {name: self._single(one) for name, one in ready.items()}
            row.sets, row.calls = len(sets), num_calls(min(single.values()))
            order = turns(row.sets, row.calls)
            batches = {name: one.batches(order) for name, one in ready.items()}
            row.times = measure(batches, self.clock, self.samples)
            row.variants = {name: one.variant for name, one in ready.items()}
            row.notes = {name: one.note for name, one in ready.items()}
            self.backend.synchronize()  # before what they hold is given back
        return row

    def _single(self, ready: Ready) -> float:
        """About how long one call takes."""
        batch = Batch(ready.once, 1)
        return min(self.clock.time([batch] * 4)[1:])

    def _compare(self, row: Row, ready: Mapping[str, Ready], operands: Operands) -> None:
        first: list[np.ndarray] = []
        for name, one in ready.items():
            for tensor in operands.outputs:
                self.backend.fill(tensor.address, tensor.nbytes, CANARY, self.stream)
            one.once()
            self.backend.synchronize()
            found = [self._ends(tensor) for tensor in operands.outputs]
            if not first:
                first = found
            elif not one.note:
                row.differences[name] = max(_difference(a, b) for a, b in zip(first, found, strict=True))

    def _ends(self, tensor: Tensor) -> np.ndarray:
        """float32 of the first and the last elements."""
        count = min(COMPARED_ELEMENTS, tensor.size)
        flat, parts = tensor.view(tensor.size), []
        for start in (0, tensor.size - count):
            part = np.empty(count, NUMPY_DTYPE[tensor.dtype])
            self.backend.download(part, flat.rows(start, start + count).address)
            parts.append(part.astype(np.float32))
        return np.concatenate(parts)


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2; infinity where either is no number."""
    size = float(np.linalg.norm(a.astype(np.float64)))
    found = float(np.linalg.norm(a.astype(np.float64) - b)) / max(size, 1e-30)
    return found if np.isfinite(found) else float("inf")


class Ours:
    """Our own launchers, free to choose or with variants forced. `unpacked`: of packed weights what they stand for."""

    def __init__(self, name: str = "ours", forced: Mapping[str, str] | None = None, unpacked: bool = False) -> None:
        self.name, self.forced, self.unpacked = name, dict(forced or {}), unpacked

    def _work(self, case: Case) -> Record:
        return case.unpacked if self.unpacked and case.unpacked is not None else case.record

    def kernels(self, backend: Any, case: Case) -> list[KernelSpec]:
        rec = Recorder.of(backend, self.forced)
        self._work(case)(rec, [_somewhere(spec) for spec in case.inputs], [_somewhere(spec) for spec in case.outputs])
        return [launch.kernel for launch in rec.launches if launch.kernel.source != cublas.SOURCE]

    def prepare(self, bench: Bench, case: Case, sets: Sequence[Operands]) -> Ready:
        backend, open_ = bench.backend, ExitStack()
        try:
            rec = self._record(bench, case, sets, [0])
            program = self._load(bench, rec.launches, open_)
        except CupyllmError:
            open_.close()
            raise

        def batches(order: Sequence[Sequence[int]]) -> list[Batch]:
            found = []
            for turn in order:
                graph = backend.capture([self._load(bench, self._record(bench, case, sets, turn).launches, open_)])
                open_.callback(graph.free)
                found.append(Batch(_launcher(graph, bench.stream), len(turn)))
            return found

        note = UNPACKED if self._work(case) is not case.record else ""
        once = partial(backend.run, program, bench.stream)
        return Ready(variant_of(rec), note, once, batches, open_.close)

    def _record(self, bench: Bench, case: Case, sets: Sequence[Operands], turn: Sequence[int]) -> Recorder:
        rec = Recorder.of(bench.backend, self.forced)
        for index in turn:
            self._work(case)(rec, sets[index].inputs, sets[index].outputs)
        return rec

    @staticmethod
    def _load(bench: Bench, launches: Sequence[Launch], open_: ExitStack) -> Any:
        offsets, total = arena_layout(launches)
        base = 0
        if total:
            arena = bench.backend.allocate(total, "temporaries")
            open_.callback(arena.free)
            base = arena.address
        return bench.backend.load(place(launches, offsets, base))


def _launcher(graph: Any, stream: Any) -> Callable[[], None]:
    return lambda: graph.launch(stream)


def _somewhere(spec: Spec) -> Tensor:
    return fixed(1 << 40, spec.shape, spec.dtype)


def variant_of(rec: Recorder) -> str:
    """The variant that was chosen; in a backward, which notes none, the one that the first launch's kernel is of."""
    if rec.chosen:
        return next(iter(rec.chosen.values()))
    names = {variant.source: variant.name for op in OPS for variant in ops.get(op).variants}
    found = [names[launch.kernel.source] for launch in rec.launches if launch.kernel.source in names]
    return found[0] if found else "none"
