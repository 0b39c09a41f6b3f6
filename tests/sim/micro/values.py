"""Operands of the micro-kernels: the values at which instructions go wrong, and seeded random ones.

Everything is bits: a register's operand is an array of uint8 (predicates), uint16, uint32 or uint64, whatever the
instruction takes them for. Nothing is stored: a golden file keeps only a hash of the operands, so a change of these
tables is noticed.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

Array = np.ndarray

WIDTH = {  # bits of the register that holds a PTX type; predicates travel as bytes, 8-bit integers in 32 bits
    "pred": 8,
    **{f"{kind}{bits}": 32 if bits == 8 else bits for kind in "usb" for bits in (8, 16, 32, 64)},
    **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "tf32": 32},
}
FLOAT = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
# (bits of the exponent, of the mantissa)
FORMAT = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


def bits_dtype(type_: str) -> np.dtype:
    """The unsigned dtype that holds a register of a PTX type."""
    return np.dtype(f"u{WIDTH[type_] // 8}")


# ---- what one operand may be ----


def float_core(type_: str) -> list[int]:
    """The bits that every float operand meets, in every combination where there are two operands."""
    exponent, mantissa = FORMAT[type_]
    sign, inf = 1 << (exponent + mantissa), ((1 << exponent) - 1) << mantissa
    one = ((1 << (exponent - 1)) - 1) << mantissa
    positive = [
        0,
        1,  # smallest subnormal
        (1 << mantissa) - 1,  # largest subnormal
        1 << mantissa,  # smallest normal
        one,
        one + 1,  # 1 + ulp
        one + (1 << (mantissa - 1)),  # 1.5
        one - (1 << mantissa),  # 0.5
        inf - 1,  # largest finite
        inf,
        inf | 1,  # a signalling NaN
    ]
    return [*positive, *(sign | bits for bits in positive[:10]), inf | 1 << (mantissa - 1) | 5]


def float_more(type_: str) -> list[int]:
    """Further values: halves between integers, the edges of the integer types, other NaNs."""
    exponent, mantissa = FORMAT[type_]
    inf = ((1 << exponent) - 1) << mantissa
    numbers = [2.5, 3.5, -2.5, -3.5, 0.49999997, 0.1, 1 / 3, np.pi, 100.0, 1e-3, 1e-8, 6e-8, 1e10, 1e30, 3e-39, 1e-40]
    for bits in (7, 8, 15, 16, 23, 24, 31, 32, 52, 53, 63, 64):
        for delta in (-1.0, -0.5, 0.0, 0.5, 1.0):
            numbers += [2.0**bits + delta, -(2.0**bits) + delta]
    numbers += [65504.0, 65519.0, 65520.0, 65536.0]  # about the largest f16
    with np.errstate(all="ignore"):
        values = np.array(numbers).astype(FLOAT[type_]).view(bits_dtype(type_))
    one = ((1 << (exponent - 1)) - 1) << mantissa
    near = [one - 1, one - 2, one + 2, one + 3, one + (3 << mantissa), (one | 1) + (5 << mantissa)]
    nans = [inf | 1 << (mantissa - 1), (1 << (exponent + mantissa + 1)) - 1, inf | 2, (inf << 1 | inf) & inf | 3]
    return [*map(int, values), *near, *nans]


def integer_core(bits: int) -> list[int]:
    """Bits of the integers that every operand meets."""
    top = 1 << (bits - 1)
    full = (top << 1) - 1
    return [0, 1, 2, 3, 7, bits - 1, bits, bits + 1, 0x7F, 0x80, 0xFF, top - 1, top, top + 1, full - 1, full,
            0x5555555555555555 & full, full // 255 * 0x80]  # fmt: skip


def integer_more(bits: int) -> list[int]:
    full = (1 << bits) - 1
    powers = [1 << i for i in range(bits)]
    return [v & full for p in powers for v in (p, p - 1, ~p)] + [0x01234567_89ABCDEF & full, 0xFEDCBA98_76543210 & full]


def core(type_: str) -> list[int]:
    if type_ in FLOAT:
        return float_core(type_)
    if type_ == "pred":
        return [0, 1]
    return integer_core(WIDTH[type_])


def draw(type_: str, n: int, rng: np.random.Generator) -> Array:
    """n operands: special ones, any bits, and ordinary magnitudes, in equal parts."""
    if type_ in ("f16x2", "bf16x2"):
        low, high = (draw(type_[:-2], n, rng).astype(np.uint32) for _ in range(2))
        return low | high << np.uint32(16)
    if type_ == "tf32":
        return draw("f32", n, rng)
    if type_ == "pred":
        return rng.integers(0, 2, n).astype(np.uint8)
    if type_ in ("u8", "s8"):  # the upper bits of the register are not looked at
        return draw("u16", n, rng).astype(np.uint32) & np.uint32(0xFF) | draw("u32", n, rng) << np.uint32(8)
    dtype = bits_dtype(type_)
    any_bits = rng.integers(0, 1 << 64, n, dtype=np.uint64).astype(dtype)
    special = np.array(core(type_) + (float_more(type_) if type_ in FLOAT else integer_more(WIDTH[type_])), dtype)
    special = rng.choice(special, n)
    if type_ in FLOAT:
        usual = (rng.standard_normal(n) * 2.0 ** rng.integers(-6, 7, n)).astype(FLOAT[type_]).view(dtype)
    else:  # small numbers of either sign
        usual = (any_bits >> (rng.integers(0, WIDTH[type_], n)).astype(dtype)) * rng.choice(
            np.array([1, (1 << WIDTH[type_]) - 1], dtype), n
        )
    return np.choose(rng.integers(0, 3, n), [special, any_bits, usual]).astype(dtype)


# ---- operands of an instruction ----


def operands(types: tuple[str, ...], n: int, seed: int) -> tuple[Array, ...]:
    """n operand tuples: all special values of one operand, all pairs of the core values of two, then drawn ones."""
    rng = np.random.default_rng(seed)
    columns = [draw(type_, n, rng) for type_ in types]
    numbers = [i for i, type_ in enumerate(types) if type_ != "pred"]
    if len(numbers) == 1:
        type_ = types[numbers[0]]
        special = specials(type_)[:n]
        columns[numbers[0]][: len(special)] = special
    elif len(numbers) == 2:
        first, second = (np.array(specials(types[i], only_core=True), bits_dtype(types[i])) for i in numbers)
        pairs = np.array([(i, j) for i in range(len(first)) for j in range(len(second))])
        if len(pairs) > n - n // 4:
            pairs = pairs[rng.permutation(len(pairs))[: n - n // 4]]
        columns[numbers[0]][: len(pairs)] = first[pairs[:, 0]]
        columns[numbers[1]][: len(pairs)] = second[pairs[:, 1]]
    return tuple(columns)


def specials(type_: str, only_core: bool = False) -> Array:
    """Every special value of a type; of a pair type each with itself turned round in the other half."""
    if type_ in ("f16x2", "bf16x2"):
        half = specials(type_[:-2], only_core).astype(np.uint32)
        return half | half[::-1] << np.uint32(16)
    if type_ == "tf32":
        return specials("f32", only_core)
    values = core(type_)
    if not only_core:
        values = values + (float_more(type_) if type_ in FLOAT else integer_more(WIDTH[type_]))
    return np.array(list(dict.fromkeys(values)), bits_dtype(type_))


def fused(type_: str, n: int, seed: int) -> tuple[Array, Array, Array]:
    """Traps for a b + c: rounding a b first, or rounding the sum in a wider format first, gives other bits.

    A quarter each: c cancels a b but for its rounding error; a b lies half way between two numbers and a tiny c
    decides; a b is tiny and c lies half way of the result's scale; drawn operands.
    """
    if type_ in ("f16x2", "bf16x2"):
        low, high = fused(type_[:-2], n, seed), fused(type_[:-2], n, seed + 1)
        a, b, c = (
            x.astype(np.uint32) | y[::-1].astype(np.uint32) << np.uint32(16) for x, y in zip(low, high, strict=True)
        )
        return a, b, c
    rng = np.random.default_rng(seed)
    dtype, (_, mantissa) = FLOAT[type_], FORMAT[type_]
    a, b, c = (draw(type_, n, rng).view(dtype).copy() for _ in range(3))
    q = n // 4
    with np.errstate(all="ignore"):
        x, y = rng.uniform(1, 2, (2, q)).astype(dtype)
        a[:q], b[:q] = x, y
        c[:q] = -(x.astype(np.float64) * y.astype(np.float64)).astype(dtype)
        # (1 + i 2^-k) (1 + 2^-(p-k)) has p + 1 fraction bits and, for an odd i, a one in the last
        k = rng.integers(1, mantissa, q)
        i = rng.integers(0, 1 << 30, q) % (1 << (k - 1)).astype(np.int64) * 2 + 1
        a[q : 2 * q] = (1 + i * 2.0**-k).astype(dtype)
        b[q : 2 * q] = (1 + 2.0 ** -(mantissa + 1 - k)).astype(dtype)
        tiny = 2.0 ** -rng.integers(mantissa + 2, 3 * mantissa, q) * rng.choice([-1.0, 1.0, 0.0], q)
        c[q : 2 * q] = tiny.astype(dtype)
        c[2 * q : 3 * q] = rng.uniform(1, 2, q).astype(dtype)
        a[2 * q : 3 * q] = (2.0 ** -(mantissa + 1) * rng.choice([-1.0, 1.0, 3.0], q)).astype(dtype)
        b[2 * q : 3 * q] = (1 + rng.choice([-1.0, 0.0, 1.0], q) * 2.0**-mantissa).astype(dtype)
    bits = bits_dtype(type_)
    return a.view(bits), b.view(bits), c.view(bits)


def dense(type_: str, n: int, seed: int) -> tuple[Array]:
    """Operands of an approximate function: every special value, then magnitudes all over the format's range."""
    rng = np.random.default_rng(seed)
    if type_ in ("f16x2", "bf16x2"):
        (low,), (high,) = dense(type_[:-2], n, seed), dense(type_[:-2], n, seed + 1)
        return (low.astype(np.uint32) | high[::-1].astype(np.uint32) << np.uint32(16),)
    dtype, bits = FLOAT[type_], bits_dtype(type_)
    values = draw(type_, n, rng)
    q = n // 4
    sign = rng.choice([-1.0, 1.0], q)
    with np.errstate(all="ignore"):
        values[:q] = (np.linspace(-10, 10, q)).astype(dtype).view(bits)
        values[q : 2 * q] = np.linspace(0.25, 4, q).astype(dtype).view(bits)
        values[2 * q : 3 * q] = (2.0 ** np.linspace(-130, 130, q) * sign).astype(dtype).view(bits)
    special = specials(type_)[: n - 3 * q]
    values[3 * q : 3 * q + len(special)] = special
    return (values,)
