"""INT4 in groups of 128 along K: weight[m,k] = (n[m,k] - zero[m,g]) scale[m,g], n in 0..15, g = k / 128.

With zero points, because AWQ and GPTQ checkpoints have them (`from_awq`, `from_gptq`), because the bound on the error
becomes (largest - smallest) / 30 in place of largest magnitude / 14 (on Gaussian weights the error is 14% less, and
more where they lean to one side), and because they cost a kernel nothing: it subtracts 128 + zero where it would
subtract 136. Zero itself stays exact: the range always holds it, and zero points are integers.

Scales are float32 with 15 mantissa bits, the low 8 bits clear: there the device layout keeps the zero point
(layout.py). Every float16 and bfloat16 scale is such a number. Rounding a scale up keeps the group's ends in range,
so the error is at most scale / 2 (and roundings, 8 u32 of the magnitude). scale is within 2^-14 of a fifteenth of the
range where the range is at least 1.8e-37, 15 times the smallest normal float32; below, scales are multiples of 2^-141
(3.6e-43), and subnormal roundings add up to 1e-43 to the error. Magnitudes above LIMIT are refused: half a scale
beyond them may be infinite. Groups lie inside rows: K must be a multiple of 128, as in those checkpoints;
other K are refused, since padding would make shapes that no other program reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.errors import InputError
from cupyllm.quant.checks import FLOATS, matrix

GROUP = 128
LARGEST = 15
LIMIT = 3.18e38  # a value is off by scale / 2 <= LIMIT / 15 (1 + 2^-14): the sum, 3.3923e38, is a float32
SCALE_MASK = np.uint32(0xFFFFFF00)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column 8 w + AWQ_ORDER[i]


@dataclass(frozen=True)
class Int4:
    codes: np.ndarray  # uint8 [M,K], 0..15
    scales: np.ndarray  # float32 [M,K/128], low 8 bits clear
    zeros: np.ndarray  # uint8 [M,K/128], 0..16 (GPTQ stores zero - 1)


def quantize(weight: np.ndarray) -> Int4:
    """weight [M,K] of FLOATS. Raises InputError on another dtype, on values that are not finite or above LIMIT, and on
    K % 128."""
    values = matrix(weight, "int4", GROUP, LIMIT)
    groups = values.reshape(values.shape[0], values.shape[1] // GROUP, GROUP)
    # Halved before they are subtracted: the difference of two finite numbers may not be finite.
    low = np.minimum(groups.min(axis=2, initial=0.0), 0) / 2
    high = np.maximum(groups.max(axis=2, initial=0.0), 0) / 2
    scales = rounded_up((high - low) / np.float32(LARGEST / 2))
    divisors = np.where(scales > 0, scales, np.float32(1))
    zeros = np.rint(-2 * (low / divisors))
    codes = np.clip(np.rint(groups / divisors[..., None] + zeros[..., None]), 0, LARGEST)
    codes = np.where((scales == 0)[..., None], zeros[..., None], codes)
    return Int4(codes.astype(np.uint8).reshape(values.shape), scales, zeros.astype(np.uint8))


def dequantize(quantized: Int4) -> np.ndarray:
    """float32 [M,K]."""
    num_rows, depth = quantized.codes.shape
    codes = quantized.codes.reshape(num_rows, depth // GROUP, GROUP).astype(np.float32)
    return ((codes - quantized.zeros[..., None]) * quantized.scales[..., None]).reshape(num_rows, depth)


def rounded_up(scales: np.ndarray) -> np.ndarray:
    """The next float32 whose low 8 bits are clear; of finite numbers from 0."""
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFF)) & SCALE_MASK).view(np.float32)


def from_gptq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray | None = None) -> Int4:
    """GPTQ's tensors (AutoGPTQ, GPTQModel's format "gptq"): qweight int32 [K/8,M], nibble i of a word is row 8 w + i;
    qzeros int32 [K/128,M/8], nibble i is column 8 w + i less one; scales float16 [K/128,M].

    Raises InputError on words that are not native int32 or uint32, on M % 8 (qzeros of the format has M // 8 columns,
    so the last rows' zero points would be missing), on another group size and on rows out of order (act-order: g_idx
    is not k / 128).
    """
    _check_words("gptq", qweight, qzeros)
    depth, num_rows = qweight.shape[0] * 8, qweight.shape[1]
    _check_groups("gptq", depth, num_rows, qzeros, scales)
    if g_idx is not None and not np.array_equal(g_idx, np.arange(depth) // GROUP):
        raise InputError(
            "gptq: g_idx is not k / 128, expected groups in order; act-order checkpoints are not supported"
        )
    codes = _nibbles(qweight.T)  # [M,K]
    zeros = _nibbles(qzeros).T + np.uint8(1)
    return Int4(codes, _scales("gptq", scales), np.ascontiguousarray(zeros))


def from_awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> Int4:
    """AWQ's tensors (AutoAWQ's "gemm" format): qweight int32 [K,M/8] and qzeros int32 [K/128,M/8], nibble i of a word
    is column 8 w + AWQ_ORDER[i]; scales float16 [K/128,M]. Raises InputError on words that are not native int32 or
    uint32 and on another group size."""
    _check_words("awq", qweight, qzeros)
    depth, num_rows = qweight.shape[0], qweight.shape[1] * 8
    _check_groups("awq", depth, num_rows, qzeros, scales)
    place = np.argsort(AWQ_ORDER)  # column c of a word is in nibble place[c]

    def columns(words: np.ndarray) -> np.ndarray:
        nibbles = _nibbles(words).reshape(*words.shape, 8)[..., place]
        return np.ascontiguousarray(nibbles.reshape(words.shape[0], 8 * words.shape[1]).T)

    return Int4(columns(qweight), _scales("awq", scales), columns(qzeros))


def _nibbles(words: np.ndarray) -> np.ndarray:
    """int32 [R,C] -> uint8 [R,8C], the lowest nibble first."""
    spread = np.ascontiguousarray(words).view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)
    return (spread & 15).astype(np.uint8).reshape(words.shape[0], 8 * words.shape[1])


def _check_words(name: str, qweight: np.ndarray, qzeros: np.ndarray) -> None:
    """Another width, byte order or kind would be read as other nibbles, without an error."""
    for label, words in (("qweight", qweight), ("qzeros", qzeros)):
        if not isinstance(words, np.ndarray) or words.dtype not in (np.int32, np.uint32) or words.ndim != 2:
            array = isinstance(words, np.ndarray)
            got = f"{words.dtype.str} ({words.dtype}) of shape {words.shape}" if array else type(words).__name__
            raise InputError(
                f"{name}: {label} is {got}, expected a matrix of native int32 or uint32; load it as the checkpoint "
                "stores it"
            )


def _check_groups(name: str, depth: int, num_rows: int, qzeros: np.ndarray, scales: np.ndarray) -> None:
    if not isinstance(scales, np.ndarray) or scales.dtype.type not in FLOATS:
        got = scales.dtype if isinstance(scales, np.ndarray) else type(scales).__name__
        raise InputError(f"{name}: scales are {got}, expected finite float16 or bfloat16 values; convert them first")
    if num_rows % 8:
        raise InputError(
            f"{name}: qweight is of a weight of {num_rows} rows, expected a multiple of 8, since a word of qzeros "
            "has 8 zero points; pad the rows"
        )
    if scales.shape != (depth // GROUP, num_rows) or depth % GROUP or qzeros.shape != (depth // GROUP, num_rows // 8):
        raise InputError(
            f"{name}: scales {scales.shape} and qzeros {qzeros.shape} of a weight of {num_rows} x {depth}, expected "
            f"{(depth // GROUP, num_rows)} and {(depth // GROUP, num_rows // 8)}; only groups of {GROUP} are supported"
        )


def _scales(name: str, scales: np.ndarray) -> np.ndarray:
    """[K/128,M] -> float32 [M,K/128]."""
    wide = np.ascontiguousarray(scales.T).astype(np.float32)
    if not np.isfinite(wide).all() or (wide.view(np.uint32) & ~SCALE_MASK).any():
        raise InputError(f"{name}: scales are {scales.dtype}, expected finite float16 or bfloat16 values; convert them")
    return wide
