"""The method, on a clock of our own: turns, medians, rotation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from cupyllm.bench import measure as method
from cupyllm.bench.measure import Batch, Times, geometric_mean, measure, num_calls, num_sets, turns


class FakeClock:
    """Time that runs slower and slower, as on a GPU that warms up; notes who ran."""

    def __init__(self, drift: float = 0.0) -> None:
        self.drift, self.ran, self.last = drift, [], 0.0  # type: ignore[var-annotated]

    def batch(self, name: str, us: float, calls: int = 1) -> Batch:
        def start() -> None:
            self.ran.append(name)
            self.last = us * calls * (1 + self.drift * len(self.ran))

        return Batch(start, calls)

    def time(self, batches: Sequence[Batch]) -> list[float]:
        found = []
        for batch in batches:
            batch.start()
            found.append(self.last)
        return found


def test_a_sample_is_the_time_of_a_call() -> None:
    clock = FakeClock()
    found = measure({"a": [clock.batch("a", 3.0, calls=50)], "b": [clock.batch("b", 7.0)]}, clock, 20)
    assert {name: times.median for name, times in found.items()} == {"a": 3.0, "b": 7.0}
    assert all(len(times.us) == 20 and times.spread == 0 for times in found.values())


def test_contenders_take_turns_in_changing_order_behind_an_untimed_run() -> None:
    clock = FakeClock()
    measure({name: [clock.batch(name, 1)] for name in "abc"}, clock, 21)
    rounds = [clock.ran[i : i + 4] for i in range(0, len(clock.ran), 4)]
    assert len(rounds) == method.WARM_ROUNDS + 21
    assert all(sorted(r[1:]) == ["a", "b", "c"] and r[0] == r[-1] for r in rounds)
    assert len({tuple(r[1:]) for r in rounds}) > 3


def test_a_drifting_clock_changes_times_and_no_ratio() -> None:
    """The device gets 40% slower during the run; one after the other, b would look that much slower."""
    clock = FakeClock(drift=0.005)
    found = measure({name: [clock.batch(name, 10)] for name in "ab"}, clock, 21)
    assert found["a"].median > 11 and abs(found["a"].median / found["b"].median - 1) < 0.02


def test_every_batch_has_its_turn() -> None:
    clock = FakeClock()
    measure({"x": [clock.batch(f"x{i}", 1) for i in range(5)]}, clock, 20)
    assert set(clock.ran[2 * method.WARM_ROUNDS + 1 :: 2]) == {f"x{i}" for i in range(5)}


@pytest.mark.parametrize(("contenders", "samples"), [({"a": []}, 21), ({"a": [Batch(lambda: None, 1)]}, 19)])
def test_no_batches_and_few_samples_are_our_bugs(contenders: dict[str, list[Batch]], samples: int) -> None:
    with pytest.raises(AssertionError):
        measure(contenders, FakeClock(), samples)


def test_median_quartiles_and_spread() -> None:
    """Of 1 to 19 and an outlier: which moves neither the median nor the spread much."""
    us = [*map(float, range(1, 20)), 1000.0]
    random.Random(0).shuffle(us)
    times = Times(tuple(us))
    assert times.median == 10.5 and times.quartiles == (5.25, 15.75)
    assert times.spread == pytest.approx(5.25 / 10.5)


@pytest.mark.parametrize(
    ("inputs", "whole", "l2", "memory", "sets"),
    [
        (10_000_000, 12_000_000, 50_000_000, 10**12, 20),  # 200 MB of inputs
        (10_000_000, 12_000_000, 100_000_000, 10**12, 40),  # four times a larger L2
        (600_000_000, 10**9, 50_000_000, 10**12, 2),  # never one: it would stay in the cache
        (1000, 2000, 50_000_000, 10**12, method.MAX_SETS),
        (10_000_000, 12_000_000, 50_000_000, 100_000_000, 8),  # what there is room for
        (10_000_000, 12_000_000, 50_000_000, 23_999_999, 0),  # not even two
    ],
)
def test_how_many_sets(inputs: int, whole: int, l2: int, memory: int, sets: int) -> None:
    assert num_sets(inputs, whole, l2, memory) == sets


@pytest.mark.parametrize(("us", "calls"), [(0.0, 256), (3.0, 134), (399.0, 2), (400.0, 1), (1e6, 1)])
def test_how_many_calls(us: float, calls: int) -> None:
    assert num_calls(us) == calls


@pytest.mark.parametrize(("sets", "calls"), [(20, 134), (20, 20), (20, 3), (2, 1), (7, 5)])
def test_turns_use_every_set_and_none_twice_in_a_row(sets: int, calls: int) -> None:
    found = turns(sets, calls)
    flat = [index for turn in found for index in turn]
    assert all(len(turn) == calls for turn in found) and set(flat) == set(range(sets))
    assert all(a != b for a, b in itertools.pairwise(flat))


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0) and geometric_mean([0.9]) == pytest.approx(0.9)
