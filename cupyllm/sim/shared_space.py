"""Loads and stores of shared memory, and where its variables lie in their window.

Addresses are offsets in the shared window. An instruction's symbols tell its variable; without them the variable is
found from the addresses. See shared.py for how an access is checked, and check.py for races.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from cupyllm.sim import lanes as on
from cupyllm.sim import names
from cupyllm.sim.check import ATOMIC_READ, ATOMIC_WRITE, READ, WRITE, Access, Log
from cupyllm.sim.lanes import Array
from cupyllm.sim.memory import Geometry
from cupyllm.sim.ptx import Variable
from cupyllm.sim.report import Reports, Site
from cupyllm.sim.shared import SharedArray

if TYPE_CHECKING:
    from cupyllm.sim.async_copy import AsyncCopies

_GAP = 256  # unaddressable bytes between variables
_TOP = np.uint64(0xFFFFFFFF)


class SharedSpace:
    """The shared memory of a launch. `copies`: what cp.async has in flight."""

    copies: AsyncCopies

    def __init__(
        self, variables: Iterable[Variable], dynamic_bytes: int, log: Log, reports: Reports, check: bool
    ) -> None:
        self.log, self.reports, self.check = log, reports, check
        self.arrays: list[SharedArray] = []
        self.by_name: dict[str, SharedArray] = {}
        self.plans: dict[Site, SharedArray | None] = {}
        shared = [variable for variable in variables if variable.space == "shared"]
        dynamic = [variable for variable in shared if not variable.nbytes]
        for variable in shared:
            if variable.nbytes:
                self.by_name[variable.name] = self._place(variable.name, variable.nbytes, variable.align)
        if dynamic:
            array = self._place(dynamic[0].name, dynamic_bytes, max(variable.align for variable in dynamic))
            self.by_name.update((variable.name, array) for variable in dynamic)

    def begin(self, geometry: Geometry) -> None:
        for array in self.arrays:
            array.begin(geometry)

    def load(
        self, site: Site, address: Array, mask: Array | None, dtype: np.dtype, vec: int, atomic: bool
    ) -> Array | tuple[Array, ...]:
        if address.dtype.itemsize == 8:
            address = np.minimum(address, _TOP).astype(np.uint32)
        array = self.plans.get(site) or self.plan(site)
        if array is None:
            value = self._load_anywhere(site, address, mask, dtype, vec, atomic)
        else:
            offset = address - array.start32 if array.start else address
            value = self._get(array, site, offset, mask, dtype.itemsize * vec, atomic)
        return value.view(dtype) if vec == 1 else on.split(value, vec, dtype)

    def store(
        self, site: Site, address: Array, mask: Array | None, dtype: np.dtype, values: tuple[Array, ...], atomic: bool
    ) -> None:
        if address.dtype.itemsize == 8:
            address = np.minimum(address, _TOP).astype(np.uint32)
        size = dtype.itemsize * len(values)
        value, kind = on.join(values, dtype), ATOMIC_WRITE if atomic else WRITE
        array = self.plans.get(site) or self.plan(site)
        if array is not None:
            self.put(array, site, address - array.start32 if array.start else address, mask, value, size, kind)
            return
        for array, lanes in self.parts(site, address, mask, size):
            self.put(array, site, address - array.start32, lanes, value, size, kind)

    def _get(self, array: SharedArray, site: Site, offset: Array, mask: Array | None, size: int, atomic: bool) -> Array:
        """Carriers [B, T], [B, 1] where the offset is uniform over threads; lanes left out give anything."""
        lanes = on.narrow(mask, offset.shape)
        try:
            index = array.index(array.table(size), size, offset, lanes)
            if len(index) == 1:
                value = array.rows[size].take(index.reshape(-1), axis=1)
            else:
                value = array.flat[size].take(index + array.bases[size])
            if self.check and not array.uniform and array.missing(index, size):
                raise IndexError
        except IndexError:
            good = self.judge_lanes(array, site, offset, mask, size, reads=True)
            width = np.broadcast_shapes(offset.shape, (1, 1) if good is None else good.shape)[1]
            if good is not None and not good.any():
                return np.zeros((array.B, width), array.flat[size].dtype)
            value = array.flat[size].take(array.index(array.plain_table(size), size, offset, good) + array.bases[size])
            if good is not None:
                value = np.where(good, value, np.zeros(1, value.dtype))
            array.refresh(size)
            mask, lanes = good, on.narrow(good, offset.shape)
        if self.check:
            seen = offset if lanes is None else array.seen(offset, lanes)
            self.log.add(Access(array, ATOMIC_READ if atomic else READ, site, size, seen, mask))
        return value

    def put(
        self,
        array: SharedArray,
        site: Site,
        offset: Array,
        mask: Array | None,
        value: Array,
        size: int,
        kind: int,
        opaque: bool = False,
    ) -> None:
        """Stores carriers, [B, T] or uniform, checked and logged. opaque: equal values excuse nobody."""
        try:
            index = array.index(array.store_table(size), size, offset, mask)
            if array.hits_flight(index, size):
                raise IndexError
            array.put(index, value, size)
        except IndexError:
            mask = self.judge_lanes(array, site, offset, mask, size, reads=False)
            if mask is not None and not mask.any():
                return
            index = array.index(array.plain_table(size), size, offset, mask)
            array.put(index, value, size)
        if self.check:
            array.mark(index, size)
            seen = offset if mask is None else array.seen(offset, mask)
            self.log.add(Access(array, kind, site, size, seen, mask, None if opaque else value))

    def watch(
        self, array: SharedArray, site: Site, offset: Array, mask: Array | None, size: int, kind: int = WRITE
    ) -> None:
        """Logs an access that is right but moves nothing here: the issue of a copy, an atomic."""
        self.log.add(Access(array, kind, site, size, offset if mask is None else array.seen(offset, mask), mask))

    def _load_anywhere(
        self, site: Site, address: Array, mask: Array | None, dtype: np.dtype, vec: int, atomic: bool
    ) -> Array:
        size = dtype.itemsize * vec
        value: Array | None = None
        for array, lanes in self.parts(site, address, mask, size):
            part = self._get(array, site, address - array.start32, lanes, size, atomic)
            value = part if value is None else np.where(lanes, part, value)
        if value is None:
            rows = self.arrays[0].B if self.arrays else len(address)
            value = np.zeros((rows, address.shape[1]), on.CARRIER[size])
        return value

    # ---- which variable ----

    def _place(self, name: str, nbytes: int, align: int) -> SharedArray:
        last = self.arrays[-1] if self.arrays else None
        unit = max(align, 16)
        start = 0 if last is None else -(-(last.start + last.nbytes + _GAP) // unit) * unit
        self.arrays.append(SharedArray(names.plain_name(name), start, nbytes, self.check))
        return self.arrays[-1]

    def plan(self, site: Site) -> SharedArray | None:
        """The only variable that the site can address."""
        if site not in self.plans:
            found = self._candidates(site)
            self.plans[site] = found[0] if len(found) == 1 else None
        return self.plans[site]

    def _candidates(self, site: Site) -> list[SharedArray]:
        named = {self.by_name[name]: None for name in site.symbols or () if name in self.by_name}
        return list(named) or self.arrays

    def parts(self, site: Site, address: Array, mask: Array | None, size: int) -> Iterator[tuple[SharedArray, Array]]:
        """The variables that the lanes address, with their lanes; reports lanes that address none."""
        lanes = np.ones(address.shape, bool) if mask is None else mask & np.ones(address.shape, bool)
        found = self._candidates(site)
        for array in found:
            inside = lanes & (address - array.start32 < array.nbytes)
            if inside.any():
                lanes = lanes & ~inside
                yield array, inside
        if lanes.any():
            row, thread, count = on.first(lanes)
            offset = int(np.broadcast_to(address, lanes.shape)[row, thread])
            before = [array for array in found if array.start <= offset] or found
            what = f"{size} bytes, {offset:#x} of shared memory, of which the kernel has none"
            if before:
                what = names.outside(before[-1].name, offset - before[-1].start, before[-1].nbytes, size)
            self.reports.add("out-of-bounds", site, row, thread, what, space="shared", count=count)

    # ---- what is wrong ----

    def judge_lanes(
        self, array: SharedArray, site: Site, offset: Array, mask: Array | None, size: int, reads: bool
    ) -> Array | None:
        """Reports what is wrong with an access and returns the lanes that are right; None: the mask was None and all
        are.

        offset: uint32, not sanitised.
        """
        shape = np.broadcast_shapes(offset.shape, (1, 1) if mask is None else mask.shape, (len(array.ready), 1))
        good = np.broadcast_to(True if mask is None else mask, shape).copy()
        at = np.broadcast_to(offset, shape).astype(np.int64)
        every = good.copy()

        def remove(kind: str, bad: Array) -> None:
            bad = bad & good
            if bad.any():
                row, thread, count = on.first(bad)
                byte = int(at[row, thread])
                what = names.crossing(array.describe(site, byte, size), byte, array.nbytes, size)
                if kind != "out-of-bounds":
                    what = array.describe(site, byte, size)
                other, who = self.copies.writer(array, row, byte, size) if kind == "cp-async" else (None, None)
                detail = "its copy has not been waited for" if kind == "cp-async" else ""
                self.reports.add(
                    kind, site, row, thread, what, detail=detail, other=other, other_thread=who, count=count
                )
                np.logical_and(good, ~bad, out=good)

        remove("out-of-bounds", at > array.nbytes - size)
        if self.check:
            remove("misaligned", at % size != 0)
            at = np.where(good, at, 0)
            if array.nbytes >= size and array.flight is not None:
                remove("cp-async", array.flying(at, size))
            if array.nbytes >= size and reads:
                remove("uninitialised-read", array.unready(at, size))
        return mask if (good == every).all() else good
