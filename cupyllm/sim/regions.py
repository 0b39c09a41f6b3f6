"""Races on global memory: between the CTAs of a launch, and between the threads of a CTA.

CTAs run in any order and cannot wait for each other, so two of them must not touch the same bytes of global memory at
any time of a launch if one writes, unless both are atomic or both execute the same store instruction with equal bits.
Fences and flags order nothing here: where the last CTA to arrive adds up what the others left behind a
__threadfence(), its loads and their stores are reported unless they are volatile or atomic, right as the kernel is.
Inside a CTA the rule is that of shared memory (check.py).

Only memory that the launch may write is watched, as regions: arguments that overlap form one. A region has a table for
each kind of access with the stamp of the last one to every granule:

    epoch of its CTA << 48 | instruction << 32 | CTA * (threads + 1) + thread + 1          0: none

with all 32 bits of the last part set for several CTAs, and with thread = T for several threads of one CTA. A launch of
more threads, or a kernel of more instructions, than the parts can hold is refused. Tables live as long as the launch
and know each access of earlier batches and barrier intervals; the accesses of the present interval come from the log,
all of them in one go.

Rejected: testing at the access, see check.py; one table of CTAs without threads, which cannot name the other thread and
would need a second one for races inside a CTA.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cupyllm.errors import BackendError
from cupyllm.sim import names
from cupyllm.sim.lanes import Array
from cupyllm.sim.memory import Extent, Scratch
from cupyllm.sim.report import Site
from cupyllm.sim.warp import WARP

if TYPE_CHECKING:
    from cupyllm.sim.check import Access, Log

_READ, _WRITE, _ATOMIC_READ, _ATOMIC_WRITE = range(4)  # as in check.py
_WHO = (1 << 32) - 1
_SITES = 1 << 16
_EPOCHS = 1 << 15
_EPOCH = 48  # its lowest bit
# Which tables an access of a kind collides with.
_RIVALS = {
    _WRITE: (_WRITE, _READ, _ATOMIC_READ, _ATOMIC_WRITE),
    _READ: (_WRITE, _ATOMIC_WRITE),
    _ATOMIC_WRITE: (_WRITE, _READ),
    _ATOMIC_READ: (_WRITE,),
}
_NOTHING = np.zeros(0, np.int64)


class Part(NamedTuple):
    """Accesses of one kind, instruction and shape as flat arrays, an element for every lane and granule.

    chosen: their lanes, counted through all accesses, None if they have all. lanes: how many an access can have.
    """

    accesses: list[Access]
    granule: Array
    stamp: Array
    chosen: Array | None
    lanes: int
    together: bool  # a lane stands for all threads of its CTA


class Lanes(NamedTuple):
    """All accesses of one kind in one array. starts: where each part begins, and the end."""

    parts: list[Part]
    granule: Array
    stamp: Array
    starts: Array
    together: bool


class Region:
    """Device bytes from `start` on, and the arguments in them, (position, extent)."""

    space = "global"
    always_judged = True

    def __init__(self, start: int, nbytes: int, extents: list[tuple[int | str, Extent]], scratch: Scratch) -> None:
        assert start % 16 == 0, "an access lies in granules of its size"
        self.start, self.nbytes, self.extents = start, nbytes, extents
        self.scratch = scratch
        self.granule = 16
        self.tables: dict[int, Array] = {}
        self.sites: list[Site] = []
        self._numbers: dict[Site, int] = {}

    def left_out(self, offset: Array, mask: Array) -> Array:
        return offset

    def left_after(self, left: Access, judged: Access) -> Access:
        """The CTAs of one access that are not judged yet find what the others, which are, have stored by it."""
        if left.kind != _WRITE or left.values is None or left.before is None or judged.mask is None:
            return left
        shape = np.broadcast_shapes(judged.mask.shape, left.offset.shape, left.values.shape)
        offset, values, before = (
            np.broadcast_to(array, shape).reshape(-1) for array in (left.offset, left.values, left.before)
        )
        stored = np.flatnonzero(np.broadcast_to(judged.mask, shape))[::-1]
        places, last = np.unique(offset[stored], return_index=True)
        at = np.minimum(np.searchsorted(places, offset), len(places) - 1)
        before = np.where(places[at] == offset, values[stored][last][at], before)
        return left._replace(before=before.reshape(shape))

    def describe(self, site: Site | None, byte: int, size: int) -> str:
        address = self.start + byte
        wanted = site.params if site is not None and site.params is not None else ()
        for chosen in (True, False):
            for position, extent in self.extents:
                if extent.address <= address < extent.address + extent.nbytes and (position in wanted or not chosen):
                    return names.element(extent, address - extent.address, size)
        return f"address {address:#x}"

    def judge(self, entries: list[Access], log: Log) -> tuple[Array, int]:
        """Reports races between CTAs; (granules where threads of one CTA may race, granule size).

        Raises BackendError where the launch or its kernel is too large for the stamps.
        """
        self._refine(min(entry.size for entry in entries))
        self.log, self.entries = log, entries
        self.T = log.geometry.T
        ctas = math.prod(log.geometry.grid)
        if ctas * (self.T + 1) >= _WHO:
            raise BackendError(
                f"{entries[0].site.kernel}: cannot look for races between {ctas} CTAs of {self.T} threads, expected at "
                f"most {(_WHO - 1) // (self.T + 1)} such CTAs; launch a smaller grid"
            )
        self.present: dict[int, Lanes] = {}
        suspects: list[Array] = []
        for kind in (_WRITE, _READ, _ATOMIC_WRITE, _ATOMIC_READ):
            parts = self._parts(kind)
            if not parts or (not log.forced and self._alone(kind, parts)):
                continue
            lanes = _joined(parts)
            for rival in _RIVALS[kind]:
                if rival in self.tables:
                    there = self.tables[rival].take(lanes.granule)
                    if np.logical_or.reduce(there):
                        self._compare(lanes, there, kind, rival, suspects)
            self.present[kind] = lanes
            met = self._enter(kind, lanes)
            if kind == _WRITE and len(met):
                self._meet(lanes, met)
                suspects.append(met)
        self.entries, self.present = [], {}
        return (np.unique(np.concatenate(suspects)) if suspects else _NOTHING), self.granule

    def _alone(self, kind: int, parts: list[Part]) -> bool:
        """The usual case: enters accesses if none but their own threads were ever there. False: nothing is entered."""
        table, before = self._table(kind), []
        for part in parts:
            for rival in {kind, *_RIVALS[kind]} & self.tables.keys():
                there = self.tables[rival].take(part.granule)
                if rival == kind:
                    before.append(there)
                if np.logical_or.reduce(there):
                    if part.together or np.logical_or.reduce((there != 0) & ((there ^ part.stamp) & _WHO != 0)):
                        return False
        for part in parts:
            table[part.granule] = part.stamp
        for part in parts:
            met = table.take(part.granule) != part.stamp
            if np.logical_or.reduce(met) and np.logical_or.reduce((table.take(part.granule) ^ part.stamp) & _WHO != 0):
                for old, entered in zip(before, parts, strict=True):
                    table[entered.granule] = old
                return False
        return True

    # ---- lanes and stamps ----

    def _refine(self, size: int) -> None:
        if size < self.granule:
            self.tables = {kind: np.repeat(table, self.granule // size) for kind, table in self.tables.items()}
            self.granule = size

    def _table(self, kind: int) -> Array:
        if kind not in self.tables:
            self.tables[kind] = self.scratch.take(-(-self.nbytes // self.granule))
        return self.tables[kind]

    def release(self) -> None:
        """The launch is over."""
        for table in self.tables.values():
            self.scratch.give_back(table)
        self.tables = {}

    def _parts(self, kind: int) -> list[Part]:
        B, T = self.log.geometry.B, self.log.geometry.T
        groups: dict[tuple[object, ...], list[Access]] = {}
        for entry in self.entries:
            if entry.kind == kind:
                shape = None if entry.mask is None else entry.mask.shape
                key = (entry.site, entry.size, entry.delta, entry.offset.shape, shape)
                groups.setdefault(key, []).append(entry)
        if not groups:
            return []
        first = (self.log.geometry.first_cta + np.arange(B)) * (T + 1) + 1 + ((self.log.epoch % _EPOCHS) << _EPOCH)
        first = first.reshape(-1, 1)
        everyone = first + np.arange(T)
        found = []
        for entries in groups.values():
            size, delta, shape = entries[0].size, entries[0].delta, entries[0].offset.shape
            mask_shape = None if entries[0].mask is None else entries[0].mask.shape
            together = kind != _WRITE and shape[1] == 1 and T > 1 and (mask_shape is None or mask_shape[1] == 1)
            stamp = (first + T if together else everyone) + (self._number(entries[0].site) << 32)
            offset = _stacked([entry.offset for entry in entries], stamp.shape)
            lanes, chosen = stamp.size, None
            stamp = stamp.reshape(-1) if len(entries) == 1 else np.tile(stamp.reshape(-1), len(entries))
            if mask_shape is not None:
                masks = [entry.mask for entry in entries if entry.mask is not None]
                chosen = np.flatnonzero(_stacked(masks, (B, lanes // B)))
                offset, stamp = offset.take(chosen), stamp.take(chosen)
            index = (offset.astype(np.int64) + delta if delta else offset.astype(np.int64)) >> (
                self.granule.bit_length() - 1
            )
            if size > self.granule:
                each = size // self.granule
                index, stamp = (index[:, None] + np.arange(each)).reshape(-1), np.repeat(stamp, each)
            found.append(Part(entries, index, stamp, chosen, lanes, together))
        return found

    def _number(self, site: Site) -> int:
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = len(self.sites)
            if number >= _SITES:
                raise BackendError(
                    f"{site.kernel}: cannot look for races between the more than {_SITES} instructions that access "
                    "one array; unroll its loops less"
                )
            self.sites.append(site)
        return number

    def _who(self, stamp: Array) -> tuple[Array, Array]:
        """(CTA, thread) of stamps that are not 0; CTA -1 for several CTAs."""
        who = stamp & _WHO
        cta, thread = np.divmod(who - 1, self.T + 1)
        return np.where(who == _WHO, -1, cta), thread

    # ---- collisions ----

    def _compare(self, lanes: Lanes, there: Array, kind: int, rival: int, suspects: list[Array]) -> None:
        """The lanes against stamps in a table: reports other CTAs, notes granules of other threads of the same one."""
        both = there != 0
        if not lanes.together:
            both &= (there ^ lanes.stamp) & _WHO != 0
        both = np.flatnonzero(both)
        mine, its = lanes.stamp[both], there[both]
        cta, thread = self._who(mine)
        rival_cta, rival_thread = self._who(its)
        apart = cta != rival_cta
        if kind == rival == _WRITE:
            others = np.flatnonzero(apart)
            apart[others] = ~self._equal_before(lanes, both[others], its[others])
        self._report(lanes, both[apart], its[apart])
        together = (cta == rival_cta) & (mine >> _EPOCH == its >> _EPOCH)
        together &= (thread != rival_thread) | (thread == self.T)
        suspects.append(lanes.granule[both[together | apart]])  # where CTAs meet, a stamp may hide a thread of its own
        if self.log.forced and together.any():
            self._report_forced(lanes, both[together], its[together], rival)

    def _enter(self, kind: int, lanes: Lanes) -> Array:
        """Enters accesses. Where several threads meet, the stamp says several threads, or several CTAs.

        Returns the granules where any of these accesses met each other or an earlier one that still matters.
        """
        table = self._table(kind)
        old = table.take(lanes.granule)
        table[lanes.granule] = lanes.stamp
        clash = (table.take(lanes.granule) ^ lanes.stamp) & _WHO != 0
        clash |= (old != 0) & ((old ^ lanes.stamp) & _WHO != 0)
        if not np.logical_or.reduce(clash):
            return _NOTHING
        granules = np.unique(lanes.granule[clash])
        at = np.flatnonzero(np.isin(lanes.granule, granules))
        place = np.searchsorted(granules, lanes.granule[at])
        stamp, before = lanes.stamp[at], old[at]
        cta, thread = self._who(stamp)
        before_cta, before_thread = self._who(before)
        # Earlier ones of the same CTA do not matter once it has passed a barrier.
        current = (before != 0) & ((before_cta != cta) | (before >> _EPOCH == stamp >> _EPOCH))
        low, high = np.full(len(granules), 1 << 62), np.full(len(granules), -2)
        low_thread, high_thread = low.copy(), high.copy()
        for chosen, ctas, threads in ((slice(None), cta, thread), (current, before_cta, before_thread)):
            np.minimum.at(low, place[chosen], ctas[chosen])
            np.maximum.at(high, place[chosen], ctas[chosen])
            np.minimum.at(low_thread, place[chosen], threads[chosen])
            np.maximum.at(high_thread, place[chosen], threads[chosen])
        last = table[granules]
        several = (last & ~_WHO) | (high * (self.T + 1) + self.T + 1)
        last = np.where(low_thread != high_thread, several, last)
        table[granules] = np.where(low != high, last | _WHO, last)
        return granules

    def _meet(self, lanes: Lanes, granules: Array) -> None:
        """Stores of this interval to the same granules: other CTAs must have stored the same bits by the same one."""
        at = np.flatnonzero(np.isin(lanes.granule, granules))
        at = at[np.argsort(lanes.granule[at], kind="stable")]
        granule, cta = lanes.granule[at], self._who(lanes.stamp[at])[0]
        starts = np.flatnonzero(np.concatenate([[True], granule[1:] != granule[:-1]]))
        first = np.repeat(starts, np.diff(np.concatenate([starts, [len(at)]])))
        apart = np.flatnonzero(cta != cta[first])
        mixed = np.isin(first, first[apart])
        equal = np.ones(len(at), bool)
        equal[mixed] = self._equal_stores(lanes, at[mixed], at[first[mixed]])
        bad = np.isin(first, first[~equal])
        apart = apart[bad[apart]]
        self._report(lanes, at[apart], lanes.stamp[at[first[apart]]])

    # ---- equal stores ----

    def _values(self, lanes: Lanes, at: Array, before: bool) -> list[bytes]:
        """The bits that lanes stored, or that were there before."""
        B, T = self.log.geometry.B, self.log.geometry.T
        found: list[bytes] = []
        for lane in at.tolist():
            entry, row, thread = self._position(lanes, lane)
            values = entry.before if before else entry.values
            assert values is not None, "stores note both"
            found.append(np.broadcast_to(values, (B, T))[row, thread].tobytes())
        return found

    def _equal_before(self, lanes: Lanes, at: Array, its: Array) -> Array:
        """Whether a lane stores, by the instruction that stored there before, the bits that were there."""
        same = (lanes.stamp[at] ^ its) >> 32 & (_SITES - 1) == 0
        some = np.flatnonzero(same)
        now, before = self._values(lanes, at[some], False), self._values(lanes, at[some], True)
        same[some] = [a == b for a, b in zip(now, before, strict=True)]
        return same

    def _equal_stores(self, lanes: Lanes, one: Array, two: Array) -> Array:
        same = (lanes.stamp[one] ^ lanes.stamp[two]) >> 32 & (_SITES - 1) == 0
        some = np.flatnonzero(same)
        first, second = self._values(lanes, one[some], False), self._values(lanes, two[some], False)
        same[some] = [a == b for a, b in zip(first, second, strict=True)]
        return same

    # ---- reports ----

    def _report(self, lanes: Lanes, at: Array, its: Array) -> None:
        """Lanes whose granule another CTA has touched, with that one's stamps."""
        if not len(at):
            return
        pair = (lanes.stamp[at] >> 32 & (_SITES - 1)) * _SITES + (its >> 32 & (_SITES - 1))
        _, firsts, counts = np.unique(pair, return_index=True, return_counts=True)
        for place, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            entry, row, thread = self._position(lanes, int(at[place]))
            cta, other_thread = (int(part[0]) for part in self._who(its[place : place + 1]))
            self.log.reports.add(
                "race-between-ctas",
                entry.site,
                row,
                None if thread == self.T else thread,
                self._name(lanes, int(at[place]), entry),
                other=self.sites[int(its[place]) >> 32 & (_SITES - 1)],
                other_cta=None if cta < 0 else cta,
                other_thread=None if cta < 0 or other_thread == self.T else other_thread,
                detail="several CTAs do" if cta < 0 else "",
                space="global",
                count=count,
            )

    def _report_forced(self, lanes: Lanes, at: Array, its: Array, rival: int) -> None:
        """Races in a CTA with accesses that have left the log. Those of a warp that synchronised may be ordered."""
        present = self.present.get(rival)
        for lane, stamp in zip(at.tolist(), its.tolist(), strict=True):
            entry, row, thread = self._position(lanes, lane)
            other = ((stamp & _WHO) - 1) % (self.T + 1)
            if self.log.ever_synced and (self.T in (other, thread) or other // WARP == thread // WARP):
                continue
            if present is not None and ((present.granule == lanes.granule[lane]) & (present.stamp == stamp)).any():
                continue  # still in the log, which knows better
            self.log.reports.add(
                "race",
                entry.site,
                row,
                None if thread == self.T else thread,
                self._name(lanes, lane, entry),
                other=self.sites[stamp >> 32 & (_SITES - 1)],
                other_thread=None if other == self.T else other,
                space="global",
            )

    def _position(self, lanes: Lanes, at: int) -> tuple[Access, int, int]:
        """(access, row, thread) of a lane; thread T when all threads of the CTA did it."""
        cta, thread = (int(found[0]) for found in self._who(lanes.stamp[at : at + 1]))
        number = int(np.searchsorted(lanes.starts, at, side="right")) - 1
        part = lanes.parts[number]
        lane = (at - int(lanes.starts[number])) // max(1, part.accesses[0].size // self.granule)
        if part.chosen is not None:
            lane = int(part.chosen[lane])
        return part.accesses[lane // part.lanes], cta - self.log.geometry.first_cta, thread

    def _name(self, lanes: Lanes, at: int, entry: Access) -> str:
        return self.describe(entry.site, int(lanes.granule[at]) * self.granule, min(entry.size, 8))


def _joined(parts: list[Part]) -> Lanes:
    starts = np.cumsum([0, *(len(part.granule) for part in parts)])
    granules, stamps = [part.granule for part in parts], [part.stamp for part in parts]
    together = any(part.together for part in parts)
    if len(parts) == 1:
        return Lanes(parts, granules[0], stamps[0], starts, together)
    return Lanes(parts, np.concatenate(granules), np.concatenate(stamps), starts, together)


def _stacked(arrays: list[Array], shape: tuple[int, int]) -> Array:
    """Arrays of one shape, each broadcast to `shape`, behind each other and flat."""
    if arrays[0].shape == shape:
        return arrays[0].reshape(-1) if len(arrays) == 1 else np.concatenate(arrays).reshape(-1)
    return np.concatenate([np.broadcast_to(array, shape).reshape(-1) for array in arrays])
