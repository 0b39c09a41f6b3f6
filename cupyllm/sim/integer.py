"""Integer instructions that NumPy has no operator for: division, high products, bit fields, permutes, dot products.

NumPy's + - * & | ^ ~ << >> on arrays already are the hardware's: they wrap, and a shift by the width or more gives 0,
or the sign. Division differs: NumPy floors, C++ truncates. Division by zero is "unspecified, machine-specific" in the
PTX manual; on NVIDIA GPUs quotient and remainder alike are all ones then, at every width.

Arrays are uint32 unless a function says otherwise.
"""

from __future__ import annotations

import numpy as np

from cupyllm.sim.rounding import Array

U32 = np.uint32
U64 = np.uint64


def divide(a: Array, b: Array) -> Array:
    """a / b of one integer dtype, towards zero; all ones where b is zero; the lowest integer over -1 is itself."""
    if a.dtype.kind == "u":
        quotient = np.floor_divide(a, b)
    else:
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        size = np.floor_divide(np.abs(a).view(unsigned), np.abs(b).view(unsigned)).view(a.dtype)
        quotient = np.where((a ^ b) < 0, -size, size)
    return _ones_at_zero(quotient, b)


def remainder(a: Array, b: Array) -> Array:
    """a - b (a / b) with a's sign, of one integer dtype; all ones where b is zero."""
    if a.dtype.kind == "u":
        rest = np.remainder(a, b)
    else:
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        size = np.remainder(np.abs(a).view(unsigned), np.abs(b).view(unsigned)).view(a.dtype)
        rest = np.where(a < 0, -size, size)
    return _ones_at_zero(rest, b)


def _ones_at_zero(result: Array, b: Array) -> Array:
    if np.count_nonzero(b) == b.size:
        return result
    return np.where(b == 0, ~np.zeros((1, 1), result.dtype), result)


def mul_high(a: Array, b: Array) -> Array:
    """The upper half of the double-width product of one integer dtype."""
    kind, nbytes = a.dtype.kind, a.dtype.itemsize
    if nbytes < 8:
        wide = np.multiply(a, b, dtype=np.dtype(f"{kind}{2 * nbytes}"))
        return (wide >> wide.dtype.type(8 * nbytes)).astype(a.dtype)
    ua, ub = a.view(U64), b.view(U64)
    half, low = U64(32), U64(0xFFFFFFFF)
    a1, a0, b1, b0 = ua >> half, ua & low, ub >> half, ub & low
    middle = a1 * b0 + (a0 * b0 >> half)  # at most 2^64 - 2^32: no carry is lost
    high = a1 * b1 + (middle >> half) + ((middle & low) + a0 * b1 >> half)
    if kind == "i":  # a signed factor stands for its bits less 2^64 when negative
        high = high - np.where(a < 0, ub, U64(0)) - np.where(b < 0, ua, U64(0))
    return high.view(a.dtype)


def sat_s32(x: Array) -> Array:
    """int64 clamped to int32."""
    return np.clip(x, -(2**31), 2**31 - 1).astype(np.int32)


def mul24(a: Array, b: Array, high: bool) -> Array:
    """mul24 of int32 or uint32: bits 47..16 (high) or 31..0 of the product of the low 24 bits."""
    signed = a.dtype.kind == "i"
    wide = np.dtype(np.int64 if signed else np.uint64)
    # Shifting up and down extends bit 23 as the type wants.
    narrow = [((x << x.dtype.type(8)) >> x.dtype.type(8)).astype(wide) for x in (a, b)]
    product = narrow[0] * narrow[1]
    return (product >> wide.type(16) if high else product).astype(a.dtype)


def bit_length(x: Array) -> Array:
    """The number of bits up to the highest one, uint32, of uint32 or uint64."""
    if x.dtype.itemsize == 8:
        upper = (x >> U64(32)).astype(U32)
        return np.where(upper != 0, bit_length(upper) + U32(32), bit_length(x.astype(U32)))
    return np.frexp(x.astype(np.float64))[1].astype(U32)  # exact: 32 bits fit a float64


def find(x: Array, shift: bool) -> Array:
    """bfind of any 32- or 64-bit integer: the highest bit that is not a sign, or its distance from the top; or ones."""
    width = 8 * x.dtype.itemsize
    if x.dtype.kind == "i":
        x = x ^ (x >> x.dtype.type(width - 1))
    length = bit_length(x.view(f"u{x.dtype.itemsize}"))
    if shift:
        return np.where(length == 0, U32(0xFFFFFFFF), U32(width) - length)
    return length - U32(1)  # 0 - 1 wraps to all ones


def find_nth(mask: Array, base: Array, offset: Array) -> Array:
    """fns: the position of the offset-th set bit from `base` on, upwards or (negative) downwards; int32 offset.

    The manual leaves a base beyond 31 undefined: an H200 finds nothing, or 0 for the lowest offset.
    """
    mask, base, offset = np.broadcast_arrays(mask, base.astype(np.int64), offset)
    left = np.maximum(np.abs(offset.astype(np.int64)), 1)
    direction = np.where(offset < 0, -1, 1)
    reach = np.where(offset == 0, 1, 32)  # offset 0 asks about the bit at base alone
    found = np.full(mask.shape, 0xFFFFFFFF, U32)
    for i in range(32):
        position = base + direction * i
        valid = (position >= 0) & (position < 32) & (i < reach)
        bit = (mask >> np.where(valid, position, 0).astype(U32)) & U32(1)
        left = left - (valid & (bit == 1))
        hit = valid & (bit == 1) & (left == 0)
        found = np.where(hit, position.astype(U32), found)
    return np.where(((base < 0) | (base > 31)) & (offset == -(2**31)), U32(0), found)


def reverse(x: Array) -> Array:
    """brev of uint32 or uint64."""
    width = 8 * x.dtype.itemsize
    ones = (1 << width) - 1
    step = 1
    while step < width:
        low = ones // ((1 << step) + 1)  # alternating runs of `step` zeros and ones
        x = ((x >> x.dtype.type(step)) & x.dtype.type(low)) | ((x & x.dtype.type(low)) << x.dtype.type(step))
        step *= 2
    return x


def _bit_field(position: Array, length: Array, width: int) -> tuple[Array, Array]:
    """Position and length of a bit field, at most `width`.

    The manual takes both modulo 256. Operands of 64 bits are not the hardware's own: an H200 takes theirs as they are,
    so that a position from 256 on is beyond the top, and a length from 256 on is everything.
    """
    if width == 32:
        position, length = position & U32(255), length & U32(255)
    return np.minimum(position, U32(width)), np.minimum(length, U32(width))


def extract(a: Array, position: Array, length: Array) -> Array:
    """bfe of any 32- or 64-bit integer: `length` bits from `position`, zero- or sign-extended."""
    width = 8 * a.dtype.itemsize
    position, length = _bit_field(position, length, width)
    unsigned = a.view(f"u{a.dtype.itemsize}")
    one = unsigned.dtype.type(1)
    keep = np.where(length >= width, ~unsigned.dtype.type(0), (one << length) - one)
    field = (unsigned >> position) & keep
    if a.dtype.kind == "i":
        top = np.minimum(position + length - U32(1), U32(width - 1))
        sign = ((unsigned >> top) & one != 0) & (length != 0)
        # Bits from `length` on, and those that would come from beyond the top, repeat the sign.
        inside = np.minimum(length, U32(width) - position)
        fill = np.where(inside >= width, unsigned.dtype.type(0), ~((one << inside) - one))
        field = np.where(sign, field | fill, field)
    return field.view(a.dtype)


def insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi of uint32 or uint64: `length` bits of a into b at `position`."""
    width = 8 * a.dtype.itemsize
    position, length = _bit_field(position, length, width)
    one = a.dtype.type(1)
    field = np.where(length >= width, ~a.dtype.type(0), (one << length) - one) << position
    return (b & ~field) | ((a << position) & field)


def bit_mask(a: Array, b: Array, clamp: bool) -> Array:
    """bmsk: b ones from bit a on; positions and widths of 32 or more clamped, or taken modulo 32."""
    if not clamp:
        a, b = a & U32(31), b & U32(31)
    ones = np.where(b >= 32, U32(0xFFFFFFFF), (U32(1) << b) - U32(1))
    return ones << a  # a shift by 32 or more gives 0


def extend(a: Array, b: Array, clamp: bool) -> Array:
    """szext of int32 or uint32: the low b bits extended; all of a when b >= 32 is clamped."""
    bits = b & U32(31)
    drop = (U32(32) - bits).astype(a.dtype)
    narrow = np.where(bits == 0, a.dtype.type(0), (a << drop) >> drop)
    return np.where(b >= 32, a, narrow) if clamp else narrow


def dot_bytes(a: Array, b: Array, c: Array) -> Array:
    """dp4a: c + sum of a[i] b[i] over the 4 bytes; a and b int32 or uint32 say their bytes' sign; c as wide."""
    return c + _sum_products(_bytes(a), _bytes(b), c)


def dot_halves(a: Array, b: Array, c: Array, high: bool) -> Array:
    """dp2a: c + sum of a's two 16-bit parts times the lower (or upper) two bytes of b."""
    halves = a[..., None].view(f"{a.dtype.kind}2").astype(np.int64)
    return c + _sum_products(halves, _bytes(b)[..., 2:] if high else _bytes(b)[..., :2], c)


def _bytes(x: Array) -> Array:
    return x[..., None].view(f"{x.dtype.kind}1").astype(np.int64)


def _sum_products(a: Array, b: Array, c: Array) -> Array:
    return np.sum(a * b, axis=-1).astype(c.dtype)  # below 2^42, so only the last step wraps


def logic3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: bit `4 a + 2 b + c` of the constant `table`, bitwise."""
    value = int(table.flat[0])
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), U32)
    for row in range(8):
        if value >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def funnel_left(a: Array, b: Array, c: Array, clamp: bool) -> Array:
    """shf.l: the upper 32 bits of b:a << c."""
    n = np.minimum(c, U32(32)) if clamp else c & U32(31)
    return ((_pair(a, b) << n) >> U64(32)).astype(U32)


def funnel_right(a: Array, b: Array, c: Array, clamp: bool) -> Array:
    """shf.r: the lower 32 bits of b:a >> c."""
    n = np.minimum(c, U32(32)) if clamp else c & U32(31)
    return (_pair(a, b) >> n).astype(U32)


def _pair(low: Array, high: Array) -> Array:
    return (high.astype(U64) << U64(32)) | low


# prmt's modes: for each value of the selector's two low bits, the source bytes of d's bytes 0 to 3.
PERMUTES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def permute(a: Array, b: Array, c: Array, mode: str = "") -> Array:
    """prmt: four bytes of b:a picked by the nibbles of c (its bit 3 repeats the byte's sign), or by a mode's table."""
    source = _pair(a, b)
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), U32)
    table = np.array(PERMUTES[mode], U32) if mode else None
    for i in range(4):
        pick = table[:, i][c & U32(3)] if table is not None else (c >> U32(4 * i)) & U32(15)
        byte = ((source >> ((pick & U32(7)) << U32(3))) & U64(255)).astype(U32)
        if table is None:
            byte = np.where(pick & U32(8) != 0, (byte >> U32(7)) * U32(255), byte)
        result |= byte << U32(8 * i)
    return result
