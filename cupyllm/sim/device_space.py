"""Loads and stores of global and constant memory.

The fast path takes the one array that a site addresses (targets.py): subtract its start, one reduction for the
alignment, and np.take from a view of the array, which raises IndexError out of bounds. Whatever that does not settle
goes lane by lane through Targets.locate.

The offset is unsigned, so an address below the start is a huge one. Elements wider than a byte are reached by a shifted
offset, which is never negative as a signed index; for bytes the reduction tells.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cupyllm.sim import lanes as on
from cupyllm.sim.check import ATOMIC_READ, ATOMIC_WRITE, READ, WRITE, Access, Log
from cupyllm.sim.lanes import Array, pattern
from cupyllm.sim.memory import CARRIER, DEVICE_BASE, READABLE, DeviceMemory, Extent
from cupyllm.sim.report import Reports, Site
from cupyllm.sim.targets import Target, Targets

_READABLE = {size: pattern(READABLE, size) for size in CARRIER}
_SHIFT = {size: np.uint64(size.bit_length() - 1) for size in CARRIER}
_BASE = np.uint64(DEVICE_BASE)
_SIGN = 1 << 63


class DeviceSpace:
    """Global memory as one launch sees it."""

    def __init__(
        self,
        memory: DeviceMemory,
        args: list[Extent | None],
        variables: Mapping[str, Extent],
        constants: frozenset[str],
        written: frozenset[int | str] | None,
        log: Log,
        reports: Reports,
        check: bool,
    ) -> None:
        self.memory, self.log, self.check = memory, log, check
        self.targets = Targets(memory, args, variables, constants, written, reports, check)
        self.plans = self.targets.plans

    def load(
        self,
        site: Site,
        address: Array,
        mask: Array | None,
        dtype: np.dtype,
        vec: int,
        atomic: bool,
        logged: list[Access] | None = None,
    ) -> Array | tuple[Array, ...]:
        """LaunchMemory.load. `logged`: what was logged of it for the races is added there."""
        size = dtype.itemsize * vec
        kind = ATOMIC_READ if atomic else READ
        target = self.plans.get(site) or self.targets.plan(site)
        value = None
        if target is not None and (views := target.views(size)) is not None:
            offset = address - target.start
            if mask is not None and (lanes := on.narrow(mask, offset.shape)) is not None:
                offset = offset * lanes  # lanes left out look at the first element
            bits = int(np.bitwise_or.reduce(offset, axis=None))
            if bits & (size - 1) == 0 and bits < _SIGN:
                value = self._take(target, views, (offset >> _SHIFT[size]).view(np.int64), size)
        if value is None:
            value = self._load_slowly(site, address, mask, size, kind, logged)
        elif self.check and target is not None:
            self.watch(target, kind, site, size, offset, mask, logged=logged)
        return value.view(dtype) if vec == 1 else on.split(value, vec, dtype)

    def store(
        self, site: Site, address: Array, mask: Array | None, dtype: np.dtype, values: tuple[Array, ...], atomic: bool
    ) -> None:
        size = dtype.itemsize * len(values)
        kind = ATOMIC_WRITE if atomic else WRITE
        value = on.join(values, dtype)
        target = self.plans.get(site) or self.targets.plan(site)
        if target is not None and not target.constant and (views := target.views(size)) is not None:
            offset = address - target.start
            if mask is not None and (lanes := on.narrow(mask, offset.shape)) is not None:
                offset = offset * lanes
            bits = int(np.bitwise_or.reduce(offset, axis=None))
            if bits & (size - 1) == 0 and bits < _SIGN:
                index = (offset >> _SHIFT[size]).view(np.int64)
                if self._put(target, views, site, offset, index, mask, value, kind):
                    return
        for target, lanes in self.targets.locate(site, address, mask, size, write=True):
            lanes = lanes if mask is None else lanes & mask
            index = self.index(address, size)
            self._put(target, self.views(size), site, address - target.start, index, lanes, value, kind)

    def index(self, address: Array, size: int) -> Array:
        """Indices into `views` of addresses; only those of lanes that Targets.locate gave are valid."""
        return ((address - _BASE) >> _SHIFT[size]).view(np.int64)

    def views(self, size: int) -> tuple[Array, Array]:
        """(bytes, shadow) of the whole arena in carriers."""
        return self.memory.arena.view(CARRIER[size]), self.memory.shadow.view(CARRIER[size])

    def readable(self, site: Site, address: Array, mask: Array | None, size: int) -> list[tuple[Target, Array]]:
        """Targets.locate for a read, without the lanes that are not initialised, which are reported."""
        found = self.targets.locate(site, address, mask, size)
        if not self.check:
            return found
        index, shadow = self.index(address, size), self.views(size)[1]
        good = []
        for target, lanes in found:
            bad = np.zeros(address.shape, bool)
            bad[lanes] = shadow.take(index[lanes]) != _READABLE[size]
            if bad.any():
                self.targets.report_uninitialised(target, site, address, mask, bad, size)
                lanes = lanes & ~bad
            if lanes.any():
                good.append((target, lanes))
        return good

    def writable(self, site: Site, address: Array, mask: Array | None, size: int) -> list[tuple[Target, Array]]:
        """Targets.locate for a write; its bytes count as initialised from then on."""
        found = self.targets.locate(site, address, mask, size, write=True)
        index, shadow = self.index(address, size), self.views(size)[1]
        for _, lanes in found:
            shadow[np.broadcast_to(index, lanes.shape)[lanes]] = _READABLE[size]
        return found

    def _take(self, target: Target, views: tuple[Array, Array], index: Array, size: int) -> Array | None:
        """The elements, or None if one is out of bounds or not initialised."""
        try:
            value = views[0].take(index)
        except IndexError:
            return None
        if self.check and not (target.whole or (target.whole is None and target.look_up())):
            known = views[1].take(index) == _READABLE[size]
            if not np.logical_and.reduce(known, axis=None):
                return None
        return value

    def _load_slowly(
        self, site: Site, address: Array, mask: Array | None, size: int, kind: int, logged: list[Access] | None
    ) -> Array:
        value = np.zeros(address.shape, CARRIER[size])
        index, data = self.index(address, size), self.views(size)[0]
        for target, lanes in self.readable(site, address, mask, size):
            value[lanes] = data.take(index[lanes])
            if self.check:
                full = lanes if mask is None else lanes & mask
                self.watch(target, kind, site, size, address - target.start, full, logged=logged)
        return value

    def _put(
        self,
        target: Target,
        views: tuple[Array, Array],
        site: Site,
        offset: Array,
        index: Array,
        mask: Array | None,
        value: Array,
        kind: int,
    ) -> bool:
        """Stores carriers at indices into the views; False, and nothing is done, if one is out of bounds."""
        data, shadow = views
        where, what = index, value
        if mask is not None:
            where, what = on.chosen(mask, index, value)
        elif value.shape != index.shape:
            where = np.broadcast_to(index, np.broadcast_shapes(index.shape, value.shape))
        watched = self.check and (target.region is not None or bool(target.within))
        try:  # both raise it: of a tensor smaller than the access the view is empty
            before = data.take(index, mode="clip") if watched else None
            data[where] = what
        except IndexError:
            return False
        if not target.whole:
            shadow[where] = _READABLE[value.dtype.itemsize]
        if self.check:
            self.watch(target, kind, site, value.dtype.itemsize, offset, mask, value, before)
        return True

    def watch(
        self,
        target: Target,
        kind: int,
        site: Site,
        size: int,
        offset: Array,
        mask: Array | None,
        value: Array | None = None,
        before: Array | None = None,
        logged: list[Access] | None = None,
    ) -> None:
        """Logs an access where races are looked for, and adds it to `logged`. offset: from the target's start."""
        found: list[Access] = []
        if target.region is not None:
            found.append(Access(target.region, kind, site, size, offset, mask, value, before, target.delta))
        # An address of unknown origin may lie in a region or not.
        for region in target.within if target.region is None else ():
            delta = target.extent.address - region.start
            begin, count = np.uint64(max(0, -delta)), np.uint64(region.nbytes)
            inside = on.both(mask, offset - begin < count)
            if inside is not False:
                found.append(Access(region, kind, site, size, offset, inside, value, before, delta))
        for access in found:
            self.log.add(access)
        if logged is not None:
            logged += found
