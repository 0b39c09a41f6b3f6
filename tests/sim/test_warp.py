"""Lane exchange against loops over single threads, written from the pseudo-code of the PTX manual."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest

from cupyllm.sim import warp
from cupyllm.sim.report import UnknownInstruction

Array = np.ndarray

MODES = ("up", "down", "bfly", "idx")
THREADS = (32, 64, 256, 33, 48, 7)


def shfl_one_thread(mode: str, thread: int, source: int, clamp: int) -> tuple[int, bool]:
    """(thread that is read, in range) as the manual computes it."""
    lane = thread % 32
    bval, cval, segmask = source & 31, clamp & 31, (clamp >> 8) & 31
    max_lane = (lane & segmask) | (cval & ~segmask & 31)
    min_lane = lane & segmask
    j, in_range = {
        "up": (lane - bval, lane - bval >= max_lane),
        "down": (lane + bval, lane + bval <= max_lane),
        "bfly": (lane ^ bval, (lane ^ bval) <= max_lane),
        "idx": (min_lane | (bval & ~segmask & 31), (min_lane | (bval & ~segmask & 31)) <= max_lane),
    }[mode]
    return thread - lane + (j if in_range else lane), in_range


def check_shuffle(mode: str, value: Array, source: Array, clamp: Array, T: int, active: Array | None) -> None:
    moved, in_range, bad = warp.shuffle(mode, value, source, clamp, T, active)
    operands = [value, source, clamp] + ([] if active is None else [active])
    B = max(array.shape[0] for array in operands)
    values, sources, clamps = (np.broadcast_to(array, (B, T)) for array in (value, source, clamp))
    member = np.ones((B, T), bool) if active is None else np.broadcast_to(active, (B, T))
    moved, in_range = np.broadcast_to(moved, (B, T)), np.broadcast_to(in_range, (B, T))
    bads = np.zeros((B, T), bool) if bad is None else np.broadcast_to(bad, (B, T))
    assert bad is None or bad.any()
    for row, thread in itertools.product(range(B), range(T)):
        if not member[row, thread]:
            assert not bads[row, thread]
            continue
        j, expected = shfl_one_thread(mode, thread, int(sources[row, thread]), int(clamps[row, thread]))
        assert in_range[row, thread] == expected
        takes_part = j < T and bool(member[row, j])
        assert bads[row, thread] == (not takes_part)
        if takes_part:
            assert moved[row, thread] == values[row, j]


@pytest.mark.parametrize("T", THREADS)
@pytest.mark.parametrize("mode", MODES)
def test_uniform_shuffle(mode: str, T: int) -> None:
    values = np.arange(3 * T, dtype=np.uint32).reshape(3, T)
    for source, clamp in itertools.product((0, 1, 2, 5, 16, 31, 33), (31, 0, 7, 0x1000, 0x181F, 0x1C07)):
        check_shuffle(mode, values, np.array([[source]], np.uint32), np.array([[clamp]], np.uint32), T, None)


@pytest.mark.parametrize("mode", MODES)
def test_shuffle_with_operands_of_every_shape(mode: str) -> None:
    rng = np.random.default_rng(3)
    shapes = ((1, 1), (2, 1), (1, 64), (2, 64))
    for value_shape, source_shape, clamp_shape in itertools.product(shapes, shapes, shapes[:2]):
        value = rng.standard_normal(value_shape).astype(np.float32)
        source = rng.integers(0, 1 << 32, source_shape, dtype=np.uint32)
        clamp = rng.choice(np.array([31, 0, 0x101F, 0x181F, 0x1807], np.uint32), clamp_shape)
        check_shuffle(mode, value, source, clamp, 64, None)
        check_shuffle(mode, value, source, clamp, 64, rng.random((2, 64)) < 0.7)


def test_shuffle_keeps_uniform_values_small() -> None:
    one, clamp = np.array([[16]], np.uint32), np.array([[31]], np.uint32)
    for shape in ((1, 1), (4, 1)):
        moved, in_range, bad = warp.shuffle("bfly", np.ones(shape, np.float32), one, clamp, 128, None)
        assert moved.shape == shape and in_range.shape == (1, 1) and in_range.all() and bad is None
    per_thread = np.arange(128, dtype=np.uint32)[None, :]
    assert warp.shuffle("bfly", per_thread, one, clamp, 128, None)[0].shape == (1, 128)


def test_shuffle_reads_inactive_lane_is_told() -> None:
    active = np.ones((2, 64), bool)
    active[1, 40] = False
    one, clamp = np.array([[1]], np.uint32), np.array([[31]], np.uint32)
    values = np.zeros((2, 64), np.uint32)
    bad = warp.shuffle("bfly", values, one, clamp, 64, active)[2]
    assert bad is not None and np.argwhere(bad).tolist() == [[1, 41]]
    assert warp.shuffle("bfly", values, one, clamp, 64, np.array([[True], [False]]))[2] is None


def test_unknown_modes_are_named() -> None:
    one = np.array([[1]], np.uint32)
    with pytest.raises(UnknownInstruction, match=r"shfl\.sync\.spin"):
        warp.shuffle("spin", one, one, one, 32, None)
    with pytest.raises(UnknownInstruction, match="most"):
        warp.vote("most", one == 1, 32, None)
    with pytest.raises(UnknownInstruction, match="mul"):
        warp.redux("mul", one, 32, None)


def draw_active(rng: np.random.Generator, B: int, T: int) -> list[Array | None]:
    ragged = rng.random((B, T)) < 0.6
    ragged[:, ::32] = True  # a warp without a lane executes nothing
    return [None, ragged, ragged[:1], np.ones((B, 1), bool)]


def warps_of(T: int, member: Array) -> list[list[int]]:
    return [
        [t for t in range(start, min(start + 32, T)) if member[t]] for start in range(0, T, 32)
    ]  # fmt: skip


@pytest.mark.parametrize("T", THREADS)
def test_votes(T: int) -> None:
    rng = np.random.default_rng(T)
    preds = [np.array([[True]]), np.array([[False], [True]]), rng.random((1, T)) < 0.5, rng.random((2, T)) < 0.9]
    preds += [np.ones((2, T), bool), np.zeros((2, T), bool)]
    for pred, active in itertools.product(preds, draw_active(rng, 2, T)):
        got = {m: np.broadcast_to(warp.vote(m, pred, T, active), (2, T)) for m in ("all", "any", "uni", "ballot")}
        lanes = np.broadcast_to(warp.activemask(T, active), (2, T))
        assert got["ballot"].dtype == lanes.dtype == np.uint32 and got["all"].dtype == bool
        full = np.broadcast_to(pred, (2, T))
        member = np.ones((2, T), bool) if active is None else np.broadcast_to(active, (2, T))
        for row in range(2):
            for threads in warps_of(T, member[row]):
                votes = [bool(full[row, t]) for t in threads]
                for t in threads:
                    assert got["all"][row, t] == all(votes)
                    assert got["any"][row, t] == any(votes)
                    assert got["uni"][row, t] == (len(set(votes)) == 1)
                    assert got["ballot"][row, t] == sum(1 << (i % 32) for i in threads if full[row, i])
                    assert lanes[row, t] == sum(1 << (i % 32) for i in threads)


@pytest.mark.parametrize("T", THREADS)
def test_match(T: int) -> None:
    rng = np.random.default_rng(T)
    drawn = [rng.integers(0, n, shape).astype(t) for n in (1, 4) for shape in ((1, 1), (2, 1), (1, T), (2, T))
             for t in (np.uint32, np.uint64)]  # fmt: skip
    for value, active in itertools.product(drawn, draw_active(rng, 2, T)):
        any_mask = np.broadcast_to(warp.match_any(value, T, active), (2, T))
        all_mask, same = (np.broadcast_to(a, (2, T)) for a in warp.match_all(value, T, active))
        assert any_mask.dtype == all_mask.dtype == np.uint32 and same.dtype == bool
        full = np.broadcast_to(value, (2, T))
        member = np.ones((2, T), bool) if active is None else np.broadcast_to(active, (2, T))
        for row in range(2):
            for threads in warps_of(T, member[row]):
                equal = len({int(full[row, t]) for t in threads}) == 1
                for t in threads:
                    assert any_mask[row, t] == sum(1 << (i % 32) for i in threads if full[row, i] == full[row, t])
                    assert same[row, t] == equal
                    assert all_mask[row, t] == (sum(1 << (i % 32) for i in threads) if equal else 0)


@pytest.mark.parametrize("T", THREADS)
@pytest.mark.parametrize("op", ["add", "min", "max", "and", "or", "xor"])
def test_redux(op: str, T: int) -> None:
    rng = np.random.default_rng(T)
    combine = {
        "add": operator.add,
        "min": min,
        "max": max,
        "and": operator.and_,
        "or": operator.or_,
        "xor": operator.xor,
    }[op]
    for dtype, shape in itertools.product((np.uint32, np.int32), ((1, 1), (2, 1), (1, T), (2, T))):
        info = np.iinfo(dtype)
        value = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
        for active in draw_active(rng, 2, T):
            result = warp.redux(op, value, T, active)
            assert result.dtype == dtype
            result, full = np.broadcast_to(result, (2, T)), np.broadcast_to(value, (2, T))
            member = np.ones((2, T), bool) if active is None else np.broadcast_to(active, (2, T))
            for row in range(2):
                for threads in warps_of(T, member[row]):
                    expected = int(full[row, threads[0]])
                    for t in threads[1:]:
                        expected = combine(expected, int(full[row, t]))
                    wrapped = np.array(expected & 0xFFFFFFFF, np.uint32).view(dtype)
                    assert (result[row, threads] == wrapped).all()


@pytest.mark.parametrize("T", THREADS)
def test_elect_takes_the_lowest_active_lane(T: int) -> None:
    rng = np.random.default_rng(T)
    active_lists = draw_active(rng, 2, T)
    late = np.zeros((1, T), bool)
    late[0, 5:] = True
    for active in [*active_lists, late]:
        leader, is_leader = (np.broadcast_to(a, (2, T)) for a in warp.elect(T, active))
        member = np.ones((2, T), bool) if active is None else np.broadcast_to(active, (2, T))
        for row in range(2):
            for threads in warps_of(T, member[row]):
                assert [int(leader[row, t]) for t in threads] == [threads[0] % 32 for _ in threads]
                assert [bool(is_leader[row, t]) for t in threads] == [t == threads[0] for t in threads]
