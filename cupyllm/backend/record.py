"""Recording launches, and laying out the memory between them.

A launcher asks the recorder for tensors that have no address yet and records launches on them. When a list is
complete, every such storage is known to live from the first to the last launch that names it, so a static arena can
be laid out: storages whose lifetimes overlap get disjoint bytes, others share. Lifetimes come from the launches
themselves, so saved activations, gradients and scratch need no annotations and cannot be annotated wrongly. A caching
allocator was rejected: its stream rules are subtle and its peak is not known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cupyllm.backend.base import (
    ALIGNMENT,
    Argument,
    Backend,
    KernelSpec,
    Launch,
    Spec,
    Storage,
    Tensor,
    TensorMap,
    tensor_of,
)

DEFAULT_SMS = 132  # of an H100 or H200, where nothing is going to run


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Recorder:
    """Collects launches in order. `capability` and `forced` decide which variant of an op is taken, `num_sms` how many
    CTAs a persistent kernel gets. `tensor_cores`: see Backend. `batch_invariant`: the order in which a row is summed
    must not depend on how many rows there are, at the price of speed with few (float32 always keeps to it)."""

    def __init__(
        self,
        capability: int,
        forced: dict[str, str] | None = None,
        num_sms: int = DEFAULT_SMS,
        tensor_cores: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        self.capability = capability
        self.batch_invariant = batch_invariant
        self.tensor_cores = tensor_cores
        self.num_sms = num_sms
        self.forced = forced or {}
        self.launches: list[Launch] = []
        self.chosen: dict[str, str] = {}  # node -> variant, for the log
        self.node = ""

    @classmethod
    def of(cls, backend: Backend, forced: dict[str, str] | None = None, batch_invariant: bool = False) -> Recorder:
        """For launches that this backend will run."""
        return cls(backend.capability, forced, backend.num_sms, backend.tensor_cores, batch_invariant)

    def empty(self, shape: Sequence[int], dtype: str, name: str = "") -> Tensor:
        """An arena tensor; its content is undefined until a recorded launch writes it."""
        spec = Spec(tuple(int(n) for n in shape), dtype)
        return Tensor(spec.shape, dtype, Storage(spec.nbytes, None, f"{self.node}.{name}"))

    def launch(
        self,
        kernel: KernelSpec,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: Argument,
        shared_bytes: int = 0,
        weights: Tensor | None = None,
    ) -> None:
        """Record one launch. An empty grid (a tensor without elements) records nothing.

        `weights`: the launch is programmatic (Launch): its kernel reads this tensor before it waits for the launch
        before it, unless one that may still be running names the same storage.
        """
        grid3, block3 = _triple(grid), _triple(block)
        assert min(block3) > 0 and block3[0] * block3[1] * block3[2] <= 1024, block3
        assert grid3[1] <= 65535 and grid3[2] <= 65535 and grid3[0] < 2**31, grid3
        if min(grid3) > 0:
            early = weights is not None and self._settled(weights.storage)
            self.launches.append(Launch(kernel, grid3, block3, args, shared_bytes, self.node, early))

    def _settled(self, storage: Storage) -> bool:
        """Whether no launch that may still be running can be writing `storage`: those back to the last one that began
        when all before it had ended. The first launch of a list waits for what came before the list."""
        for launch in reversed(self.launches):
            if _names(launch, storage):
                return False
            if not launch.programmatic:
                return True
        return False


def _names(launch: Launch, storage: Storage) -> bool:
    """Whether any argument lies in `storage`; two storages at known addresses are compared by their bytes."""

    def same(other: Storage) -> bool:
        if other is storage or other.address is None or storage.address is None:
            return other is storage
        return other.address < storage.address + storage.nbytes and storage.address < other.address + other.nbytes

    return any(tensor is not None and same(tensor.storage) for tensor in map(tensor_of, launch.args))


def _triple(value: int | tuple[int, ...]) -> tuple[int, int, int]:
    value = (value,) if isinstance(value, int) else value
    x, y, z = (*value, 1, 1)[:3]
    return int(x), int(y), int(z)


def arena_layout(launches: Iterable[Launch], keep: Iterable[Tensor] = ()) -> tuple[dict[Storage, int], int]:
    """Offsets of every unplaced storage, and the arena's bytes.

    `keep` lists tensors that must survive the whole list (outputs read after it ran). Greedy by size, each at the
    lowest offset free of every overlapping lifetime: within a few percent of the optimum on decoder layers.
    """
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    count = 0
    for index, launch in enumerate(launches):
        count = index + 1
        for arg in launch.args:
            tensor = tensor_of(arg)
            if tensor is not None and tensor.storage.address is None:
                first.setdefault(tensor.storage, index)
                last[tensor.storage] = index
    for tensor in keep:
        if tensor.storage in first:
            last[tensor.storage] = count
    offsets: dict[Storage, int] = {}
    placed: list[tuple[int, int, Storage]] = []  # (start, stop, storage) sorted by start
    total = 0
    for storage in sorted(first, key=lambda s: (-s.nbytes, first[s])):
        need, start = align(storage.nbytes), 0
        for other_start, other_stop, other in sorted(placed, key=lambda item: item[0]):
            if last[other] < first[storage] or last[storage] < first[other]:
                continue
            if other_start >= start + need:
                break
            start = max(start, other_stop)
        offsets[storage] = start
        placed.append((start, start + need, storage))
        total = max(total, start + need)
    return offsets, total


def place(launches: Sequence[Launch], offsets: dict[Storage, int], base: int) -> list[Launch]:
    """The launches with every arena storage at its address; the recorded list itself stays reusable."""
    moved = {storage: Storage(storage.nbytes, base + offset, storage.name) for storage, offset in offsets.items()}

    def bound(arg: Argument) -> Argument:
        if isinstance(arg, TensorMap) and arg.tensor.storage in moved:
            return replace(arg, tensor=replace(arg.tensor, storage=moved[arg.tensor.storage]))
        if isinstance(arg, Tensor) and arg.storage in moved:
            return replace(arg, storage=moved[arg.storage])
        return arg

    return [replace(launch, args=tuple(bound(arg) for arg in launch.args)) for launch in launches]
