"""The sampler: case C11, the filters on distributions known by hand, Philox by its published vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupyllm.errors import InputError
from cupyllm.serve.sampler import SamplingError, SamplingParams, choose, philox, uniform


def sample(logits: object, number: int = 0, valid: int | None = None, **options: object) -> int:
    return choose(np.array(logits, np.float32), SamplingParams(**options), number=number, valid_vocab=valid).token  # type: ignore[arg-type]


def frequencies(logits: object, draws: int = 4000, **options: object) -> np.ndarray:
    counts = np.zeros(len(logits))  # type: ignore[arg-type]
    for number in range(draws):
        counts[sample(logits, number, **options)] += 1
    return counts / draws


def test_C11_ties_go_to_the_lowest_id_for_every_seed() -> None:
    logits = np.zeros(16)
    logits[[5, 9]] = 12.5
    for seed in range(50):
        assert sample(logits, temperature=0, seed=seed) == 5
        assert sample(logits, temperature=1, top_k=1, seed=seed) == 5
        assert sample(logits, temperature=1, top_p=0, seed=seed) == 5


def test_C11_tiny_temperatures_are_finite() -> None:
    logits = [1000, 999, -math.inf]
    for temperature in (1e-5, 1e-300):
        assert {sample(logits, n, temperature=temperature) for n in range(50)} == {0}
    choice = choose(np.array(logits, np.float32), SamplingParams(logprobs=2), number=0)
    assert dict(choice.top)[0] == pytest.approx(math.log(0.7310586), abs=1e-6)
    assert dict(choice.top)[1] == pytest.approx(math.log(0.2689414), abs=1e-6)
    assert frequencies(logits)[:2] == pytest.approx([0.731, 0.269], abs=0.03)


def test_C11_padded_ids_are_never_chosen_but_count_in_logprobs() -> None:
    logits = np.zeros(151936, np.float32)
    logits[151700], logits[42] = 50, 10
    for temperature in (0.0, 1.0):
        choice = choose(logits, SamplingParams(temperature=temperature, top_k=1), number=0, valid_vocab=151669)
        assert choice.token == 42
        assert choice.logprob == pytest.approx(-40, abs=1e-6)


def test_C11_nan_ends_the_request() -> None:
    with pytest.raises(SamplingError, match="NaN at id 2"):
        sample([0, 1, math.nan])
    with pytest.raises(SamplingError, match="inf at id 1"):
        sample([0, math.inf, 2], logprobs=2)
    with pytest.raises(SamplingError, match="every id"):
        sample([-math.inf, -math.inf, 5], valid=2)


@pytest.mark.parametrize(
    "option, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 2.0),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_options_are_named(option: str, value: float) -> None:
    with pytest.raises(InputError, match=option.replace("_", "-") + ": got"):
        SamplingParams(**{option: value})  # type: ignore[arg-type]


# Probabilities 0.5, 0.25, 0.125, 0.125.
KNOWN = np.log([0.5, 0.25, 0.125, 0.125])


def test_temperature_scales() -> None:
    want = np.array([0.5, 0.25, 0.125, 0.125]) ** 2
    # 4000 draws: a frequency's standard deviation is at most 0.008; three of those and some.
    assert frequencies(KNOWN, temperature=0.5) == pytest.approx(want / want.sum(), abs=0.03)
    assert frequencies(KNOWN) == pytest.approx(np.exp(KNOWN), abs=0.03)


def test_filters_keep_exactly_what_they_say() -> None:
    assert set(np.flatnonzero(frequencies(KNOWN, top_k=3))) == {0, 1, 2}  # of equal ones the lowest id stays
    assert set(np.flatnonzero(frequencies(KNOWN, top_p=0.49))) == {0}
    assert set(np.flatnonzero(frequencies(KNOWN, top_p=0.51))) == {0, 1}
    assert set(np.flatnonzero(frequencies(KNOWN, min_p=0.49))) == {0, 1}
    assert set(np.flatnonzero(frequencies(KNOWN, min_p=0.51))) == {0}
    assert frequencies(KNOWN, top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.03)


def test_repetition_penalty_is_transformers() -> None:
    """Positive scores are divided, negative ones multiplied, once each however often an id occurred."""
    logits, params = np.array([3.0, -1.0, 2.0, -2.0], np.float32), SamplingParams(0, repetition_penalty=2.0)
    assert choose(logits, params, number=0, history=np.array([0, 0, 0])).token == 2
    assert choose(-logits, params, number=0, history=np.array([3, 3])).token == 1  # 1 and 2/2: the lower id
    assert choose(logits, params, number=0, history=np.array([], int)).token == 0


def test_draws_depend_on_seed_and_number_alone() -> None:
    logits = np.zeros(100)
    once = [sample(logits, n, seed=7) for n in range(40)]
    assert once == [sample(logits, n, seed=7) for n in range(40)]
    assert once != [sample(logits, n, seed=8) for n in range(40)]
    assert len(set(once)) > 20


def test_philox_known_answers() -> None:
    """The vectors that Random123 ships for philox4x32 with ten rounds."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    draws = np.array([uniform(3, n) for n in range(4000)])
    assert 0 <= draws.min() and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.02
