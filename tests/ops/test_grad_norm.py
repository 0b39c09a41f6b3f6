"""Sum of squares in float64, its non-finite test, and scaling in place.

Tolerance: float64 sums of n squares of float32 numbers (each exact in float64): n 2^-53 relative at most, as all terms
have one sign; so 1e-11 for the sizes here and equality for one element.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupyllm.backend.base import Backend, Spec
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops.grad_norm import as_factor, clip_coefficient, global_norm, scale, sum_of_squares
from cupyllm.reference import grad_norm as reference
from tests.hostcuda.backend import HostBackend
from tests.ops.opcheck import GuardedBackend, assert_same_bits


def sums(backend: Backend, *gradients: np.ndarray) -> np.ndarray:
    """One slot a gradient, and one at the end that nobody writes."""
    with Session(backend) as session:
        out = session.put(np.full(len(gradients) + 1, -7.0))
        rec = Recorder.of(backend)
        for slot, gradient in enumerate(gradients):
            sum_of_squares(rec, session.put(gradient), out, slot)
        session.execute(rec)
        result = session.get(out)
    assert result[-1] == -7.0
    return result[:-1]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 8191, 8192, 8193, 300_000])
def test_sums(backend: Backend, size: int) -> None:
    rng = np.random.default_rng(size)
    gradient = rng.standard_normal(size).astype(np.float32)
    got = sums(backend, gradient, gradient.reshape(1, -1) * np.float32(1e19))
    want = float((gradient.astype(np.float64) ** 2).sum())
    np.testing.assert_allclose(got[0], want, rtol=size * 2.0**-53)
    assert got[1] == pytest.approx(reference.sum_of_squares(gradient * np.float32(1e19)), rel=1e-12)


def test_every_element_counts_once(backend: Backend) -> None:
    """Integers add without rounding: the sum tells whether an element was left out or taken twice."""
    for size in (8192, 20_000):
        gradient = np.arange(1, size + 1, dtype=np.float32)
        assert sums(backend, gradient)[0] == size * (size + 1) * (2 * size + 1) // 6


@pytest.mark.parametrize("size", [1, 1000, 8191, 9001])
def test_nothing_beyond_the_end_counts(backend: Backend, size: int) -> None:
    """Between guard bytes, which are NaN as floats: one element too many, and the sum is NaN."""
    assert sums(GuardedBackend(backend), np.ones(size, np.float32))[0] == size  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 8191, 8192, 9000])
def test_one_bad_element_shows(backend: Backend, position: int, value: float) -> None:
    gradient = np.zeros(9001, np.float32)
    gradient[position] = value
    assert not math.isfinite(sums(backend, gradient)[0])


def test_no_elements(backend: Backend) -> None:
    with Session(backend) as session:
        out = session.put(np.full(2, -7.0))
        rec = Recorder.of(backend)
        sum_of_squares(rec, session.empty(Spec((0,), "float32")), out, 1)
        session.execute(rec)
        assert session.get(out).tolist() == [-7.0, 0.0]


def test_same_bits_every_time_and_in_any_thread_order(backend: Backend) -> None:
    gradient = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    first = sums(backend, gradient)
    others = [backend, HostBackend(descending=True)] if isinstance(backend, HostBackend) else [backend]
    for other in others:
        assert_same_bits(sums(other, gradient), first)


@pytest.mark.parametrize("size", [1, 256, 257])
def test_scale(backend: Backend, size: int) -> None:
    gradient = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    with Session(backend) as session:
        g = session.put(gradient)
        rec = Recorder.of(backend)
        scale(rec, g, session.put(as_factor(0.3)))
        session.execute(rec)
        assert_same_bits(session.get(g), gradient * np.float32(0.3))


def test_global_norm_and_coefficient() -> None:
    assert global_norm([9.0, 16.0]) == 5.0
    assert global_norm([]) == 0.0
    assert math.isnan(global_norm([1.0, math.nan])) and global_norm([1.0, math.inf]) == math.inf
    assert clip_coefficient(5.0, 1.0) == 1 / (5 + 1e-6)
    assert clip_coefficient(0.0, 1.0) == 1.0 and clip_coefficient(0.5, 1.0) == 1.0
    for bad in (math.inf, math.nan):
        with pytest.raises(InputError, match="skip this step"):
            clip_coefficient(bad, 1.0)
    with pytest.raises(InputError, match="largest norm is 0"):
        clip_coefficient(1.0, 0.0)


def test_refused_arrays(backend: Backend) -> None:
    with Session(backend) as session:
        g, low = session.empty(Spec((4,), "float32")), session.empty(Spec((4,), "bfloat16"))
        out, factor = session.empty(Spec((2,), "float64")), session.empty(Spec((1,), "float32"))
        for call, words in (
            (lambda: sum_of_squares(Recorder(80), low, out), "bfloat16"),
            (lambda: sum_of_squares(Recorder(80), g, factor), "out is"),
            (lambda: sum_of_squares(Recorder(80), g, out, 2), "slot is 2"),
            (lambda: scale(Recorder(80), low, factor), "bfloat16"),
            (lambda: scale(Recorder(80), g, g), "factor is"),
        ):
            with pytest.raises(InputError, match=words):
                call()
