"""IEEE rounding, NaN, subnormal and saturation rules of float registers, over whole arrays.

A result is right when it is the exact value rounded once. NumPy's own +, -, *, / and sqrt on float32 and float64 do
that to nearest-even, so those rules are plain NumPy. What is here is the rest:

- directed rounding (.rz .rm .rp) of float32: the nearest result r is stepped to a neighbour by the sign of
  (exact - r), and that sign is exact in float64: products of two float32 have 48 bits, a quotient's is the sign of
  a - r b, a root's the sign of a - r r, and a sum is first rounded to odd.
- rounding to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE TC 57(4), 2008): an inexact
  float64 sum takes the neighbour whose last bit is 1. That bit stays sticky, so that rounding again to a format of at
  most 51 bits, in any mode, equals one rounding of the exact sum.
- directed float64, which no width of NumPy contains, goes through fractions, one element at a time: only interval
  arithmetic asks for it.

NaN: float32 arithmetic gives 0x7fffffff and half precision 0x7fff on NVIDIA GPUs, whatever went in; float64 passes a
NaN operand on, made quiet, its sign and payload kept, and generates 0xfff8000000000000 (PTX ISA 9.7.3 has payloads
supported in double precision alone). Which of several NaNs passes is not documented: NAN_ORDER is what an H200 was seen
to do. Looking for a NaN costs one pass: the dot product of an array with itself is NaN exactly when the array
holds one, since squares cannot cancel; it takes 0.5 us on 2048 float32, np.isnan(x).any() 1.6 us (one x86 core).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import inf, isqrt
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

NAN32 = np.uint32(0x7FFFFFFF)
NAN16 = np.uint16(0x7FFF)
NAN64 = np.uint64(0xFFF8000000000000)
QUIET64 = np.uint64(0x0008000000000000)
# By operation: operands of float64 by precedence of their NaNs. Division, which is no single instruction of the
# hardware, takes the first; sums, products and minima take the second, and a b + c takes b before c. That c is before
# a was not seen: it follows if a sum is a 1 + c.
NAN_ORDER = {"add": (1, 0), "sub": (1, 0), "mul": (1, 0), "min": (1, 0), "max": (1, 0), "fma": (1, 2, 0)}
SMALLEST_NORMAL = {np.dtype(np.float16): 2.0**-14, np.dtype(np.float32): 2.0**-126, np.dtype(np.float64): 2.0**-1022}


def nan32(x: Array) -> Array:
    """`x` (float32, owned by the caller) with every NaN made the canonical one, in place."""
    if (square := np.vdot(x, x)) != square:
        x.view(np.uint32)[x != x] = NAN32
    return x


def nan16(x: Array) -> Array:
    """`x` (float16, owned by the caller) with every NaN made the canonical one, in place."""
    missing = x != x
    if np.count_nonzero(missing):
        x.view(np.uint16)[missing] = NAN16
    return x


def nan64(name: str, x: Array, *operands: Array) -> Array:
    """`x` (float64, owned by the caller), the result of `name` of `operands`, with the GPU's NaNs, in place."""
    if has_nan(x):
        missing = x != x
        bits = np.full(np.count_nonzero(missing), NAN64)
        for i in reversed(NAN_ORDER.get(name, range(len(operands)))):
            passed = np.broadcast_to(operands[i], x.shape)[missing]
            bits = np.where(passed != passed, passed.view(np.uint64) | QUIET64, bits)
        x.view(np.uint64)[missing] = bits
    return x


def has_nan(x: Array) -> bool:
    """Whether a float32 or float64 array holds a NaN."""
    square = np.vdot(x, x)
    return bool(square != square)


def flush(x: Array) -> Array:
    """Subnormals as zeros of their sign (.ftz), for float16, float32 and float64; `x` itself when there are none."""
    tiny = np.abs(x) < x.dtype.type(SMALLEST_NORMAL[x.dtype])
    if not np.count_nonzero(tiny):
        return x
    return np.where(tiny, np.copysign(x.dtype.type(0), x), x)


def saturate(x: Array) -> Array:
    """Clamped to [0, 1]; NaN and -0 give +0 (.sat on floats)."""
    # fmax takes the number where the other is NaN; adding +0 turns the -0 that it may keep into +0.
    clamped = np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1))
    return np.add(clamped, x.dtype.type(0), clamped)


def odd_sum(p: Array, c: Array) -> Array:
    """p + c of float64 arrays, rounded to odd where inexact (and not overflowing)."""
    s = np.add(p, c)
    part = s - p
    error = (p - (s - part)) + (c - part)  # Knuth's two-sum: p + c = s + error exactly
    if np.count_nonzero(error):
        # abs() > 0 is False for the NaN error of an infinite sum.
        nudge = np.flatnonzero((np.abs(error) > 0) & ((s.view(np.uint64) & np.uint64(1)) == 0))
        flat = s.reshape(-1)
        flat[nudge] = np.nextafter(flat[nudge], np.copysign(np.inf, error.reshape(-1)[nudge]))
    return s


def step(r: Array, gap: Array, mode: str) -> Array:
    """The nearest result `r` moved, in place, to the one that `mode` wants; `gap` has the sign of (exact - r).

    A NaN gap moves nothing. A neighbour's bits are one more, away from zero, or one less; r is never a zero whose sign
    is against the exact result's.
    """
    if mode == "rn":
        return r
    bits = r.view(f"i{r.dtype.itemsize}")
    negative = bits < 0
    wrong = np.where(negative, gap > 0, gap < 0) if mode == "rz" else gap < 0 if mode == "rm" else gap > 0
    if mode == "rz":
        bits -= wrong
    elif np.count_nonzero(wrong):
        away = negative if mode == "rm" else ~negative
        bits += wrong & away
        bits -= wrong & ~away
    return r


def round32(x: Array, mode: str) -> Array:
    """float64, exact or rounded to odd, to float32 in mode rn, rz, rm or rp."""
    r = x.astype(np.float32)
    return r if mode == "rn" else step(r, x - r.astype(np.float64), mode)


def zero_sign(result: Array, p: Array, c: Array, mode: str) -> Array:
    """A sum of mode rm that is exactly zero is -0 unless both terms are +0; `result` is p + c."""
    if mode == "rm":
        zeros = (result == 0) & (p == -c)
        if np.count_nonzero(zeros):
            negative = np.where(np.signbit(p) | np.signbit(c), result.dtype.type(-0.0), result.dtype.type(0))
            return np.where(zeros, negative, result)
    return result


def add_f32(a: Array, b: Array, mode: str) -> Array:
    """a + b of float32 in a directed mode."""
    p, c = a.astype(np.float64), b.astype(np.float64)
    return zero_sign(round32(odd_sum(p, c), mode), p, c, mode)


def mul_f32(a: Array, b: Array, mode: str) -> Array:
    """a b of float32 in a directed mode; the product is exact in float64."""
    return round32(a.astype(np.float64) * b.astype(np.float64), mode)


def div_f32(a: Array, b: Array, mode: str, ftz: bool = False) -> Array:
    """a / b of float32 in a directed mode.

    ftz: a quotient below the least normal number before rounding is flushed, also where it would be rounded up to that
    number; the nearest result is subnormal exactly then, as no quotient lies within 2^-25 below a power of two.
    """
    r = np.divide(a, b)
    tiny = np.abs(r) < np.float32(SMALLEST_NORMAL[r.dtype]) if ftz else None
    wide = b.astype(np.float64)
    r = step(r, (a - r * wide) * np.copysign(1.0, wide), mode)
    return r if tiny is None else np.where(tiny, np.copysign(np.float32(0), r), r)


def sqrt_f32(a: Array, mode: str) -> Array:
    """The square root of float32 in a directed mode."""
    r = np.sqrt(a)
    wide = r.astype(np.float64)
    return step(r, a - wide * wide, mode)


# --- float64 in a directed mode, through exact rational numbers


def round_fraction(x: Fraction, mode: str, digits: int = 53, smallest: int = -1074, largest: int = 1024) -> float:
    """A nonzero rational number rounded to the float64 numbers of `digits` bits, multiples of 2^smallest, < 2^largest.

    The result may be +-inf. Ties go to even in mode rn and away from zero in mode rna.
    """
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    quantum = max(exponent - digits + 1, smallest)
    scaled = size / Fraction(2) ** quantum
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": rest > 0 and x < 0,
        "rp": rest > 0 and x > 0,
    }[mode]
    whole += up
    if whole.bit_length() + quantum > largest:
        outwards = mode in ("rn", "rna") or mode == ("rm" if x < 0 else "rp")
        value = inf if outwards else float((2**digits - 1) * Fraction(2) ** (largest - digits))
    else:
        value = float(whole * Fraction(2) ** quantum)
    return -value if x < 0 else value


def _root(x: Fraction) -> Fraction:
    """A rational number that rounds as the square root of `x` does: 200 bits of it, and a sticky one."""
    scale = 2**1400
    whole = isqrt(x.numerator * x.denominator * scale * scale)
    exact = whole * whole == x.numerator * x.denominator * scale * scale
    return Fraction(2 * whole + (not exact), 2 * scale * x.denominator)


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
    "sqrt": _root,
}
PLAIN: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": lambda a, b, c: a * b + c,
    "sqrt": np.sqrt,
}


def exact_f64(name: str, mode: str, *operands: Array) -> Array:
    """add, sub, mul, div, fma or sqrt of float64 in any mode, an element at a time (about 10 us each)."""
    result = np.array(PLAIN[name](*operands))  # right wherever an operand is not finite, and for exact zeros
    flat = result.reshape(-1)
    columns = [np.broadcast_to(x, result.shape).reshape(-1).tolist() for x in operands]
    for i, values in enumerate(zip(*columns, strict=True)):
        if not np.isfinite(values).all() or (name == "div" and values[1] == 0) or (name == "sqrt" and values[0] <= 0):
            if name == "fma" and np.isfinite(values[:2]).all():
                flat[i] = values[2]  # a b may overflow where c is infinite or NaN
            continue
        exact = EXACT[name](*map(Fraction, values))
        if exact:
            flat[i] = round_fraction(exact, mode)
        elif name in ("add", "sub", "fma"):
            p = np.float64(values[0]) * (np.float64(values[1]) if name == "fma" else 1.0)
            c = -values[-1] if name == "sub" else values[-1]
            flat[i] = zero_sign(flat[i : i + 1], np.array([p]), np.array([c]), mode)[0]
    return nan64(name, result, *operands)
