"""cvt between every pair of types: rounding by mode, clamping and NaN rules of PTX, narrow floats as their bits.

A narrow float (f16, bf16, tf32, e4m3, e5m2) is made in two exact steps: the value in float64, exact or rounded to odd
(integers of more than 53 bits), is divided by the format's quantum at its exponent, a power of two, rounded to an
integer in the wanted mode, and multiplied back; then it is written in the format's bits. The two hot conversions,
float32 to f16 and to bf16 to nearest-even, have their own shorter way.

float to integer (PTX ISA, cvt, integer notes): clamped to the target's range; NaN gives 0, or, when the source is f64
or the target has 64 bits, 1 << (width - 1).

bf16 arrays are uint16 bits, tf32 uint32 bits, e4m3 and e5m2 uint8 bits; f16 is np.float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyllm.sim.rounding import NAN16, Array, flush, has_nan, nan16, nan32, nan64

ROUND: dict[str, Callable[..., Any]] = {
    "n": np.rint,
    "z": np.trunc,
    "m": np.floor,
    "p": np.ceil,
    "na": lambda x: np.copysign(np.floor(np.abs(x)) + (np.abs(x) % 1 >= 0.5), x),
}


@dataclass(frozen=True)
class Format:
    """A float format: stored mantissa bits, least normal exponent, largest number, whether it has infinities."""

    digits: int
    low: int
    largest: float
    infinite: bool = True


FORMATS = {
    "f16": Format(10, -14, 65504.0),
    "bf16": Format(7, -126, (2 - 2.0**-7) * 2.0**127),
    "f32": Format(23, -126, (2 - 2.0**-23) * 2.0**127),
    "tf32": Format(10, -126, (2 - 2.0**-10) * 2.0**127),
    "e5m2": Format(2, -14, 57344.0),
    "e4m3": Format(3, -6, 448.0, infinite=False),
}


def quantize(x: Array, name: str, mode: str = "rn", finite: bool = False) -> Array:
    """float64 (exact, or rounded to odd) to the float64 of the number that format `name` rounds it to.

    Beyond the largest number: infinity, or the largest number where the mode rounds inwards, or (`finite`) wherever
    the input is not NaN, .satfinite.
    """
    fmt = FORMATS[name]
    exponent = np.maximum(np.frexp(x)[1] - 1, fmt.low) - fmt.digits
    result = np.ldexp(ROUND[mode[1:]](np.ldexp(x, -exponent)), exponent)
    over = np.abs(result) > fmt.largest
    if np.count_nonzero(over):
        limit = np.copysign(fmt.largest, x)
        inwards = (mode == "rz") | ((mode == "rm") & (x > 0)) | ((mode == "rp") & (x < 0))
        keep_infinite = np.isinf(x) & (not finite)
        result = np.where(over, np.where(~keep_infinite & (inwards | finite), limit, np.copysign(np.inf, x)), result)
    return result


def encode(x: Array, name: str) -> Array:
    """float64 numbers that format `name` holds, written in it: f16 and f32 as themselves, the others as bits."""
    if name == "f16":
        return nan16(x.astype(np.float16))
    single = nan32(x.astype(np.float32))
    if name == "f32":
        return single
    bits = single.view(np.uint32)
    if name == "tf32":
        return bits
    if name == "bf16":
        return (bits >> np.uint32(16)).astype(np.uint16)
    half = x.astype(np.float16).view(np.uint16)
    if name == "e5m2":
        code = (half >> np.uint16(8)).astype(np.uint8)
    else:  # e4m3: float16's exponent less 8, and a subnormal range that float16 has as normal numbers
        size = np.abs(x)
        normal = ((half & np.uint16(0x7FFF)) >> np.uint16(7)).astype(np.int64) - 64
        code = np.where(size < 2.0**-6, np.nan_to_num(size) * 2.0**9, normal).astype(np.uint8)
        code |= (np.signbit(x) * np.uint8(128)).astype(np.uint8)
    return np.where(x != x, np.uint8(0x7F), code)


def narrow(x: Array, name: str, mode: str, relu: bool = False, finite: bool = False) -> Array:
    """float16/32/64 to format `name`, with .relu (negative to +0, NaN kept) and .satfinite."""
    if not relu and not finite and x.dtype == np.float32:
        if mode == "rn" and name == "f16":
            return nan16(x.astype(np.float16))
        if mode == "rn" and name == "bf16":
            return f32_to_bf16(x)
        if mode == "rna" and name == "tf32":
            return f32_to_tf32(x)
    value = quantize(x.astype(np.float64), name, mode, finite)
    if relu:
        value = np.where(value <= 0, 0.0, value)
    return encode(value, name)


def f32_to_tf32(x: Array) -> Array:
    """float32 to tf32 bits to nearest, ties away from zero (cvt.rna.tf32.f32); the low 13 bits are zero.

    Only sizes are rounded: a NaN loses its low bits, and becomes an infinity when it has no others. The manual says
    nothing about NaN here, nor about the low 13 bits of any result; this is what an H200 gives.
    """
    bits = x.view(np.uint32)
    top = np.uint32(0x7F800000)
    half = ((bits & top) != top) * np.uint32(0x1000)
    return (bits + half) & np.uint32(0xFFFFE000)


def to_f64(x: Array) -> Array:
    """float16 or float32 to float64; a NaN keeps its sign and payload, and becomes quiet."""
    wide = x.astype(np.float64)
    return nan64("cvt", wide, wide)


def f64_to_f16(x: Array, mode: str) -> Array:
    """float64 to float16; a NaN keeps its sign and the first bits of its payload, and becomes quiet."""
    r = encode(quantize(x, "f16", mode), "f16")
    if has_nan(x):
        missing = x != x
        bits = np.ascontiguousarray(x[missing]).view(np.uint64)
        sign, payload = bits >> np.uint64(48) & np.uint64(0x8000), bits >> np.uint64(42) & np.uint64(0x3FF)
        r.view(np.uint16)[missing] = sign | payload | np.uint64(0x7E00)
    return r


def f32_to_bf16(x: Array) -> Array:
    """float32 to bf16 bits to nearest-even; NaN is 0x7fff."""
    bits = x.view(np.uint32)
    high = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    if has_nan(x):
        high[x != x] = NAN16
    return high


def bf16_to_f32(x: Array) -> Array:
    """bf16 bits to float32; NaN is the canonical one."""
    return nan32(np.left_shift(x, np.uint32(16), dtype=np.uint32).view(np.float32))


def small_to_f64(x: Array, name: str) -> Array:
    """e4m3 or e5m2 bits to float64."""
    wide = x.astype(np.uint16)
    if name == "e5m2":
        return (wide << np.uint16(8)).view(np.float16).astype(np.float64)
    size = x & np.uint8(0x7F)
    # As a float16 the same bits stand for 2^-8 of the number, subnormals included.
    value = ((wide & np.uint16(0x7F)) << np.uint16(7)).view(np.float16).astype(np.float64) * 256.0
    value = np.where(size == 0x7F, np.nan, value)
    return np.where(x & np.uint8(0x80) != 0, -value, value)


def odd_f64(x: Array) -> Array:
    """An integer array to float64, rounded to odd beyond 53 bits."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64)
    size = np.abs(x).view(np.uint64) if x.dtype.kind == "i" else x
    sticky = (size & np.uint64(0x7FF)) != 0
    cut = ((size >> np.uint64(11)) | sticky).astype(np.float64) * 2048.0
    result = np.where(size >> np.uint64(53) != 0, cut, size.astype(np.float64))
    return np.where(x < 0, -result, result) if x.dtype.kind == "i" else result


def int_to_float(x: Array, name: str, mode: str) -> Array:
    """Any integer array to f16, bf16, f32 or f64."""
    if mode == "rn" and name in ("f32", "f64"):
        return x.astype(np.float32 if name == "f32" else np.float64)
    if name == "f64":
        return _int_to_f64(x, mode)
    return encode(quantize(odd_f64(x), name, mode), name)


def _int_to_f64(x: Array, mode: str) -> Array:
    """Directed rounding to 53 bits: the magnitude's bits beyond them are cut, or one unit is added to the cut."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64)
    negative = x < 0
    size = np.abs(x).view(np.uint64) if x.dtype.kind == "i" else x
    # Odd rounding leaves a number's 53 bits, the last of which is wrong only where `odd` differs from the integer.
    excess = np.maximum(np.frexp(odd_f64(size))[1] - 53, 0).astype(np.uint64)
    cut = size >> excess
    away = (cut << excess != size) & {"rz": False, "rm": negative, "rp": ~negative}[mode]
    result = np.ldexp((cut + away).astype(np.float64), excess.astype(np.int64))
    return np.where(negative, -result, result)


def float_to_int(x: Array, dtype: Any, mode: str, ftz: bool = False) -> Array:
    """float16/32/64 to an integer dtype, mode rni, rzi, rmi or rpi, clamped; NaN as PTX has it."""
    target = np.dtype(dtype)
    width = 8 * target.itemsize
    wide_nan = x.dtype == np.float64 or width == 64
    x = (flush(x) if ftz else x).astype(np.float64)
    rounded = ROUND[mode[1:-1]](x)
    info = np.iinfo(target)
    if width < 64:
        result = np.clip(np.nan_to_num(rounded, nan=0.0, posinf=np.inf, neginf=-np.inf), info.min, info.max)
        result = result.astype(target)
    else:
        result = _float_to_int64(rounded, target)
    if wide_nan and has_nan(x):
        one = target.type(info.min) if target.kind == "i" else target.type(1 << (width - 1))
        result = np.where(x != x, one, result)
    return result


def _float_to_int64(x: Array, target: np.dtype[Any]) -> Array:
    """Whole float64 numbers to int64 or uint64, clamped; each cast is within its range."""
    half = 2.0**63
    low = np.where(np.abs(x) < half, x, 0.0).astype(np.int64)
    if target.kind == "i":
        return np.where(x >= half, np.iinfo(np.int64).max, np.where(x <= -half, np.iinfo(np.int64).min, low))
    upper = np.where((x >= half) & (x < 2 * half), x - half, 0.0).astype(np.int64).view(np.uint64)
    result = np.where(x > 0, low, 0).view(np.uint64)
    result = np.where(x >= half, upper | np.uint64(1 << 63), result)
    return np.where(x >= 2 * half, ~np.uint64(0), result)


def saturate_int(x: Array, dtype: Any) -> Array:
    """An integer array clamped to the range of another integer dtype."""
    source, target = np.iinfo(x.dtype), np.iinfo(dtype)
    return np.clip(x, max(source.min, target.min), min(source.max, target.max)).astype(dtype)


def join(high: Array, low: Array) -> Array:
    """Two 16-bit (8-bit) bit arrays as one of twice the width."""
    nbytes = high.dtype.itemsize
    wide = np.dtype(f"u{2 * nbytes}")
    bits = np.dtype(f"u{nbytes}")
    return (high.view(bits).astype(wide) << wide.type(8 * nbytes)) | low.view(bits)


def pack(a: Array, b: Array, rest: Array | None, name: str) -> Array:
    """cvt.pack: int32 a and b clamped to type `name` (s or u, and bits): b lowest, then a, then low bits of rest."""
    bits = int(name[1:])
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if name[0] == "s" else (0, (1 << bits) - 1)
    mask = np.uint32((1 << bits) - 1)
    ta, tb = (np.clip(x, low, high).view(np.uint32) & mask for x in (a, b))
    packed = (ta << np.uint32(bits)) | tb
    return packed if rest is None else packed | (rest << np.uint32(2 * bits))
