"""int4: values by hand, the bound, zero points, AWQ's and GPTQ's tensors, refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyllm.errors import InputError
from cupyllm.quant.int4 import GROUP, Int4, dequantize, from_awq, from_gptq, quantize

U32 = 2.0**-24


def test_values_by_hand() -> None:
    weight = np.zeros((1, 128), np.float32)
    weight[0, :5] = [-2.0, 5.5, 0.24, 0.26, 1.0]
    made = quantize(weight)
    assert made.scales[0, 0] == 0.5 and made.zeros[0, 0] == 4
    np.testing.assert_array_equal(made.codes[0, :6], [0, 15, 4, 5, 6, 4])
    np.testing.assert_array_equal(dequantize(made)[0, :6], [-2.0, 5.5, 0.0, 0.5, 1.0, 0.0])


@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e30, 2e38])
@pytest.mark.parametrize("lean", [0.0, 3.0, -3.0])
def test_error_is_at_most_half_a_scale(spread: float, lean: float) -> None:
    """And a scale is a fifteenth of the range, zero included; a leaning group does not pay for the other side."""
    weight = np.clip(np.random.default_rng(0).standard_normal((60, 384)) + lean, -1.5 + lean, 1.5 + lean)
    weight = (weight / 4.5 * spread).astype(np.float32)
    made = quantize(weight)
    groups = weight.astype(np.float64).reshape(60, 3, GROUP)
    error = np.abs(dequantize(made).astype(np.float64).reshape(60, 3, GROUP) - groups)
    largest = np.abs(groups).max(axis=2)
    assert (error.max(axis=2) <= made.scales * 0.5 + 8 * U32 * largest).all()
    span = np.maximum(groups.max(axis=2), 0) - np.minimum(groups.min(axis=2), 0)
    assert (made.scales >= span / 15 * (1 - 1e-6)).all() and (made.scales <= span / 15 * (1 + 2.0**-14)).all()


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_groups_of_one_value(value: float) -> None:
    made = quantize(np.full((2, 256), value))
    np.testing.assert_allclose(dequantize(made), value, rtol=2.0**-14)
    assert (made.scales > 0).all() == (value != 0)


def test_scales_keep_the_zero_points_byte_clear() -> None:
    made = quantize(np.random.default_rng(1).standard_normal((9, 640)))
    assert not (made.scales.view(np.uint32) & 255).any()
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    assert not (halves.view(np.uint32) & 255).any()
    bfloats = (np.arange(0x10000, dtype=np.uint32) << 16).view(np.float32)
    assert not (bfloats.view(np.uint32) & 255).any()


def gptq(codes: np.ndarray, zeros: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """qweight [K/8,M] and qzeros [K/128,M/8] of codes [M,K] and zeros [M,K/128], one nibble at a time."""
    num_rows, depth = codes.shape
    qweight = np.zeros((depth // 8, num_rows), np.uint32)
    qzeros = np.zeros((depth // GROUP, num_rows // 8), np.uint32)
    for m in range(num_rows):
        for k in range(depth):
            qweight[k // 8, m] |= np.uint32(int(codes[m, k]) << 4 * (k % 8))
        for g in range(depth // GROUP):
            qzeros[g, m // 8] |= np.uint32(int(zeros[m, g]) - 1 << 4 * (m % 8))
    return qweight.view(np.int32), qzeros.view(np.int32)


def awq(codes: np.ndarray, zeros: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """qweight [K,M/8] and qzeros [K/128,M/8]: columns 0, 2, 4, 6, 1, 3, 5, 7 of eight, lowest nibble first."""
    num_rows, depth = codes.shape
    qweight = np.zeros((depth, num_rows // 8), np.uint32)
    qzeros = np.zeros((depth // GROUP, num_rows // 8), np.uint32)
    for m in range(num_rows):
        nibble = (m % 8) // 2 + 4 * (m % 2)
        for k in range(depth):
            qweight[k, m // 8] |= np.uint32(int(codes[m, k]) << 4 * nibble)
        for g in range(depth // GROUP):
            qzeros[g, m // 8] |= np.uint32(int(zeros[m, g]) << 4 * nibble)
    return qweight.view(np.int32), qzeros.view(np.int32)


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (16, 256)).astype(np.uint8)
    return codes, rng.integers(1, 16, (16, 2)).astype(np.uint8), rng.uniform(0.01, 0.1, (2, 16)).astype(np.float16)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_checkpoints_of_other_programs(name: str) -> None:
    codes, zeros, scales = drawn()
    made = from_gptq(*gptq(codes, zeros), scales) if name == "gptq" else from_awq(*awq(codes, zeros), scales)
    np.testing.assert_array_equal(made.codes, codes)
    np.testing.assert_array_equal(made.zeros, zeros)
    np.testing.assert_array_equal(made.scales, scales.T.astype(np.float32))
    by_hand = (float(codes[5, 200]) - float(zeros[5, 1])) * float(scales[1, 5])
    assert dequantize(made)[5, 200] == np.float32(by_hand)


def test_gptq_zero_points_reach_16() -> None:
    """It stores them less one."""
    codes, zeros, scales = drawn()
    zeros[:] = 16
    made = from_gptq(*gptq(codes, zeros), scales, np.arange(256) // 128)
    assert (made.zeros == 16).all()


def test_refusals() -> None:
    codes, zeros, scales = drawn()
    qweight, qzeros = gptq(codes, zeros)
    with pytest.raises(InputError, match=r"gptq: g_idx is not k / 128, .*act-order"):
        from_gptq(qweight, qzeros, scales, np.arange(256) % 2)
    with pytest.raises(InputError, match="only groups of 128 are supported"):
        from_gptq(qweight, np.zeros((4, 2), np.int32), np.ones((4, 16), np.float16))
    with pytest.raises(InputError, match="scales are float32, expected finite float16 or bfloat16 values"):
        from_gptq(qweight, qzeros, np.full((2, 16), 0.1, np.float32))
    with pytest.raises(InputError, match="int4: weight has 100 columns, expected a multiple of 128"):
        quantize(np.ones((2, 100)))
    with pytest.raises(
        InputError, match=r"int4: weight has 2 values that are not finite in float32, the first at \(0, 5\)"
    ):
        weight = np.ones((2, 128))
        weight[:, 5] = np.nan
        quantize(weight)


@pytest.mark.parametrize("dtype", ["<f4", ">i4", ">u4", "<i8", "<i2", "u1", "?", "O"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_words_of_another_dtype_are_refused(name: str, place: int, dtype: str) -> None:
    """A view as uint32 would take them for other nibbles."""
    codes, zeros, scales = drawn()
    words: list[Any] = list((gptq if name == "gptq" else awq)(codes, zeros))
    words[place] = words[place].astype(dtype)
    label, shown = ("qweight", "qzeros")[place], np.dtype(dtype).str.replace("|", r"\|").replace("?", r"\?")
    with pytest.raises(InputError, match=rf"^{name}: {label} is {shown} .*expected a matrix of native int32 or uint32"):
        from_gptq(words[0], words[1], scales) if name == "gptq" else from_awq(words[0], words[1], scales)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_words_of_uint32_are_the_same_words(name: str) -> None:
    codes, zeros, scales = drawn()
    qweight, qzeros = (gptq if name == "gptq" else awq)(codes, zeros)
    read: Any = from_gptq if name == "gptq" else from_awq
    made = read(qweight.view(np.uint32), qzeros.view(np.uint32), scales)
    np.testing.assert_array_equal(made.codes, codes)
    np.testing.assert_array_equal(made.zeros, zeros)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_tensors_that_are_no_matrices_or_arrays_are_refused(name: str) -> None:
    codes, zeros, scales = drawn()
    read: Any = from_gptq if name == "gptq" else from_awq
    qweight, qzeros = (gptq if name == "gptq" else awq)(codes, zeros)
    with pytest.raises(InputError, match=rf"{name}: qweight is list, expected a matrix"):
        read(qweight.tolist(), qzeros, scales)
    with pytest.raises(InputError, match=rf"{name}: qzeros is .* of shape \(4,\), expected a matrix"):
        read(qweight, qzeros.ravel(), scales)
    with pytest.raises(InputError, match=rf"{name}: scales are complex64, expected finite float16 or bfloat16"):
        read(qweight, qzeros, scales.astype(np.complex64))


@pytest.mark.parametrize("num_rows", [1, 7, 12])
@pytest.mark.parametrize("columns", [np.floor, np.ceil])
def test_gptq_rows_that_do_not_fill_a_word_of_zero_points_are_refused(num_rows: int, columns: Any) -> None:
    """The format has M // 8 columns of qzeros, and its writers ask for M % 32 == 0."""
    qweight, scales = np.zeros((16, num_rows), np.int32), np.ones((1, num_rows), np.float16)
    with pytest.raises(InputError, match=rf"gptq: qweight is of a weight of {num_rows} rows, expected a multiple of 8"):
        from_gptq(qweight, np.zeros((1, int(columns(num_rows / 8))), np.int32), scales)


@pytest.mark.parametrize("num_rows", [0, 8])
@pytest.mark.parametrize("depth", [0, 128])
def test_checkpoints_without_rows_or_columns(num_rows: int, depth: int) -> None:
    scales, qzeros = np.ones((depth // 128, num_rows), np.float16), np.zeros((depth // 128, num_rows // 8), np.int32)
    one = from_gptq(np.zeros((depth // 8, num_rows), np.int32), qzeros, scales)
    two = from_awq(np.zeros((depth, num_rows // 8), np.int32), qzeros, scales)
    for made in (one, two):
        assert made.codes.shape == dequantize(made).shape == (num_rows, depth)
        assert made.zeros.shape == made.scales.shape == (num_rows, depth // 128)


def test_magnitudes_that_could_overflow_are_refused() -> None:
    """bfloat16's largest value is below float32's and still too large: half a scale is added to it."""
    row = np.where(np.arange(128) % 2, 1, -1) * 3.39e38
    for dtype in (ml_dtypes.bfloat16, np.float32, np.float64):
        with pytest.raises(InputError, match=r"int4: .* magnitude is 3\.3.*e\+38, expected at most 3\.18e\+38.*scale"):
            quantize(row[None].astype(dtype))


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_magnitudes_stay_finite(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.uniform(-1, 1, (200, 128))
    weight[:, 0], weight[:, 1] = 1, -rng.uniform(0, 1, 200)  # every place of zero between two codes
    weight = (weight * rng.choice([-1, 1], (200, 1)) * 3.18e38).astype(np.float32)
    got = dequantize(quantize(weight))
    assert np.isfinite(got).all() and np.abs(got).max() > 3.18e38


@pytest.mark.parametrize("exponent", range(-149, -110, 3))
def test_error_of_subnormal_scales(exponent: int) -> None:
    """The bound of the module's docstring over all of them: half a scale and 1e-43."""
    weight = np.random.default_rng(7).uniform(-1, 1, (60, 256)) * 2.0**exponent
    weight = weight.astype(np.float32)
    made = quantize(weight)
    error = np.abs(dequantize(made).astype(np.float64) - weight).reshape(60, 2, GROUP).max(axis=2)
    largest = np.abs(weight.astype(np.float64)).reshape(60, 2, GROUP).max(axis=2)
    assert (error <= made.scales.astype(np.float64) / 2 + 8 * U32 * largest + 1e-43).all()


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 128), (3, 0)):
        made = quantize(np.zeros(shape))
        assert dequantize(made).shape == shape and isinstance(made, Int4)
