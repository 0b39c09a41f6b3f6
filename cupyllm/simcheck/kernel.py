"""Any kernel run once on the simulator with the checks on: compiled, its arguments made, launched, judged.

Every array is a device allocation of exactly its size, so one element too far is out of bounds; on a GPU it would be
somebody else's memory, or nothing's, depending on the allocator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cupyllm.backend.base import Argument, KernelSpec, Launch, fixed
from cupyllm.errors import InputError
from cupyllm.sim.machine import Simulator
from cupyllm.sim.memory import DEVICE_BASE, INITIALISED, DeviceMemory
from cupyllm.sim.module import load_module
from cupyllm.sim.ptx import Parameter
from cupyllm.sim.report import Report, SimError
from cupyllm.simcheck.arguments import DTYPES, Array, Given, Same, arrays, assign, scalar
from cupyllm.simcheck.declarations import Declared, declared, find_kernel
from cupyllm.simcheck.source import Source, compile_source

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
DEFAULT_BUDGET = 5_000_000_000  # instructions times threads; about half a minute, whoever waits for it
DEVICE_BYTES = 64 << 30  # of addresses; pages cost memory when they are touched
_STORED_AS = {1: "uint8", 2: "float16", 4: "int32", 8: "int64"}  # a launch's tensors need the element size only


@dataclass(frozen=True)
class Request:
    """What to run. `kernel`: its name, symbol, or "" for a file's only one."""

    file: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: Sequence[Given]
    shared_bytes: int = 0
    defines: Sequence[str] = ()
    includes: Sequence[str] = ()
    budget: int = DEFAULT_BUDGET


@dataclass
class Found:
    """One launch's end. `arrays`: contents behind it, `unwritten`: how many elements nobody has ever written."""

    symbol: str
    given: list[Given]
    seconds: float = 0.0
    reports: tuple[Report, ...] = ()
    total: int = 0  # of different findings; no more than some are kept
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    unwritten: dict[str, int] = field(default_factory=dict)


class Prepared:
    """A compiled kernel with its arguments checked; `run` does the work. Raises InputError on what does not fit."""

    def __init__(self, request: Request, cache: Path | None = None) -> None:
        check_geometry(request.grid, request.block)
        self.request = request
        self.source: Source = compile_source(request.file, request.defines, request.includes, _folder(cache, "kernels"))
        self._module = load_module(self.source.ptx, _folder(cache, "sim"))
        self.symbol = find_kernel(request.kernel, list(self._module.kernels), request.file)
        self.parameters: list[Parameter] = self._module.kernels[self.symbol].kernel.parameters
        self.known: list[Declared] | None = declared(self.source.texts.values(), self.symbol, len(self.parameters))
        self.given = assign(request.args, self.parameters, self.known)

    def run(self) -> Found:
        """Launch once. Raises BackendError on what a GPU would refuse, and on instructions that are not simulated."""
        contents = arrays(self.given)
        memory = DeviceMemory(DEVICE_BYTES)
        addresses = self._upload(memory, contents)
        launch = Launch(
            KernelSpec(self.request.file, self.symbol),
            self.request.grid,
            self.request.block,
            tuple(self._argument(i, addresses) for i in range(len(self.given))),
            self.request.shared_bytes,
        )
        found = Found(self.symbol, self.given)
        simulator = Simulator(memory, budget=self.request.budget)
        began = time.perf_counter()
        try:
            simulator.launch(self._module, launch)
        except SimError as error:
            found.reports, found.total = error.reports, error.total
        found.seconds = time.perf_counter() - began
        self._download(memory, addresses, found)
        return found

    def _upload(self, memory: DeviceMemory, contents: dict[str, np.ndarray | None]) -> dict[str, int]:
        addresses = {}
        for item in self.given:
            if isinstance(item.value, Array):
                addresses[item.name] = memory.allocate(item.value.nbytes, item.name).address
                values = contents[item.name]
                if values is not None and values.size:
                    memory.upload(addresses[item.name], values)
        return addresses

    def _argument(self, index: int, addresses: dict[str, int]) -> Argument:
        item = self.given[index]
        owner = self._owner(item)
        if owner is None:
            return scalar(item, self.parameters[index], self.known[index] if self.known else None)
        assert isinstance(owner.value, Array)
        stored = _STORED_AS[DTYPES[owner.value.dtype].itemsize]
        return fixed(addresses[owner.name], owner.value.shape, stored, item.name)

    def _owner(self, item: Given) -> Given | None:
        """The argument whose array this one is; None for a number."""
        if isinstance(item.value, Same):
            target = item.value.target
            return next(other for other in self.given if other.name == target)
        return item if isinstance(item.value, Array) else None

    def _download(self, memory: DeviceMemory, addresses: dict[str, int], found: Found) -> None:
        for item in self.given:
            if isinstance(item.value, Array):
                dtype = DTYPES[item.value.dtype]
                values = np.empty(item.value.shape, dtype)
                if values.size:
                    memory.download(values, addresses[item.name])
                start = addresses[item.name] - DEVICE_BASE
                known = memory.shadow[start : start + item.value.nbytes].reshape(-1, dtype.itemsize) & INITIALISED
                found.arrays[item.name] = values
                found.unwritten[item.name] = int((~known.all(axis=1)).sum())


def check_geometry(grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
    """Raise InputError on a grid or block that no GPU takes."""
    for option, got, most in (("--grid", grid, MAX_GRID), ("--block", block, MAX_BLOCK)):
        if any(not 1 <= size <= limit for size, limit in zip(got, most, strict=True)):
            shown, limits = (",".join(map(str, sizes)) for sizes in (got, most))
            raise InputError(f"{option} is {shown}, expected 1,1,1 to {limits}")
    threads = block[0] * block[1] * block[2]
    if threads > MAX_BLOCK[0]:
        raise InputError(f"--block has {threads} threads, expected at most {MAX_BLOCK[0]}; take more blocks instead")


def _folder(cache: Path | None, name: str) -> Path:
    """A folder of the user's cache, or of the one that stands in for it."""
    if cache is None:
        from cupyllm.cache import cache_subdir  # here, since it imports the checkpoint reader

        return cache_subdir(name)
    (cache / name).mkdir(parents=True, exist_ok=True)
    return cache / name
