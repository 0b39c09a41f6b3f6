"""NF4, as bitsandbytes stores it: blocks of 64 along the flattened weight, value = CODEBOOK[index] absmax[block].

The 16 levels are quantiles of a normal distribution (Dettmers et al., QLoRA, arXiv:2305.14314, section 3). Bytes are
bitsandbytes' (0.50, quantize_4bit; MIT licence, read for the format only), so that checkpoints pass both ways:
- an index is the number of midpoints between neighbouring levels below x (1 / absmax), in float32: a tie goes down;
- two indices a byte, the even element in the high nibble; an odd length ends with a low nibble of index 7 (zero);
- absmax float32, of a short last block over its own elements alone; a block of zeros has absmax 0 and indices 7;
- double quantisation: offset = mean(absmax), then absmax - offset as 8-bit indices into the signed dynamic map
  (Dettmers, 8-bit approximations, arXiv:1511.04561) in blocks of 256, each with a float32 absmax2;
  absmax = map[index] absmax2 + offset in float32, multiplied, rounded, added, rounded.

Errors: of a value at most WIDEST_GAP / 2 = 0.1519036 absmax (the widest gap is -1 to -0.696); of an absmax at most
half the map's widest gap, 0.00707 max|absmax - mean| of its block of 256. Both are so where the block's absmax (or
max|absmax - mean|) is 0 or from 1e-38 to 8.5e37. Below, as in bitsandbytes, values are divided by 1e-38 and not by
absmax, and the error may reach absmax (or the deviation) itself; above, 1 / absmax is subnormal and adds 3e-7 absmax.
Double-quantised, magnitudes above LIMIT are refused: an absmax that is off upwards may be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyllm.quant.checks import finite_float32

BLOCK, OUTER_BLOCK = 64, 256
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
CODEBOOK = np.array(LEVELS, np.float32)
MIDPOINTS = (CODEBOOK[1:] + CODEBOOK[:-1]) / np.float32(2)
ZERO = 7  # the index of 0
TINY = np.float32(1e-38)
LIMIT = 3.37e38  # double-quantised: times 1.00708, the error of an absmax, is 3.3939e38, a float32


@dataclass(frozen=True)
class Nf4:
    """`shape`: of the weight, whose size is not in `packed` when it is odd."""

    packed: np.ndarray  # uint8 [ceil(n/2)], the even element in the high nibble
    shape: tuple[int, ...]
    absmax: np.ndarray  # float32 [B] or, double-quantised, uint8 [B]; B = ceil(n/64)
    offset: np.floating[Any] | float = 0.0
    absmax2: np.ndarray | None = None  # float32 [ceil(B/256)], None: not double-quantised
    code2: np.ndarray | None = None  # float32 [256], the dynamic map


def quantize(weight: np.ndarray, double: bool = True) -> Nf4:
    """weight of any shape, of FLOATS. `double`: quantise absmax, too. Raises InputError on another dtype, where values
    are not finite and, with `double`, above LIMIT."""
    values = finite_float32(weight, "nf4", LIMIT if double else np.inf)
    indices, absmax = _blockwise(values.ravel(), BLOCK, MIDPOINTS)
    packed = pack_nibbles(indices)
    if not double:
        return Nf4(packed, values.shape, absmax)
    offset = np.float32(absmax.mean(dtype=np.float64)) if absmax.size else np.float32(0)
    code = dynamic_map()
    inner, absmax2 = _blockwise(absmax - offset, OUTER_BLOCK, (code[1:] + code[:-1]) / np.float32(2))
    return Nf4(packed, values.shape, inner, offset, absmax2, code)


def dequantize(quantized: Nf4) -> np.ndarray:
    """float32, of the weight's shape."""
    size = int(np.prod(quantized.shape, dtype=np.int64))
    indices = unpack_nibbles(quantized.packed, size)
    return (CODEBOOK[indices] * np.repeat(block_absmax(quantized), BLOCK)[:size]).reshape(quantized.shape)


def block_absmax(quantized: Nf4) -> np.ndarray:
    """float32 [B]: absmax of every block, as bitsandbytes computes it."""
    if quantized.absmax2 is None:
        return quantized.absmax
    assert quantized.code2 is not None
    inner = quantized.code2[quantized.absmax]
    return inner * np.repeat(quantized.absmax2, OUTER_BLOCK)[: inner.size] + quantized.offset


def pack_nibbles(indices: np.ndarray) -> np.ndarray:
    """uint8 [n] of 0..15 -> uint8 [ceil(n/2)], the even element in the high nibble."""
    even = np.append(indices, np.uint8(ZERO)) if indices.size % 2 else indices
    return (even[::2] << 4 | even[1::2]).astype(np.uint8)


def unpack_nibbles(packed: np.ndarray, size: int) -> np.ndarray:
    """The inverse: uint8 [size]."""
    return np.stack([packed >> 4, packed & 15], axis=-1).ravel()[:size]


def dynamic_map() -> np.ndarray:
    """float32 [256], ascending: bitsandbytes' create_dynamic_map(signed=True, max_exponent_bits=7, total_bits=8).

    Decade i of 7 (10^(i - 6)) has 2^i values a sign, the midpoints of as many equal steps from 0.1 to 1; with 0 and 1.
    """
    values = [np.float32(0), np.float32(1)]
    for decade in range(7):
        edges = _linspace(2**decade + 1)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        values += [*middles, *-middles]
    return np.sort(np.array(values, np.float32))


def _linspace(count: int) -> np.ndarray:
    """torch.linspace(0.1, 1, count) in float32: each half from its own end, the product and the sum rounded once."""
    start, stop = np.float32(0.1), np.float32(1)
    step = (stop - start) / np.float32(count - 1)
    i = np.arange(count, dtype=np.float64)
    rising = (float(start) + float(step) * i).astype(np.float32)
    falling = (float(stop) - float(step) * (count - 1 - i)).astype(np.float32)
    return np.where(i < count // 2, rising, falling)


def _blockwise(values: np.ndarray, block: int, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 [n], float32 [ceil(n/block)]): how many bounds lie below each value over its block's absmax; and those."""
    size = values.size
    padded = np.zeros(-(-size // block) * block, np.float32)  # zeros leave the last block's absmax alone
    padded[:size] = values
    blocks = padded.reshape(-1, block)
    absmax = np.abs(blocks).max(axis=1, initial=0.0)
    inverse = np.float32(1) / np.maximum(absmax, TINY)
    scaled = np.clip(blocks * inverse[:, None], np.float32(-1), np.float32(1))
    return np.searchsorted(bounds, scaled.ravel()[:size], side="left").astype(np.uint8), absmax
