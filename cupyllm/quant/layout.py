"""Device layouts of quantised weights: what the kernels of ops/quantized_linear.py read. `pack`, `unpack` are inverse.

Letters: M out features, K in features; W [M,K] integer codes, one a weight: int8 q (two's complement), int4 n (0..15),
nf4 the codebook's index (0..15). Scales are kept apart and never multiplied into the codes.

Codes: uint8 [MB, KT, 512], MB = ceil(M / 16), KT = tiles along K. A tile is 512 bytes: 32 lanes of 16 consecutive
bytes, and holds 16 rows by DEPTH k (int8: 32; int4 and nf4: 64). Lane 4 g + t (g 0..7, t 0..3) has exactly the A
fragments of mma.sync.m16n8k16 (and of a warp of wgmma.m64nXk16 with A in registers) of the tile, so one 16-byte load a
lane feeds 2 (int8) or 4 mma steps, k in its natural order:
    step s covers k = 16 s .. 16 s + 15 of the tile; its registers are pairs (first k in the low half)
    a0 = W[g][16s + 2t, +1]   a1 = W[g + 8][same k]   a2 = W[g][16s + 2t + 8, +9]   a3 = W[g + 8][same k as a2]
  int4: 32-bit word s (little endian): nibble i is a_i's first, nibble i + 4 its second, so
        (word >> 4 i) & 0x000f000f | 0x43004300 is the bf16 pair 128 + n.
  nf4:  word s: byte i is a_i, its first in the low nibble: a byte is an index into 256 bf16 pairs.
  int8: words 2 s and 2 s + 1: (a0, a1) and (a2, a3); bytes 0 and 2 of a word are its first register's pair, bytes 1
        and 3 its second's. With h = word or word >> 8, (h & 0x007f007f | 0x43004300) - (h & 0x00800080 | 0x43004300)
        is the bf16 pair q, exactly: 128 + (low 7 bits) less 128 or, of a negative q, 256.
K of int8 is padded to a multiple of 64 (KT even), rows to a multiple of 16. Padding is the code of zero (int8 0, int4
8, nf4 7), its scales are 0. Kernels do not rely on that: past K they read zeros of x, past M they store nothing.

Scales, G k a group, in the order that a walk along K of a block of 16 rows meets them:
  int8: float32 [M], one a row.
  int4: int32 [MB, K / 128, 16] (block of rows, group, row in block): a float32 whose low 8 mantissa bits are the zero
        point (0..16). scale = bits & 0xffffff00 as float; weight = (n - zero) * scale. float16 and bfloat16 scales
        survive exactly.
  nf4:  absmax float32 [MB, K / 64, 16]; or, double-quantised, absmax codes uint8 of that shape, and `nested` float32
        [257 + B2]: the 256 values of the dynamic map, the offset, then B2 = ceil(M K / 64 / 256) second-level absmax.
        absmax of row m, block b: i = m K / 64 + b (rows not padded); map[code] * nested[257 + i / 256] + offset,
        multiplied and then added in float32, each rounded. i of padding rows may lie past the end: clamp the row to
        M - 1; what comes of it is not stored. weight = codebook[index] * absmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupyllm.errors import InputError
from cupyllm.quant.int4 import SCALE_MASK, Int4
from cupyllm.quant.int8 import Int8
from cupyllm.quant.nf4 import ZERO, Nf4, pack_nibbles, unpack_nibbles

FORMATS = ("int8", "int4", "nf4")
ROWS = 16  # of a tile
DEPTH = {"int8": 32, "int4": 64, "nf4": 64}  # k of a tile
STEP = 64  # K is padded to a multiple
TILE_BYTES = 512
GROUP = {"int4": 128, "nf4": 64}  # k a scale
MAP = 256  # values of the dynamic map, the head of `nested`; the offset follows


def codes_shape(format: str, num_rows: int, depth: int) -> tuple[int, int, int]:
    """[MB, KT, 512] of a weight [num_rows, depth]."""
    return -(-num_rows // ROWS), -(-depth // STEP) * STEP // DEPTH[format], TILE_BYTES


def format_number(format: str, params: Sequence[object]) -> int:
    """FORMAT of cu/quantized.cuh: the place in FORMATS; behind them double-quantised nf4, which has 3 parameters."""
    return len(FORMATS) if len(params) == 3 else FORMATS.index(format)


def pack(weight: Int8 | Int4 | Nf4) -> tuple[np.ndarray, ...]:
    """A product's parameters in the device layout: (codes, scales), of double-quantised nf4 (codes, absmax, nested).

    Raises InputError on an nf4 weight that is no matrix or whose K is not a multiple of 64.
    """
    if isinstance(weight, Int8):
        return _pack_int8(weight.codes), weight.scales
    if isinstance(weight, Int4):
        bits = np.ascontiguousarray(weight.scales).view(np.uint32)
        assert not (bits & ~SCALE_MASK).any(), "int4 scales have 8 clear bits"
        words = _rows_to_blocks((bits | weight.zeros).view(np.int32))
        return _pack_4bit(weight.codes, 8, nf4=False), words
    check_nf4_shape(weight.shape)
    num_rows, depth = weight.shape
    codes = _pack_4bit(unpack_nibbles(weight.packed, num_rows * depth).reshape(num_rows, depth), ZERO, nf4=True)
    absmax = _rows_to_blocks(weight.absmax.reshape(num_rows, depth // GROUP["nf4"]))
    if weight.absmax2 is None:
        return codes, absmax
    assert weight.code2 is not None
    return codes, absmax, np.concatenate([weight.code2, [weight.offset], weight.absmax2]).astype(np.float32)


def unpack(format: str, params: tuple[np.ndarray, ...], num_rows: int, depth: int) -> Int8 | Int4 | Nf4:
    """The inverse of `pack`, of a weight [num_rows, depth]."""
    codes = params[0]
    if format == "int8":
        return Int8(_unpack_int8(codes)[:num_rows, :depth].copy(), params[1])
    values = _unpack_4bit(codes, nf4=format == "nf4")[:num_rows, :depth]
    scales = _blocks_to_rows(params[1], num_rows)
    if format == "int4":
        bits = scales.view(np.uint32)
        return Int4(values.copy(), (bits & SCALE_MASK).view(np.float32), (bits & ~SCALE_MASK).astype(np.uint8))
    packed, shape = pack_nibbles(values.ravel()), (num_rows, depth)
    if len(params) == 2:
        return Nf4(packed, shape, scales.ravel())
    code, offset, absmax2 = np.split(params[2], (MAP, MAP + 1))
    return Nf4(packed, shape, scales.ravel(), np.float32(offset[0]), absmax2, code)


def check_nf4_shape(shape: tuple[int, ...]) -> None:
    """Blocks must lie inside rows. Raises InputError."""
    if len(shape) != 2 or shape[1] % GROUP["nf4"]:
        raise InputError(
            f"nf4: weight shape is {shape}, expected [out, in] with in a multiple of {GROUP['nf4']}, so that no block "
            "spans two rows; dequantise it to use it in a product"
        )


def _rows_to_blocks(values: np.ndarray) -> np.ndarray:
    """[M,G] -> [MB,G,16], zeros in the padding."""
    padded = _padded(values, ROWS, 1, 0)
    return np.ascontiguousarray(padded.reshape(padded.shape[0] // ROWS, ROWS, values.shape[1]).swapaxes(1, 2))


def _blocks_to_rows(blocks: np.ndarray, num_rows: int) -> np.ndarray:
    """[MB,G,16] -> [num_rows,G]."""
    rows = blocks.swapaxes(1, 2).reshape(blocks.shape[0] * ROWS, blocks.shape[1])
    return np.ascontiguousarray(rows[:num_rows])


def _padded(values: np.ndarray, rows: int, cols: int, fill: int) -> np.ndarray:
    pad = ((0, -values.shape[0] % rows), (0, -values.shape[1] % cols))
    return np.pad(values, pad, constant_values=fill)


# A weight seen as [MB, high row, g, KT, step, high k, t, second]: row = 16 MB + 8 high + g, k = DEPTH KT + 16 step +
# 8 high + 2 t + second. The tuples list these axes in the order in which a tile's codes lie in memory.
_AXES_INT8 = (0, 3, 2, 6, 4, 5, 7, 1)  # bytes; word 2 step + high k, byte 2 second + high row
_AXES_INT4 = (0, 3, 2, 6, 4, 7, 5, 1)  # nibbles; word step, nibble 4 second + 2 high k + high row
_AXES_NF4 = (0, 3, 2, 6, 4, 5, 1, 7)  # nibbles; word step, byte 2 high k + high row, nibble second


def _permute(values: np.ndarray, steps: int, axes: tuple[int, ...]) -> np.ndarray:
    """Padded codes [16 MB, K] in the order of memory: [MB, KT, codes of a tile]."""
    seen = values.reshape(values.shape[0] // ROWS, 2, 8, values.shape[1] // (16 * steps), steps, 2, 4, 2)
    return np.ascontiguousarray(seen.transpose(axes)).reshape(seen.shape[0], seen.shape[3], 256 * steps)


def _unpermute(tiles: np.ndarray, steps: int, axes: tuple[int, ...]) -> np.ndarray:
    """The inverse of `_permute`."""
    sizes = (tiles.shape[0], 2, 8, tiles.shape[1], steps, 2, 4, 2)
    seen = tiles.reshape([sizes[axis] for axis in axes]).transpose(np.argsort(axes))
    return np.ascontiguousarray(seen).reshape(tiles.shape[0] * ROWS, tiles.shape[1] * 16 * steps)


def _pack_int8(codes: np.ndarray) -> np.ndarray:
    return _permute(_padded(codes, ROWS, STEP, 0), 2, _AXES_INT8).view(np.uint8)


def _unpack_int8(tiles: np.ndarray) -> np.ndarray:
    return _unpermute(tiles, 2, _AXES_INT8).view(np.int8)


def _pack_4bit(codes: np.ndarray, fill: int, *, nf4: bool) -> np.ndarray:
    nibbles = _permute(_padded(codes, ROWS, STEP, fill), 4, _AXES_NF4 if nf4 else _AXES_INT4)
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).astype(np.uint8)


def _unpack_4bit(tiles: np.ndarray, *, nf4: bool) -> np.ndarray:
    nibbles = np.stack([tiles & 15, tiles >> 4], axis=-1).reshape(*tiles.shape[:2], 2 * TILE_BYTES)
    return _unpermute(nibbles, 4, _AXES_NF4 if nf4 else _AXES_INT4)
