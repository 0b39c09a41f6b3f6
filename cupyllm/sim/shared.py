"""Shared memory: one array a variable, [B, bytes], with what is known of every byte.

Every variable is stored apart, so that its end is the end of an array. A table per access width turns a byte offset
into an element index, and into a huge one where the offset is misaligned, out of bounds, not initialised or the
target of a copy in flight. One np.take through the table and one from the data are thus the whole check of a good
load: whatever is wrong raises IndexError, and the slow path finds out what (_judge_lanes).

Behind each row lie 16 bytes for every thread, out of reach of addresses. Lanes that a mask leaves out are sent there,
each to its own, so that neither the access nor the judging of races has to know masks.

What is initialised is kept once for all CTAs of a batch while they agree, [1, bytes], and per CTA, [B, bytes], after a
store under a mask or to addresses that differ between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyllm.sim import names
from cupyllm.sim.granules import SharedJudge
from cupyllm.sim.lanes import Array, narrow, pattern
from cupyllm.sim.memory import CARRIER, Geometry
from cupyllm.sim.report import Site

if TYPE_CHECKING:
    from cupyllm.sim.check import Access, Log

HUGE = 1 << 40  # an index that no array has, with a row's start added or not
SLOT = 16  # bytes behind a row for each thread
_ONES = {size: pattern(1, size) for size in CARRIER}


class SharedArray:
    """A shared variable, or dynamic shared memory under all its names. `start`: its offset in the window, 16-aligned.

    checked: whether misaligned and uninitialised accesses are looked for; bounds always are.
    """

    space = "shared"
    always_judged = False

    def __init__(self, name: str, start: int, nbytes: int, checked: bool) -> None:
        self.name, self.start, self.nbytes, self.checked = name, start, nbytes, checked
        self.start32 = np.uint32(start)
        self.padded = -(-nbytes // SLOT) * SLOT
        self.B = self.T = 0
        self.judge_state = SharedJudge(self)

    def begin(self, geometry: Geometry) -> None:
        """Uninitialised again, for a new batch."""
        if (self.B, self.T) != (geometry.B, geometry.T):
            self.B, self.T = geometry.B, geometry.T
            self.row_bytes = self.padded + SLOT * self.T
            self.data = np.zeros(self.B * self.row_bytes, np.uint8)
            self.slots = (self.padded + SLOT * np.arange(self.T, dtype=np.uint32)).reshape(1, -1)
            self.flat = {size: self.data.view(carrier) for size, carrier in CARRIER.items()}
            self.rows = {size: flat.reshape(self.B, -1) for size, flat in self.flat.items()}
            self.slot_index = {size: self.slots.astype(np.int64) // size for size in CARRIER}
            self.bases = {
                size: (np.arange(self.B) * (self.row_bytes // size)).reshape(-1, 1) for size in CARRIER
            }  # index of each row's start
            self.judge_state.begin()
            self._templates: dict[int, Array] = {}
        else:
            self.data.fill(0)
        self._set_ready(np.zeros((1, self.row_bytes), np.uint8))
        self.ready[:, self.padded :] = 1
        self.flight: Array | None = None  # like ready: bytes that a copy in flight will write
        self.tables: dict[int, Array] = {}  # of loads
        self.store_tables: dict[int, Array] = {}

    @property
    def uniform(self) -> bool:
        """Whether all CTAs have the same bytes initialised."""
        return len(self.ready) == 1

    # ---- index tables, int64 [padded bytes + 1]; the last entry, huge, stands for everything beyond ----

    def index(self, table: Array, size: int, offset: Array, lanes: Array | None) -> Array:
        """Element indices of offsets: huge where the table says so, the slot's where a lane is left out."""
        index = table.take(offset, mode="clip")
        if lanes is None:
            return index
        slots = self.slot_index[size]
        return np.where(lanes, index, slots if max(index.shape[1], lanes.shape[1]) > 1 else slots[:, :1])

    def table(self, size: int) -> Array:
        """For loads. While CTAs differ it knows bounds and alignment only, see `missing`."""
        found = self.tables.get(size)
        if found is None:
            found = self.tables[size] = self.plain_table(size).copy()
            if self.checked and self.uniform:
                ready = self.ready_flat[size][: self.padded // size] == _ONES[size]
                found[:-1:size][~ready] = HUGE
        return found

    def store_table(self, size: int) -> Array:
        """For stores: bounds, alignment, and copies in flight while CTAs agree (else `flying` knows)."""
        found = self.store_tables.get(size)
        if found is None:
            found = self.plain_table(size)
            if self.flight is not None and self.uniform:
                found = found.copy()
                found[:-1:size][self.flight[0, : self.padded].reshape(-1, size).any(axis=1)] = HUGE
            self.store_tables[size] = found
        return found

    def refresh(self, size: int) -> Array:
        """The table of loads with what was stored since it was made."""
        self.tables.pop(size, None)
        return self.table(size)

    def plain_table(self, size: int) -> Array:
        """Bounds and alignment only. Unchecked, a misaligned offset counts as the aligned one below it."""
        found = self._templates.get(size)
        if found is None:
            found = np.full(self.padded + 1, HUGE)
            end = max(0, self.nbytes - size + 1)
            if self.checked:
                found[:end:size] = np.arange(-(-end // size))
            else:
                found[:end] = np.arange(end) // size
            self._templates[size] = found
        return found

    def put(self, index: Array, value: Array, size: int) -> None:
        """Stores carriers at indices of a table. Raises IndexError, with nothing stored, if one is huge."""
        if value.shape[1] > index.shape[1]:
            value = value[:, -1:]  # all threads write there: the last one wins
        self.flat[size][index + self.bases[size]] = value

    # ---- what is initialised ----

    def _set_ready(self, ready: Array) -> None:
        """uint8 [1 or B, row bytes]: 1 where initialised and no copy is in flight."""
        self.ready = ready
        self.ready_flat = {size: ready.reshape(-1).view(carrier) for size, carrier in CARRIER.items()}

    def part(self) -> None:
        """From now on what is initialised is kept per CTA."""
        if self.uniform and self.B > 1:
            self._set_ready(np.repeat(self.ready, self.B, axis=0))
            if self.flight is not None:
                self.flight = np.repeat(self.flight, self.B, axis=0)
            self.tables.clear()
            self.store_tables.clear()

    def missing(self, index: Array, size: int) -> bool:
        """While CTAs differ: whether a lane's element, an index in the table, is not all initialised."""
        ready = self.ready_flat[size].take(index + self.bases[size])
        return not np.logical_and.reduce(ready == _ONES[size], axis=None)

    def flying(self, offset: Array, size: int) -> Array:
        """Lanes with a byte that a copy in flight will write. offset: in bounds or in a slot."""
        assert self.flight is not None
        return np.logical_or.reduce(self._bytes(self.flight, offset, size), axis=2)

    def hits_flight(self, index: Array, size: int) -> bool:
        """While CTAs differ: whether a copy in flight will write one of these elements of a table."""
        if self.flight is None or self.uniform or np.maximum.reduce(index, axis=None) >= HUGE:
            return False
        flight = self.flight.reshape(-1).view(CARRIER[size]).take(index + self.bases[size])
        return bool((flight != 0).any())

    def unready(self, offset: Array, size: int) -> Array:
        """Lanes with a byte that is not initialised."""
        return ~np.logical_and.reduce(self._bytes(self.ready, offset, size), axis=2)

    def _bytes(self, state: Array, offset: Array, size: int) -> Array:
        start = offset.astype(np.int64)[..., None] + np.arange(size)
        return state.reshape(-1)[start + np.arange(len(state)).reshape(-1, 1, 1) * self.row_bytes]

    def mark(self, index: Array, size: int) -> None:
        """Elements that a store has written; one row of them if every CTA has written these."""
        if self.uniform:
            if len(index) == 1:
                self.ready_flat[size][index] = _ONES[size]
                return
            if (self.ready_flat[size].take(index) == _ONES[size]).all():
                return
            self.part()
        self.ready_flat[size][index + self.bases[size]] = _ONES[size]

    # ---- copies in flight ----

    def take_off(self, offset: Array, size: int, lanes: Array) -> None:
        """Bytes that an asynchronous copy will write, until `land`. lanes: bool [B, T] or [1, T]."""
        self._fly(offset, size, lanes, 1)

    def land(self, offset: Array, size: int, lanes: Array) -> None:
        self._fly(offset, size, lanes, 0)

    def _fly(self, offset: Array, size: int, lanes: Array, flying: int) -> None:
        if not (len(offset) == 1 and len(lanes) == 1):
            self.part()
        if self.flight is None:
            self.flight = np.zeros_like(self.ready)
        shape = np.broadcast_shapes(offset.shape, lanes.shape, (len(self.ready), 1))
        chosen = np.broadcast_to(lanes, shape)
        at = np.broadcast_to(offset, shape).astype(np.int64)
        if not self.uniform:
            at = at + np.arange(self.B).reshape(-1, 1) * self.row_bytes
        at = at[chosen] // size
        self.flight.reshape(-1, size)[at] = flying
        self.ready.reshape(-1, size)[at] = 1 - flying
        if self.uniform:
            for tables in (self.tables, self.store_tables):
                for width, table in tables.items():
                    if tables is self.store_tables and table is self._templates[width]:
                        table = tables[width] = table.copy()
                    if width <= size:
                        _cells(table, size)[at] = HUGE if flying else _cells(self.plain_table(width), size)[at]
            for width in [width for width in self.tables if width > size]:
                del self.tables[width]
            for width in [width for width in self.store_tables if width > size]:
                del self.store_tables[width]

    # ---- what the log asks of a domain (check.py) ----

    def left_out(self, offset: Array, mask: Array) -> Array:
        """Offsets with the lanes outside the mask sent to their slots."""
        return np.where(mask, offset, self.slots)

    def left_after(self, left: Access, judged: Access) -> Access:
        """CTAs share nothing, so what some of them did makes no difference to the others."""
        return left

    def seen(self, offset: Array, mask: Array) -> Array:
        """The same as narrow as the offsets are: a uniform offset stays one if any of its lanes is in the mask."""
        lanes = narrow(mask, offset.shape)
        if lanes is None:
            return offset
        return np.where(lanes, offset, self.slots if offset.shape[1] > 1 else self.slots[:, :1])

    def judge(self, entries: list[Access], log: Log) -> tuple[Array, int]:
        return self.judge_state.candidates(entries)

    def describe(self, site: Site | None, byte: int, size: int) -> str:
        return names.item(self.name, byte, self.nbytes, min(size, 4) if size == SLOT else size, size)


def _cells(table: Array, size: int) -> Array:
    """The entries of a table by aligned runs of `size` bytes."""
    return table[:-1].reshape(-1, size)
