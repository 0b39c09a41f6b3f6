"""Which arrays in device memory an instruction may address, and which of its lanes do.

A site's parameters and variables, found by analysing the kernel (flow.py), say which arrays an address may derive
from. This is the strong check: tensors lie next to each other in larger allocations, where bounds of allocations mean
nothing. An address of unknown origin is looked up among the allocations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from cupyllm.sim import lanes as on
from cupyllm.sim import names
from cupyllm.sim.lanes import Array
from cupyllm.sim.memory import ADDRESSABLE, CARRIER, DEVICE_BASE, DeviceMemory, Extent
from cupyllm.sim.regions import Region
from cupyllm.sim.report import Reports, Site


class Target:
    """An array that instructions may address. dead: it is empty, or not, or no longer, inside one allocation.

    region: where races on it are watched, from `delta` on; None: not at all. within: regions that lie inside it, for an
    allocation that has some.
    """

    def __init__(self, memory: DeviceMemory, extent: Extent) -> None:
        self.memory, self.extent = memory, extent
        self.start = np.uint64(extent.address)
        self.dead = extent.nbytes == 0 or not memory.holds(extent.address, extent.nbytes)
        self.constant = False
        self.region: Region | None = None
        self.delta = 0
        self.within: list[Region] = []
        self.whole: bool | None = None  # whether all of it is initialised; None: not looked up in this batch
        self._views: dict[int, tuple[Array, Array] | None] = {}

    def views(self, size: int) -> tuple[Array, Array] | None:
        """(bytes, shadow) in carriers of `size`; None where the array does not start at a multiple of it."""
        if size not in self._views:
            begin = self.extent.address - DEVICE_BASE
            end = begin + self.extent.nbytes // size * size
            found = None
            if not self.dead and begin % size == 0:
                carrier = CARRIER[size]
                found = self.memory.arena[begin:end].view(carrier), self.memory.shadow[begin:end].view(carrier)
            self._views[size] = found
        return self._views[size]

    def look_up(self) -> bool:
        self.whole = self.memory.initialised(self.extent.address, self.extent.nbytes)
        return self.whole


class Targets:
    """The arrays of one launch.

    args: by the kernel's parameters, None for those that are no tensors. variables: the module's. written: parameters
    and variables that the kernel may write, None if that is unknown: then everything is watched, by allocations.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        args: list[Extent | None],
        variables: Mapping[str, Extent],
        constants: frozenset[str],
        written: frozenset[int | str] | None,
        reports: Reports,
        check: bool,
    ) -> None:
        self.memory, self.reports, self.check = memory, reports, check
        self.known: dict[int | str, Target] = {}
        named: list[tuple[int | str, Extent | None]] = [*enumerate(args), *variables.items()]
        for position, extent in named:
            if extent is not None:
                name = names.plain_name(extent.name or f"argument {position}")
                extent = Extent(extent.address, extent.nbytes, name, extent.itemsize, extent.shape)
                self.known[position] = Target(memory, extent)
        for name in constants & self.known.keys():
            self.known[name].constant = True
        self.plans: dict[Site, Target | None] = {}
        self._allocations: dict[int, Target] = {}
        self._regions: list[Region] = []
        self._watch_all = check and written is None
        if self._watch_all:
            for target in self.known.values():
                self._watch_allocation(target)
        elif check and written:
            self._regions = _watch_written(self.known, written)

    def begin(self) -> None:
        """A new batch: what the last one wrote may have completed an array."""
        for target in (*self.known.values(), *self._allocations.values()):
            target.whole = target.whole or None

    def release(self) -> None:
        """The launch is over: other launches may use the tables."""
        for target in (*self.known.values(), *self._allocations.values()):
            if target.region is not None:
                target.region.release()

    def plan(self, site: Site) -> Target | None:
        """The array to try first for a site that has no plan yet."""
        if site not in self.plans:
            found = self._candidates(site)
            self.plans[site] = found[0] if found and not found[0].dead else None
        return self.plans[site]

    def locate(
        self, site: Site, address: Array, mask: Array | None, size: int, write: bool = False
    ) -> list[tuple[Target, Array]]:
        """Lanes by the array that they address, and reports of those that address none or are misaligned.

        Lanes: bool, of the address's shape; some lane of the mask has that address.
        """
        lanes = on.narrow(mask, address.shape)
        left = np.ones(address.shape, bool) if lanes is None else np.broadcast_to(lanes, address.shape).copy()
        found = []
        candidates = self._candidates(site)
        for target in self._allocations_of(address, left) if candidates is None else candidates:
            inside = left & (address - target.start <= np.uint64(max(0, target.extent.nbytes - size)))
            if target.dead or target.extent.nbytes < size or not inside.any():
                continue
            left &= ~inside
            found.append((target, inside))
        if left.any():
            self._report("out-of-bounds", site, address, mask, left, size, candidates or [])
        if self.check:
            found = self._without("misaligned", found, address & np.uint64(size - 1) != 0, site, address, mask, size)
        if write:
            constant = [(target, inside) for target, inside in found if target.constant]
            for target, inside in constant:
                self._report(
                    "out-of-bounds", site, address, mask, inside, size, [target], "constant memory is read-only"
                )
            found = [(target, inside) for target, inside in found if not target.constant]
        if len(found) == 1 and not (write and found[0][0].constant):
            self.plans[site] = found[0][0]
        return found

    def report_uninitialised(
        self, target: Target, site: Site, address: Array, mask: Array | None, bad: Array, size: int
    ) -> None:
        self._report("uninitialised-read", site, address, mask, bad, size, [target])

    # ---- which arrays ----

    def _candidates(self, site: Site) -> list[Target] | None:
        """Arrays that a site may address; None if that is unknown."""
        if site.params is None and site.symbols is None:
            return None
        wanted: list[int | str] = [*sorted(site.params or ()), *sorted(site.symbols or ())]
        return [self.known[position] for position in wanted if position in self.known] or None

    def _allocations_of(self, address: Array, left: Array) -> Iterator[Target]:
        """The allocations that the lanes `left` address, which the caller takes away from it one by one."""
        offset = address - np.uint64(DEVICE_BASE)
        known = offset < np.uint64(self.memory.shadow.nbytes)
        valid = known & (self.memory.shadow.take(np.where(known, offset, 0).astype(np.int64)) & ADDRESSABLE != 0)
        while (left & valid).any():
            at = int(address[left & valid][0])
            allocation = self.memory.find(at)
            assert allocation is not None, "the shadow and the list of allocations agree"
            yield self._allocation(allocation.address, allocation.nbytes, allocation.name)
            valid &= ~(address - np.uint64(allocation.address) < np.uint64(allocation.nbytes))

    def _allocation(self, address: int, nbytes: int, name: str) -> Target:
        target = self._allocations.get(address)
        if target is None:
            target = Target(self.memory, Extent(address, nbytes, name or f"the allocation at {address:#x}"))
            self._allocations[address] = target
            if self._watch_all:
                inside = [
                    (position, known.extent)
                    for position, known in self.known.items()
                    if address <= known.extent.address < address + nbytes
                ]
                target.region = Region(address, nbytes, [*inside, ("", target.extent)], self.memory.scratch)
            target.within = [r for r in self._regions if address <= r.start < address + nbytes]
        return target

    def _watch_allocation(self, target: Target) -> None:
        allocation = None if target.dead else self.memory.find(target.extent.address)
        if allocation is not None:
            whole = self._allocation(allocation.address, allocation.nbytes, allocation.name)
            target.region, target.delta = whole.region, target.extent.address - allocation.address

    # ---- reports ----

    def _without(
        self,
        kind: str,
        found: list[tuple[Target, Array]],
        bad: Array,
        site: Site,
        address: Array,
        mask: Array | None,
        size: int,
    ) -> list[tuple[Target, Array]]:
        if not bad.any():
            return found
        for target, inside in found:
            if (inside & bad).any():
                self._report(kind, site, address, mask, inside & bad, size, [target])
        return [(target, inside & ~bad) for target, inside in found if (inside & ~bad).any()]

    def _report(
        self,
        kind: str,
        site: Site,
        address: Array,
        mask: Array | None,
        bad: Array,
        size: int,
        near: list[Target],
        detail: str = "",
    ) -> None:
        if mask is not None:
            bad = bad & mask
        row, thread, count = on.first(bad)
        at = int(np.broadcast_to(address, bad.shape)[row, thread])
        what = self._name(at, size, near, kind)
        self.reports.add(kind, site, row, thread, what, detail=detail, space="global", count=count)

    def _name(self, address: int, size: int, near: list[Target], kind: str) -> str:
        if not near or address < names.NULL_BYTES:
            return names.unknown(self.memory, address, size)

        def distance(target: Target) -> int:
            start, end = target.extent.address, target.extent.address + target.extent.nbytes
            return max(start - address, address - end + 1, 0)

        extent = min(near, key=distance).extent
        offset = address - extent.address
        text = names.element(extent, offset, size)
        if kind != "out-of-bounds" or not 0 <= offset < extent.nbytes:
            return text
        if not self.memory.holds(extent.address, extent.nbytes):
            return f"{text}, in memory that was freed"
        return text if offset + size <= extent.nbytes else names.crossing(text, offset, extent.nbytes, size)


def written_by(sites: Iterable[Site]) -> frozenset[int | str] | None:
    """Parameters and variables that a kernel with these sites may write in device memory; None if that is unknown."""
    found: set[int | str] = set()
    for site in sites:
        if site.opcode.split(".", 1)[0] in ("st", "atom", "red") and site.space not in ("shared", "local"):
            if site.params is None and site.symbols is None:
                return None
            found |= {*(site.params or ()), *(site.symbols or ())}
    return frozenset(found)


def _watch_written(known: dict[int | str, Target], written: frozenset[int | str]) -> list[Region]:
    """One region for each run of overlapping arrays of which one may be written."""
    alive = [(position, target) for position, target in known.items() if not target.dead]
    alive.sort(key=lambda item: item[1].extent.address)
    runs: list[list[tuple[int | str, Target]]] = []
    end = 0
    for position, target in alive:
        if runs and target.extent.address < end:
            runs[-1].append((position, target))
        else:
            runs.append([(position, target)])
        end = max(end, target.extent.address + target.extent.nbytes)
    regions = []
    for run in runs:
        if any(position in written for position, _ in run):
            start = run[0][1].extent.address // 16 * 16
            stop = max(target.extent.address + target.extent.nbytes for _, target in run)
            extents = [(position, target.extent) for position, target in run]
            regions.append(Region(start, stop - start, extents, run[0][1].memory.scratch))
            for _, target in run:
                target.region, target.delta = regions[-1], target.extent.address - start
    return regions
