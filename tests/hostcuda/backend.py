"""A device made of host memory: runs our kernels on a CPU, for tests.

It is stricter than a GPU. Every allocation has guard bytes that are checked after each launch that names it; arguments
must match the kernel's parameters and lie inside live allocations; barriers that not every thread reaches are errors.
`descending` runs threads and blocks in the opposite order, which makes missing barriers and dependences between blocks
show. `deferred` runs stream work as late as the events allow, which makes missing waits show.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from cupyllm.backend.base import ALIGNMENT, Launch, Tensor, TensorMap
from cupyllm.backend.cublas import refuse
from cupyllm.backend.record import DEFAULT_SMS
from cupyllm.errors import BackendError, OutOfMemory
from tests.hostcuda.build import build

GUARD_BYTES = 512
GUARD = b"\xa5" * GUARD_BYTES
FREED = 0xFD
_QUEUES = threading.RLock()  # of all streams: work of one drains another where it waits for an event
_LOCK = threading.Lock()  # a compiled kernel's fibers are static data: one launch at a time


class HostBuffer:
    """Exactly `nbytes` between two guards."""

    def __init__(self, backend: HostBackend, nbytes: int, name: str) -> None:
        self.nbytes, self.name, self.backend = nbytes, name, backend
        self._raw = np.empty(nbytes + 2 * GUARD_BYTES + ALIGNMENT, np.uint8)
        base = self._raw.ctypes.data + GUARD_BYTES
        self.address = -(-base // ALIGNMENT) * ALIGNMENT
        ctypes.memmove(self.address - GUARD_BYTES, GUARD, GUARD_BYTES)
        ctypes.memmove(self.address + nbytes, GUARD, GUARD_BYTES)

    def check(self, where: str) -> None:
        """Raise BackendError when something wrote outside."""
        before = ctypes.string_at(self.address - GUARD_BYTES, GUARD_BYTES)
        after = ctypes.string_at(self.address + self.nbytes, GUARD_BYTES)
        if before != GUARD or after != GUARD:
            bad = np.frombuffer(before if before != GUARD else after, np.uint8) != GUARD[0]
            side = (
                f"{GUARD_BYTES - int(bad.argmax())} bytes before"
                if before != GUARD
                else f"{int(bad.argmax())} bytes after"
            )
            raise BackendError(f"{where} wrote outside {self.name or 'a buffer'} ({self.nbytes} bytes): {side} it")

    def free(self) -> None:
        if self.backend.buffers.pop(self.address, None) is None:
            return
        self.backend.synchronize()
        self.backend.addresses.remove(self.address)
        self.backend.live_bytes -= self.nbytes
        self.check("something")
        self._raw.fill(FREED)


class HostEvent:
    def __init__(self) -> None:
        self.stream: HostStream | None = None  # where it was recorded last
        self.ticket = 0
        self.time = 0.0


class HostStream:
    """Work in order. `done` counts finished items; `queue` holds the rest (always empty unless deferred)."""

    def __init__(self, deferred: bool) -> None:
        self.deferred = deferred
        self.queue: deque[Callable[[], None]] = deque()
        self.submitted = self.done = 0

    def submit(self, work: Callable[[], None]) -> None:
        with _QUEUES:
            self.queue.append(work)
            self.submitted += 1
        if not self.deferred:
            self.drain(self.submitted)

    def drain(self, ticket: int) -> None:
        with _QUEUES:  # a thread that waits must not go on while another one is inside the work it waits for
            while self.done < ticket:
                work = self.queue.popleft()
                self.done += 1
                work()


@dataclass
class HostProgram:
    launches: list[Launch]
    calls: list[tuple[Any, Any, Any, list[int]]] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)


@lru_cache(maxsize=None)
def _library(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


class HostBackend:
    """Backend (cupyllm/backend/base.py) on host memory. `memory_bytes` limits what can be allocated."""

    name = "host"
    device_name = "host emulator"
    tensor_cores = False  # kernels run as C++: no inline PTX

    def __init__(
        self,
        capability: int = 80,
        *,
        descending: bool = False,
        deferred: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        self.capability, self.num_sms = capability, DEFAULT_SMS
        self.descending = descending
        self.deferred = deferred
        self.memory_bytes = memory_bytes
        self.buffers: dict[int, HostBuffer] = {}
        self.addresses: list[int] = []
        self.live_bytes = self._peak = 0
        self.num_launches = 0
        self._streams: list[HostStream] = []
        self._pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    # ---- memory ----

    def allocate(self, nbytes: int, name: str = "") -> HostBuffer:
        assert nbytes > 0, nbytes
        if self.live_bytes + nbytes > (self.memory_bytes if self.memory_bytes is not None else 2**62):
            raise OutOfMemory(f"GPU memory: {name or 'a buffer'} needs {nbytes} bytes, {self.free_bytes()} are free")
        buffer = HostBuffer(self, nbytes, name)
        self.buffers[buffer.address] = buffer
        bisect.insort(self.addresses, buffer.address)
        self.live_bytes += nbytes
        self._peak = max(self._peak, self.live_bytes)
        return buffer

    def allocate_host(self, nbytes: int) -> np.ndarray:
        array = np.empty(nbytes, np.uint8)
        self._pinned[array.ctypes.data] = array
        return array

    def owner(self, address: int, nbytes: int, what: str) -> int:
        """Address of the live allocation that holds these bytes."""
        index = bisect.bisect_right(self.addresses, address) - 1
        if index >= 0:
            buffer = self.buffers[self.addresses[index]]
            if address + nbytes <= buffer.address + buffer.nbytes:
                return buffer.address
        raise BackendError(f"{what}: bytes {address:#x}+{nbytes} are in no live allocation")

    def _is_pinned(self, array: np.ndarray) -> bool:
        start = array.ctypes.data
        return any(
            base <= start and start + array.nbytes <= base + whole.nbytes for base, whole in self._pinned.items()
        )

    def peak_bytes(self) -> int:
        return self._peak

    def process_peak_bytes(self) -> int | None:
        return None

    def free_bytes(self) -> int:
        return (self.memory_bytes if self.memory_bytes is not None else 1 << 40) - self.live_bytes

    # ---- order ----

    def stream(self) -> HostStream:
        stream = HostStream(self.deferred)
        self._streams.append(stream)
        return stream

    def event(self) -> HostEvent:
        return HostEvent()

    def record(self, event: HostEvent, stream: HostStream) -> None:
        def mark() -> None:
            event.time = time.perf_counter()

        stream.submit(mark)
        event.stream, event.ticket = stream, stream.submitted

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        if event.stream is not None:
            source, ticket = event.stream, event.ticket
            stream.submit(lambda: source.drain(ticket))

    def wait_host(self, event: HostEvent) -> None:
        if event.stream is not None:
            event.stream.drain(event.ticket)

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.drain(stream.submitted)

    def elapsed_ms(self, start: HostEvent, stop: HostEvent) -> float:
        self.wait_host(stop)
        return (stop.time - start.time) * 1e3

    def _submit(self, stream: HostStream | None, work: Callable[[], None]) -> None:
        if stream is None:
            work()
        else:
            stream.submit(work)

    # ---- work ----

    def upload(self, address: int, source: np.ndarray, stream: Any = None) -> None:
        assert source.flags.c_contiguous
        self.owner(address, source.nbytes, "upload")
        if stream is not None and self.deferred and not self._is_pinned(source):
            source = source.copy()  # CUDA stages pageable memory before it returns
        self._submit(stream, lambda: _move(address, source.ctypes.data, source.nbytes))

    def download(self, target: np.ndarray, address: int, stream: Any = None) -> None:
        assert target.flags.c_contiguous and target.flags.writeable
        self.owner(address, target.nbytes, "download")
        if stream is not None and self.deferred and not self._is_pinned(target):
            stream.drain(stream.submitted)  # CUDA returns from a pageable download when it is complete
        self._submit(stream, lambda: _move(target.ctypes.data, address, target.nbytes))

    def copy(self, target: int, source: int, nbytes: int, stream: Any = None) -> None:
        self.owner(target, nbytes, "copy target")
        self.owner(source, nbytes, "copy source")
        self._submit(stream, lambda: _move(target, source, nbytes))

    def fill(self, address: int, nbytes: int, byte: int, stream: Any = None) -> None:
        self.owner(address, nbytes, "fill")
        self._submit(stream, lambda: (ctypes.memset(address, byte, nbytes), None)[1])

    def load(self, launches: Sequence[Launch]) -> HostProgram:
        refuse(launches, "the emulator")
        units = list(dict.fromkeys((launch.kernel.source, launch.kernel.defines) for launch in launches))
        with ThreadPoolExecutor(2) as pool:
            libraries = dict(zip(units, pool.map(lambda unit: _library(str(build(*unit))), units), strict=True))
        program = HostProgram(list(launches))
        for launch in launches:
            self._bind(program, launch, libraries[launch.kernel.source, launch.kernel.defines])
        return program

    def _bind(self, program: HostProgram, launch: Launch, library: ctypes.CDLL) -> None:
        symbol, where = launch.kernel.symbol, f"{launch.kernel.symbol} ({launch.node})"
        try:
            signature_of, function = library[f"{symbol}__signature"], library[f"{symbol}__launch"]
        except AttributeError:
            raise BackendError(f"{launch.kernel.source} defines no kernel {symbol}") from None
        signature_of.restype = ctypes.c_char_p
        function.restype = ctypes.c_char_p
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        expected = signature_of().decode()
        values, owners, given = np.zeros(max(len(launch.args), 1), np.uint64), [], ""
        for i, arg in enumerate(launch.args):
            if arg is None:
                given += "p"
            elif isinstance(arg, Tensor):
                given += "p"
                values[i] = arg.address
                assert arg.address % 16 == 0, f"{where}: argument {i} at {arg.address:#x} is not 16-byte aligned"
                if arg.nbytes:
                    owners.append(self.owner(arg.address, arg.nbytes, f"{where} argument {i}"))
            elif isinstance(arg, np.float32):
                given += "f"
                values[i : i + 1].view(np.float32)[0] = arg
            elif isinstance(arg, np.float64):
                given += "d"
                values[i : i + 1].view(np.float64)[0] = arg
            else:
                assert not isinstance(arg, TensorMap), f"{where}: the emulator has no tensor maps"
                assert isinstance(arg, (int, np.integer)) and not isinstance(arg, bool), (
                    f"{where}: argument {i} is {arg!r}"
                )
                given += "l"
                values[i : i + 1].view(np.int64)[0] = arg
        assert given == expected, f"{where}: arguments are {given!r}, the kernel takes {expected!r} (p, l, f, d)"
        assert launch.shared_bytes == 0, f"{where}: the emulator has no dynamic shared memory"
        pointers = values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        shape = np.array([*launch.grid, *launch.block], np.int64)
        program.keep.append((values, pointers, shape))
        program.calls.append((function, pointers.ctypes.data, shape.ctypes.data, owners))

    def run(self, program: HostProgram, stream: Any = None) -> None:
        self._submit(stream, lambda: self._run(program))

    def _run(self, program: HostProgram) -> None:
        for launch, (function, args, shape, owners) in zip(program.launches, program.calls, strict=True):
            where = f"{launch.kernel.symbol} ({launch.node})"
            for owner in owners:
                if owner not in self.buffers:
                    raise BackendError(f"{where} runs on memory that has been freed")
            with _LOCK:
                error = function(args, shape, int(self.descending))
            if error is not None:
                raise BackendError(f"{where}: {error.decode()}")
            self.num_launches += 1
            for owner in owners:
                self.buffers[owner].check(where)

    def close(self) -> None:
        self.synchronize()
        for buffer in list(self.buffers.values()):
            buffer.check("something")


def _move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)
