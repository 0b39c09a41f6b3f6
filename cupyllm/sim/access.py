"""The memory of one launch: what generated code calls for every instruction that touches memory.

The spaces are kept by one class each: device_space.py (global, const), shared_space.py, local.py. A generic address
tells its space by the window it lies in; lanes may disagree. Races are found from a log (check.py, regions.py).

Registers and masks are as everywhere in the simulator: arrays of shape [B, T], [B, 1], [1, T] or [1, 1]; a mask of None
means every lane. What is wrong is reported and left out, loads give 0 there, and the launch goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cupyllm.sim import atomics
from cupyllm.sim import lanes as on
from cupyllm.sim.async_copy import AsyncCopies
from cupyllm.sim.check import ATOMIC_WRITE, Log
from cupyllm.sim.device_space import DeviceSpace
from cupyllm.sim.lanes import Array
from cupyllm.sim.local import LocalSpace
from cupyllm.sim.memory import DTYPE, LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BYTES, DeviceMemory, Extent, Geometry
from cupyllm.sim.ptx import Kernel
from cupyllm.sim.report import Reports, Site, UnknownInstruction
from cupyllm.sim.shared import SharedArray
from cupyllm.sim.shared_space import SharedSpace

_SHARED, _LOCAL, _SIZE = np.uint64(SHARED_WINDOW), np.uint64(LOCAL_WINDOW), np.uint64(WINDOW_BYTES)
Loaded = Array | tuple[Array, ...]


class LaunchMemory:
    """Memory as the CTAs of one launch see it, a batch of them at a time.

    module_variables: __device__ and __constant__ variables in device memory, which outlive the launch; constants: names
    of those that are read-only. args: the tensor of each parameter, None for other parameters and null pointers.
    written: parameters and module variables that the kernel may write, None if unknown, which is right but slower.
    check=False leaves bounds as the only check.
    """

    def __init__(
        self,
        device: DeviceMemory,
        kernel: Kernel,
        module_variables: Mapping[str, Extent],
        args: list[Extent | None],
        shared_bytes: int,
        reports: Reports,
        check: bool,
        written: frozenset[int | str] | None = None,
        constants: frozenset[str] = frozenset(),
    ) -> None:
        self.shared_bytes, self.reports, self.check = shared_bytes, reports, check
        self.variables = module_variables
        self.log = Log(reports)
        self.device = DeviceSpace(device, args, module_variables, constants, written, self.log, reports, check)
        self.shared = SharedSpace(kernel.variables, shared_bytes, self.log, reports, check)
        self.local = LocalSpace(kernel.variables, reports, check)
        self.copies = AsyncCopies(self.shared, self.device, check)
        self.geometry = Geometry((1, 1, 1), (1, 1, 1), 0, 1, 1)

    def begin(self, geometry: Geometry) -> None:
        """A new batch of CTAs: their shared and local memory is uninitialised."""
        self.geometry = geometry
        self.reports.begin(geometry.grid, geometry.block, geometry.first_cta)
        self.log.begin(geometry)
        self.device.targets.begin()
        self.shared.begin(geometry)
        self.local.begin(geometry)
        self.copies.begin(geometry)

    def address_of(self, name: str) -> int:
        """A variable's address in its own space: an offset for shared and local ones. Raises KeyError."""
        if name in self.shared.by_name:
            return self.shared.by_name[name].start
        if name in self.local.starts:
            return self.local.starts[name]
        return self.variables[name].address

    def load(
        self, space: str, site: Site, address: Array, mask: Array | None, type: str, vec: int = 1, atomic: bool = False
    ) -> Loaded:
        """The values, of the type's dtype; `vec` arrays if vec > 1. Lanes left out get anything.

        Shape: the address's (global, const); [B, T], or [B, 1] for an address uniform over threads (shared); [B, T]
        (local). atomic: volatile or with an ordering, which does not race with other such accesses.
        """
        dtype = DTYPE[type]
        if space == "global" or space == "const":
            return self.device.load(site, address, mask, dtype, vec, atomic)
        if space == "shared":
            return self.shared.load(site, address, mask, dtype, vec, atomic)
        if space == "local":
            return self.local.load(site, address, mask, dtype, vec)
        result: Loaded | None = None
        for part, where, lanes in self._spaces(address, mask):
            loaded = self.load(part, site, where, lanes, type, vec, atomic)
            if result is None:
                result = loaded
                continue
            assert lanes is not None, "there are lanes of another space"
            if isinstance(loaded, tuple):
                result = tuple(np.where(lanes, new, old) for new, old in zip(loaded, result, strict=True))
            else:
                result = np.where(lanes, loaded, result)
        assert result is not None, "a mask has at least one lane"
        return result

    def store(
        self,
        space: str,
        site: Site,
        address: Array,
        mask: Array | None,
        type: str,
        values: tuple[Array, ...],
        atomic: bool = False,
    ) -> None:
        """Stores one value a lane, or a vector of them."""
        dtype = DTYPE[type]
        if space == "global" or space == "const":
            self.device.store(site, address, mask, dtype, values, atomic)
        elif space == "shared":
            self.shared.store(site, address, mask, dtype, values, atomic)
        elif space == "local":
            self.local.store(site, address, mask, dtype, values)
        else:
            for part, where, lanes in self._spaces(address, mask):
                self.store(part, site, where, lanes, type, values, atomic)

    def atom(
        self,
        space: str,
        site: Site,
        op: str,
        type: str,
        address: Array,
        mask: Array | None,
        b: Array,
        c: Array | None = None,
        result: bool = True,
    ) -> Array:
        """op: add min max and or xor exch cas inc dec. Returns the old values, [B, T], lanes in order (atomics.py).

        result: whether anything reads them; an exchange of which nothing does is a write.
        """
        shape = (self.geometry.B, self.geometry.T)
        old = np.zeros(shape, DTYPE[type])
        flat = old.reshape(-1)
        for part, where, lanes in self._spaces(address, mask) if space == "generic" else [(space, address, mask)]:
            if part == "local":
                raise UnknownInstruction(f"{site.opcode} on local memory", site)
            size = DTYPE[type].itemsize
            if part == "shared":
                pieces = self._atomic_shared(site, where, lanes, size)
            else:
                pieces = self._atomic_global(site, where, lanes, size, reads=result or op != "exch")
            for data, index, good in pieces:
                full = np.broadcast_to(good, shape)
                at = np.flatnonzero(full)
                picked = [np.broadcast_to(x, shape).reshape(-1).take(at) for x in (index, b)]
                other = None if c is None else np.broadcast_to(c, shape).reshape(-1).take(at)
                flat[at] = atomics.apply(data, picked[0], part, op, type, picked[1], other)
        return old

    def cp_async(
        self,
        site: Site,
        shared_address: Array,
        global_address: Array,
        nbytes: int,
        src_bytes: Array | None,
        mask: Array | None,
        source: Site | None = None,
    ) -> None:
        """Starts a copy of 4, 8 or 16 bytes a lane. source: the site with the origins of the global address."""
        self.copies.issue(site, source or site, shared_address, global_address, nbytes, src_bytes, mask)

    def cp_commit(self, mask: Array | None) -> None:
        self.copies.commit(mask)

    def cp_wait(self, site: Site, pending: int, mask: Array | None, everything: bool = False) -> None:
        """Waits for all but the last `pending` groups; everything: for all copies, committed or not."""
        self.copies.wait(pending, mask, everything)

    def barrier(self, rows: Array | None) -> None:
        """These CTAs, bool [B], or all of them have passed a CTA barrier."""
        if self.check:
            self.copies.read_sources()
            self.log.barrier(rows)

    def warp_sync(self, mask: Array | None) -> None:
        """__syncwarp among these lanes."""
        if self.check:
            self.log.sync(mask)

    def end_batch(self) -> None:
        """The CTAs have ended: judges what they have done since their last barrier."""
        if self.check:
            self.copies.read_sources()
            self.log.barrier(None)

    def finish(self) -> None:
        """The launch is over. Batches leave nothing behind that would be judged later."""
        self.end_batch()
        self.device.targets.release()

    def _spaces(self, address: Array, mask: Array | None) -> Iterator[tuple[str, Array, Array | None]]:
        """(space, address in it, lanes) of the lanes of a generic address."""
        if address.dtype.itemsize != 8:
            address = address.astype(np.uint64)
        shared, local = address - _SHARED < _SIZE, address - _LOCAL < _SIZE
        for space, inside, base in (("shared", shared, _SHARED), ("local", local, _LOCAL), ("global", None, None)):
            if inside is None:
                inside = ~(shared | local)
            if not inside.any():
                continue
            whole = bool(inside.all())
            lanes = mask if whole else on.both(mask, inside)
            if lanes is not False:
                yield space, address if base is None else address - base, lanes

    def _atomic_global(
        self, site: Site, address: Array, mask: Array | None, size: int, reads: bool
    ) -> Iterator[tuple[Array, Array, Array]]:
        index, data = self.device.index(address, size), self.device.views(size)[0]
        find = self.device.readable if reads else self.device.writable
        for target, lanes in find(site, address, mask, size):
            good = lanes if mask is None else lanes & mask
            if target.constant:
                self.device.targets.locate(site, address, good, size, write=True)
                continue
            yield data, index, good
            if self.check:
                self.device.watch(target, ATOMIC_WRITE, site, size, address - target.start, good)

    def _atomic_shared(
        self, site: Site, address: Array, mask: Array | None, size: int
    ) -> Iterator[tuple[Array, Array, Array]]:
        if address.dtype.itemsize == 8:
            address = np.minimum(address, np.uint64(0xFFFFFFFF)).astype(np.uint32)
        array = self.shared.plan(site)
        parts: list[tuple[SharedArray, Array | None]] = [(array, mask)] if array else []
        for array, lanes in parts or self.shared.parts(site, address, mask, size):
            offset = address - array.start32
            good = self.shared.judge_lanes(array, site, offset, lanes, size, reads=True)
            if good is not None and not good.any():
                continue
            every = np.ones((1, 1), bool) if good is None else good
            index = array.index(array.plain_table(size), size, offset, good)
            yield array.flat[size], index + array.bases[size], every
            if self.check:
                self.shared.watch(array, site, offset, good, size, ATOMIC_WRITE)
