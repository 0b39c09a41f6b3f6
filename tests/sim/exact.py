"""Correct rounding by definition, for tests: floats as bit patterns, values as fractions.

The encodings of the non-negative numbers of a format are ordered as their values are, so the two neighbours of a
number are found by bisection over encodings; no quantum, scaling or float arithmetic is involved.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from functools import lru_cache
from math import isqrt

FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52), "e5m2": (5, 2), "tf32": (8, 10)}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "e5m2": 0x7F}


@lru_cache(maxsize=None)
def value(bits: int, name: str) -> Fraction | None:
    """The number that `bits` encode; None for infinities and NaN."""
    e, m = FORMATS[name]
    field, mantissa = bits >> m & (1 << e) - 1, bits & (1 << m) - 1
    if field == (1 << e) - 1:
        return None
    bias = (1 << e - 1) - 1
    size = Fraction(mantissa + (1 << m if field else 0)) * Fraction(2) ** (max(field, 1) - bias - m)
    return -size if bits >> (e + m) else size


def infinity(name: str) -> int:
    e, m = FORMATS[name]
    return (1 << e) - 1 << m


def is_nan(bits: int, name: str) -> bool:
    e, m = FORMATS[name]
    return bits & (1 << e + m) - 1 > infinity(name)


def rounded(x: Fraction, name: str, mode: str = "rn", zero_bits: int = 0) -> int:
    """The encoding of `x` rounded; `zero_bits` is the zero that an x of 0 gives."""
    e, m = FORMATS[name]
    if x == 0:
        return zero_bits
    sign = (x < 0) << (e + m)
    size = abs(x)
    low, high = 0, infinity(name)  # value(low) <= size < value(high), infinity counting as the next power of two
    beyond = Fraction(2) ** (1 << e - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if value(middle, name) <= size:  # type: ignore[operator]
            low = middle
        else:
            high = middle
    below = value(low, name)
    assert below is not None
    above = value(high, name) if high < infinity(name) else beyond
    assert above is not None
    if below == size:
        return sign | low
    if mode in ("rn", "rna"):
        gap = (size - below) - (above - size)
        up = gap > 0 or (gap == 0 and (mode == "rna" or low % 2 == 1))
    else:
        up = mode == ("rm" if x < 0 else "rp")
    return sign | (high if up else low)


def root_neighbours(x: Fraction) -> Fraction:
    """A fraction on the same side of every float64 or float32 number and midpoint as the square root of x."""
    shift = 4**600
    whole = isqrt(x.numerator * shift // x.denominator)
    if Fraction(whole * whole, shift) == x:
        return Fraction(whole, 2**600)
    return Fraction(2 * whole + 1, 2**601)


def f32(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def f64(x: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", x))[0]
