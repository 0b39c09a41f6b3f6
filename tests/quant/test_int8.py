"""int8: values by hand, the bound, rows of zeros, refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyllm.errors import InputError
from cupyllm.quant import int4, int8, nf4
from cupyllm.quant.int8 import Int8, dequantize, quantize

U32 = 2.0**-24


def test_values_by_hand() -> None:
    made = quantize(
        np.array([[127.0, -127.0, 63.5, 0.4, -0.6], [0.0, 0.0, 0.0, 0.0, 0.0], [-2.54, 1.27, 0.0, 0.011, 0.0]])
    )
    np.testing.assert_array_equal(made.codes[0], [127, -127, 64, 0, -1])  # 63.5 is a tie, to even
    np.testing.assert_array_equal(made.codes[1], 0)
    np.testing.assert_array_equal(made.codes[2], [-127, 64, 0, 1, 0])  # 1.27 / 0.02 = 63.5 or so, from above
    np.testing.assert_allclose(made.scales, [1.0, 0.0, 0.02], rtol=1e-7)
    assert made.codes.dtype == np.int8 and made.scales.dtype == np.float32


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (50, 1000), (4, 0)])
@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e30])
def test_error_is_at_most_half_a_scale(shape: tuple[int, int], spread: float) -> None:
    weight = (np.random.default_rng(0).standard_normal(shape) * spread).astype(np.float32)
    made = quantize(weight)
    error = np.abs(dequantize(made).astype(np.float64) - weight)
    largest = np.abs(weight).max(axis=1, initial=0.0)[:, None]
    assert (error <= made.scales[:, None] * (0.5 + 1e-9) + 4 * U32 * largest).all()
    assert (np.abs(made.codes.astype(np.int64)).max(axis=1, initial=0) == (127 if shape[1] else 0)).all()


def test_what_was_quantised_once_stays_as_it_is() -> None:
    codes = np.random.default_rng(1).integers(-127, 128, (5, 40)).astype(np.int8)
    codes[:, 0] = 127
    made = Int8(codes, np.array([1.0, 0.25, 2.0**-20, 8.0, 2.0**20], np.float32))
    again = quantize(dequantize(made))
    np.testing.assert_array_equal(again.codes, made.codes)
    np.testing.assert_array_equal(again.scales, made.scales)


def test_a_row_too_small_for_its_scale_becomes_zero() -> None:
    """Its scale would be a number that float32 has not."""
    made = quantize(np.full((1, 4), 1e-45))
    assert made.scales[0] == 0 and not made.codes.any()


def test_any_float_dtype() -> None:
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        assert quantize(np.array([[1.0, -0.5]], dtype)).codes.tolist() == [[127, -64]]
    assert quantize(np.array([[1.0, -0.5]], ">f4")).codes.tolist() == [[127, -64]]


@pytest.mark.parametrize("codec", [int4, int8, nf4])
@pytest.mark.parametrize("dtype", ["complex64", "U3", "S3", "O", "?", "i4", "u1", "longdouble"])
def test_other_dtypes_are_refused(codec: Any, dtype: str) -> None:
    weight = np.ones((2, 128)).astype(dtype)
    name = codec.__name__.rpartition(".")[2]
    with pytest.raises(InputError) as caught:
        codec.quantize(weight)
    assert str(caught.value) == (
        f"{name}: weight is {weight.dtype}, expected a NumPy array of float16, bfloat16, float32 or float64; convert "
        "it first"
    )


@pytest.mark.parametrize("codec", [int4, int8, nf4])
@pytest.mark.parametrize("weight", [[[1.0] * 128], None, 1.0])
def test_what_is_no_array_is_refused(codec: Any, weight: Any) -> None:
    with pytest.raises(InputError, match=rf": weight is {type(weight).__name__}, expected a NumPy array of float16"):
        codec.quantize(weight)


def test_magnitudes_that_could_overflow_are_refused() -> None:
    with pytest.raises(InputError, match=r"int8: .* magnitude is 3\.40282347e\+38, expected at most 3\.4e\+38.*scale"):
        quantize(np.full((1, 4), -np.finfo(np.float32).max))


def test_the_largest_magnitudes_stay_finite() -> None:
    weight = np.linspace(3.38e38, 3.4e38, 5000)[:, None].astype(np.float32) * np.array([1, -1], np.float32)
    got = dequantize(quantize(weight))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, weight, rtol=2 * U32)
    bfloat = ml_dtypes.finfo(ml_dtypes.bfloat16).max
    assert np.isfinite(dequantize(quantize(np.full((1, 4), bfloat, ml_dtypes.bfloat16)))).all()


@pytest.mark.parametrize("exponent", range(-149, -110, 3))
def test_error_of_subnormal_scales(exponent: int) -> None:
    """The bound of the module's docstring: half a scale and 127 2^-150."""
    weight = np.random.default_rng(7).uniform(-1, 1, (200, 64)) * 2.0**exponent
    weight = weight.astype(np.float32)
    made = quantize(weight)
    error = np.abs(dequantize(made).astype(np.float64) - weight).max(axis=1)
    largest = np.abs(weight.astype(np.float64)).max(axis=1)
    assert (error <= made.scales.astype(np.float64) / 2 + 4 * U32 * largest + 127 * 2.0**-150).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight = np.ones((4, 6))
    weight[2, 3] = value
    with pytest.raises(
        InputError, match=r"int8: weight has 1 values that are not finite in float32, the first at \(2, 3\)"
    ):
        quantize(weight)


def test_a_vector_is_refused() -> None:
    with pytest.raises(InputError, match=r"int8: weight shape is \(6,\), expected \[out, in\]"):
        quantize(np.ones(6))
