"""The .approx and .full functions: the exact value in float64, rounded to the nearest result.

The hardware's own results come from tables and interpolation that are not published; they lie within the bounds of
isa.APPROXIMATE, and so does the nearest result (exp2_f16's is cut off instead, as the hardware's is). Special values
(infinities, zeros, NaN, subnormals with .ftz) follow the manual's tables exactly. Rejected: imitating the tables of one
generation, which would be wrong on the next.

Arrays are float32 (float64 where named so) of any shape.
"""

from __future__ import annotations

import numpy as np

from cupyllm.sim.rounding import Array, flush, nan16, nan32

NAN64 = np.uint64(0x7FFFFFFF00000000)  # of rcp and rsqrt.approx.ftz.f64, whose lower half is zero


def exp2(x: Array) -> Array:
    """ex2.approx.f32."""
    return nan32(np.exp2(x.astype(np.float64)).astype(np.float32))


def exp2_f16(x: Array) -> Array:
    """ex2.approx.f16 of float16, rounded towards zero.

    That the hardware cuts off is not said in the manual, but its bound of 2^-9.9 is just more than the 2^-10 that
    cutting off costs; and an H200 gives these bits wherever the result is subnormal, where the bound, being relative,
    allows less than the format's spacing.
    """
    exact = np.exp2(x.astype(np.float64))
    r = exact.astype(np.float16)
    r.view(np.uint16)[...] -= (r > exact) & (r < np.inf)  # the number below
    return nan16(r)


def log2(x: Array) -> Array:
    """lg2.approx.f32; negative numbers give NaN, both zeros -inf."""
    return nan32(np.log2(x.astype(np.float64)).astype(np.float32))


def sine(x: Array) -> Array:
    """sin.approx.f32."""
    return nan32(np.sin(x.astype(np.float64)).astype(np.float32))


def cosine(x: Array) -> Array:
    """cos.approx.f32."""
    return nan32(np.cos(x.astype(np.float64)).astype(np.float32))


def tanh(x: Array) -> Array:
    """tanh.approx.f32."""
    return nan32(np.tanh(x.astype(np.float64)).astype(np.float32))


def reciprocal(x: Array) -> Array:
    """rcp.approx.f32."""
    return nan32((1.0 / x.astype(np.float64)).astype(np.float32))


def root(x: Array) -> Array:
    """sqrt.approx.f32."""
    return nan32(np.sqrt(x))


def reciprocal_root(x: Array) -> Array:
    """rsqrt.approx.f32; sqrt(-0) = -0, so that -0 gives -inf."""
    return nan32((1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32))


def reciprocal_root_f64(x: Array) -> Array:
    """rsqrt.approx.f64 of float64."""
    return 1.0 / np.sqrt(x)


def divide(a: Array, b: Array) -> Array:
    """div.approx.f32, which is a times the reciprocal of b: that flushes to zero where |b| > 2^126."""
    quotient = np.divide(a, b)
    size = np.abs(b)
    large = (size > 2.0**126) & (size < np.inf)
    if np.count_nonzero(large):
        zero = np.copysign(np.float32(0), b) * a  # 0 x inf = NaN
        quotient = np.where(large, zero, quotient)
    return nan32(quotient)


def upper_half(x: Array, function: str) -> Array:
    """rcp or rsqrt.approx.ftz.f64: of the upper 32 bits of float64, to the upper 32 bits."""
    top = np.uint64(0xFFFFFFFF00000000)
    x = flush((x.view(np.uint64) & top).view(np.float64))
    result = 1.0 / (x if function == "rcp" else np.sqrt(x))
    bits = flush(result).view(np.uint64) & top
    return np.where(result != result, NAN64, bits).view(np.float64)
