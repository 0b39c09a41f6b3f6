"""The method: contenders take turns in one run, on inputs that no cache holds, and medians are compared.

A round runs every contender once, in an order that changes from round to round, behind a run that is not timed and that
keeps the device busy while the host queues the others. Clocks, power and temperature then act on all alike, which they
do not when one contender is timed after the other. Work that is shorter than a few hundred microseconds is repeated
within a sample (device.py: as one graph), since starting a sample takes microseconds, too.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

SAMPLES = 21
MIN_SAMPLES = 20
WARM_ROUNDS = 2
SAMPLE_US = 400.0  # of one sample, at least
MAX_CALLS = 256  # of one sample
MIN_ROTATED_BYTES = 200_000_000
MIN_SETS, MAX_SETS = 2, 256


@dataclass(frozen=True)
class Batch:
    """What one sample runs: `calls` calls of the work, started by `start`, which returns before they end."""

    start: Callable[[], None]
    calls: int


class Clock(Protocol):
    """Times work on a device."""

    def time(self, batches: Sequence[Batch]) -> list[float]:
        """Microseconds of each batch, all queued one behind the other."""
        ...


@dataclass(frozen=True)
class Times:
    """Microseconds of one call in each sample."""

    us: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.us, n=4)
        return low, high

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        low, high = self.quartiles
        return (high - low) / 2 / self.median


def measure(contenders: Mapping[str, Sequence[Batch]], clock: Clock, samples: int = SAMPLES) -> dict[str, Times]:
    """Times of every contender, interleaved. Sample i of a contender runs its batch i modulo their number."""
    assert samples >= MIN_SAMPLES and all(contenders.values()), (samples, contenders)
    names, rng = list(contenders), random.Random(0)
    jobs: list[tuple[str, Batch]] = []  # "" is not counted
    for index in range(-WARM_ROUNDS, samples):
        rng.shuffle(names)
        busy = contenders[names[-1]]
        jobs.append(("", busy[(index - 1) % len(busy)]))
        jobs += [(name if index >= 0 else "", contenders[name][index % len(contenders[name])]) for name in names]
    took = clock.time([batch for _, batch in jobs])
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for (name, batch), us in zip(jobs, took, strict=True):
        if name:
            found[name].append(us / batch.calls)
    return {name: Times(tuple(us)) for name, us in found.items()}


def num_sets(input_bytes: int, set_bytes: int, l2_bytes: int, memory_bytes: int) -> int:
    """How many sets of operands to rotate: their inputs are four times the L2 and at least 200 MB, two sets at least.

    0 where `memory_bytes` does not hold two. `set_bytes`: of all operands of a set; `input_bytes`: of those read.
    """
    rotated = max(MIN_ROTATED_BYTES, 4 * l2_bytes)
    wanted = min(MAX_SETS, max(MIN_SETS, -(-rotated // max(input_bytes, 1))))
    held = memory_bytes // max(set_bytes, 1)
    return min(wanted, held) if held >= MIN_SETS else 0


def num_calls(us: float, sample_us: float = SAMPLE_US) -> int:
    """Calls of one sample, when one takes `us`."""
    return max(1, min(MAX_CALLS, math.ceil(sample_us / max(us, 0.1))))


def turns(sets: int, calls: int) -> list[list[int]]:
    """Which sets each batch uses: batches of `calls`, so many that every set has a turn."""
    batches = -(-sets // calls)
    return [[(batch * calls + call) % sets for call in range(calls)] for batch in range(batches)]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
