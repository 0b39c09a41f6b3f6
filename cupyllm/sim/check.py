"""Races between the threads of a CTA.

The rule: two threads of a CTA that touch the same bytes between two barriers, at least one of them writing, race,
unless both are atomic, or a __syncwarp orders them, or it is one store instruction that writes equal bits from both.
That is the happens-before relation of CUDA restricted to what our kernels synchronise with.

The method: accesses are only logged, as the arrays that they are (Access). At a barrier the whole interval is judged
in a few NumPy calls: every write puts its thread into a table of granules, and whoever then finds another thread in a
granule that it wrote or read is a candidate. Candidates are rare; they are resolved exactly, with order and values,
from the log. A granule has the size of the narrowest access of the interval. While addresses are uniform over the
CTAs of a batch, one row stands for all of them.

Rejected: a table that every access updates as it happens (last writer, readers). It costs several gathers and
scatters an access, knows only one reader, and misses write-after-read by a third thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cupyllm.sim.memory import Geometry
from cupyllm.sim.report import Reports, Site
from cupyllm.sim.resolve import Conflicts

if TYPE_CHECKING:
    from cupyllm.sim.regions import Region
    from cupyllm.sim.shared import SharedArray

Array = np.ndarray

# Kinds of access: bit 0 writes, bit 1 atomic.
READ, WRITE, ATOMIC_READ, ATOMIC_WRITE, SYNC = range(5)
_SYNC = Site("", "bar.warp.sync", ())
_NOWHERE = np.uint32(0xFFFFFFFF)
LIMIT = 4096  # accesses of an interval that are kept before they are judged early


class Access(NamedTuple):
    """One executed instruction. A SYNC has a mask only.

    offset: bytes from the domain's start plus `delta`, as wide as the address was. mask: the lanes, None for all.
    Lanes left out have an offset of their own beyond the end (shared), or any (regions).
    values: a store's values in their carrier type; before: what a region held there, where that matters.
    """

    domain: SharedArray | Region | None
    kind: int
    site: Site
    size: int
    offset: Array
    mask: Array | None
    values: Array | None = None
    before: Array | None = None
    delta: int = 0


class Log:
    """The accesses of the batch since the last barrier of each of its CTAs.

    epoch: int64 [B], barriers that each CTA has passed. forced: whether entries of regions of this epoch were judged
    and dropped already. ever_synced: whether there was any warp_sync.
    """

    def __init__(self, reports: Reports) -> None:
        self.reports = reports
        self.entries: list[Access] = []
        self.limit = LIMIT
        self.forced = self.ever_synced = False
        self.geometry = Geometry((1, 1, 1), (1, 1, 1), 0, 1, 1)
        self.epoch = np.zeros(1, np.int64)

    def begin(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.epoch = np.zeros(geometry.B, np.int64)
        self.forced = self.ever_synced = False
        self.entries, self.limit = [], LIMIT

    def add(self, access: Access) -> None:
        self.entries.append(access)
        if len(self.entries) > self.limit:
            self._compact()

    def sync(self, mask: Array | None) -> None:
        """__syncwarp among these lanes."""
        self.ever_synced = True
        if self.entries:
            self.add(Access(None, SYNC, _SYNC, 0, np.zeros((1, 1), np.uint32), mask))

    def barrier(self, rows: Array | None) -> None:
        """These CTAs (None: all) have passed a barrier, which ends their interval."""
        if self.entries:
            if rows is None:
                entries, self.entries, self.limit = self.entries, [], LIMIT
            else:
                entries, self.entries = self._split(rows)
            self._judge(entries)
        if rows is None:
            self.epoch += 1
            self.forced = False
        else:
            self.epoch[rows] += 1

    def _split(self, rows: Array) -> tuple[list[Access], list[Access]]:
        """The log of these CTAs and that of the others."""
        inside, outside = rows.reshape(-1, 1), ~rows.reshape(-1, 1)
        mine, rest = [], []
        for entry in self.entries:
            part = _of(entry, inside)
            left = _of(entry, outside)
            if part is not None:
                mine.append(part)
            if left is not None:
                rest.append(left if part is None or entry.domain is None else entry.domain.left_after(left, part))
        return mine, rest

    def _judge(self, entries: list[Access]) -> None:
        domains: dict[SharedArray | Region, list[Access]] = {}
        written = set()
        for entry in entries:
            domain = entry.domain
            if domain is None:
                continue
            if domain in domains:
                domains[domain].append(entry)
            else:
                domains[domain] = [entry]
            if entry.kind & 1:
                written.add(domain)
        for domain, found in domains.items():
            if domain.always_judged or domain in written:
                candidates, granule = domain.judge(found, self)
                if len(candidates):
                    self.resolve(domain, entries, candidates, granule)

    def resolve(self, domain: SharedArray | Region, entries: list[Access], candidates: Array, granule: int) -> int:
        """Reports the real races among the candidate granules of a domain; how many there are."""
        return Conflicts(domain, entries, candidates, granule, self.geometry).report(self.reports)

    def _compact(self) -> None:
        """A long interval: judge it now and keep only what later accesses can still collide with.

        Of equal accesses the last one decides, since whatever orders it before a later access orders the earlier ones
        too. Regions need nothing kept, their tables remember (regions.py).
        """
        self._judge(self.entries)
        self.forced = True
        kept: dict[tuple[object, ...], Access] = {}
        count = 0  # of syncs met that stand between accesses
        for entry in self.entries:
            key: tuple[object, ...]
            if entry.domain is None:
                count += 1
                key = (count,)
            elif entry.domain.always_judged:
                continue
            else:
                key = (
                    entry.domain,
                    entry.kind,
                    entry.site,
                    entry.offset.tobytes(),
                    entry.offset.shape,
                    _key(entry.mask),
                )
            kept.pop(key, None)
            kept[key] = entry
        self.entries = _without_repeated_syncs(list(kept.values()))
        if 2 * len(self.entries) > self.limit:
            self.entries = self._packed(self.entries)
        self.limit = max(LIMIT, 2 * len(self.entries))

    def _packed(self, entries: list[Access]) -> list[Access]:
        """Per instruction and stretch without a sync: the different offsets of each thread, one access for each."""
        stretches: list[dict[tuple[object, ...], list[Access]]] = [{}]
        syncs = []
        for entry in entries:
            if entry.domain is None:
                syncs.append(entry)
                stretches.append({})
            else:
                stretches[-1].setdefault((entry.domain, entry.kind, entry.site, entry.size), []).append(entry)
        packed: list[Access] = []
        for place, stretch in enumerate(stretches):
            packed += [syncs[place - 1]] if place else []
            for found in stretch.values():
                packed += _distinct(found, self.geometry) if len(found) > 1 else found
        return packed


def _of(access: Access, rows: Array) -> Access | None:
    """What CTAs, bool [B, 1], have of an access."""
    mask = rows if access.mask is None else access.mask & rows
    if not mask.any():
        return None
    offset = access.offset
    if len(offset) > 1 and access.domain is not None:
        offset = access.domain.left_out(offset, mask)
    return access._replace(mask=mask, offset=offset)


def _key(mask: Array | None) -> tuple[object, ...]:
    return () if mask is None else (mask.shape, mask.tobytes())


def _without_repeated_syncs(entries: list[Access]) -> list[Access]:
    kept: list[Access] = []
    for entry in entries:
        repeated = kept and entry.domain is None and kept[-1].domain is None and _key(kept[-1].mask) == _key(entry.mask)
        if not repeated:
            kept.append(entry)
    return kept


def _distinct(entries: list[Access], geometry: Geometry) -> list[Access]:
    """The accesses of one instruction with each thread's different offsets once."""
    first = entries[0]
    assert first.domain is not None
    rows = max(len(array) for e in entries for array in (e.offset, e.mask) if array is not None)
    shape = (rows, geometry.T)
    offsets = np.stack([np.broadcast_to(e.offset, shape) for e in entries])
    there = np.stack([np.broadcast_to(True if e.mask is None else e.mask, shape) for e in entries])
    order = np.argsort(np.where(there, offsets, _NOWHERE), axis=0, kind="stable")
    offsets, there = np.take_along_axis(offsets, order, axis=0), np.take_along_axis(there, order, axis=0)
    there[:-1] &= (offsets[1:] != offsets[:-1]) | ~there[1:]  # the last of equal ones stays
    values = None
    if first.values is not None:
        whole = (geometry.B, geometry.T)  # values may differ between CTAs where offsets do not
        stacked = np.stack([np.broadcast_to(e.values, whole) for e in entries if e.values is not None])
        values = np.take_along_axis(stacked, np.broadcast_to(order, stacked.shape), axis=0)
    found = []
    for place, mask in enumerate(there):
        if mask.any():
            offset = first.domain.left_out(offsets[place], mask)
            found.append(first._replace(offset=offset, mask=mask, values=None if values is None else values[place]))
    return found
