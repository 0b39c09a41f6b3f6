"""Races: every kind planted, and beside each the nearest program that is right."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.errors import BackendError
from cupyllm.sim import check, regions
from cupyllm.sim.targets import written_by
from tests.sim.launchkit import TILE, Launch

T = 64
t = np.arange(T).reshape(1, T)
row = np.arange(2).reshape(2, 1)
RACE, CTAS, COPY = "race", "race-between-ctas", "cp-async"


def one(thread):
    return t == thread


def launch(**options):
    return Launch(**{"B": 2, "T": T, "shared": {TILE: 4096}, **options})


def filled(**options):
    """A launch whose tile every thread t has written at [4 t], with a barrier behind it."""
    run = launch(**options)
    run.write(1, TILE, 16 * t, *(t.astype(np.float32),) * 4)
    run.barrier()
    return run


# ---- shared memory, between barriers ----


def test_read_of_what_another_thread_writes_without_a_barrier():
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.read(11, TILE, 4 * (T - 1 - t))
    assert run.lines() == [
        "race in shared memory: test, CTA (0,0,0), thread (63,0,0) reads tile[0] at a.cu:11, "
        "which thread (0,0,0) writes at a.cu:10 with no barrier between"
    ]


def test_the_line_of_a_race_names_both_threads_and_the_element():
    run = launch(block=(8, 8, 1))
    run.write(10, TILE, 4 * t, t)
    run.read(11, TILE, 4 * (t ^ 1), mask=one(13))
    (report,) = run.reports_of()
    assert report.line == (
        "race in shared memory: test, CTA (0,0,0), thread (5,1,0) reads tile[12] at a.cu:11, "
        "which thread (4,1,0) writes at a.cu:10 with no barrier between"
    )


def test_the_same_with_a_barrier_between():
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.barrier()
    run.read(11, TILE, 4 * (T - 1 - t))
    assert run.problems() == []


def test_write_after_another_threads_read():
    run = filled()
    run.read(10, TILE, 16 * (t ^ 1))
    run.write(11, TILE, 16 * t, t)
    assert run.problems() == [(RACE, 10)]


def test_write_after_read_with_a_barrier_between():
    run = filled()
    run.read(10, TILE, 16 * (t ^ 1))
    run.barrier()
    run.write(11, TILE, 16 * t, t)
    assert run.problems() == []


def test_two_stores_of_different_threads():
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.write(11, TILE, 4 * (t ^ 1), t)
    assert run.problems() == [(RACE, 11)]


def test_a_thread_may_rewrite_and_read_its_own():
    run = launch()
    for line in range(10, 14):
        run.write(line, TILE, 4 * t, t)
        run.read(line + 10, TILE, 4 * t)
    assert run.problems() == []


def test_one_store_of_different_values_to_one_place():
    run = launch()
    run.write(10, TILE, 4 * (t // 2), t)
    assert run.problems() == [(RACE, 10)]


def test_one_store_of_equal_values_to_one_place():
    run = launch()
    run.write(10, TILE, 4 * (t // 2), t // 2)
    assert run.problems() == []


def test_equal_values_by_two_instructions_race():
    run = launch()
    run.write(10, TILE, 0, 1, mask=one(3))
    run.write(11, TILE, 0, 1, mask=one(4))
    assert run.problems() == [(RACE, 11)]


def test_all_threads_store_one_value_at_one_place():
    run = launch()
    run.write(10, TILE, 0, 1)
    assert run.problems() == []


def test_all_threads_store_different_values_at_one_place():
    run = launch()
    run.write(10, TILE, 0, t)
    assert run.problems() == [(RACE, 10)]


def test_values_that_differ_in_one_cta_only():
    run = launch()
    run.write(10, TILE, 0, t * row)
    (report,) = run.reports_of()
    assert (report.kind, report.cta) == (RACE, (1, 0, 0))


def test_all_threads_store_at_one_place_twice():
    run = launch()
    run.write(10, TILE, 0, 1)
    run.write(11, TILE, 0, 2)
    assert run.problems() == [(RACE, 11)]


def test_all_threads_read_what_one_has_written():
    run = launch()
    run.write(10, TILE, 0, 1, mask=one(0))
    run.read(11, TILE, 0)
    assert run.problems() == [(RACE, 11)]


def test_all_threads_read_what_one_has_written_before_a_barrier():
    run = launch()
    run.write(10, TILE, 0, 1, mask=one(0))
    run.barrier()
    run.read(11, TILE, 0)
    assert run.problems() == []


def test_one_thread_alone_writes_and_reads_at_one_place():
    run = launch()
    run.write(10, TILE, 0, 1, mask=one(5))
    run.read(11, TILE, 0, mask=one(5))
    assert run.problems() == []


def test_a_third_threads_read_is_not_hidden_by_the_writers_own():
    run = filled()
    run.read(10, TILE, 0, mask=one(9))
    run.read(11, TILE, 0, mask=one(3))
    run.write(12, TILE, 0, 1, mask=one(3))
    assert run.problems() == [(RACE, 10)]


def test_neighbouring_bytes_of_a_word():
    run = launch()
    run.write(10, TILE, t, t, type="u8")
    run.read(11, TILE, t, type="u8")
    assert run.problems() == []


def test_a_word_and_one_of_its_bytes():
    run = filled()
    run.read(10, TILE, 16 * t, type="u32", mask=one(2))
    run.write(11, TILE, 16 * 2 + 3, 1, type="u8", mask=one(3))
    assert run.problems() == [(RACE, 10)]


def test_vectors_that_overlap_by_an_element():
    run = filled()
    run.read(10, TILE, 16 * t, vec=4)
    run.write(11, TILE, 16 * t + 12, t, mask=one(7))
    assert run.problems() == []
    run = filled()
    run.read(10, TILE, 16 * t, vec=4)
    run.write(11, TILE, 16 * (t ^ 1) + 12, t, mask=one(7))
    assert run.problems() == [(RACE, 10)]


def test_two_variables_are_apart():
    run = launch(shared={TILE: 256, "other": 256})
    run.write(10, TILE, 4 * t, t)
    run.write(11, "other", 4 * (t ^ 1), t)
    assert run.problems() == []


# ---- masks, CTAs of their own ways ----


@pytest.mark.parametrize("mask", [one(3), one(3) & (row == 1), row == 1])
def test_masked_lanes_have_no_part_in_it(mask):
    run = launch()
    garbage = np.where(np.broadcast_to(mask, (2, T)), 4 * np.broadcast_to(t, (2, T)), 10**9)
    run.write(10, TILE, garbage, t, mask=mask)
    run.write(11, TILE, np.where(mask, 10**9, 4 * t + 1024), t, mask=~mask)
    run.read(12, TILE, garbage, mask=mask)
    assert run.problems() == []


def test_a_masked_race_is_found():
    run = launch()
    run.write(10, TILE, 4 * t, t, mask=t < 8)
    run.write(11, TILE, 4 * (t - 8), t, mask=(t >= 8) & (t < 16))
    assert run.problems() == [(RACE, 11)]


def test_different_ctas_do_not_meet_in_shared_memory():
    run = launch()
    run.write(10, TILE, 4 * t, t, mask=row == 0)
    run.write(11, TILE, 4 * (t ^ 1), t, mask=row == 1)
    assert run.problems() == []


def test_the_cta_of_a_race_in_one_of_them():
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.write(11, TILE, 4 * (t ^ 1), t, mask=row == 1)
    (report,) = run.reports_of()
    assert (report.kind, report.cta) == (RACE, (1, 0, 0))


def test_addresses_that_differ_between_ctas():
    run = launch()
    run.write(10, TILE, 4 * t + 256 * row, t)
    run.write(11, TILE, 4 * t + 256 * (1 - row), t)  # own places of the other CTA, in memory of this one
    assert run.problems() == []
    run = launch()
    run.write(10, TILE, 4 * t + 256 * row, t)
    run.read(11, TILE, 4 * (t ^ row) + 256 * row)
    (report,) = run.reports_of()
    assert (report.kind, report.cta) == (RACE, (1, 0, 0))


def test_a_barrier_of_one_cta_ends_its_interval_only():
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.barrier(np.array([True, False]))
    run.read(11, TILE, 4 * (t ^ 1), mask=row == 0)
    assert run.problems() == []
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.barrier(np.array([True, False]))
    run.read(11, TILE, 4 * (t ^ 1))
    (report,) = run.reports_of()
    assert (report.kind, report.cta) == (RACE, (1, 0, 0))


def test_ctas_that_pass_barriers_one_after_another():
    run = launch()
    offset = 4 * t + 256 * row  # an address of each CTA's own
    for step in range(4):
        rows = np.array([step % 2 == 0, step % 2 == 1])
        mask = rows.reshape(2, 1)
        run.write(10, TILE, offset, t, mask=mask)
        run.barrier(rows)
        run.read(11, TILE, 4 * (t ^ 1) + 256 * row, mask=mask)
        run.barrier(rows)
    assert run.problems() == []


def test_loops_of_different_length():
    """CTA 1 leaves the loop early and waits; its last reads and CTA 0's later writes are no race."""
    run = launch()
    for step in range(5):
        rows = np.array([True, step < 2])
        mask = None if rows.all() else rows.reshape(2, 1)
        run.write(10, TILE, 4 * t, t, mask=mask)
        run.barrier(None if rows.all() else rows)
        run.read(11, TILE, 4 * (t ^ 1), mask=mask)
        run.barrier(None if rows.all() else rows)
    run.write(12, TILE, 4 * t, t)
    run.barrier()
    assert run.problems() == []


# ---- warps ----


def test_a_warp_sync_orders_lanes_of_a_warp():
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.M.warp_sync(None)
    run.read(11, TILE, 4 * (t ^ 1))
    run.M.warp_sync(None)
    run.write(12, TILE, 4 * t, t)
    assert run.problems() == []


def test_a_warp_sync_does_not_order_two_warps():
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.M.warp_sync(None)
    run.read(11, TILE, 4 * (t ^ 32))
    assert run.problems() == [(RACE, 11)]


def test_a_warp_sync_of_other_lanes():
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.M.warp_sync(t % 32 < 16)
    run.read(11, TILE, 4 * (t ^ 1))
    (report,) = run.reports_of()
    assert report.kind == RACE and report.thread[0] % 32 >= 16


def test_a_chain_of_warp_syncs():
    run = launch()
    run.write(10, TILE, 0, 1, mask=one(0))
    run.M.warp_sync(t < 2)
    run.M.warp_sync((t == 1) | (t == 2))
    run.read(11, TILE, 0, mask=one(2))
    assert run.problems() == []
    run = launch()
    run.write(10, TILE, 0, 1, mask=one(0))
    run.M.warp_sync((t == 1) | (t == 2))
    run.M.warp_sync(t < 2)
    run.read(11, TILE, 0, mask=one(2))
    assert run.problems() == [(RACE, 11)]


def test_a_warp_sync_in_one_cta():
    run = launch()
    run.write(10, TILE, 4 * t, t)
    run.M.warp_sync(row == 0)
    run.read(11, TILE, 4 * (t ^ 1))
    (report,) = run.reports_of()
    assert (report.kind, report.cta) == (RACE, (1, 0, 0))


def test_a_partial_last_warp():
    run = Launch(B=2, T=40, shared={TILE: 4096})
    lane = np.arange(40).reshape(1, 40)
    run.write(10, TILE, 4 * lane, lane)
    run.M.warp_sync(None)
    run.read(11, TILE, 4 * (lane ^ 1))
    assert run.problems() == []


# ---- atomics ----


def add(run, line, of, offset, mask=None):
    space = "shared" if of == TILE else "global"
    site = run.site(line, f"atom.{space}.add.u32 %r1, [%r2], 1;", *run.origin(of))
    return run.M.atom(space, site, "add", "u32", run.address(space, of, offset), mask, np.ones((1, 1), np.uint32))


def test_atomics_do_not_race_with_each_other():
    run = filled()
    add(run, 10, TILE, 0)
    add(run, 11, TILE, 4 * (t % 4), mask=t % 2 == 0)
    assert run.problems() == []


def test_atomics_race_with_a_plain_read():
    run = filled()
    add(run, 10, TILE, 0)
    run.read(11, TILE, 0, mask=one(3))
    assert run.problems() == [(RACE, 11)]


def test_atomics_race_with_a_plain_write():
    run = filled()
    run.write(10, TILE, 0, 1, mask=one(3))
    add(run, 11, TILE, 0, mask=one(4))
    assert run.problems() == [(RACE, 11)]


def test_volatile_accesses_count_as_atomic():
    run = filled()
    run.write(10, TILE, 16 * t, t, atomic=True)
    run.read(11, TILE, 16 * (t ^ 1), atomic=True)
    assert run.problems() == []


def test_an_atomic_read_and_a_plain_one():
    run = filled()
    run.read(10, TILE, 16 * t, atomic=True)
    run.read(11, TILE, 16 * (t ^ 1))
    assert run.problems() == []


def test_an_atomic_read_and_a_plain_write():
    run = filled()
    run.read(10, TILE, 16 * t, atomic=True)
    run.write(11, TILE, 16 * (t ^ 1), t)
    assert run.problems() == [(RACE, 10)]


# ---- long intervals ----


@pytest.fixture
def short_log(monkeypatch):
    monkeypatch.setattr(check, "LIMIT", 8)


def test_a_race_with_an_access_long_ago(short_log):
    run = launch()
    run.write(10, TILE, 4 * t, t)
    for _ in range(200):
        run.write(11, TILE, 1024 + 4 * t, t)
        run.read(12, TILE, 1024 + 4 * t)
    run.read(13, TILE, 4 * (t ^ 1))
    assert len(run.M.log.entries) <= 16
    assert run.problems() == [(RACE, 13)]


def test_a_long_interval_that_is_right(short_log):
    run = launch()
    for step in range(300):
        run.write(10, TILE, 4 * t + 256 * (step % 3), t)
        run.read(11, TILE, 4 * t + 256 * (step % 3))
        run.write(12, TILE, 2048, 1)  # by all threads, equal bits
    assert len(run.M.log.entries) <= 16
    assert run.problems() == []


def test_different_offsets_without_end_are_packed(short_log):
    run = launch()
    random = np.random.default_rng(3)
    for _ in range(400):
        place = random.integers(0, 8, (2, T)) * 4 + 32 * t
        run.write(10, TILE, place, t)
        run.write(11, TILE, 3072 + 4 * (t // 2), t // 2)
    assert len(run.M.log.entries) <= 40
    run.read(12, TILE, 32 * (t ^ 1), mask=one(4))
    assert run.problems() == [(RACE, 12)]


def test_warp_syncs_in_a_long_interval(short_log):
    run = launch()
    for _ in range(100):
        run.write(10, TILE, 4 * t, t)
        run.M.warp_sync(None)
        run.read(11, TILE, 4 * (t ^ 1))
        run.M.warp_sync(None)
    assert len(run.M.log.entries) <= 16
    assert run.problems() == []


def test_a_missing_warp_sync_in_a_long_interval(short_log):
    run = launch()
    for _ in range(50):
        run.write(10, TILE, 4 * t, t)
        run.M.warp_sync(None)
        run.read(11, TILE, 4 * (t ^ 1))
    assert run.problems() == [(RACE, 11)]


def test_a_long_interval_on_global_memory(short_log):
    run = launch(arrays=[np.zeros(4096, np.float32)], grid=(2, 1, 1))
    for step in range(20):
        run.write(10, 0, 4 * t + 256 * (2 * step + row), t)
    run.read(11, 0, 4 * t + 256 * row)
    assert run.problems() == []
    run = launch(arrays=[np.zeros(4096, np.float32)], grid=(2, 1, 1))
    for step in range(20):
        run.write(10, 0, 4 * t + 256 * (2 * step + row), t)
    run.read(11, 0, 4 * (t ^ 1) + 256 * row)
    assert run.problems() == [(RACE, 11)]


# ---- global memory ----


def tensor(**options):
    return launch(**{"arrays": [np.zeros((64, 64), np.float32)], "grid": (4, 1, 1), "shared": None, **options})


@pytest.mark.parametrize("written", [None, frozenset({0})])
def test_threads_of_a_cta_race_on_global_memory(written):
    run = tensor(written=written)
    run.write(10, 0, 4 * t + 256 * row, t)
    run.read(11, 0, 4 * (t ^ 1) + 256 * row)
    (report,) = run.reports_of()
    assert report.kind == RACE
    assert "race in global memory" in report.line and "reads x0[0,0] at a.cu:11" in report.line


@pytest.mark.parametrize("written", [None, frozenset({0})])
def test_the_same_with_a_barrier(written):
    run = tensor(written=written)
    run.write(10, 0, 4 * t + 256 * row, t)
    run.barrier()
    run.read(11, 0, 4 * (t ^ 1) + 256 * row)
    run.barrier()
    run.write(12, 0, 4 * (t ^ 2) + 256 * row, t)
    assert run.problems() == []


def test_a_warp_sync_orders_global_memory():
    run = tensor()
    run.write(10, 0, 4 * t + 256 * row, t)
    run.M.warp_sync(None)
    run.read(11, 0, 4 * (t ^ 1) + 256 * row)
    assert run.problems() == []


def test_ctas_of_a_batch_write_one_place():
    run = tensor()
    run.write(10, 0, 4 * t, t + row)
    (report,) = run.reports_of()
    assert report.line == (
        "race between CTAs: test, CTA (1,0,0), thread (0,0,0) writes x0[0,0] at a.cu:10, "
        "which CTA (0,0,0), thread (0,0,0) writes at a.cu:10"
    )


def test_ctas_of_a_batch_write_equal_bits_by_one_instruction():
    run = tensor()
    run.write(10, 0, 4 * t, t)
    run.write(11, 0, 256, 1)
    run.write(12, 0, 260, 1, mask=one(0))
    assert run.problems() == []


def test_equal_bits_by_two_instructions_of_two_ctas():
    run = tensor()
    run.write(10, 0, 4 * t, t, mask=row == 0)
    run.write(11, 0, 4 * t, t, mask=row == 1)
    assert run.problems() == [(CTAS, 11)]


def test_ctas_of_two_batches_write_one_place():
    run = tensor()
    run.write(10, 0, 4 * t + 256 * row, t)
    run.batch(2)
    run.write(10, 0, 4 * t + 256 * row, 2 * t)
    (report,) = run.reports_of()
    assert report.kind == CTAS and report.cta[0] >= 2 and "which CTA (" in report.line


def test_ctas_of_two_batches_write_equal_bits():
    run = tensor()
    for first in (0, 2):
        run.batch(first)
        run.write(10, 0, 4 * t, t)
        run.write(11, 0, 512, 7, mask=one(1))
    assert run.problems() == []


def test_equal_bits_of_ctas_that_pass_a_barrier_one_after_another():
    for values, expected in ((np.array([[5]]), []), (5 + row, [(CTAS, 10)])):
        run = tensor()
        run.write(10, 0, 0, values, mask=one(0))
        run.barrier(np.array([True, False]))
        run.barrier(np.array([False, True]))
        assert run.problems() == expected


def test_a_later_store_to_what_several_ctas_have_stored():
    run = tensor()
    run.write(10, 0, 0, 5, mask=one(0))
    run.barrier()
    run.write(11, 0, 0, 6, mask=one(0) & (row == 1))
    assert run.problems() == [(CTAS, 11)]


def test_the_next_launch_knows_nothing_of_the_last():
    first = tensor()
    for run in (first, tensor(arrays=first.extents, device=first.device)):
        run.write(10, 0, 4 * t + 256 * row, t)
        assert run.problems() == []
    last = tensor(arrays=first.extents, device=first.device)
    last.write(11, 0, 4 * t + 256 * (1 - row), t)
    assert last.problems() == []


def test_a_cta_reads_what_another_one_writes():
    run = tensor()
    run.write(10, 0, 4 * t, t, mask=row == 0)
    run.barrier()
    run.read(11, 0, 4 * t, mask=row == 1)
    assert run.problems() == [(CTAS, 11)]


def test_a_cta_of_a_later_batch_writes_what_one_has_read():
    run = tensor()
    run.read(10, 0, 4 * t + 256 * row)
    run.batch(2)
    run.write(11, 0, 4 * t + 256 * row, t)
    assert run.problems() == [(CTAS, 11)]


def test_a_cta_of_a_later_batch_writes_what_several_have_read():
    run = tensor()
    run.read(10, 0, 0)
    run.batch(2)
    run.write(11, 0, 0, 1, mask=one(0) & (row == 0))
    assert [kind for kind, _ in run.problems()] == [CTAS]


def test_every_cta_reads_and_writes_its_own():
    run = tensor()
    for first in (0, 2):
        run.batch(first)
        for _ in range(3):
            place = 4 * t + 256 * (row + first)
            run.read(10, 0, place)
            run.write(11, 0, place, t)
            run.barrier()
            run.read(12, 0, 4 * (t ^ 1) + 256 * (row + first))
            run.barrier()
    assert run.problems() == []


def test_widths_that_change_between_batches():
    run = tensor()
    run.write(10, 0, 16 * t + 1024 * row, t, t, t, t)
    run.batch(2)
    run.write(11, 0, 2048 + 2 * t + 128 * row, t, type="u16")
    assert run.problems() == []
    run = tensor()
    run.write(10, 0, 16 * t + 1024 * row, t, t, t, t)
    run.batch(2)
    run.write(11, 0, 2, 1, type="u16", mask=one(0) & (row == 0))
    assert run.problems() == [(CTAS, 11)]


def test_atomics_of_all_ctas():
    run = launch(arrays=[np.zeros(64, np.uint32)], grid=(4, 1, 1))
    for first in (0, 2):
        run.batch(first)
        add(run, 10, 0, 0)
        add(run, 11, 0, 4 * (t % 8))
    assert run.problems() == []


def test_a_plain_read_of_what_ctas_update():
    run = launch(arrays=[np.zeros(64, np.uint32)], grid=(4, 1, 1))
    add(run, 10, 0, 0, mask=row == 0)
    run.batch(2)
    run.read(11, 0, 0, mask=one(0) & (row == 1), type="u32")
    assert run.problems() == [(CTAS, 11)]


def one_tensor_twice():
    """An in-place operation: x0 and x1 are the same bytes, read as one and written as the other."""
    owner = tensor()
    return tensor(arrays=[owner.extents[0]] * 2, device=owner.device, written=frozenset({1}))


def test_an_operation_in_place():
    run = one_tensor_twice()
    run.read(10, 0, 4 * t + 256 * row)
    run.write(11, 1, 4 * t + 256 * row, t)
    assert run.problems() == []


def test_an_operation_in_place_that_reads_its_neighbour():
    run = one_tensor_twice()
    run.read(10, 0, 4 * (t ^ 1) + 256 * row)
    run.write(11, 1, 4 * t + 256 * row, t)
    assert run.problems() == [(RACE, 10)]


def test_an_operation_in_place_that_reads_another_cta():
    run = one_tensor_twice()
    run.read(10, 0, 4 * t + 256 * (1 - row))
    run.write(11, 1, 4 * t + 256 * row, t)
    assert run.problems() == [(CTAS, 10)]


def test_a_tensor_that_is_only_read_is_not_watched():
    run = launch(arrays=[np.zeros(64, np.float32), np.zeros((2, 64), np.float32)], written=frozenset({1}))
    run.read(10, 0, 4 * t)
    run.write(11, 1, 4 * t + 256 * row, t)
    assert {entry.site.where[0].line for entry in run.M.log.entries} == {11}
    assert run.problems() == []


def test_what_a_kernel_may_write():
    run = launch()
    sites = [
        run.site(1, "ld.global.f32 %f1, [%rd1];", frozenset({0}), frozenset()),
        run.site(2, "@%p1 st.global.v4.f32 [%rd1], {%f1, %f1, %f1, %f1};", frozenset({1, 4}), frozenset()),
        run.site(3, "st.shared.f32 [%r1], %f1;"),
        run.site(4, "red.global.add.u32 [%rd1], 1;", frozenset(), frozenset({"counter"})),
    ]
    assert written_by(sites) == {1, 4, "counter"}
    assert written_by([*sites, run.site(5, "st.f32 [%rd1], %f1;")]) is None


# ---- against a search through all pairs ----

W = 36  # threads: two warps, one of them partial


class Pairs:
    """Every access of every thread, and the rule applied to each two of them."""

    def __init__(self):
        self.accesses = []  # (line, CTA, thread, epoch, time, place, size, writes, atomic, value)
        self.syncs = []  # (CTA, lanes, time)
        self.time = 0

    def add(self, line, first, mask, epoch, places, size, writes, atomic, values):
        self.time += 1
        for cta, thread in np.argwhere(np.broadcast_to(mask, (2, W))):
            place = int(np.broadcast_to(places, (2, W))[cta, thread])
            value = int(np.broadcast_to(values, (2, W))[cta, thread])
            self.accesses.append((line, first + cta, thread, epoch[cta], self.time, place, size, writes, atomic, value))

    def sync(self, first, mask):
        self.time += 1
        for cta in range(2):
            for warp in range(2):
                lanes = {t for t in range(32 * warp, min(W, 32 * warp + 32)) if np.broadcast_to(mask, (2, W))[cta, t]}
                self.syncs.append((first + cta, lanes, self.time))

    def ordered(self, cta, one, two, begin, end):
        reached = {one}
        for other, lanes, time in self.syncs:
            if other == cta and begin < time < end and lanes & reached:
                reached |= lanes
        return two in reached

    def found(self, shared):
        kinds = set()
        for i, a in enumerate(self.accesses):
            for b in self.accesses[i + 1 :]:
                apart = a[1] != b[1]
                if (shared and apart) or (not apart and (a[2] == b[2] or a[3] != b[3])):
                    continue
                if a[5] + a[6] <= b[5] or b[5] + b[6] <= a[5]:
                    continue
                equal = a[0] == b[0] and a[5] == b[5] and a[9] == b[9]
                if not (a[7] or b[7]) or (a[8] and b[8]) or (equal and a[7] and b[7] and not a[8] and not b[8]):
                    continue
                if not apart and self.ordered(a[1], a[2], b[2], *sorted((a[4], b[4]))):
                    continue
                kinds.add(CTAS if apart else RACE)
        return kinds


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize("seed", range(60))
def test_as_a_search_through_all_pairs(space, seed, monkeypatch):
    random = np.random.default_rng(seed)
    if seed % 3 == 0:
        monkeypatch.setattr(check, "LIMIT", 3)
    shared = space == "shared"
    spread = int(random.choice([1, 2, 40, 400]))  # how crowded the memory is
    run = Launch([np.zeros(65536, np.uint8)], B=2, T=W, grid=(4, 1, 1), shared={TILE: 16384})
    lane = np.arange(W).reshape(1, W)
    rule = Pairs()
    for first in (0, 2):
        run.batch(first)
        epoch = [0, 0] if first == 0 else [100, 100]
        if shared:
            for part in range(0, 16384, 16 * W):
                offset = part + 16 * lane
                run.write(
                    1, TILE, offset, *(np.zeros((1, 1)),) * 4, mask=None if part + 16 * W <= 16384 else offset < 16384
                )
            run.barrier()
        for line in range(10, 10 + int(random.integers(2, 7))):
            what = random.choice(["read", "write", "write", "barrier", "row", "sync", "volatile"])
            masks = [lane >= 0, lane < random.integers(1, W), np.array([[True], [random.random() < 0.5]])]
            mask = masks[random.integers(0, 3)]
            if random.random() < 0.3:
                mask = random.random((2, W)) < 0.5
                mask[0, 0] = True
            if what == "barrier":
                run.barrier()
                epoch = [e + 1 for e in epoch]
            elif what == "row":
                rows = np.array([True, False]) if random.random() < 0.5 else np.array([False, True])
                run.barrier(rows)
                epoch = [e + int(passed) for e, passed in zip(epoch, rows, strict=True)]
            elif what == "sync":
                run.M.warp_sync(mask)
                rule.sync(first, mask)
            else:
                size = int(random.choice([1, 2, 4, 8]))
                own = lane if shared or random.random() < 0.2 else lane + W * (first + np.arange(2).reshape(2, 1))
                shift = random.choice([0, 0, 1, 5])
                place = (own + shift) % (4 * W) * max(8, min(spread, 16))
                if random.random() < 0.3:
                    place = random.integers(0, spread, (2, W)) * 8
                if random.random() < 0.15:
                    place = np.array([[int(random.integers(0, spread)) * 8]])
                values = [lane % 3, np.array([[5]]), random.integers(0, 2, (2, W))][random.integers(0, 3)]
                values = values.astype(f"u{size}")
                writes, atomic = what != "read", what == "volatile" or bool(random.random() < 0.2)
                of, type = (TILE if shared else 0), f"u{8 * size}"
                if writes:
                    run.write(line, of, place, values, mask=mask, type=type, atomic=atomic)
                else:
                    run.read(line, of, place, mask=mask, type=type, atomic=atomic)
                rule.add(100 * first + line, first, mask, epoch, place, size, writes, atomic, values)
        run.sites.clear()  # the next batch runs other instructions
    found = {kind for kind, _ in run.problems()}
    expected = rule.found(shared)
    if shared or found == {RACE}:
        assert found == expected
    else:  # where CTAs meet, the race of two threads of one may stay in its shadow
        assert found <= expected and (CTAS in found) == (CTAS in expected)


def test_more_instructions_than_a_launch_can_have_sites(monkeypatch):
    """Each of thousands of stores is told apart: equal values of two of them excuse nobody, and both are named."""
    number = 4200
    run = launch(arrays=[np.zeros(number, np.float32)], written=frozenset({0}))
    for line in range(1, number):
        run.write(line, 0, 4 * line, mask=(row == 0) & one(0))
    run.write(number, 0, 4 * (number - 1), mask=(row == 1) & one(0))
    (report,) = run.reports_of()
    assert (report.kind, {report.site.where[0].line, report.other.where[0].line}) == (CTAS, {number, number - 1})
    monkeypatch.setattr(regions, "_SITES", 4)
    run = launch(arrays=[np.zeros(8, np.float32)], written=frozenset({0}))
    for line in range(1, 6):
        run.write(line, 0, 4 * line, mask=(row == 0) & one(0))
    with pytest.raises(BackendError, match="more than 4 instructions that access one array"):
        run.barrier()


@pytest.mark.parametrize("more", [0, 1])
def test_a_grid_of_more_threads_than_can_be_told_apart(more):
    """Stamps of the last CTA that fits must not be those of several CTAs."""
    ctas = (2**32 - 2) // (T + 1) + more
    run = launch(arrays=[np.zeros(T, np.float32)], written=frozenset({0}), grid=(ctas, 1, 1), B=1)
    run.batch(ctas - 1)
    run.write(1, 0, 4 * t)
    if more:
        with pytest.raises(BackendError, match=f"between {ctas} CTAs of 64 threads, expected at most {ctas - 1} "):
            run.barrier()
        return
    run.barrier()
    run.batch(0)
    run.write(3, 0, 4 * t)
    (line,) = run.lines()
    assert "CTA (0,0,0), thread (0,0,0) writes x0[0] at a.cu:3" in line
    assert f"which CTA ({ctas - 1},0,0), thread (0,0,0) writes at a.cu:1" in line
