"""int8: values by hand, the bound, rows of zeros, refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupyllm.errors import InputError
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
