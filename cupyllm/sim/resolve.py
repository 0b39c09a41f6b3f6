"""Which of the candidates for a race really are one: from the log, with order, values and warp synchronisation.

All accesses to the candidate granules are laid out as lanes (CTA, granule, access, thread) and sorted. Two lanes of one
CTA and granule by different threads race if one writes and not both are atomic, except

- lanes that write equal bits by one store instruction,
- lanes of one warp with a __syncwarp of both, or a chain of them, between the accesses.

Of the threads of one access only the first and the last of a granule (of a warp, where there are syncs) can be needed
to find a pair of different threads, which bounds the pairs that are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupyllm.sim.memory import Geometry
from cupyllm.sim.report import Reports
from cupyllm.sim.warp import WARP

if TYPE_CHECKING:
    from cupyllm.sim.check import Access

Array = np.ndarray
_ENOUGH = 1 << 25  # pairs compared in one judgement once something was found


class Conflicts:
    """The accesses of one domain to some granules. `candidates`: sorted different granule numbers."""

    def __init__(self, domain: Any, entries: list[Access], candidates: Array, granule: int, geometry: Geometry) -> None:
        self.domain, self.granule, self.geometry = domain, granule, geometry
        self.accesses = [entry for entry in entries if entry.domain is domain]
        self.order = np.array([i for i, entry in enumerate(entries) if entry.domain is domain])
        self.syncs = [(i, self._bits(entry.mask)) for i, entry in enumerate(entries) if entry.domain is None]
        every = (1 << WARP) - 1
        tail = geometry.T % WARP
        full = np.full((geometry.B, -(-geometry.T // WARP)), every, np.uint64)
        full[:, -1] = (1 << tail) - 1 if tail else every
        # A sync of part of a warp may order the threads between the first and the last but not these.
        self.partial = any(((bits != 0) & (bits != full)).any() for _, bits in self.syncs)
        self.kind = np.array([entry.kind for entry in self.accesses])
        sites = {id(entry.site): number for number, entry in enumerate(self.accesses)}
        self.site = np.array([sites[id(entry.site)] for entry in self.accesses])
        self.blank = np.array([entry.values is None for entry in self.accesses])
        self.found: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self._layout(candidates)

    def report(self, reports: Reports) -> int:
        """Adds every pair of instructions that races; returns how many pairs there are."""
        self._same_access()
        self._other_accesses()
        for (a, b), (count, (row, one, two, granule)) in self.found.items():
            first, second = self.accesses[a], self.accesses[b]
            if first.kind & 1 == 0 and second.kind & 1:
                first, second, one, two = second, first, two, one  # the reader is the subject of the sentence
            reports.add(
                "race",
                second.site,
                row,
                two,
                self.domain.describe(second.site, self._byte(second, row, two, granule), second.size),
                verb=_verb(second),
                space=self.domain.space,
                other=first.site,
                other_thread=one,
                other_verb=_verb(first),
                count=count,
            )
        return len(self.found)

    def _layout(self, candidates: Array) -> None:
        """Sorted lanes: group = (CTA, granule), access, thread."""
        B, T = self.geometry.B, self.geometry.T
        keys = []
        number = len(candidates)
        for place, entry in enumerate(self.accesses):
            mask = np.broadcast_to(True if entry.mask is None else entry.mask, (B, T)).reshape(-1)
            lanes = np.flatnonzero(mask)
            start = np.broadcast_to(entry.offset, (B, T)).reshape(-1)[lanes].astype(np.int64) + entry.delta
            granules = start[:, None] // self.granule + np.arange(max(1, entry.size // self.granule))
            found = np.searchsorted(candidates, granules)
            hit = candidates[np.minimum(found, number - 1)] == granules
            at = np.nonzero(hit)
            row, thread = np.divmod(lanes[at[0]], T)
            keys.append(((row * number + found[at]) * len(self.accesses) + place) * T + thread)
        key = np.sort(np.concatenate(keys))
        rest, self.thread = np.divmod(key, T)
        self.group, self.access = np.divmod(rest, len(self.accesses))
        self.candidates = candidates

    def _same_access(self) -> None:
        """Threads of one store that write different values to one granule."""
        same = (self.group[1:] == self.group[:-1]) & (self.access[1:] == self.access[:-1])
        same &= self.kind[self.access[1:]] == 1
        pairs = np.flatnonzero(same)
        pairs = pairs[~self._equal(pairs, pairs + 1)]
        self._note(pairs, pairs + 1)

    def _other_accesses(self) -> None:
        """Pairs of lanes of different accesses, found by comparing the sorted lanes with themselves, shifted."""
        if not self.partial:
            self._keep_outermost()
        kind = self.kind[self.access]
        compared = 0
        for shift in range(1, len(self.group)):
            same = self.group[shift:] == self.group[:-shift]
            compared += len(same)
            if not same.any() or (compared > _ENOUGH and self.found):
                break
            a, b = kind[:-shift], kind[shift:]
            same &= (self.thread[shift:] != self.thread[:-shift]) & (self.access[shift:] != self.access[:-shift])
            same &= ((a | b) & 1 == 1) & (a & b & 2 == 0)
            pairs = np.flatnonzero(same)
            pairs = pairs[~self._equal(pairs, pairs + shift)]
            if len(pairs) and self.syncs:
                pairs = pairs[~self._ordered(pairs, pairs + shift)]
            self._note(pairs, pairs + shift)

    def _equal(self, first: Array, second: Array) -> Array:
        """Which pairs are plain stores of equal bits by one instruction."""
        one, two = self.access[first], self.access[second]
        equal = (self.site[one] == self.site[two]) & (self.kind[one] == 1) & (self.kind[two] == 1)
        equal &= ~(self.blank[one] | self.blank[two])
        some = np.flatnonzero(equal)
        equal[some] = (self._values(first[some]) == self._values(second[some])).all(axis=1)
        return equal

    def _values(self, lanes: Array) -> Array:
        """The bytes that lanes store, [lanes, 16], zeros behind them."""
        found = np.zeros((len(lanes), 16), np.uint8)
        place = self.group[lanes] // len(self.candidates) * self.geometry.T + self.thread[lanes]
        access = self.access[lanes]
        for number in np.unique(access):
            values = self.accesses[number].values
            raw = np.ascontiguousarray(np.broadcast_to(values, (self.geometry.B, self.geometry.T)))
            mine = access == number
            found[mine, : raw.itemsize] = raw.view(np.uint8).reshape(raw.size, -1)[place[mine]]
        return found

    def _keep_outermost(self) -> None:
        part = self.thread // WARP if self.syncs else np.zeros_like(self.thread)
        new = np.ones(len(part) + 1, bool)
        new[1:-1] = (np.diff(self.group) != 0) | (np.diff(self.access) != 0) | (np.diff(part) != 0)
        keep = new[:-1] | new[1:]
        self.group, self.access, self.thread = self.group[keep], self.access[keep], self.thread[keep]

    def _ordered(self, first: Array, second: Array) -> Array:
        """Which pairs have a chain of warp syncs between them: lanes reached from the first thread, sync by sync."""
        row = self.group[first] // len(self.candidates)
        warp, start = np.divmod(self.thread[first], WARP)
        other_warp, end = np.divmod(self.thread[second], WARP)
        begin, stop = self.order[self.access[first]], self.order[self.access[second]]
        reached = np.uint64(1) << start.astype(np.uint64)
        for position, bits in self.syncs:
            members = bits[row, warp]
            meets = (begin < position) & (position < stop) & (members & reached != 0)
            reached = np.where(meets, reached | members, reached)
        return (warp == other_warp) & (reached >> end.astype(np.uint64) & np.uint64(1) == 1)

    def _bits(self, mask: Array | None) -> Array:
        """Lane masks [B, warps], uint64, of a sync."""
        B, T = self.geometry.B, self.geometry.T
        padded = np.zeros((B, -(-T // WARP) * WARP), np.uint64)
        padded[:, :T] = np.broadcast_to(True if mask is None else mask, (B, T))
        return (padded.reshape(B, -1, WARP) << np.arange(WARP, dtype=np.uint64)).sum(axis=2, dtype=np.uint64)

    def _note(self, first: Array, second: Array) -> None:
        if not len(first):
            return
        codes, at, counts = np.unique(
            self.access[first] * len(self.accesses) + self.access[second], return_index=True, return_counts=True
        )
        for code, place, count in zip(codes.tolist(), at.tolist(), counts.tolist(), strict=True):
            pair = divmod(code, len(self.accesses))
            one, two = first[place], second[place]
            row, candidate = divmod(int(self.group[one]), len(self.candidates))
            lanes = (row, int(self.thread[one]), int(self.thread[two]), int(self.candidates[candidate]))
            before, kept = self.found.get(pair, (0, lanes))
            self.found[pair] = (before + count, kept)

    def _byte(self, access: Access, row: int, thread: int, granule: int) -> int:
        """First byte that the access has in the granule."""
        shape = (self.geometry.B, self.geometry.T)
        start = int(np.broadcast_to(access.offset, shape)[row, thread]) + access.delta
        return max(start, granule * self.granule)


def _verb(access: Access) -> str:
    """In the third person; an asynchronous copy writes what it is reported for."""
    if access.kind & 2:
        return ""
    return "writes" if access.kind & 1 else "reads"
