"""int4: values by hand, the bound, zero points, AWQ's and GPTQ's tensors, refusals."""

from __future__ import annotations

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


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 128), (3, 0)):
        made = quantize(np.zeros(shape))
        assert dequantize(made).shape == shape and isinstance(made, Int4)
