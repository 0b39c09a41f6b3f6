"""The rules of pure instructions: which opcodes have one, shapes and types, and integers against Python's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from cupyllm.sim import isa
from cupyllm.sim.report import UnknownInstruction
from tests.sim.instructions import (
    DTYPES,
    IN_USE,
    INTEGERS,
    ORDERED,
    check,
    compare,
    evaluate,
    numbers,
    register,
    run,
    spellings,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def truncated(a: int, b: int) -> int:
    size = abs(a) // abs(b)
    return -size if (a < 0) != (b < 0) else size


def test_every_opcode_of_our_kernels_has_a_rule() -> None:
    assert len(IN_USE) > 100
    for opcode in IN_USE:
        assert isinstance(isa.rule(opcode), isa.Rule), opcode


NOT_PURE = """ld.global.f32 st.shared.v4.f32 bra.uni bar.sync shfl.sync.bfly.b32 cvta.to.global.u64 ret red.add.f32
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 cp.async.ca.shared.global vote.sync.ballot.b32 isspacep.shared
atom.global.add.f32 membar.gl activemask.b32""".split()
REFUSED = """add.cc.u32 addc.cc.u32 madc.hi.u32 add.f32x2 add.rn.f32.bf16 mul.wide.s64 add.sat.u32 fma.f32 add.relu.f32
mul.sat.f64 fma.rn.oob.f16 cvt.rs.bf16x2.f32 cvt.f16.f32 cvt.rn.e2m1x2.f32 div.f32 vadd4.s32.s32.s32 setp.lo.s32
setp.lt.b32 ex2.f32 tanh.approx.f64 min.relu.u32 mov.b128 lop3.xor.b32 prmt.b32.f5e cvt.f64 abs.u32 popc.b16
sin.approx.f16 ex2.approx.bf16""".split()


@pytest.mark.parametrize("opcode", NOT_PURE)
def test_other_instructions_are_not_ours(opcode: str) -> None:
    assert isa.rule(opcode) is None


@pytest.mark.parametrize("opcode", REFUSED)
def test_unsupported_spellings_are_refused_by_name(opcode: str) -> None:
    with pytest.raises(UnknownInstruction, match=opcode):
        isa.rule(opcode)


def test_results_keep_shape_and_type() -> None:
    rng = np.random.default_rng(0)
    count = 0
    for opcode in dict.fromkeys([*IN_USE, *spellings()]):
        rule = isa.rule(opcode)
        assert rule is not None, opcode
        for shapes in (((1, 1),), ((3, 1), (1, 1)), ((1, 5), (1, 1)), ((3, 5),), ((3, 1), (1, 5))):
            operands = []
            for i, type_ in enumerate(rule.inputs):
                shape = shapes[i % len(shapes)]
                if opcode.startswith("lop3") and i == 3:
                    shape = (1, 1)
                bits = rng.integers(0, 256, (*shape, 8), np.uint8)
                dtype = np.dtype(DTYPES[type_])
                value = (
                    bits[..., 0] > 127 if type_ == "pred" else bits[..., : dtype.itemsize].copy().view(dtype)[..., 0]
                )
                operands.append(value)
            copies = [operand.copy() for operand in operands]
            result = evaluate(opcode, *operands)
            results = result if len(rule.outputs) > 1 else (result,)
            used = operands if rule.expr != "{0}" else operands[:1]
            shape = np.broadcast_shapes(*(operand.shape for operand in used))
            assert len(results) == len(rule.outputs)
            for got, type_ in zip(results, rule.outputs, strict=True):
                assert isinstance(got, np.ndarray) and got.dtype == DTYPES[type_], (opcode, got.dtype, type_)
                assert got.shape == shape, (opcode, got.shape, shape)
            for operand, copy in zip(operands, copies, strict=True):
                assert operand.tobytes() == copy.tobytes(), f"{opcode} wrote its operand"
            count += 1
    assert count > 4000


@pytest.mark.parametrize("t", INTEGERS)
def test_integer_arithmetic(t: str) -> None:
    width = int(t[1:])
    pairs, triples = numbers(t, 200), numbers(t, 200, 3)
    check(f"add.{t}", pairs, lambda a, b: a + b)
    check(f"sub.{t}", pairs, lambda a, b: a - b)
    check(f"mul.lo.{t}", pairs, lambda a, b: a * b)
    check(f"mul.hi.{t}", pairs, lambda a, b: a * b >> width)
    check(f"mad.lo.{t}", triples, lambda a, b, c: a * b + c)
    check(f"mad.hi.{t}", triples, lambda a, b, c: (a * b >> width) + c)
    check(f"sad.{t}", triples, lambda a, b, c: abs(a - b) + c)
    check(f"min.{t}", pairs, min)
    check(f"max.{t}", pairs, max)
    check(f"div.{t}", pairs, lambda a, b: truncated(a, b) if b else -1)
    check(f"rem.{t}", pairs, lambda a, b: a - b * truncated(a, b) if b else -1)
    if width < 64:
        check(f"mul.wide.{t}", pairs, lambda a, b: a * b)
        check(f"mad.wide.{t}", triples, lambda a, b, c: a * b + c)
    if t[0] == "s":
        check(f"abs.{t}", [case[:1] for case in pairs], abs)
        check(f"neg.{t}", [case[:1] for case in pairs], lambda a: -a)


def test_integer_saturation_and_24_bits() -> None:
    pairs, triples = numbers("s32", 300), numbers("s32", 300, 3)
    clamp = lambda x: max(-(2**31), min(2**31 - 1, x))  # noqa: E731
    check("add.sat.s32", pairs, lambda a, b: clamp(a + b))
    check("sub.sat.s32", pairs, lambda a, b: clamp(a - b))
    check("mad.hi.sat.s32", triples, lambda a, b, c: clamp((a * b >> 32) + c))
    check("max.relu.s32", pairs, lambda a, b: max(a, b, 0))
    low24 = lambda x: (x + 2**23) % 2**24 - 2**23  # noqa: E731
    check("mul24.lo.s32", pairs, lambda a, b: low24(a) * low24(b))
    check("mul24.hi.s32", pairs, lambda a, b: low24(a) * low24(b) >> 16)
    check("mul24.hi.u32", numbers("u32", 200), lambda a, b: (a % 2**24) * (b % 2**24) >> 16)
    as_s32 = lambda x: (x + 2**31) % 2**32 - 2**31  # noqa: E731
    check("mad24.hi.sat.s32", triples, lambda a, b, c: clamp(as_s32(low24(a) * low24(b) >> 16) + c))
    halves = lambda f: lambda a, b: sum((f(a >> s & 65535, b >> s & 65535) & 65535) << s for s in (0, 16))  # noqa: E731
    check("add.u16x2", numbers("u32", 200), halves(lambda a, b: a + b))
    signed = lambda x: (x + 2**15) % 2**16 - 2**15  # noqa: E731
    check("max.s16x2", numbers("u32", 200), halves(lambda a, b: max(signed(a), signed(b))))
    check("min.u16x2", numbers("u32", 200), halves(min))


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts_of_any_amount(width: int) -> None:
    amounts = [0, 1, width - 1, width, width + 1, 31, 32, 33, 63, 64, 65, 255, 2**31 - 1, 2**31, 2**32 - 1]
    values = [a for a, _ in numbers(f"u{width}", 20)][::3]
    cases = list(itertools.product(values, amounts))
    signed = lambda x: (x + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)  # noqa: E731
    check(f"shl.b{width}", cases, lambda a, n: a << min(n, width))
    for t in "ub":
        check(f"shr.{t}{width}", cases, lambda a, n: a >> min(n, width))
    check(f"shr.s{width}", cases, lambda a, n: signed(a) >> min(n, width))
    if width == 32:
        triples = [(a, b, n) for (a, b), n in itertools.product(numbers("u32", 20)[::7], amounts)]
        for mode, limit in (("clamp", lambda n: min(n, 32)), ("wrap", lambda n: n & 31)):
            check(f"shf.l.{mode}.b32", triples, lambda a, b, c: ((b << 32 | a) << limit(c)) >> 32)  # noqa: B023
            check(f"shf.r.{mode}.b32", triples, lambda a, b, c: (b << 32 | a) >> limit(c))  # noqa: B023


def bit_list(x: int, width: int) -> list[int]:
    return [x >> i & 1 for i in range(width)]


def from_bits(bits: Sequence[int]) -> int:
    return sum(bit << i for i, bit in enumerate(bits))


@pytest.mark.parametrize("width", [32, 64])
def test_bit_fields(width: int) -> None:
    values = [a for a, _ in numbers(f"u{width}", 60)][::3]
    singles = [(a,) for a in values] + [(1 << i,) for i in range(width)] + [((1 << i) - 1,) for i in range(width)]
    check(f"popc.b{width}", singles, int.bit_count)
    check(f"clz.b{width}", singles, lambda a: width - a.bit_length())
    check(f"brev.b{width}", singles, lambda a: from_bits(bit_list(a, width)[::-1]))
    check(f"bfind.u{width}", singles, lambda a: a.bit_length() - 1)
    check(f"bfind.shiftamt.u{width}", singles, lambda a: width - a.bit_length() if a else -1)
    magnitude = lambda a: a ^ ((1 << width) - 1) if a >> (width - 1) else a  # noqa: E731
    check(f"bfind.s{width}", singles, lambda a: magnitude(a).bit_length() - 1)
    places = [0, 1, 5, width - 1, width, width + 3, 200, 255, 256, 259, 2**31, 2**32 - 1]
    low = 255 if width == 32 else 2**32 - 1  # a GPU's 64-bit forms do not take positions and lengths modulo 256

    def extract(a: int, b: int, c: int, signed: bool) -> int:
        position, length = b & low, c & low
        bits = bit_list(a, width)
        sign = bits[min(position + length - 1, width - 1)] if signed and length else 0
        return from_bits([bits[position + i] if i < length and position + i < width else sign for i in range(width)])

    triples = list(itertools.product(values[::4], places, places))
    check(f"bfe.u{width}", triples, lambda a, b, c: extract(a, b, c, False))
    check(f"bfe.s{width}", triples, lambda a, b, c: extract(a, b, c, True))

    def insert(a: int, b: int, c: int, d: int) -> int:
        bits = bit_list(b, width)
        for i in range(min(d & low, width)):
            if (c & low) + i < width:
                bits[(c & low) + i] = a >> i & 1
        return from_bits(bits)

    fours = [(a, b, c, d) for (a, b), c, d in itertools.product(numbers(f"u{width}", 9)[::25], places, places)]
    check(f"bfi.b{width}", fours, insert)


def test_masks_extensions_and_nth_bits() -> None:
    places = [0, 1, 7, 15, 31, 32, 33, 40, 2**32 - 1]
    pairs = list(itertools.product(places, places))
    ones = lambda a, b: ((1 << b) - 1) << a  # noqa: E731
    check("bmsk.clamp.b32", pairs, lambda a, b: ones(min(a, 32), min(b, 32)))
    check("bmsk.wrap.b32", pairs, lambda a, b: ones(a & 31, b & 31))
    values = [a for a, _ in numbers("u32", 30)][::4]

    def extend(a: int, n: int, signed: bool) -> int:
        low = a & (1 << n) - 1
        return low - (1 << n) if signed and n and low >> (n - 1) else low

    for value, n in itertools.product(values, places):
        for t, signed in (("u32", False), ("s32", True)):
            check(f"szext.clamp.{t}", [(value, n)], lambda a, b: a if b >= 32 else extend(a, b, signed))  # noqa: B023
            check(f"szext.wrap.{t}", [(value, n)], lambda a, b: extend(a, b & 31, signed))  # noqa: B023

    def find(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else -1
        places = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [i for i in places if mask >> i & 1]
        return found[abs(offset) - 1] if len(found) >= abs(offset) else -1

    cases = list(itertools.product(values, (0, 3, 16, 31), (-33, -3, -1, 0, 1, 2, 5, 32)))
    check("fns.b32", cases, find)


def test_logic_permutes_and_dot_products() -> None:
    pairs = numbers("u32", 50)
    check("and.b32", pairs, lambda a, b: a & b)
    check("or.b32", pairs, lambda a, b: a | b)
    check("xor.b32", pairs, lambda a, b: a ^ b)
    check("not.b64", numbers("u64", 20, 1), lambda a: ~a)
    check("cnot.b16", [(0,), (1,), (65535,)], lambda a: int(a == 0))
    rng = np.random.default_rng(3)
    triples = [tuple(int(x) for x in case) for case in rng.integers(0, 2**32, (40, 3))]
    for table in range(256):
        result = evaluate(
            "lop3.b32", *(register(c, "b32") for c in zip(*triples, strict=True)), register([table], "u32")
        )
        for case, got in zip(triples, result[0].tolist(), strict=True):
            rows = zip(*(bit_list(x, 32) for x in case), strict=True)
            assert got == from_bits([table >> (4 * a + 2 * b + c) & 1 for a, b, c in rows]), table
    d, p = evaluate("lop3.and.b32", *(register([x, 0], "b32") for x in (1, 1, 1)), register([0x80], "u32"),
                    np.array([[True, True]]))  # fmt: skip
    assert d.tolist() == [[1, 0]] and p.tolist() == [[True, False]]

    def permute(a: int, b: int, c: int) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        picked = []
        for i in range(4):
            selector = c >> 4 * i & 15
            byte = source[selector & 7]
            picked.append((255 if byte & 128 else 0) if selector & 8 else byte)
        return int.from_bytes(bytes(picked), "little")

    check("prmt.b32", triples, permute)
    tables = {"f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
              "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
              "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232)}  # fmt: skip
    for mode, table in tables.items():
        check(f"prmt.b32.{mode}", triples, lambda a, b, c: permute(a, b, table[c & 3]))  # noqa: B023

    def parts(x: int, bits: int, signed: bool) -> list[int]:
        fields = [x >> i & (1 << bits) - 1 for i in range(0, 32, bits)]
        return [f - (1 << bits) if signed and f >> (bits - 1) else f for f in fields]

    for a, b in itertools.product(("u32", "s32"), repeat=2):
        sa, sb = a == "s32", b == "s32"
        dot = lambda x, y: sum(p * q for p, q in zip(x, y, strict=False))  # noqa: E731
        check(f"dp4a.{a}.{b}", triples, lambda x, y, z: z + dot(parts(x, 8, sa), parts(y, 8, sb)))  # noqa: B023
        check(f"dp2a.lo.{a}.{b}", triples, lambda x, y, z: z + dot(parts(x, 16, sa), parts(y, 8, sb)))  # noqa: B023
        check(f"dp2a.hi.{a}.{b}", triples, lambda x, y, z: z + dot(parts(x, 16, sa), parts(y, 8, sb)[2:]))  # noqa: B023


def test_integer_conversions() -> None:
    for source, target in itertools.product(("u8", "s8", *INTEGERS), repeat=2):
        info = np.iinfo(DTYPES[target])
        cases = [case[:1] for case in numbers(source, 40)]
        check(f"cvt.{target}.{source}", cases, lambda a: a)
        check(f"cvt.sat.{target}.{source}", cases, lambda a: max(info.min, min(info.max, a)))  # noqa: B023
    pairs = numbers("s32", 50)
    check("cvt.pack.sat.s16.s32", pairs, lambda a, b: sum(
        (max(-32768, min(32767, x)) & 65535) << s for x, s in ((b, 0), (a, 16))))  # fmt: skip
    check("cvt.pack.sat.u4.s32.b32", numbers("s32", 50, 3), lambda a, b, c: (c << 8) | sum(
        max(0, min(15, x)) << s for x, s in ((b, 0), (a, 4))))  # fmt: skip


def test_integer_comparisons_know_the_sign() -> None:
    for t in INTEGERS:
        pairs = numbers(t, 50)
        columns = list(zip(*pairs, strict=True))
        for order in ORDERED:
            assert run(f"setp.{order}.{t}", *columns) == [compare(order, a, b) for a, b in pairs]
        if t[0] == "u":
            for order, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
                assert run(f"setp.{order}.{t}", *columns) == [compare(same, a, b) for a, b in pairs]
