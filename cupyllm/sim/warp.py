"""Instructions in which the lanes of a warp exchange registers: shfl, vote, match, redux, elect, activemask.

A register is an array that broadcasts to (B, T): B CTAs of T threads, and a warp is 32 neighbouring threads of one row.
The last warp of a row is shorter when 32 does not divide T. `active` is the mask of lanes that execute the instruction
together (None: all of them); what inactive lanes get is arbitrary.

shfl.sync follows the pseudo-code of the PTX manual. With a source lane and clamp that are the same in every lane, as
compilers emit for reductions, the exchange is one permutation of a row, computed once and kept: np.take with it is the
fastest form that was found (2.7 us for 16 x 256 lanes; a reshape and flip takes 3 to 12 us, fancy indexing 4.4). Values
that are uniform over a CTA come back as they are, and every result stays as small as its operands allow.

The other instructions reduce over the 32 lanes of (rows, warps, 32) arrays, short warps padded with inactive lanes.
A loop over the set bits of the member mask was rejected: masks differ from warp to warp.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cupyllm.sim.report import UnknownInstruction

Array = np.ndarray

WARP = 32
FULL = 0xFFFFFFFF


# ---- shuffle ----


def shuffle(
    mode: str, value: Array, source: Array, clamp: Array, T: int, active: Array | None
) -> tuple[Array, Array, Array | None]:
    """shfl.sync.<mode>: (value of the source lane, in-range predicate, lanes that read a lane which takes no part).

    value: any dtype; source, clamp: operands b and c, integers; all broadcastable to (B, T). The predicate has the
    smallest shape that holds it; the third result is None when every lane reads a lane that takes part.
    """
    if source.size == 1 and clamp.size == 1:
        lanes, in_range, missing = _permutation(mode, int(source.flat[0]) & FULL, int(clamp.flat[0]) & FULL, T)
        bad = missing
        if active is not None:
            bad = _reads_outside(lanes, active, missing, T)
        moved = value if value.shape[1] == 1 else value.take(lanes, axis=1, mode="clip")
        return moved, in_range, bad
    lanes, in_range = source_lanes(mode, source, clamp, T)
    outside = lanes >= T
    lanes = np.where(outside, np.arange(T), lanes)
    bad = _reads_outside(lanes, active, outside if outside.any() else None, T)
    moved = value if value.shape[1] == 1 else _take_lanes(value, lanes)
    return moved, in_range, bad


def source_lanes(mode: str, source: Array, clamp: Array, T: int) -> tuple[Array, Array]:
    """(thread each thread reads, in-range predicate), shaped (1 or B, T); a short last warp may give threads >= T.

    The names are those of the manual's pseudo-code.
    """
    thread = np.arange(T, dtype=np.int64)[None, :]
    lane = thread & 31
    bval = source.astype(np.int64) & 31
    cval = clamp.astype(np.int64) & 31
    segmask = (clamp.astype(np.int64) >> 8) & 31
    max_lane = (lane & segmask) | (cval & ~segmask)
    min_lane = lane & segmask
    if mode == "up":
        j = lane - bval
        in_range = j >= max_lane
    elif mode == "down":
        j = lane + bval
        in_range = j <= max_lane
    elif mode == "bfly":
        j = lane ^ bval
        in_range = j <= max_lane
    elif mode == "idx":
        j = min_lane | (bval & ~segmask)
        in_range = j <= max_lane
    else:
        raise UnknownInstruction(f"shfl.sync.{mode}")
    return (thread - lane) + np.where(in_range, j, lane), in_range


@lru_cache(maxsize=1024)
def _permutation(mode: str, source: int, clamp: int, T: int) -> tuple[Array, Array, Array | None]:
    """(thread read (T,), predicate (1, 1) or (1, T), threads that read past T or None) of a uniform shuffle."""
    lanes, in_range = source_lanes(mode, np.array([[source]]), np.array([[clamp]]), T)
    outside = lanes >= T
    lanes = np.where(outside, np.arange(T), lanes)
    if in_range.all():
        in_range = np.ones((1, 1), bool)
    for array in (lanes, in_range, outside):
        array.flags.writeable = False  # kept, and handed out again and again
    return lanes[0], in_range, outside if outside.any() else None


def _reads_outside(lanes: Array, active: Array | None, outside: Array | None, T: int) -> Array | None:
    """Active lanes whose source is inactive, or lies past the last thread; None when there are none."""
    if active is None:
        return outside
    if active.shape[1] == 1:
        bad = None if outside is None else outside & active
    else:
        member = active[:, lanes] if lanes.ndim == 1 else _take_lanes(active, lanes)
        bad = active & ~member
        if outside is not None:
            bad = bad | (active & outside)
    return bad if bad is not None and bad.any() else None


def _take_lanes(value: Array, lanes: Array) -> Array:
    """value[row, lanes[row]], where either may have one row for all."""
    rows = max(value.shape[0], lanes.shape[0])
    T = lanes.shape[1]
    return np.take_along_axis(np.broadcast_to(value, (rows, T)), np.broadcast_to(lanes, (rows, T)), axis=1)


# ---- votes, match, reductions ----


def vote(mode: str, pred: Array, T: int, active: Array | None) -> Array:
    """vote.sync.<mode> of a bool register: bool for all, any and uni, uint32 for ballot."""
    if mode not in ("all", "any", "uni", "ballot"):
        raise UnknownInstruction(f"vote.sync.{mode}")
    if active is None and pred.shape[1] == 1:
        if mode == "ballot":
            return np.where(pred, activemask(T, None), np.uint32(0))
        return np.ones((1, 1), bool) if mode == "uni" else pred
    votes, member = _warps(pred, T, active)
    if mode == "ballot":
        return _spread(_bits(votes & member), T)
    if mode == "any":
        return _spread((votes & member).any(axis=2), T)
    every = (votes | ~member).all(axis=2)
    if mode == "uni":
        every |= ~(votes & member).any(axis=2)
    return _spread(every, T)


def activemask(T: int, active: Array | None) -> Array:
    """activemask.b32: the lanes of the warp that execute together, uint32."""
    if active is None and T % WARP == 0:
        return np.full((1, 1), FULL, np.uint32)
    votes, member = _warps(np.ones((1, 1), bool), T, active)
    return _spread(_bits(votes & member), T)


def match_any(value: Array, T: int, active: Array | None) -> Array:
    """match.any.sync: for each lane the mask of lanes that hold the same bits, uint32."""
    if value.shape[1] == 1:
        return activemask(T, active)
    values, member = _warps(value, T, active)
    mask = np.zeros(np.broadcast_shapes(values.shape, member.shape), np.uint32)
    for lane in range(WARP):
        same = (values == values[:, :, lane : lane + 1]) & member[:, :, lane : lane + 1]
        mask |= same.astype(np.uint32) << np.uint32(lane)
    return _threads(mask, T)


def match_all(value: Array, T: int, active: Array | None) -> tuple[Array, Array]:
    """match.all.sync: (mask of the active lanes if they all hold the same bits, else 0; whether they do)."""
    mask = activemask(T, active)
    if value.shape[1] == 1:
        return mask, np.ones((1, 1), bool)
    values, member = _warps(value, T, active)
    first = np.broadcast_to(member, np.broadcast_shapes(values.shape, member.shape)).argmax(axis=2)
    leader = np.take_along_axis(np.broadcast_to(values, (*first.shape, WARP)), first[:, :, None], axis=2)
    same = _spread(((values == leader) | ~member).all(axis=2), T)
    return np.where(same, mask, np.uint32(0)), same


_REDUCTIONS = {
    "add": (np.add, lambda dtype: 0),
    "min": (np.minimum, lambda dtype: np.iinfo(dtype).max),
    "max": (np.maximum, lambda dtype: np.iinfo(dtype).min),
    "and": (np.bitwise_and, lambda dtype: np.iinfo(dtype).max if dtype.kind == "u" else -1),
    "or": (np.bitwise_or, lambda dtype: 0),
    "xor": (np.bitwise_xor, lambda dtype: 0),
}


def redux(op: str, value: Array, T: int, active: Array | None) -> Array:
    """redux.sync.<op>: the reduction over the active lanes, in every lane; add wraps.

    value: uint32, or int32 where the instruction is .s32; the result has its dtype.
    """
    if op not in _REDUCTIONS:
        raise UnknownInstruction(f"redux.sync.{op}")
    if active is None and value.shape[1] == 1 and op in ("min", "max", "and", "or"):
        return value
    ufunc, neutral = _REDUCTIONS[op]
    values, member = _warps(value, T, active)
    values = np.where(member, values, np.array(neutral(value.dtype), value.dtype))
    return _spread(ufunc.reduce(values, axis=2, dtype=value.dtype), T)


def elect(T: int, active: Array | None) -> tuple[Array, Array]:
    """elect.sync: (lane number of the leader, whether this lane is it); the leader is the lowest active lane.

    It needs sm_90, so no PTX for the simulated sm_80 has it; it is here for the day when sm_90 is simulated.
    """
    lane = (np.arange(T) & 31)[None, :]
    if active is None:
        return np.zeros((1, 1), np.uint32), lane == 0
    _, member = _warps(np.ones((1, 1), bool), T, active)
    leader = _spread(member.argmax(axis=2).astype(np.uint32), T)
    return leader, active & (lane == leader)


# ---- rows of threads as warps ----


def _warps(value: Array, T: int, active: Array | None) -> tuple[Array, Array]:
    """value and its member mask as (rows, warps, 32), which broadcast with each other; lanes past T are no members."""
    return _by_warp(value, T), _full(T) if active is None else _by_warp(active, T) & _full(T)


def _by_warp(value: Array, T: int) -> Array:
    rows, warps = value.shape[0], -(-T // WARP)
    if value.shape[1] == 1:
        return np.broadcast_to(value[:, :, None], (rows, warps, WARP))
    if T % WARP:
        value = np.concatenate((value, np.zeros((rows, warps * WARP - T), value.dtype)), axis=1)
    return value.reshape(rows, warps, WARP)


@lru_cache(maxsize=64)
def _full(T: int) -> Array:
    """(1, warps, 32): which lanes exist."""
    member = (np.arange(-(-T // WARP) * WARP) < T).reshape(1, -1, WARP)
    member.flags.writeable = False
    return member


def _bits(lanes: Array) -> Array:
    """bool (rows, warps, 32) -> uint32 (rows, warps), lane 0 in bit 0."""
    packed = np.packbits(lanes, axis=2, bitorder="little")
    return packed.view("<u4")[:, :, 0].astype(np.uint32, copy=False)


def _spread(per_warp: Array, T: int) -> Array:
    """(rows, warps) -> what each thread holds, (rows, 1) when there is one warp."""
    return per_warp if per_warp.shape[1] == 1 else np.repeat(per_warp, WARP, axis=1)[:, :T]


def _threads(lanes: Array, T: int) -> Array:
    """(rows, warps, 32) -> (rows, T)."""
    return lanes.reshape(lanes.shape[0], -1)[:, :T]
