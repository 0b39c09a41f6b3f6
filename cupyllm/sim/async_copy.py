"""cp.async: copies from global to shared memory that are in flight from their issue to the wait that covers them.

Nothing is written until then, and until then the target belongs to the copy: every access to it by any thread is
reported (shared.py). The copy is logged as a store of its thread at the issue, which finds threads that may still
read what it overwrites, and again at the wait, from which on a barrier makes it visible to others. The source is
checked at the issue and read at the wait; where the kernel may write it, the copy is logged as a read of it in every
barrier interval from the issue to the wait, since it may happen in any of them.

Groups are numbered per thread; arrays of shape [1, 1] while all threads agree. A wait for all but n groups covers those
numbered below (groups committed - n).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cupyllm.sim import lanes as on
from cupyllm.sim.check import WRITE, Access
from cupyllm.sim.device_space import DeviceSpace
from cupyllm.sim.lanes import Array
from cupyllm.sim.memory import CARRIER, DEVICE_BASE, Geometry
from cupyllm.sim.report import Site
from cupyllm.sim.shared import HUGE, SharedArray
from cupyllm.sim.shared_space import SharedSpace


@dataclass
class Copy:
    """One cp.async, for the lanes whose copy is not complete. source: byte offsets in the arena, clipped into it.

    filled: bytes taken from the source, the rest are zeros; None: all. group: number of its group, per thread. reads:
    those of the source that were logged at the issue, none where nothing can write it.
    """

    site: Site
    array: SharedArray
    offset: Array
    source: Array
    size: int
    filled: Array | None
    lanes: Array | None
    group: Array
    reads: list[Access]


class AsyncCopies:
    """The copies of the batch that are in flight."""

    def __init__(self, shared: SharedSpace, device: DeviceSpace, check: bool) -> None:
        self.shared, self.device, self.check = shared, device, check
        self.pending: list[Copy] = []
        self.committed = np.zeros((1, 1), np.int64)
        shared.copies = self

    def begin(self, geometry: Geometry) -> None:
        self.pending = []
        self.committed = np.zeros((1, 1), np.int64)

    def issue(
        self,
        site: Site,
        source_site: Site,
        offset: Array,
        address: Array,
        size: int,
        filled: Array | None,
        mask: Array | None,
    ) -> None:
        """Starts copying `size` bytes (4, 8 or 16) a lane from global `address` to the shared window's `offset`.

        offset: uint32 or uint64; address: uint64; filled: int, bytes a lane takes from the source, None: `size`; all
        [B, T] or uniform. mask: the lanes that copy, bool, None: all. site: of the access to shared memory;
        source_site: the same instruction with the origins of the global address. A lane that is wrong is reported and
        left out.
        """
        if offset.dtype.itemsize == 8:
            offset = np.minimum(offset, np.uint64(0xFFFFFFFF)).astype(np.uint32)
        reads = self._check_source(source_site, address, size, filled, mask)
        top = np.uint64(self.device.memory.arena.nbytes - size)
        source = np.minimum(address - np.uint64(DEVICE_BASE), top).astype(np.int64)
        array = self.shared.plans.get(site) or self.shared.plan(site)
        parts: list[tuple[SharedArray, Array | None]] = [(array, mask)] if array else []
        for array, lanes in parts or self.shared.parts(site, offset, mask, size):
            self._start(Copy(site, array, offset - array.start32, source, size, filled, lanes, self.committed, reads))

    def commit(self, mask: Array | None) -> None:
        """Closes the current group of these threads."""
        self.committed = self.committed + (1 if mask is None else mask.astype(np.int64))

    def wait(self, pending: int, mask: Array | None, everything: bool) -> None:
        """Completes all but the last `pending` groups of these threads, or all copies, committed or not.

        mask: the threads that wait, bool, [B, T] or uniform, None: all. Others' copies stay in flight.
        """
        left = []
        for copy in self.pending:
            done = np.ones((1, 1), bool) if everything else copy.group < self.committed - pending
            if mask is not None:
                done = done & mask
            if copy.lanes is not None:
                done = done & copy.lanes
            if not done.any():
                left.append(copy)
                continue
            self._finish(copy, done)
            rest = ~done if copy.lanes is None else copy.lanes & ~done
            if rest.any():
                copy.lanes = rest
                left.append(copy)
        self.pending = left

    def writer(self, array: SharedArray, row: int, byte: int, size: int) -> tuple[Site | None, int | None]:
        """(site, thread) of a copy in flight to some of these bytes."""
        for copy in self.pending:
            if copy.array is array:
                shape = (array.B, array.T)
                start = np.broadcast_to(copy.offset, shape)[row].astype(np.int64)
                hit = (start < byte + size) & (byte < start + copy.size)
                if copy.lanes is not None:
                    hit &= np.broadcast_to(copy.lanes, shape)[row]
                if hit.any():
                    return copy.site, int(np.flatnonzero(hit)[0])
        return None, None

    def read_sources(self) -> None:
        """Logs what is in flight as reads of the sources: a barrier interval ends."""
        for copy in self.pending:
            self._log_reads(copy, copy.lanes)

    def _log_reads(self, copy: Copy, lanes: Array | None) -> None:
        for read in copy.reads:
            if lanes is None or read.mask is None:
                both: Array | Literal[False] | None = read.mask if lanes is None else lanes
            else:
                both = on.both(read.mask, lanes)
            if both is not False:
                self.device.log.add(read._replace(mask=both))

    def _check_source(
        self, site: Site, address: Array, size: int, filled: Array | None, mask: Array | None
    ) -> list[Access]:
        """Checks and logs the read of the source; lanes with nothing to copy do not touch it. What was logged."""
        carrier = CARRIER[min(size, 8)]
        vec = size // carrier.itemsize
        reads: list[Access] = []
        if filled is None:
            self.device.load(site, address, mask, carrier, vec, False, reads)
            return reads
        whole = filled >= size
        lanes = whole if mask is None else mask & whole
        if lanes.any():
            self.device.load(site, address, lanes, carrier, vec, False, reads)
        partly = (filled > 0) & ~whole if mask is None else mask & (filled > 0) & ~whole
        if partly.any():
            for place in range(size - 1):
                lanes = partly & (filled > place)
                if lanes.any():
                    self.device.load(site, address + np.uint64(place), lanes, CARRIER[1], 1, False, reads)
        return reads

    def _start(self, copy: Copy) -> None:
        array = copy.array
        index = array.index(array.store_table(copy.size), copy.size, copy.offset, copy.lanes)
        if np.maximum.reduce(index, axis=None) >= HUGE or array.hits_flight(index, copy.size):
            copy.lanes = self.shared.judge_lanes(array, copy.site, copy.offset, copy.lanes, copy.size, reads=False)
            if copy.lanes is not None and not copy.lanes.any():
                return
        if self.check:
            self.shared.watch(array, copy.site, copy.offset, copy.lanes, copy.size)
            array.take_off(copy.offset, copy.size, _threads(copy.lanes, array))
        self.pending.append(copy)

    def _finish(self, copy: Copy, done: Array) -> None:
        """The data of these lanes arrive."""
        array = copy.array
        value = self._data(copy)
        lanes = _threads(done, array)
        if self.check:
            array.land(copy.offset, copy.size, lanes)
        every = None if lanes.all() and copy.lanes is None else lanes
        self._log_reads(copy, every)
        self.shared.put(array, copy.site, copy.offset, every, value, copy.size, WRITE, opaque=True)

    def _data(self, copy: Copy) -> Array:
        arena = self.device.memory.arena
        if copy.filled is None:
            return arena.view(CARRIER[copy.size]).take(copy.source // copy.size)
        each = arena.take(copy.source[..., None] + np.arange(copy.size), mode="clip")
        each = np.where(np.arange(copy.size) < copy.filled[..., None], each, np.uint8(0))
        return np.ascontiguousarray(each).view(CARRIER[copy.size])[..., 0]


def _threads(lanes: Array | None, array: SharedArray) -> Array:
    """A mask that tells threads apart, [1, T] or [B, T]."""
    every = np.ones((1, array.T), bool)
    return every if lanes is None else lanes & every
