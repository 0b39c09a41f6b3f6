"""Candidates for races in a shared variable: threads that meet in a granule between two barriers (see check.py).

The table holds, for every granule, the stamp of a thread that wrote it. All writes of the interval are put in first,
then every write and read looks up its granules. If two threads write one, the table has only one of them and the
other finds it; if a thread reads what another writes, it finds that. The order in which they happened does not
matter. Stamps grow from interval to interval, so the table is never cleared.

A granule that all threads of a CTA touch at once has the stamp of nobody in particular, which equals no thread's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyllm.sim.lanes import Array

if TYPE_CHECKING:
    from cupyllm.sim.check import Access
    from cupyllm.sim.shared import SharedArray

_NOTHING = np.zeros(0, np.int64)
Lanes = list[tuple[Array, "Array | int"]]  # granules and the threads that touch them, broadcastable


class SharedJudge:
    """The tables of one shared variable."""

    def __init__(self, array: SharedArray) -> None:
        self.array = array

    def begin(self) -> None:
        """The number of CTAs or threads has changed."""
        self.T = self.array.T
        self.threads = np.arange(1, self.T + 1)
        self.anybody = self.T + 1 if self.T > 1 else 1
        self.tables: dict[tuple[int, int], Array] = {}
        self.base = 0

    def candidates(self, entries: list[Access]) -> tuple[Array, int]:
        """(granule numbers in question, sorted; granule size) of an interval with at least one write."""
        granule = min(entry.size for entry in entries)
        rows = max(len(entry.offset) for entry in entries)
        kinds: tuple[Lanes, ...] = tuple(self._lanes(entries, kind, granule, rows) for kind in range(4))
        reads, writes, atomic_reads, atomic_writes = kinds
        size = rows * self.array.row_bytes // granule
        self.base += self.T + 2
        written = self._table(0, size)
        found: list[Array] = []
        self._put(written, writes)
        for index, who in writes:
            self._note(found, index, written.take(index) != who + self.base)
            if isinstance(who, int) and len(index) > 1:  # two instructions by which everybody writes the same place
                every = np.sort(index.reshape(-1))
                self._note(found, every[1:], every[1:] == every[:-1])
        for lanes in (reads, atomic_reads, atomic_writes):
            self._look(found, written, lanes)
        if atomic_writes and reads:
            updated = self._table(1, size)
            self._put(updated, atomic_writes)
            for index, who in atomic_writes:
                several = updated.take(index) != who + self.base
                updated[index[several]] = self.anybody + self.base
            self._look(found, updated, reads)
        if not found:
            return _NOTHING, granule
        return np.unique(np.concatenate(found) % (self.array.row_bytes // granule)), granule

    def _table(self, which: int, size: int) -> Array:
        table = self.tables.get((which, size))
        if table is None:
            table = self.tables[which, size] = np.zeros(size, np.int64)
        return table

    def _put(self, table: Array, lanes: Lanes) -> None:
        for index, who in lanes:
            table[index] = who + self.base

    def _look(self, found: list[Array], table: Array, lanes: Lanes) -> None:
        """Notes the granules where somebody else has left a stamp."""
        for index, who in lanes:
            there = table.take(index)
            if np.maximum.reduce(there, axis=None) > self.base:
                alone = 0 if isinstance(who, int) and self.T > 1 else who
                self._note(found, index, (there > self.base) & (there != alone + self.base))

    def _note(self, found: list[Array], index: Array, bad: Array) -> None:
        if np.logical_or.reduce(bad, axis=None):
            found.append(index[bad])

    def _lanes(self, entries: list[Access], kind: int, granule: int, rows: int) -> Lanes:
        """The granules of all accesses of a kind, accesses of one shape together."""
        groups: dict[tuple[int, int], list[Array]] = {}
        for entry in entries:
            if entry.kind == kind:
                offset = self._threads_apart(entry, kind)
                if rows > 1:
                    offset = offset + np.arange(rows, dtype=np.uint32).reshape(-1, 1) * np.uint32(self.array.row_bytes)
                groups.setdefault((entry.size, offset.shape[1]), []).append(offset)
        found: Lanes = []
        for (size, width), offsets in groups.items():
            index = offsets[0] if len(offsets) == 1 else np.concatenate(offsets)
            index = index.astype(np.int64) >> (granule.bit_length() - 1)
            who: Array | int = self.anybody if width == 1 else self.threads
            if size > granule:
                index = index[..., None] + np.arange(size // granule)
                who = who if width == 1 else self.threads[:, None]
            found.append((index, who))
        return found

    def _threads_apart(self, entry: Access, kind: int) -> Array:
        """One offset for all threads stays one, unless a mask or different values tell them apart."""
        offset, mask = entry.offset, entry.mask
        if offset.shape[1] != 1 or self.T == 1:
            return offset
        if mask is not None and mask.shape[1] != 1:
            if len(offset) == 1 and len(mask) > 1:
                mask = np.logical_or.reduce(mask, axis=0, keepdims=True)
            return np.where(mask, offset, self.array.slots)
        same = kind != 1 or (entry.values is not None and entry.values.shape[1] == 1)
        return offset if same else np.repeat(offset, self.T, axis=1)
