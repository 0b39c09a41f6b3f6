"""Fused multiply-add of float32 and float64: one rounding of the exact a b + c.

float32. In float64 the product of two float32 is exact (48 of 53 bits), so s = fl64(a b + c) carries one rounding error
and fl32(s) a second. The two differ from one rounding only where s is a midpoint of two float32 and inexact: rounding
is monotone and midpoints are float64 numbers, so any other s lies on the same side of every midpoint as the exact sum.
Midpoints are found by their bits and the few that there are (but with bfloat16 data every tenth sum is an exact tie)
are nudged by the sign of the two-sum error before the second rounding:

    normal results      the low 29 bits of s are 1 followed by zeros; this is also the midpoint between the largest
                        float32 and infinity
    subnormal results   a midpoint is inexact as a float32, so the conversion raises the underflow flag, which NumPy
                        reads anyway: these lanes go through rounding to odd, which is right always, and slower

Rejected: rounding every sum to odd (12 more passes); long double (x87, 40 times slower, and absent on some machines).

float64. Boldo and Melquiond's algorithm (IEEE TC 57(4), 2008): error-free product and sums, the two low parts added to
odd, then one ordinary addition. It needs products that neither overflow nor lose bits below 2^-1074: operands beyond
moderate exponents are scaled by powers of two first, and a result that would be subnormal, which would round twice,
is computed from fractions instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from cupyllm.sim.rounding import Array, exact_f64, nan32, nan64, odd_sum, round32, zero_sign

LOW29 = np.uint64(0x1FFFFFFF)
MIDPOINT = np.uint64(0x10000000)

# float64 elements of scratch that fma_f32_many works on at a time: three arrays of 128 KiB stay in the L2 cache.
BLOCK = 16384
# Up to this many lanes a call's overhead outweighs a copy, so that products are formed by fancy indexing.
FEW_LANES = 256


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f32: float32 arrays of broadcastable shapes; a fresh float32 array of the broadcast shape.

    12 NumPy calls: 6.0 us at 64 lanes, 7.6 at 512, 9.8 at 2048, 12.6 at 4096 (one x86 core with AVX-512).
    """
    p = a.astype(np.float64) * b.astype(np.float64)
    c = c.astype(np.float64)
    s = p + c
    try:
        with np.errstate(under="raise"):
            r = s.astype(np.float32)
    except FloatingPointError:
        return nan32(odd_sum(p, c).astype(np.float32))
    midpoints = (s.view(np.uint64) & LOW29) == MIDPOINT
    if np.count_nonzero(midpoints):
        _settle(r, p, c, s, midpoints)
    return nan32(r)


def fma_f32_many(a: Sequence[Array], b: Sequence[Array], c: Sequence[Array] | Array) -> Array:
    """n independent fma.rn.f32, a[i] b[i] + c[i]: float32 arrays whose shapes all broadcast together, `c` a sequence of
    n, or one array [n, ...] as this function returns it. A fresh float32 array [n, *broadcast shape].

    Each distinct array object of `a` and `b` is widened to float64 once, all n sums are checked and rounded together.
    Microseconds an fma, against fma_f32 called n times (one x86 core with AVX-512; 8 + 8 distinct operands):

        lanes      64     512    2048    4096
        n = 16    1.6     2.6     5.2     8.8
        n = 64    0.8     2.0     4.7     8.1
        single    6.0     7.6     9.8    12.6

    A sequence as `c` costs 0.4 more. At n = 3 the two are equal up to 512 lanes, and this one is ahead beyond.
    Slower: scratch for all n at once (beyond 128 KiB an array the allocator maps fresh pages at every call: 40 us an
    fma at 2048 lanes), mixed float64-float32 operands and dtype= (both go through NumPy's cast buffer).
    """
    n = len(a)
    stacked = isinstance(c, np.ndarray)
    shapes = {x.shape for x in (*a, *b)} | ({c.shape[1:]} if isinstance(c, np.ndarray) else {x.shape for x in c})
    shape = next(iter(shapes)) if len(shapes) == 1 else np.broadcast_shapes(*shapes)
    lanes = prod(shape)
    wide, index_a, index_b = _widen(a, b, shape)
    out = np.empty((n, *shape), np.float32)
    rows = max(1, min(n, BLOCK // lanes))
    scratch = np.empty((4, rows, *shape))
    for k in range(0, n, rows):
        m = min(rows, n - k)
        p, e = scratch[0, :m], scratch[1, :m]
        if lanes <= FEW_LANES:
            np.multiply(wide[index_a[k : k + m]], wide[index_b[k : k + m]], p)
        else:
            for i, left, right in zip(range(m), index_a[k : k + m], index_b[k : k + m], strict=True):
                np.multiply(wide[left], wide[right], p[i])
        if stacked:
            e[...] = c[k : k + m]
        else:
            for i in range(m):
                e[i] = c[k + i]
        _round_block(out[k : k + m], p, e, scratch[2, :m], scratch[3, :m])
    return nan32(out)


def fma_f32_directed(a: Array, b: Array, c: Array, mode: str) -> Array:
    """fma.rz, .rm or .rp of float32; NaN as it comes."""
    p, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    return zero_sign(round32(odd_sum(p, c), mode), p, c, mode)


def fma_odd(a: Array, b: Array, c: Array) -> Array:
    """a b + c of float64 arrays that hold float32 (or narrower) values: float64 rounded to odd."""
    return odd_sum(a * b, c)


def _widen(a: Sequence[Array], b: Sequence[Array], shape: tuple[int, ...]) -> tuple[Array, list[int], list[int]]:
    """Every distinct operand once as float64 [number, *shape], and where each a[i] and b[i] is in it."""
    place: dict[int, int] = {}
    distinct: list[Array] = []
    indices = []
    for operands in (a, b):
        index = []
        for x in operands:
            if (at := place.get(id(x))) is None:
                at = place[id(x)] = len(distinct)
                distinct.append(x)
            index.append(at)
        indices.append(index)
    wide = np.empty((len(distinct), *shape))
    for i, x in enumerate(distinct):
        wide[i] = x
    return wide, indices[0], indices[1]


def _round_block(r: Array, p: Array, c: Array, s: Array, scratch: Array) -> None:
    """r = p + c rounded once, for float64 p and c and float32 r of one shape; `s` and `scratch` are like p."""
    np.add(p, c, s)
    try:
        with np.errstate(under="raise"):
            r[...] = s
    except FloatingPointError:
        r[...] = odd_sum(p, c)
        return
    low = np.bitwise_and(s.view(np.uint64), LOW29, scratch.view(np.uint64))
    midpoints = low == MIDPOINT
    if np.count_nonzero(midpoints):
        _settle(r, p, c, s, midpoints)


def _settle(r: Array, p: Array, c: Array, s: Array, midpoints: Array) -> None:
    """Correct `r`, the float32 of s = fl(p + c), where s is a midpoint and not the exact sum."""
    where = np.nonzero(midpoints)
    p, c, s = np.broadcast_to(p, midpoints.shape)[where], np.broadcast_to(c, midpoints.shape)[where], s[where]
    part = s - p
    error = (p - (s - part)) + (c - part)
    inexact = np.flatnonzero(error)
    if inexact.size:
        nudged = np.nextafter(s[inexact], np.copysign(np.inf, error[inexact]))
        r[tuple(axis[inexact] for axis in where)] = nudged.astype(np.float32)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f64: float64 arrays of broadcastable shapes. 70 us at 2048 lanes, 39 at 64."""
    if _moderate(a) and _moderate(b) and _moderate(c) and _moderate(a * b):
        return _fma_f64_moderate(a, b, c)
    return _fma_f64_scaled(a, b, c)


def _moderate(x: Array) -> bool:
    """Whether every element is zero or of magnitude 2^-400 to 2^400, so that no step of fma_f64 can go out of range."""
    size = np.abs(x)
    return bool(np.max(size) < 2.0**400) and not np.count_nonzero((size < 2.0**-400) & (size != 0))


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a b = p + e exactly (Dekker, Numerische Mathematik 18, 1971), without over- or underflow in any step."""
    p = a * b
    split = 134217729.0  # 2^27 + 1
    wide = a * split
    a_high = wide - (wide - a)
    a_low = a - a_high
    wide = b * split
    b_high = wide - (wide - b)
    b_low = b - b_high
    return p, a_low * b_low - (((p - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b = s + e exactly (Knuth)."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def _fma_f64_moderate(a: Array, b: Array, c: Array) -> Array:
    """Boldo and Melquiond's algorithm."""
    high, low = _two_product(a, b)
    t, t_low = _two_sum(c, low)
    v, v_low = _two_sum(high, t)
    result = v + odd_sum(t_low, v_low)
    # The error-free steps lose the sign of a zero sum; a b is exact there.
    return result if np.count_nonzero(result) == result.size else np.where(result == 0, high + c, result)


def _fma_f64_scaled(a: Array, b: Array, c: Array) -> Array:
    """Any exponents, infinities and NaN: mantissas through the moderate algorithm, powers of two put back after it."""
    a, b, c = np.broadcast_arrays(a, b, c)
    (ma, ea), (mb, eb), (mc, ec) = np.frexp(a), np.frexp(b), np.frexp(c)
    exponent = ea + eb
    # ma mb is a multiple of 2^-106 below 1. Beyond +-120 only the order of magnitude of c's distance matters, as a
    # sticky bit below one of the two; where c is the larger one the result's exponent is c's.
    distance = np.clip(ec - exponent, -120, 120)
    exponent = np.where((ec - exponent > 120) & (c != 0), ec - 120, exponent)
    scaled = _fma_f64_moderate(ma, mb, np.ldexp(mc, distance))
    result = np.ldexp(scaled, exponent)
    tiny = np.flatnonzero((np.abs(result) < 2.0**-1021) & (scaled != 0))
    if tiny.size:
        result.reshape(-1)[tiny] = exact_f64("fma", "rn", *(x.reshape(-1)[tiny] for x in (a, b, c)))
    # A zero product is exact, and its scaled sum with c may be out of range. An infinite or NaN c decides alone when a
    # and b are finite: a b may overflow against it.
    finite = np.isfinite(a) & np.isfinite(b)
    result = np.where(~finite | (a == 0) | (b == 0), a * b + c, result)
    return nan64("fma", np.where(finite & ~np.isfinite(c), c, result), a, b, c)
