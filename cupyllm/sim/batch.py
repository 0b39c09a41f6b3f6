"""What a running kernel sees beside its registers: special registers, parameters, and what lanes do together.

One object a batch of CTAs; generated code (translate.py) calls it X. Arrays broadcast to (B, T), see machine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from cupyllm.sim import tensor, warp
from cupyllm.sim.access import LaunchMemory
from cupyllm.sim.memory import LOCAL_WINDOW, SHARED_WINDOW, Geometry
from cupyllm.sim.report import Reports, Site, UnknownInstruction

Array = np.ndarray
Mask = Array | None
_WINDOW_BYTES = 1 << 32
NS_A_CLOCK = 1


class Batch:
    """CTAs `first_cta` to `first_cta + B - 1` of a launch. Special registers are attributes: %tid.x is tid_x."""

    def __init__(self, geometry: Geometry, memory: LaunchMemory, params: Array, reports: Reports) -> None:
        self.M, self.reports, self.geometry = memory, reports, geometry
        self.B, self.T = geometry.B, geometry.T
        self.params = params
        self._loaded: dict[tuple[int, Any], Array] = {}
        self._addresses: dict[tuple[str, int], Array] = {}
        self._clock = 0
        self._fragments = tensor.Fragments()
        cta = np.arange(geometry.first_cta, geometry.first_cta + geometry.B)[:, None]
        gx, gy, _ = geometry.grid
        self.ctaid_x, self.ctaid_y, self.ctaid_z = (
            v.astype(np.uint32) for v in (cta % gx, cta // gx % gy, cta // (gx * gy))
        )
        self.nctaid_x, self.nctaid_y, self.nctaid_z = (_uniform(n) for n in geometry.grid)
        self.ntid_x, self.ntid_y, self.ntid_z = (_uniform(n) for n in geometry.block)
        self.tid_x, self.tid_y, self.tid_z, self.laneid, self.warpid, self.lanemasks = _threads(geometry.block)
        self.nwarpid = _uniform(-(-self.T // 32))
        self.smid = self.nsmid = self.gridid = _uniform(0)

    def __getattr__(self, name: str) -> Array:
        """The special registers that are rarely read."""
        if name in ("clock", "clock_hi", "globaltimer_lo", "globaltimer_hi"):
            self._clock += 100
            return _uniform(0 if name.endswith("_hi") else self._clock)
        if name in ("clock64", "globaltimer"):
            self._clock += 100
            return np.array([[self._clock]], np.uint64)
        if name in self.lanemasks:
            return self.lanemasks[name]
        if name == "dynamic_smem_size":
            return _uniform(self.M.shared_bytes)
        raise UnknownInstruction(f"%{name}")

    # ---- parameters and addresses ----

    def param(self, offset: int, dtype: Any) -> Array:
        """The launch argument at a byte offset, uniform."""
        key = offset, dtype
        if key not in self._loaded:
            self._loaded[key] = self.params[offset : offset + dtype.itemsize].view(dtype).reshape(1, 1)
        return self._loaded[key]

    def address(self, name: str, offset: int) -> Array:
        """A variable's address in its own space, plus bytes; uint64, uniform."""
        key = name, offset
        if key not in self._addresses:
            self._addresses[key] = np.array([[(self.M.address_of(name) + offset) % 2**64]], np.uint64)
        return self._addresses[key]

    def is_space(self, space: str, address: Array) -> Array:
        """isspacep: whether generic addresses lie in a space."""
        shared = (address >= np.uint64(SHARED_WINDOW)) & (address < np.uint64(SHARED_WINDOW + _WINDOW_BYTES))
        local = (address >= np.uint64(LOCAL_WINDOW)) & (address < np.uint64(LOCAL_WINDOW + _WINDOW_BYTES))
        return {"shared": shared, "local": local}.get(space, ~(shared | local))

    # ---- masks ----

    def both(self, guard: Array, mask: Mask) -> Mask | bool:
        """Lanes of `mask` where the guard holds; None for every lane, False for none."""
        if guard.size == 1:
            return mask if guard.item() else False
        if mask is not None:
            guard = guard & mask
        elif guard.all():
            return None
        return guard if guard.any() else False

    def _parts(self, members: Array | None, mask: Mask, site: Site) -> list[Mask]:
        """The lanes of `mask`, apart where their member masks (uint32; None: all lanes) differ: those of equal masks
        execute the instruction together. Reports lanes that do not name themselves."""
        if members is None:
            return [mask]
        named = (members >> self.laneid & np.uint32(1)).astype(bool)
        outside = ~named if mask is None else mask & ~named
        if outside.any():
            row, thread = first_lane(outside, self.B, self.T)
            detail = "this lane executes it without being named in its member mask"
            self.reports.add("divergent-shuffle", site, row, thread, detail=detail)
        if members.size == 1:
            return [mask]
        shape = members.shape if mask is None else np.broadcast_shapes(members.shape, mask.shape)
        whole = np.broadcast_to(members, shape)
        values = np.unique(whole if mask is None else whole[np.broadcast_to(mask, shape)])
        if len(values) == 1:
            return [mask]
        return [whole == value if mask is None else (whole == value) & mask for value in values]

    def _together(
        self, site: Site, members: Array | None, mask: Mask, run: Callable[[Mask], tuple[Array, ...]]
    ) -> tuple[Array, ...]:
        """What `run` gives for each part of the lanes, put together."""
        first, *others = self._parts(members, mask, site)
        results = run(first)
        for active in others:
            assert active is not None, "parts of several are masks"
            results = tuple(np.where(active, new, old) for new, old in zip(run(active), results, strict=True))
        return results

    # ---- barriers ----

    def barrier(self, site: Site, threads: Array | None, mask: Mask) -> None:
        """bar.sync of whole CTAs: those of `mask`."""
        if threads is not None and (threads != -(-self.T // 32) * 32).any() and (threads != self.T).any():
            raise UnknownInstruction("bar.sync of a part of the CTA", site)
        rows: Mask = None if mask is None or mask.shape[0] == 1 else np.any(mask, axis=1)
        self.M.barrier(None if rows is None or rows.all() else rows)

    def warp_sync(self, site: Site, members: Array | None, mask: Mask) -> None:
        for part in self._parts(members, mask, site):
            self.M.warp_sync(part)

    def reduce(self, op: str, pred: Array, mask: Mask) -> Array:
        """bar.red over the CTA: popc, and, or."""
        votes = np.broadcast_to(pred, (max(pred.shape[0], 1 if mask is None else mask.shape[0]), self.T))
        if op == "and":
            return np.all(votes if mask is None else votes | ~mask, axis=1, keepdims=True)
        if mask is not None:
            votes = votes & mask
        if op == "or":
            return np.any(votes, axis=1, keepdims=True)
        return votes.sum(axis=1, keepdims=True, dtype=np.uint32)

    # ---- warps ----

    def shuffle(
        self, site: Site, mode: str, value: Array, source: Array, clamp: Array, members: Array | None, mask: Mask
    ) -> tuple[Array, Array]:
        def run(active: Mask) -> tuple[Array, ...]:
            moved, inside, bad = warp.shuffle(mode, value, source, clamp, self.T, active)
            if bad is not None:
                row, thread = first_lane(bad, self.B, self.T)
                detail = "it reads a lane that has exited, does not exist or is not a member"
                self.reports.add("divergent-shuffle", site, row, thread, detail=detail, count=int(bad.sum()))
            return moved, inside

        moved, inside = self._together(site, members, mask, run)
        return moved, inside

    def vote(self, site: Site, mode: str, pred: Array, members: Array | None, mask: Mask) -> Array:
        return self._together(site, members, mask, lambda active: (warp.vote(mode, pred, self.T, active),))[0]

    def active(self, mask: Mask) -> Array:
        return warp.activemask(self.T, mask)

    def match(self, site: Site, mode: str, value: Array, members: Array | None, mask: Mask) -> tuple[Array, Array]:
        """match.any, match.all: (lanes with the same value, whether all have it)."""
        if mode == "all":
            lanes, same = self._together(site, members, mask, lambda active: warp.match_all(value, self.T, active))
            return lanes, same
        return self._together(site, members, mask, lambda active: (warp.match_any(value, self.T, active),))[0], _TRUE

    def redux(self, site: Site, op: str, value: Array, members: Array | None, mask: Mask) -> Array:
        return self._together(site, members, mask, lambda active: (warp.redux(op, value, self.T, active),))[0]

    # ---- tensor cores ----

    def mma(self, site: Site, opcode: str, a: list[Array], b: list[Array], c: list[Array], mask: Mask) -> list[Array]:
        self._whole_warps(site, mask)
        a, b, c = ([self._full(r) for r in registers] for registers in (a, b, c))
        return tensor.mma(opcode, a, b, c, self._fragments)

    def ldmatrix(self, site: Site, address: Array, num: int, trans: bool, mask: Mask) -> list[Array]:
        self._whole_warps(site, mask)
        readers = self.laneid < np.uint32(8 * num)
        lanes = readers if mask is None else readers & mask
        rows = self.M.load("shared", site, address, None if num == 4 and mask is None else lanes, "b32", 4)
        return tensor.ldmatrix([self._full(row) for row in rows], num, trans)

    def movmatrix(self, site: Site, register: Array, mask: Mask) -> Array:
        self._whole_warps(site, mask)
        return tensor.movmatrix(self._full(register))

    def _full(self, register: Array) -> Array:
        shape = self.B, self.T  # the same object where it has the shape already: Fragments knows it again
        return register if register.shape == shape else np.broadcast_to(register, shape)

    def _whole_warps(self, site: Site, mask: Mask) -> None:
        """Matrix instructions are executed by all 32 lanes of a warp."""
        if self.T % 32:
            raise UnknownInstruction(f"{site.opcode} in a CTA of {self.T} threads, not a multiple of 32", site)
        if mask is None or mask.shape[1] == 1:
            return
        lanes = np.broadcast_to(mask, (mask.shape[0], self.T)).reshape(mask.shape[0], -1, 32)
        part = lanes & ~lanes.all(axis=2, keepdims=True)
        if part.any():
            row, thread = first_lane(part.reshape(mask.shape[0], self.T), self.B, self.T)
            self.reports.add("divergent-shuffle", site, row, thread, detail="some lanes of its warp do not execute it")

    def trap(self, site: Site, mask: Mask) -> None:
        """Report it; the machine ends the launch."""
        row, thread = (0, 0) if mask is None else first_lane(mask, self.B, self.T)
        self.reports.add("trap", site, row, thread, detail="the kernel asked to be stopped")
        self.M.end_batch()  # what is logged and not judged yet
        self.reports.raise_if_any()


_TRUE = np.ones((1, 1), bool)


def first_lane(mask: Array, B: int, T: int) -> tuple[int, int]:
    """(row, thread) of the first lane that is set in a mask that broadcasts to (B, T)."""
    return tuple(int(i) for i in np.argwhere(np.broadcast_to(mask, (B, T)))[0])  # type: ignore[return-value]


def _uniform(value: int) -> Array:
    return np.array([[value]], np.uint32)


@lru_cache(maxsize=64)
def _threads(block: tuple[int, int, int]) -> tuple[Any, ...]:
    """tid.x, tid.y, tid.z, laneid, warpid and the %lanemask registers of a CTA, each (1, T)."""
    bx, by, bz = block
    thread = np.arange(bx * by * bz)[None, :]
    lane = (thread % 32).astype(np.uint32)
    one, below = np.uint32(1) << lane, (np.uint32(1) << lane) - np.uint32(1)
    masks = {"lanemask_eq": one, "lanemask_lt": below, "lanemask_le": below | one}
    masks |= {"lanemask_ge": ~below, "lanemask_gt": ~(below | one)}
    places = (thread % bx, thread // bx % by, thread // (bx * by))
    shrunk = tuple(_small(place.astype(np.uint32)) for place in places)
    return (*shrunk, lane, (thread // 32).astype(np.uint32), masks)


def _small(values: Array) -> Array:
    """(1, 1) where all are equal: uniform values are cheaper."""
    return values[:, :1] if (values == values[:, :1]).all() else values
