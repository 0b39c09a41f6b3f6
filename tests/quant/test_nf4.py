"""nf4: bytes that bitsandbytes 0.50.2 made, values by hand, bounds, tails, zero blocks, refusals."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupyllm.errors import InputError
from cupyllm.quant.nf4 import CODEBOOK, MIDPOINTS, Nf4, block_absmax, dequantize, dynamic_map, quantize, unpack_nibbles

# quantize_4bit(.., quant_type="nf4") on the CPU of the inputs that `drawn` makes, with and without compress_statistics
GOLDEN = dict(np.load(Path(__file__).with_name("bitsandbytes.npz")))
HALF_GAP = 0.1519036  # of the widest gap
INPUTS = ("long", "matrix", "tail", "zeros")


def drawn(kind: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    if kind == "long":
        return rng.standard_normal(64 * 300 + 5).astype(np.float32)
    if kind == "matrix":
        return (rng.standard_normal((24, 192)) * rng.lognormal(size=(24, 1))).astype(np.float32)
    if kind == "tail":
        return np.concatenate([np.linspace(-1, 1, 64), np.linspace(-8, 8, 36)]).astype(np.float32)
    return np.concatenate([np.zeros(64), rng.standard_normal(64)]).astype(np.float32)


def test_tables_are_bitsandbytes() -> None:
    np.testing.assert_array_equal(CODEBOOK, GOLDEN["codebook"])
    np.testing.assert_array_equal(dynamic_map(), GOLDEN["dynamic_map"])


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
def test_bytes_are_bitsandbytes(kind: str, double: bool) -> None:
    """The offset is a mean, whose last bit depends on the order of its sum; an index of the second level may move by
    one where that decides."""
    name = f"{kind}.{'double' if double else 'single'}."
    made = quantize(drawn(kind), double)
    np.testing.assert_array_equal(made.packed, GOLDEN[name + "packed"])
    moved = np.abs(made.absmax.astype(np.float64) - GOLDEN[name + "absmax"])
    assert moved.max() <= (1 if double else 0) and (moved != 0).mean() <= 0.01
    if double:
        assert made.absmax2 is not None
        assert abs(made.offset - GOLDEN[name + "offset"]) <= 2.0**-23 * abs(made.offset)
        np.testing.assert_allclose(made.absmax2, GOLDEN[name + "absmax2"], rtol=1e-6)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
def test_values_of_bitsandbytes_bytes_are_bitsandbytes(kind: str, double: bool) -> None:
    name, shape = f"{kind}.{'double' if double else 'single'}.", drawn(kind).shape
    second = (GOLDEN[name + "offset"], GOLDEN[name + "absmax2"], GOLDEN["dynamic_map"]) if double else ()
    got = dequantize(Nf4(GOLDEN[name + "packed"], shape, GOLDEN[name + "absmax"], *second))
    if name + "values" in GOLDEN:
        np.testing.assert_array_equal(got, GOLDEN[name + "values"].reshape(shape))
    sums = got.astype(np.float64).sum(), np.abs(got.astype(np.float64)).sum()
    np.testing.assert_allclose(sums, GOLDEN[name + "sum"], rtol=1e-12)


def test_levels_times_anything_round_trip() -> None:
    """E5 (a)."""
    for factor in (2.0, 0.37, 1e-20, 1e20):
        x = np.tile(CODEBOOK * np.float32(factor), 4)
        np.testing.assert_array_equal(dequantize(quantize(x, double=False)), x)


def test_a_short_last_block_has_its_own_absmax() -> None:
    """E5 (b): two scales, 1 and 8, and the largest errors."""
    x = drawn("tail")
    made = quantize(x, double=False)
    np.testing.assert_array_equal(made.absmax, [1.0, 8.0])
    error = np.abs(dequantize(made) - x)
    assert error[:64].max() == pytest.approx(0.1451, abs=5e-5) and error[64:].max() == pytest.approx(1.0590, abs=5e-5)
    assert error[:64].max() <= HALF_GAP and error[64:].max() <= 8 * HALF_GAP


@pytest.mark.parametrize("double", [False, True])
def test_zeros_stay_zeros(double: bool) -> None:
    """E5 (c); all of it, or a block beside others."""
    got = dequantize(quantize(np.zeros(64), double))
    assert not got.any() and np.isfinite(got).all()
    got = dequantize(quantize(drawn("zeros"), double))
    assert not got[:64].any() and got[64:].any()


@pytest.mark.parametrize("shape", [(64 * 300 + 5,), (3, 5, 7), (1,), (17, 192), (0,), ()])
def test_double_quantisation_of_any_shape(shape: tuple[int, ...]) -> None:
    """E5 (d): the shape is kept; each absmax is off by at most 0.0071 of the largest |absmax - mean| of its 256."""
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    single, double = quantize(x, double=False), quantize(x)
    np.testing.assert_array_equal(single.packed, double.packed)
    exact, got = single.absmax.astype(np.float64), block_absmax(double).astype(np.float64)
    for first in range(0, exact.size, 256):
        part = slice(first, first + 256)
        away = np.abs(exact[part] - float(double.offset)).max()
        assert (np.abs(got - exact)[part] <= 0.0071 * away + 4 * 2.0**-24 * exact.max()).all()
    assert dequantize(double).shape == shape
    error = np.abs(dequantize(single).ravel() - x.ravel())
    assert (error <= np.repeat(single.absmax, 64)[: x.size] * np.float32(HALF_GAP)).all()
    assert (double.packed.size, double.absmax.size) == (-(-x.size // 2), -(-x.size // 64))


def test_ties_go_down() -> None:
    x = np.concatenate([MIDPOINTS, [1.0], np.nextafter(MIDPOINTS, np.float32(2))]).astype(np.float32)
    indices = unpack_nibbles(quantize(x, double=False).packed, x.size)
    np.testing.assert_array_equal(indices, [*range(15), 15, *range(1, 16)])


def test_the_even_element_is_in_the_high_nibble() -> None:
    made = quantize(np.array([1.0, -1.0, 0.0]), double=False)
    np.testing.assert_array_equal(made.packed, [0xF0, 0x77])  # an odd length ends with a zero


def test_quantising_a_merged_delta_again_loses_it() -> None:
    """E4: why a merge is 16-bit on the dequantised weight."""
    x = np.tile(CODEBOOK, 4)
    touched = np.abs(x) < 1
    merged = np.where(touched, x + np.float32(0.01), x)
    np.testing.assert_array_equal(dequantize(quantize(merged, double=False)), x)
    kept = merged.astype(ml_dtypes.bfloat16) != x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(kept, touched)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    """E5 (e)."""
    x = np.ones((2, 64))
    x[1, 3] = value
    with pytest.raises(
        InputError, match=r"nf4: weight has 1 values that are not finite in float32, the first at \(1, 3\)"
    ):
        quantize(x)


def test_magnitudes_that_could_overflow_are_refused_where_doubled() -> None:
    """An absmax of the second level may be off upwards; of the first it is exact."""
    x = np.full((20, 64), np.finfo(np.float32).max)
    x[3] = 0
    with pytest.raises(InputError, match=r"nf4: .* magnitude is 3\.40282347e\+38, expected at most 3\.37e\+38.*scale"):
        quantize(x)
    np.testing.assert_array_equal(dequantize(quantize(x, double=False)), x)


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_magnitudes_stay_finite(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.full((256, 64), 3.37e38, np.float32)
    x[rng.integers(0, 256, rng.integers(1, 250))] *= np.float32(rng.uniform(0, 1) if seed else 0)
    got = dequantize(quantize(x))
    assert np.isfinite(got).all() and (np.abs(got - x) <= 0.0071 * 3.37e38).all()


@pytest.mark.parametrize("largest", [0.0, 1.01e-38, 1e-30, 1.0, 8.5e37, 3.4e38])
def test_the_range_of_the_bound(largest: float) -> None:
    """Next to the midpoint of the widest gap, where the error is largest; above 8.5e37 by 3e-7 more."""
    x = np.linspace(-0.848097, -0.848096, 64)
    x[0] = 1
    x = (x * largest).astype(np.float32)
    error = np.abs(dequantize(quantize(x, double=False)).astype(np.float64) - x).max()
    assert error <= (HALF_GAP + 4 * 2.0**-24 + (3e-7 if largest > 8.5e37 else 0)) * largest


def test_below_the_range_of_the_bound_the_error_may_reach_absmax() -> None:
    """As in bitsandbytes: 1e-38 divides, and what is far below it becomes zero."""
    x = np.full(64, 1e-41, np.float32)
    assert not dequantize(quantize(x, double=False)).any()
