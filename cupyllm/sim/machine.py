"""Runs launches: CTAs in batches, lanes in lock step for as long as they agree.

A batch of B CTAs of T threads runs as arrays that broadcast to (B, T): a value that is the same for all lanes is
(1, 1), one that differs by CTA (B, 1), by thread (1, T). NumPy's overhead is paid once an instruction and batch: B is
chosen to give about 2000 lanes. While all lanes are at one place, whole blocks run. Where a branch divides them, groups
with masks run, lowest segment first, and join where they meet; a group at a barrier or a warp instruction waits until
those it must enter with have come. When every group waits, the kernel would hang on a GPU: a report says so. CTAs run
in order and never wait for one another; a kernel that needs another CTA's progress spins, and the budget ends it.

Running CTAs one after another instead took 3 (a product of 256^3) to 18 times (RMSNorm of 64 x 1024) as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyllm.backend.base import ITEMSIZE, Argument, Launch, Tensor, TensorMap
from cupyllm.errors import BackendError
from cupyllm.sim import warp
from cupyllm.sim.access import LaunchMemory
from cupyllm.sim.batch import Batch, first_lane
from cupyllm.sim.flow import EXIT
from cupyllm.sim.memory import DeviceMemory, Extent, Geometry
from cupyllm.sim.module import BlockPlan, SegmentPlan, SimKernel, SimModule
from cupyllm.sim.ptx import Kernel
from cupyllm.sim.report import Reports, Site

Array = np.ndarray
Mask = Array | None
DEFAULT_BUDGET = 10_000_000_000  # instructions times lanes of one launch: a loop on one lane ends in 40 s
LANES = 2048
MAX_THREADS = 1024
MAX_SHARED_BYTES = 163 << 10  # of a CTA, compute capability 8.0
# What a block and a segment of diverged lanes cost beside their instructions, in the same unit: 4 ns, as measured.
_A_BLOCK, _A_SEGMENT, _A_BATCH = 1_000, 20_000, 60_000
_LEAST_LANES = 512  # what an instruction on fewer lanes counts as: it costs as much
_TURNS = 4096  # after so many, another group than the lowest gets one, so that waiting loops make progress


class Simulator:
    """Runs kernels on a DeviceMemory.

    check: whether accesses and synchronisation are judged; bounds and meetings always are. budget: instructions times
    lanes that a launch may take. lanes: threads of a batch, at least one CTA's.
    """

    def __init__(
        self, memory: DeviceMemory, *, check: bool = True, budget: int = DEFAULT_BUDGET, lanes: int = LANES
    ) -> None:
        self.memory, self.check, self.budget, self.lanes = memory, check, budget, lanes
        self._variables: dict[str, dict[str, Extent]] = {}

    def launch(self, module: SimModule, launch: Launch) -> None:
        """Run one launch to its end. Raises SimError with everything that the checks found, BackendError on a launch
        that a GPU would refuse, UnknownInstruction."""
        kernel = module.kernels[launch.kernel.symbol]
        geometry = self._geometry(kernel.kernel, launch)
        reports = Reports()
        args = [_extent(arg) for arg in launch.args]
        memory = LaunchMemory(
            self.memory,
            kernel.kernel,
            self._module_variables(module),
            args,
            launch.shared_bytes,
            reports,
            self.check,
            _written(kernel, args),
            frozenset(variable.name for variable in module.variables if variable.space == "const"),
        )
        params = _pack(kernel.kernel, launch.args)
        run = _Run(kernel, self.budget, launch)
        num_ctas = geometry.grid[0] * geometry.grid[1] * geometry.grid[2]
        rows = max(1, self.lanes // geometry.T)
        try:
            with np.errstate(all="ignore"):
                for first in range(0, num_ctas, rows):
                    part = Geometry(geometry.grid, geometry.block, first, min(rows, num_ctas - first), geometry.T)
                    reports.begin(part.grid, part.block, first)
                    memory.begin(part)
                    run.batch(Batch(part, memory, params, reports))
                    memory.end_batch()
        finally:
            memory.finish()
        reports.raise_if_any()

    def _geometry(self, kernel: Kernel, launch: Launch) -> Geometry:
        """Check what a driver checks, and that the budget can hold one instruction of each thread."""
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        most = min(kernel.max_threads or MAX_THREADS, MAX_THREADS)
        if not 1 <= threads <= most:
            raise BackendError(f"{kernel.name}: a block of {threads} threads, expected 1 to {most}")
        if min(launch.grid) < 1:
            raise BackendError(f"{kernel.name}: grid {launch.grid}, expected at least 1 in each direction")
        shared = sum(v.nbytes for v in kernel.variables if v.space == "shared") + launch.shared_bytes
        if shared > MAX_SHARED_BYTES:
            raise BackendError(
                f"{kernel.name}: {shared} bytes of shared memory a block, expected <= {MAX_SHARED_BYTES}"
            )
        num_threads = threads * launch.grid[0] * launch.grid[1] * launch.grid[2]
        if num_threads > self.budget:
            raise BackendError(
                f"{kernel.name}: {num_threads} threads, more than the budget of {self.budget} thread instructions; "
                "take a smaller grid or raise the budget"
            )
        if len(launch.args) != len(kernel.parameters):
            raise BackendError(f"{kernel.name}: {len(launch.args)} arguments, expected {len(kernel.parameters)}")
        return Geometry(launch.grid, launch.block, 0, 1, threads)

    def _module_variables(self, module: SimModule) -> dict[str, Extent]:
        """Device memory of __device__ and __constant__ variables, made at the module's first launch."""
        if module.digest not in self._variables:
            found: dict[str, Extent] = {}
            images: dict[str, Array] = {}
            for variable in module.variables:
                size = max(variable.nbytes, 1)
                allocation = self.memory.allocate(size, variable.name)
                initial = np.zeros(size, np.uint8)
                if variable.initial is not None:
                    initial[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
                images[variable.name] = initial
                element = variable.element_bytes
                shape = (variable.nbytes // element,)
                found[variable.name] = Extent(allocation.address, variable.nbytes, variable.name, element, shape)
            for variable in module.variables:
                image = images[variable.name]
                for byte, symbol in variable.addresses:
                    address = found[symbol.name].address + symbol.offset
                    image[byte : byte + 8] = np.frombuffer(np.uint64(address).tobytes(), np.uint8)
                self.memory.upload(found[variable.name].address, image)
            self._variables[module.digest] = found
        return self._variables[module.digest]


def _extent(arg: Argument) -> Extent | None:
    if not isinstance(arg, Tensor):
        return None
    return Extent(arg.address, arg.nbytes, arg.storage.name, ITEMSIZE[arg.dtype], arg.shape)


def _written(kernel: SimKernel, args: Sequence[Extent | None]) -> frozenset[int | str] | None:
    """Parameters and variables that the launch may write; None where a store has an address of unknown origin."""
    found: set[int | str] = set()
    for origins in kernel.stores:
        known = {o for o in origins or () if isinstance(o, str) or args[o] is not None}
        if not known:
            return None
        found |= known
    return frozenset(found)


def _pack(kernel: Kernel, args: Sequence[Argument]) -> Array:
    """The parameter bytes as a kernel reads them."""
    size = max((p.offset + p.nbytes for p in kernel.parameters), default=0)
    packed = np.zeros(size, np.uint8)
    for parameter, arg in zip(kernel.parameters, args, strict=True):
        place = packed[parameter.offset : parameter.offset + parameter.nbytes]
        assert not isinstance(arg, TensorMap), "refused when the program was loaded"
        if isinstance(arg, Tensor):
            value: Any = np.uint64(arg.address)
        elif arg is None:
            value = np.uint64(0)
        elif isinstance(arg, (np.float32, np.float64)):
            value = arg
        else:
            value = np.int64(arg) if parameter.nbytes == 8 else np.array(arg).astype(f"i{parameter.nbytes}")[()]
        if value.nbytes != parameter.nbytes:
            raise BackendError(
                f"{kernel.name}: argument {arg!r} has {value.nbytes} bytes, expected {parameter.nbytes} "
                f"({parameter.name})"
            )
        place[:] = np.frombuffer(value.tobytes(), np.uint8)
    return packed


class _Run:
    """One launch: the plan of its kernel, and how much of the budget is spent."""

    def __init__(self, kernel: SimKernel, budget: int, launch: Launch) -> None:
        self.kernel, self.budget, self.launch = kernel, budget, launch
        self.spent = 0
        self.blocks: list[tuple[Any, BlockPlan]] = [(kernel.functions[b.name], b) for b in kernel.blocks]
        self.segments: list[tuple[Any, SegmentPlan]] = [(kernel.functions[s.name], s) for s in kernel.segments]
        self.starts = {block.segments[0]: i for i, block in enumerate(kernel.blocks)}

    def batch(self, X: Batch) -> None:
        """Run a batch to its end."""
        R = self.kernel.registers()
        lanes = max(X.B * X.T, _LEAST_LANES)
        self.spent += _A_BATCH
        block: int = 0
        alive: Mask = None
        while block != EXIT:
            groups, alive = self._together(R, X, block, alive, lanes)
            if groups is None:
                return
            block, alive = self._apart(R, X, groups, alive, lanes)

    def _together(
        self, R: list[Array], X: Batch, index: int, alive: Mask, lanes: int
    ) -> tuple[dict[int, Array] | None, Mask]:
        """Run blocks for as long as all living lanes go the same way: (groups after a parting or None, who lives)."""
        blocks, budget, spent = self.blocks, self.budget, self.spent
        while index != EXIT:
            function, block = blocks[index]
            condition = function(R, X, alive, False)
            spent += block.cost * lanes + _A_BLOCK
            if spent > budget:
                self._exhausted(X, index)
            if not block.conditional:
                index = block.taken
                continue
            if condition.size == 1:
                index = block.taken if condition.item() else block.following
                continue
            if alive is None:
                on, off = condition, None
                if on.all():
                    index = block.taken
                    continue
                if not on.any():
                    index = block.following
                    continue
                off = ~condition
            else:
                on, off = condition & alive, ~condition & alive
                if not off.any():
                    index = block.taken
                    continue
                if not on.any():
                    index = block.following
                    continue
            if block.taken == EXIT or block.following == EXIT:
                alive, index = (off, block.following) if block.taken == EXIT else (on, block.taken)
                continue
            if block.taken == block.following:
                index = block.taken
                continue
            self.spent = spent
            return {self._start(block.taken): on, self._start(block.following): off}, alive
        self.spent = spent
        return None, alive

    def _start(self, block: int) -> int:
        return self.kernel.blocks[block].segments[0]

    def _apart(self, R: list[Array], X: Batch, groups: dict[int, Array], alive: Mask, lanes: int) -> tuple[int, Mask]:
        """Run diverged groups until the living lanes are together at the start of a block: (that block, who lives)."""
        blocked: set[int] = set()
        turn = 0
        while True:
            if len(groups) == 1:
                index = next(iter(groups))
                if index in self.starts:
                    return self.starts[index], alive
            if not groups:
                return EXIT, alive
            runnable = [s for s in groups if s not in blocked]
            if not runnable:
                self._stuck(X, groups, alive)
            turn += 1
            index = min(runnable) if turn % _TURNS else max(runnable)
            mask = groups.pop(index)
            function, segment = self.segments[index]
            if segment.meeting:
                ready = self._ready(R, X, segment, mask, alive)
                waiting = mask & ~ready
                if not ready.any():
                    groups[index] = mask
                    blocked.add(index)
                    continue
                if waiting.any():
                    groups[index] = waiting
                    blocked.add(index)
                mask = ready
            alone = not groups
            condition = function(R, X, alive if alone else mask, not alone)
            self.spent += segment.cost * lanes + _A_SEGMENT
            if self.spent > self.budget:
                self._exhausted(X, segment.block)
            alive = self._go_on(X, groups, blocked, segment, mask, condition, alive)

    def _go_on(
        self,
        X: Batch,
        groups: dict[int, Array],
        blocked: set[int],
        segment: SegmentPlan,
        mask: Array,
        condition: Any,
        alive: Mask,
    ) -> Mask:
        """Send the lanes of `mask` to what comes after their segment. Returns who lives."""
        if segment.following != EXIT:
            self._join(groups, blocked, segment.following, mask)
            return alive
        block = self.kernel.blocks[segment.block]
        targets = [(block.taken, mask)]
        if block.conditional:
            targets = [(block.taken, mask & condition), (block.following, mask & ~condition)]
        for target, lanes in targets:
            if not lanes.any():
                continue
            if target == EXIT:
                self._passed_by(X, groups, segment.block, lanes)
                alive = ~lanes if alive is None else alive & ~lanes
                blocked.clear()  # who waited for these lanes waits no more
            else:
                self._join(groups, blocked, self._start(target), lanes)
        return alive

    def _passed_by(self, X: Batch, groups: dict[int, Array], block: int, lanes: Array) -> None:
        """Report meetings that others wait at and that `lanes`, which exit from `block`, went past: they ran code that
        comes behind the meeting. Lanes that returned early did not, and nobody has to wait for those."""
        for index, waiting in groups.items():
            segment = self.kernel.segments[index]
            if block not in segment.beyond or segment.site is None:
                continue
            gone = np.broadcast_to(lanes, (X.B, X.T))
            if segment.meeting == "cta":
                left = waiting & gone.any(axis=1, keepdims=True)
            else:
                left = waiting & (warp.vote("ballot", np.ones((1, 1), bool), X.T, gone) & np.uint32(segment.mask) != 0)
            if left.any():
                row, thread = first_lane(left, X.B, X.T)
                kind = "divergent-barrier" if segment.meeting == "cta" else "divergent-shuffle"
                X.reports.add(kind, segment.site, row, thread, detail="other threads went past it and ended")

    def _join(self, groups: dict[int, Array], blocked: set[int], index: int, lanes: Array) -> None:
        groups[index] = groups[index] | lanes if index in groups else lanes
        blocked.discard(index)

    def _ready(self, R: list[Array], X: Batch, segment: SegmentPlan, mask: Array, alive: Mask) -> Array:
        """Lanes of `mask` whose CTA, or whose warp's members, are all there; who has exited is not waited for."""
        missing = ~mask if alive is None else alive & ~mask
        if segment.meeting == "cta":
            return mask & ~missing.any(axis=1, keepdims=True)
        absent = warp.vote("ballot", np.ones((1, 1), bool), X.T, missing)
        members = np.uint32(segment.mask) if segment.members is None else R[segment.members].view(np.uint32)
        return mask & ((absent & members) == 0)

    def _stuck(self, X: Batch, groups: dict[int, Array], alive: Mask) -> None:
        """Every group waits: say for whom, and end the launch."""
        for index, mask in sorted(groups.items()):
            segment = self.kernel.segments[index]
            assert segment.site is not None
            row, thread = first_lane(mask, X.B, X.T)
            kind = "divergent-barrier" if segment.meeting == "cta" else "divergent-shuffle"
            other, where = self._absent(X, groups, index, row, thread, segment.meeting)
            X.reports.add(
                kind, segment.site, row, thread, other=other, other_thread=where, detail=_WAITS[other is None]
            )
        X.M.end_batch()  # what is logged and not judged yet
        X.reports.raise_if_any()
        raise AssertionError("a deadlock without a report")

    def _absent(
        self, X: Batch, groups: dict[int, Array], index: int, row: int, thread: int, meeting: str
    ) -> tuple[Site | None, int | None]:
        """Where one of the lanes waits that this one waits for."""
        for other, mask in groups.items():
            lanes = np.broadcast_to(mask, (X.B, X.T))[row]
            near = lanes if meeting == "cta" else lanes & (np.arange(X.T) // 32 == thread // 32)
            if other != index and near.any():
                return self.kernel.segments[other].site, int(near.argmax())
        return None, None

    def _exhausted(self, X: Batch, block: int) -> None:
        """The budget is spent: report where."""
        plan = self.kernel.blocks[block]
        site = self._site_near(plan)
        X.reports.add(
            "budget",
            site,
            detail=f"more than {self.budget} thread instructions are spent, the budget of a launch: an endless loop, "
            "a loop that waits for another CTA, or a launch that needs a larger budget",
        )
        X.M.end_batch()  # what is logged and not judged yet
        X.reports.raise_if_any()

    def _site_near(self, plan: BlockPlan) -> Site:
        return next(
            (self.kernel.segments[s].site for s in plan.segments if self.kernel.segments[s].site), None
        ) or Site(self.kernel.kernel.name, "bra", plan.where)


_WAITS = {
    True: "it waits for threads that never come",
    False: "threads wait at different places, and none can go on",
}
