"""Local memory: bytes that every thread has for itself, [B, T, bytes], with a flag for each initialised one.

Variables lie one after another with unaddressable bytes between them. A table per access width turns an offset in the
window into an element index, a huge one where the access is misaligned or outside, as for shared memory (shared.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cupyllm.sim import lanes as on
from cupyllm.sim import names
from cupyllm.sim.lanes import Array, pattern
from cupyllm.sim.memory import CARRIER, Geometry
from cupyllm.sim.ptx import Variable
from cupyllm.sim.report import Reports, Site

_GAP = 64
_SLOT = 16  # bytes at the end for lanes left out
_HUGE = 1 << 40
_TOP = np.uint64(0xFFFFFFFF)
_ONES = {size: pattern(1, size) for size in CARRIER}


class LocalSpace:
    """The local memory of a launch."""

    def __init__(self, variables: Iterable[Variable], reports: Reports, check: bool) -> None:
        self.reports, self.check = reports, check
        self.starts: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        end = _GAP
        for variable in variables:
            if variable.space == "local":
                unit = max(16, variable.align)
                self.starts[variable.name] = -(-end // unit) * unit
                self._sizes[variable.name] = variable.nbytes
                end = self.starts[variable.name] + variable.nbytes + _GAP
        self.slot = np.uint32(-(-end // 16) * 16)
        self.bytes = int(self.slot) + _SLOT  # of a thread
        self._tables: dict[int, Array] = {}
        self._shape = (0, 0)

    def begin(self, geometry: Geometry) -> None:
        """Uninitialised again, for a new batch; nothing is held while the kernel has no local variables."""
        self._shape = (geometry.B, geometry.T) if self.starts else (0, 0)
        lanes = self._shape[0] * self._shape[1]
        self._data, self._ready = np.zeros(lanes * self.bytes, np.uint8), np.zeros(lanes * self.bytes, np.uint8)
        self._ready.reshape(lanes, self.bytes)[:, self.slot :] = 1
        self._lanes = np.arange(lanes).reshape(self._shape)

    def load(
        self, site: Site, address: Array, mask: Array | None, dtype: np.dtype, vec: int
    ) -> Array | tuple[Array, ...]:
        """The values, `vec` arrays [B, T] of the dtype if vec > 1; lanes that are wrong, or all left out, give zeros.

        address: offsets in the window, uint32 or uint64, [B, T] or uniform. mask: the lanes that load, bool, None: all.
        """
        size = dtype.itemsize * vec
        good, index = self._index(site, address, mask, size, reads=True)
        value = self._data.view(CARRIER[size]).take(index) if index.size else np.zeros(address.shape, CARRIER[size])
        if good is not None:
            value = np.where(good, value, np.zeros(1, value.dtype))
        return value.view(dtype) if vec == 1 else on.split(value, vec, dtype)

    def store(self, site: Site, address: Array, mask: Array | None, dtype: np.dtype, values: tuple[Array, ...]) -> None:
        """Stores one register a lane, or a vector of them, whose low bits the dtype takes.

        address, values: [B, T] or uniform, the address uint32 or uint64. mask: the lanes that store, bool, None: all.
        """
        value = on.join(values, dtype)
        size = value.dtype.itemsize
        _, index = self._index(site, address, mask, size, reads=False)
        if index.size:
            self._data.view(CARRIER[size])[index] = value
            self._ready.view(CARRIER[size])[index] = _ONES[size]

    def _index(
        self, site: Site, address: Array, mask: Array | None, size: int, reads: bool
    ) -> tuple[Array | None, Array]:
        """(lanes that are right, None: all), element indices [B, T], the slot's where a lane is left out or wrong."""
        offset = np.minimum(address, _TOP).astype(np.uint32) if address.dtype.itemsize == 8 else address
        if not self.starts:
            return self._judge(site, offset, mask, size, reads), np.zeros((0, 0), np.int64)
        base = self._lanes * (self.bytes // size)
        seen = offset if mask is None else np.where(mask, offset, self.slot)
        try:
            index = self._table(size).take(seen)
            if not (index < _HUGE).all():
                raise IndexError
            index = index + base
            if not (reads and self.check) or (self._ready.view(CARRIER[size]).take(index) == _ONES[size]).all():
                return None, index
        except IndexError:
            pass
        good = self._judge(site, offset, mask, size, reads)
        return good, self._table(size).take(np.where(good, offset, self.slot)) + base

    def _table(self, size: int) -> Array:
        found = self._tables.get(size)
        if found is None:
            found = self._tables[size] = np.full(self.bytes, _HUGE)
            for name, start in self.starts.items():
                end = start + max(0, self._sizes[name] - size + 1)
                step = size if self.check else 1
                found[start:end:step] = np.arange(start, end, step) // size
            found[self.slot] = int(self.slot) // size
        return found

    def _judge(self, site: Site, offset: Array, mask: Array | None, size: int, reads: bool) -> Array:
        """Reports what is wrong and returns the lanes, [B, T], that are right."""
        shape = (
            self._shape if self.starts else np.broadcast_shapes(offset.shape, (1, 1) if mask is None else mask.shape)
        )
        good = np.broadcast_to(True if mask is None else mask, shape).copy()
        at = np.broadcast_to(offset, shape).astype(np.int64)
        aligned = np.where(at < self.bytes - size, at // size * size, 0)
        inside = (self._table(size).take(aligned) < _HUGE) & (at < self.bytes - size) & (at < self.slot)
        self._remove("out-of-bounds", site, good, ~inside, at, size)
        if self.check:
            self._remove("misaligned", site, good, at % size != 0, at, size)
        if self.check and reads and good.any():
            start = np.where(good, at, 0) + self._lanes * self.bytes
            ready = self._ready[start[..., None] + np.arange(size)].all(axis=2)
            self._remove("uninitialised-read", site, good, ~ready, at, size)
        return good

    def _remove(self, kind: str, site: Site, good: Array, bad: Array, at: Array, size: int) -> None:
        bad = bad & good
        if bad.any():
            row, thread, count = on.first(bad)
            what = self._name(int(at[row, thread]), size)
            self.reports.add(kind, site, row, thread, what, space="local", count=count)
            np.logical_and(good, ~bad, out=good)

    def _name(self, offset: int, size: int) -> str:
        before = [name for name, start in self.starts.items() if start <= offset] or list(self.starts)[:1]
        if not before:
            return f"{size} bytes, {offset:#x} of local memory, of which the kernel has none"
        start, nbytes = self.starts[before[-1]], self._sizes[before[-1]]
        text = names.item(names.plain_name(before[-1]), offset - start, nbytes, min(size, 8), size)
        return text if offset + size <= start + nbytes else names.crossing(text, offset - start, nbytes, size)
