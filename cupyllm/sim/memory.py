"""Device memory of the simulator: one reservation, its allocations, and what is known of every byte.

The arena is an anonymous mapping that the system backs with pages as they are touched, so its size costs nothing.
Beside it lies a shadow of the same size, one byte a byte: bit 0 says addressable, bit 1 initialised. Allocations have
exactly the size asked for and unaddressable red zones on both sides, and freed bytes stay unaddressable, so that an
access that misses its array is found from the address alone. Launches know more, the exact tensors of their arguments
(Extent), and check against these first (device_space.py).

Device addresses begin at DEVICE_BASE, beyond what 32 bits hold, so that a pointer cut short is found as well. Shared
and local memory are windows of the generic address space above every device address.

Separate NumPy arrays per allocation were rejected: an address is an integer that kernels compute with, and one flat
arena turns any of them into an index.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cupyllm.errors import BackendError, OutOfMemory

DEVICE_BASE = 1 << 40
SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 1 << 61
WINDOW_BYTES = 1 << 32

ALIGNMENT = 256
RED_ZONE = 256
ADDRESSABLE = 1
INITIALISED = 2
READABLE = ADDRESSABLE | INITIALISED

_PAGE = 1 << 16  # no smaller than any system's page
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap names from 3.13 on
_SLACK = 64 << 20  # room for red zones and for keeping freed addresses unused for a while

# A PTX type as the dtype of a register's view; the packed ones are bits.
DTYPE: dict[str, np.dtype[Any]] = {
    **{f"{letter}{8 * n}": np.dtype(f"{'i' if letter == 's' else 'u'}{n}") for letter in "bus" for n in (1, 2, 4, 8)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    **dict.fromkeys(("f16x2", "bf16x2", "tf32"), np.dtype(np.uint32)),
}
# What moves n bytes at once. 16 bytes travel as complex128: NumPy copies them, nothing computes with them.
CARRIER: dict[int, np.dtype[Any]] = {
    **{n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    16: np.dtype(np.complex128),
}


@dataclass(frozen=True)
class Allocation:
    """Device bytes [address, address + nbytes), alive until DeviceMemory.free."""

    address: int
    nbytes: int
    name: str = ""


@dataclass
class Extent:
    """The bytes that a pointer argument or a variable stands for. shape and itemsize are for naming its elements."""

    address: int
    nbytes: int
    name: str = ""
    itemsize: int = 1
    shape: tuple[int, ...] = ()


@dataclass
class Geometry:
    """One batch of a launch: CTAs first_cta .. first_cta + B - 1 of `grid`, x fastest, of T threads each."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    first_cta: int
    B: int
    T: int


class Scratch:
    """Arrays of zeros, int64, that one launch after another uses: fresh ones cost a page fault every 4 KiB."""

    _LIMIT = 16 << 20  # elements kept

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._kept = 0

    def take(self, length: int) -> np.ndarray:
        if self._free.get(length):
            self._kept -= length
            found = self._free[length].pop()
            found.fill(0)
            return found
        return np.zeros(length, np.int64)

    def give_back(self, array: np.ndarray) -> None:
        if self._kept + len(array) <= self._LIMIT:
            self._kept += len(array)
            self._free.setdefault(len(array), []).append(array)


@dataclass
class DeviceMemory:
    """All device allocations of a backend; `nbytes` is the sum that may be alive at once."""

    nbytes: int
    live_bytes: int = 0
    arena: np.ndarray = field(init=False, repr=False)  # uint8
    shadow: np.ndarray = field(init=False, repr=False)  # uint8
    scratch: Scratch = field(default_factory=Scratch, repr=False)
    _starts: list[int] = field(default_factory=list, repr=False)  # of live allocations, sorted
    _live: list[Allocation] = field(default_factory=list, repr=False)  # in the same order
    _whole: set[tuple[int, int]] = field(default_factory=set, repr=False)  # (address, nbytes) known to be initialised
    _next: int = field(default=DEVICE_BASE + _PAGE, repr=False)

    def __post_init__(self) -> None:
        size = _round_up(2 * self.nbytes + _SLACK, _PAGE)
        # glibc's malloc gives pages back at once until something as large as this was freed; after that it keeps up to
        # twice as much, which the simulator's many short-lived arrays need: else each costs page faults.
        np.empty(24 << 20, np.uint8)  # freed at once
        self._arena_map, self._shadow_map = _reserve(size), _reserve(size)
        self.arena = np.frombuffer(self._arena_map, np.uint8)
        self.shadow = np.frombuffer(self._shadow_map, np.uint8)

    def allocate(self, nbytes: int, name: str = "") -> Allocation:
        """Uninitialised bytes, 256-aligned. Raises OutOfMemory."""
        span = _round_up(nbytes, ALIGNMENT) + RED_ZONE
        start = None if self.live_bytes + nbytes > self.nbytes else self._place(span)
        if start is None:
            raise OutOfMemory(
                f"simulated GPU memory: {name or 'a buffer'} needs {nbytes} bytes, {self.nbytes - self.live_bytes} of "
                f"{self.nbytes} are free; take fewer tokens or rows, --stream, or give the simulator more memory"
            )
        allocation = Allocation(start, nbytes, name)
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._live.insert(at, allocation)
        self.live_bytes += nbytes
        self.shadow[start - DEVICE_BASE : start - DEVICE_BASE + nbytes] = ADDRESSABLE
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Takes the bytes back; an access from now on is out of bounds."""
        at = bisect_right(self._starts, allocation.address) - 1
        if at < 0 or self._live[at] != allocation:
            raise BackendError(f"free: {allocation} is not allocated, or was freed before; free each allocation once")
        del self._starts[at], self._live[at]
        self.live_bytes -= allocation.nbytes
        self._doubt(allocation.address, allocation.nbytes)
        start = allocation.address - DEVICE_BASE
        self.shadow[start : start + allocation.nbytes] = 0
        first, last = _round_up(start, _PAGE), (start + allocation.nbytes) // _PAGE * _PAGE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._arena_map.madvise(mmap.MADV_DONTNEED, first, last - first)
            self._shadow_map.madvise(mmap.MADV_DONTNEED, first, last - first)  # comes back as zeros: unaddressable

    def find(self, address: int) -> Allocation | None:
        """The live allocation that holds the byte at `address`."""
        at = bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._starts[at] + self._live[at].nbytes:
            return self._live[at]
        return None

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether one live allocation has all of these bytes."""
        found = self.find(address)
        return found is not None and address + nbytes <= found.address + found.nbytes

    def initialised(self, address: int, nbytes: int) -> bool:
        """Whether all of these bytes are. A yes is remembered until they are freed, forgotten or copied over."""
        if (address, nbytes) in self._whole:
            return True
        start = address - DEVICE_BASE
        whole = bool((self.shadow[start : start + nbytes] == READABLE).all())
        if whole:
            self._whole.add((address, nbytes))
        return whole

    def forget(self, address: int, nbytes: int) -> None:
        """Count these bytes as never written, whatever they hold."""
        self.shadow[self._checked(address, nbytes, "forget")] = ADDRESSABLE
        self._doubt(address, nbytes)

    def _doubt(self, address: int, nbytes: int) -> None:
        """Drop what is remembered of arrays that overlap these bytes."""
        end = address + nbytes
        self._whole = {(start, size) for start, size in self._whole if start + size <= address or end <= start}

    def upload(self, address: int, array: np.ndarray) -> None:
        """Host bytes to the device, initialised from then on. `array`: C-contiguous."""
        place = self._checked(address, array.nbytes, "upload to")
        self.arena[place] = _bytes_of(array)
        self.shadow[place] = READABLE

    def download(self, array: np.ndarray, address: int) -> None:
        """Device bytes to the host, initialised or not. `array`: C-contiguous, written."""
        _bytes_of(array)[:] = self.arena[self._checked(address, array.nbytes, "download from")]

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Device to device, with what is known of each byte; the two may overlap."""
        there, here = self._checked(target, nbytes, "copy to"), self._checked(source, nbytes, "copy from")
        self.arena[there] = self.arena[here]
        self.shadow[there] = self.shadow[here]
        if not (self.shadow[there] == READABLE).all():
            self._doubt(target, nbytes)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        place = self._checked(address, nbytes, "fill of")
        self.arena[place] = byte
        self.shadow[place] = READABLE

    def _checked(self, address: int, nbytes: int, what: str) -> slice:
        if nbytes and not self.holds(address, nbytes):
            raise BackendError(
                f"{what} {nbytes} bytes at {address:#x}: not inside one live allocation of the simulated GPU"
            )
        return slice(address - DEVICE_BASE, address - DEVICE_BASE + nbytes)

    def _place(self, span: int) -> int | None:
        """An address with `span` free bytes: new ones while there are any, so that stale pointers stay invalid."""
        limit = DEVICE_BASE + self.arena.nbytes
        if self._next + span <= limit:
            start, self._next = self._next, self._next + span
            return start
        free = DEVICE_BASE + _PAGE
        for allocation in self._live:
            if allocation.address - free >= span:
                return free
            free = allocation.address + _round_up(allocation.nbytes, ALIGNMENT) + RED_ZONE
        return free if free + span <= limit else None


def _reserve(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    assert array.flags.c_contiguous, "host arrays of copies are contiguous"
    return array.reshape(-1).view(np.uint8)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
