"""Half precision (f16, bf16), alone and in pairs: arithmetic, minima, comparisons; and minima of every float type.

One rounding of the exact result. float16 +, - and * through float32 (NumPy's own way) are exact before the rounding
or differ by double rounding only where that is harmless (24 >= 2 * 11 + 2 bits; Figueroa, SIGNUM 30(3), 1995). bf16
reaches float32's subnormals, where that argument fails, so bf16 goes through float64 rounded to odd, as both fmas do.

f16 arrays are np.float16; bf16 arrays are uint16 bits. A pair register (uint32) becomes an array with a last axis of
2, lower half first (`split`), so that shapes broadcast as registers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyllm.sim.convert import bf16_to_f32, encode, f32_to_bf16, quantize
from cupyllm.sim.fma import fma_odd
from cupyllm.sim.rounding import NAN16, Array, flush, nan16, nan32, nan64, odd_sum


def split(x: Array, dtype: Any) -> Array:
    """uint32 [...] as `dtype` (16 bits) [..., 2]."""
    return x[..., None].view(dtype)


def unsplit(x: Array) -> Array:
    """16-bit [..., 2] as uint32 [...]."""
    return np.ascontiguousarray(x).view(np.uint32)[..., 0]


def fma_f16(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f16; NaN canonical."""
    odd = fma_odd(a.astype(np.float64), b.astype(np.float64), c.astype(np.float64))
    return encode(quantize(odd, "f16"), "f16")


def _bf16_to_f64(x: Array) -> Array:
    return bf16_to_f32(x).astype(np.float64)


def add_bf16(a: Array, b: Array) -> Array:
    """add.bf16."""
    return encode(quantize(odd_sum(_bf16_to_f64(a), _bf16_to_f64(b)), "bf16"), "bf16")


def sub_bf16(a: Array, b: Array) -> Array:
    """sub.bf16."""
    return encode(quantize(odd_sum(_bf16_to_f64(a), -_bf16_to_f64(b)), "bf16"), "bf16")


def mul_bf16(a: Array, b: Array) -> Array:
    """mul.bf16; the product is exact in float64."""
    return encode(quantize(_bf16_to_f64(a) * _bf16_to_f64(b), "bf16"), "bf16")


def fma_bf16(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.bf16."""
    return encode(quantize(fma_odd(_bf16_to_f64(a), _bf16_to_f64(b), _bf16_to_f64(c)), "bf16"), "bf16")


def neg_bf16(x: Array) -> Array:
    """neg.bf16; NaN canonical."""
    return _nan_bf16(x ^ np.uint16(0x8000))


def abs_bf16(x: Array) -> Array:
    """abs.bf16; NaN canonical."""
    return _nan_bf16(x & np.uint16(0x7FFF))


def _nan_bf16(x: Array) -> Array:
    missing = (x & np.uint16(0x7FFF)) > np.uint16(0x7F80)
    if np.count_nonzero(missing):
        x[missing] = NAN16
    return x


def via_f32(function: Callable[[Array], Array], x: Array) -> Array:
    """A float32 function of bf16 bits, rounded to bf16."""
    return f32_to_bf16(function(bf16_to_f32(x)))


def half(function: Callable[[Array], Array], x: Array) -> Array:
    """A float32 function of float16, rounded to float16."""
    return nan16(function(x.astype(np.float32)).astype(np.float16))


def relu_f16(x: Array) -> Array:
    """Negative to +0; NaN kept."""
    return np.where(x <= 0, np.float16(0), x)


def relu_bf16(x: Array) -> Array:
    """Negative to +0; NaN, which is canonical and therefore positive, kept."""
    return np.where(x >= np.uint16(0x8000), np.uint16(0), x)


def flush_bf16(x: Array) -> Array:
    """Subnormals as zeros of their sign."""
    return np.where(x & np.uint16(0x7F80) == 0, x & np.uint16(0x8000), x)


# --- min and max of float16, float32, float64


def _minmax(pick: Any, combine: Any, a: Array, b: Array) -> Array:
    """np.fmin or np.fmax with -0 below +0, which NumPy leaves open: the bits of both orders are combined at zeros."""
    r = pick(a, b)
    if np.count_nonzero(r) != r.size:
        bits = f"u{r.dtype.itemsize}"
        return combine(r.view(bits), pick(b, a).view(bits)).view(r.dtype)
    return r


def _tidy(name: str, r: Array, a: Array, b: Array) -> Array:
    """NaN canonical; of float64 an operand's."""
    if r.dtype == np.float64:
        return nan64(name, r, a, b)
    return nan16(r) if r.dtype == np.float16 else nan32(r)


def minimum(a: Array, b: Array) -> Array:
    """min: the number where the other is NaN."""
    return _tidy("min", _minmax(np.fmin, np.bitwise_or, a, b), a, b)


def maximum(a: Array, b: Array) -> Array:
    """max: the number where the other is NaN."""
    return _tidy("max", _minmax(np.fmax, np.bitwise_and, a, b), a, b)


def minimum_nan(a: Array, b: Array) -> Array:
    """min.NaN: NaN where either is."""
    return _tidy("min", _minmax(np.minimum, np.bitwise_or, a, b), a, b)


def maximum_nan(a: Array, b: Array) -> Array:
    """max.NaN: NaN where either is."""
    return _tidy("max", _minmax(np.maximum, np.bitwise_and, a, b), a, b)


def xorsign(pick: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """.xorsign.abs: the magnitude of min or max of |a| and |b|, negative where one of a and b is."""
    r = pick(np.abs(a), np.abs(b))
    negative = np.signbit(a) ^ np.signbit(b)
    return np.where(negative & (r == r), -r, r)


def pick_bf16(function: Callable[..., Array], *operands: Array) -> Array:
    """A minimum or maximum, which rounds nothing, of bf16 bits."""
    return f32_to_bf16(function(*map(bf16_to_f32, operands)))


def abs_f64(x: Array) -> Array:
    """abs.f64: a NaN keeps its sign."""
    return nan64("abs", np.abs(x), x)


def neg_f64(x: Array) -> Array:
    """neg.f64: a NaN keeps its sign."""
    return nan64("neg", np.negative(x), x)


# --- comparisons of floats; integers use NumPy's operators directly


def test(x: Array, name: str) -> Array:
    """testp of float32 or float64; zeros count as normal."""
    if name == "finite":
        return np.isfinite(x)
    if name == "infinite":
        return np.isinf(x)
    if name == "number":
        return x == x
    if name == "notanumber":
        return x != x
    small = (flush(x) == 0) & (x != 0)
    return small if name == "subnormal" else np.isfinite(x) & ~small


def ones(x: Array, name: str) -> Array:
    """set: a bool array as the true and false values of type `name` (bits of half types)."""
    if name == "f32":
        return x.astype(np.float32)
    if name in ("f16", "bf16"):
        return np.where(x, np.uint16(0x3C00 if name == "f16" else 0x3F80), np.uint16(0))
    dtype = {"u16": np.uint16, "s16": np.uint16}.get(name, np.uint32)
    return np.where(x, ~dtype(0), dtype(0))
