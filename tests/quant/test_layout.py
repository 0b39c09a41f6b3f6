"""Device layouts: pack and unpack are inverse, and places by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.errors import InputError
from cupyllm.quant import int4, int8, nf4
from cupyllm.quant.layout import TILE_BYTES, codes_shape, pack, unpack
from cupyllm.reference.quantized_linear import decode

SHAPES = ((1, 128), (15, 128), (16, 256), (17, 384), (40, 1024))


def made(format: str, shape: tuple[int, int], seed: int = 0) -> int8.Int8 | int4.Int4 | nf4.Nf4:
    weight = np.random.default_rng(seed).standard_normal(shape)
    if format == "int8":
        return int8.quantize(weight)
    return int4.quantize(weight) if format == "int4" else nf4.quantize(weight, double=format == "nf4 double")


@pytest.mark.parametrize("format", ["int8", "int4", "nf4", "nf4 double"])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 64), (16, 100), (5, 1), (0, 128), (3, 0), (0, 0)])
def test_unpack_is_the_inverse_of_pack(format: str, shape: tuple[int, int]) -> None:
    if shape[1] % {"int8": 1, "int4": 128}.get(format, 64):
        return
    name, quantised = format.split()[0], made(format, shape)
    params = pack(quantised)
    assert params[0].shape == codes_shape(name, *shape) and params[0].dtype == np.uint8
    again = unpack(name, params, *shape)
    for field, value in vars(quantised).items():
        other = getattr(again, field)
        assert (value is None) == (other is None), field
        if value is not None:
            np.testing.assert_array_equal(other, value, field)
            assert np.asarray(other).dtype == np.asarray(value).dtype, field
    for one, two in zip(params, pack(again), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("format", ["int8", "int4", "nf4", "nf4 double"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_decodes_what_was_packed(format: str, shape: tuple[int, int]) -> None:
    """By its own formula for each weight's byte."""
    quantised = made(format, shape, 1)
    codec = {"int8": int8, "int4": int4}.get(format, nf4)
    codes, scales, nested = (*pack(quantised), None)[:3]
    assert codes is not None and scales is not None
    got = decode(codes, scales, nested, format.split()[0], *shape)
    np.testing.assert_allclose(got, codec.dequantize(quantised), rtol=1e-6)


def test_an_int8_tile_by_hand() -> None:
    """Lane 4 g + t: words 2 s and 2 s + 1, in each a0's first, a1's first, a0's second, a1's second."""
    codes = (np.arange(16)[:, None] * 8 + np.arange(64)[None, :] // 8).astype(np.int8)
    codes[3, 21] = -5  # row 3, k 21: step 1, 2 t + second = 5, so t 2, second 1
    codes[11, 29] = -6  # row g 3 + 8, high k
    tiles = pack(int8.Int8(codes, np.ones(16, np.float32)))[0]
    assert tiles.shape == (1, 2, TILE_BYTES)
    lane = tiles[0, 0, (3 * 4 + 2) * 16 :][:16].view(np.int8)
    assert lane[8 + 2] == -5 and lane[8 + 4 + 3] == -6
    assert lane[0] == codes[3, 4] and lane[1] == codes[11, 4]


def test_an_int4_tile_by_hand() -> None:
    codes = np.full((16, 128), 8, np.uint8)
    codes[0, 0], codes[0, 1], codes[8, 0], codes[0, 8], codes[8, 9] = 1, 2, 3, 4, 5
    codes[7, 63] = 6  # lane 4 * 7 + 3, step 3, high k, second: a2's second
    tiles = pack(int4.Int4(codes, np.ones((16, 1), np.float32), np.full((16, 1), 8, np.uint8)))[0]
    first = int(tiles[0, 0, :4].view(np.uint32)[0])
    assert [first >> 4 * i & 15 for i in range(8)] == [1, 3, 4, 8, 2, 8, 8, 5]
    last = int(tiles[0, 0, 31 * 16 + 12 :][:4].view(np.uint32)[0])
    assert [last >> 4 * i & 15 for i in range(8)] == [8, 8, 8, 8, 8, 8, 6, 8]


def test_an_nf4_tile_by_hand() -> None:
    codes = np.zeros(16 * 64, np.uint8).reshape(16, 64)
    codes[0, 0], codes[0, 1], codes[8, 0], codes[0, 8], codes[8, 9] = 1, 2, 3, 4, 5
    weight = nf4.Nf4(nf4.pack_nibbles(codes.ravel()), (16, 64), np.ones(16, np.float32))
    tiles = pack(weight)[0]
    assert tiles[0, 0, :4].tolist() == [0x21, 0x03, 0x04, 0x50]


def test_scales_by_hand() -> None:
    weight = made("int4", (20, 256))
    words = pack(weight)[1]
    assert isinstance(weight, int4.Int4) and words.shape == (2, 2, 16) and words.dtype == np.int32
    word = int(words.view(np.uint32)[1, 0, 3])
    assert word & 255 == weight.zeros[19, 0]
    assert np.uint32(word & 0xFFFFFF00).view(np.float32) == weight.scales[19, 0]
    assert not words[1, :, 4:].any()
    doubled = made("nf4 double", (20, 256))
    assert isinstance(doubled, nf4.Nf4) and doubled.absmax2 is not None
    _, absmax, nested = pack(doubled)
    assert absmax[1, 2, 3] == doubled.absmax[19 * 4 + 2] and absmax.dtype == np.uint8
    assert nested[256] == doubled.offset and nested.size == 257 + doubled.absmax2.size


@pytest.mark.parametrize("shape", [(4, 100), (256,), (2, 2, 64)])
def test_nf4_blocks_that_span_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"nf4: weight shape is .*expected \[out, in\] with in a multiple of 64"):
        pack(nf4.quantize(np.ones(shape)))
