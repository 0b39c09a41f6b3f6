"""The rules of float instructions against the PTX manual's tables; rounding itself is test_numeric.py's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyllm.sim import isa
from tests.sim import exact
from tests.sim.instructions import DTYPES, FLOAT_ORDERS, compare, evaluate, register, run


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("t", ["f32", "f64", "f16", "bf16"])
def test_float_comparisons(t: str) -> None:
    values = [-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf, math.nan]
    pairs = list(itertools.product(values, repeat=2))
    columns = [np.array([column], np.float32) for column in zip(*pairs, strict=True)]
    if t == "bf16":
        a, b = (column.astype(ml_dtypes.bfloat16).view(np.uint16) for column in columns)
    else:
        a, b = (column.astype(DTYPES[t]) for column in columns)
    c = np.arange(len(pairs))[None] % 2 == 0
    for order in FLOAT_ORDERS:
        plain = [compare(order, x, y) for x, y in pairs]
        assert evaluate(f"setp.{order}.{t}", a, b)[0].tolist() == plain, order
        combine: dict[str, Callable[[bool, bool], bool]] = {
            "and": lambda x, y: x and y, "or": lambda x, y: x or y, "xor": lambda x, y: x != y}  # fmt: skip
        for name, join in combine.items():
            p, q = evaluate(f"setp.{order}.{name}.{t}", a, b, c)
            assert p[0].tolist() == [join(x, y) for x, y in zip(plain, c[0].tolist(), strict=True)]
            assert q[0].tolist() == [join(not x, y) for x, y in zip(plain, c[0].tolist(), strict=True)]
        assert evaluate(f"set.{order}.u32.{t}", a, b)[0].tolist() == [0xFFFFFFFF * x for x in plain]
    tiny = np.array([[1e-40]], np.float32)
    zero = np.zeros((1, 1), np.float32)
    assert evaluate("setp.gt.f32", tiny, zero).item() and not evaluate("setp.gt.ftz.f32", tiny, zero).item()


def test_packed_halves_work_by_half() -> None:
    pack = lambda low, high: np.array([[low]], np.float16).view(np.uint16).astype(np.uint32) | (  # noqa: E731
        np.array([[high]], np.float16).view(np.uint16).astype(np.uint32) << np.uint32(16))  # fmt: skip
    a, b = pack(1.5, -2.0), pack(0.25, 4.0)
    assert evaluate("add.f16x2", a, b).tolist() == pack(1.75, 2.0).tolist()
    assert evaluate("fma.rn.relu.f16x2", a, b, pack(1.0, 1.0)).tolist() == pack(1.375, 0.0).tolist()
    assert evaluate("min.f16x2", a, b).tolist() == pack(0.25, -2.0).tolist()
    p, q = evaluate("setp.lt.f16x2", a, b)
    assert (p.item(), q.item()) == (False, True)
    assert evaluate("set.lt.u32.f16x2", a, b).item() == 0xFFFF0000
    assert evaluate("set.lt.f16x2.f16x2", a, b).tolist() == pack(0.0, 1.0).tolist()
    x, y = np.array([[1.0]], np.float32), np.array([[-2.0]], np.float32)
    assert (
        evaluate("cvt.rn.f16x2.f32", x, y).tolist() == pack(-2.0, 1.0).tolist()
    )  # the first operand is the upper half
    assert evaluate("cvt.rn.bf16x2.f32", x, y).item() == 0x3F80C000
    assert evaluate("cvt.rn.relu.bf16x2.f32", x, y).item() == 0x3F800000
    assert evaluate("cvt.rn.satfinite.e4m3x2.f32", x, y).item() == 0x38C0
    assert evaluate("cvt.rn.f16x2.e4m3x2", np.array([[0x38C0]], np.uint16)).tolist() == pack(-2.0, 1.0).tolist()
    assert evaluate("cvt.rn.f16x2.e5m2x2", np.array([[0x3CC0]], np.uint16)).tolist() == pack(-2.0, 1.0).tolist()
    assert evaluate("cvt.rn.satfinite.e5m2x2.f16x2", pack(-2.0, 1.0)).item() == 0x3CC0


def bits32(values: Sequence[int]) -> Any:
    return np.array([values], np.uint32).view(np.float32)


def run32(opcode: str, *columns: Sequence[int]) -> list[int]:
    """A float32 instruction on encodings."""
    return evaluate(opcode, *(bits32(c) for c in columns)).view(np.uint32)[0].tolist()


INF, NEG_INF, NAN, NEG_ZERO, ONE, SUBNORMAL = 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x80000000, 0x3F800000, 0x00000001
NEG_SUBNORMAL = SUBNORMAL | NEG_ZERO


@pytest.mark.parametrize("opcode, table", [
    ("ex2.approx.f32", {NEG_INF: 0, NEG_ZERO: ONE, 0: ONE, INF: INF, SUBNORMAL: ONE, 0xC3000000: 0x00200000}),
    ("ex2.approx.ftz.f32", {NEG_INF: 0, NEG_ZERO: ONE, 0: ONE, INF: INF, NEG_SUBNORMAL: ONE, 0xC3000000: 0}),
    ("lg2.approx.f32", {NEG_INF: NAN, 0xBF800000: NAN, NEG_ZERO: NEG_INF, 0: NEG_INF, INF: INF, 1: 0xC3150000}),
    ("lg2.approx.ftz.f32", {SUBNORMAL: NEG_INF, NEG_SUBNORMAL: NEG_INF, 0x40000000: ONE}),
    ("rcp.approx.f32", {NEG_INF: NEG_ZERO, NEG_ZERO: NEG_INF, 0: INF, INF: 0, SUBNORMAL: INF, 0x7F000000: 0x00400000}),
    ("rcp.approx.ftz.f32", {SUBNORMAL: INF, NEG_SUBNORMAL: NEG_INF, 0x7F000000: 0}),
    ("sqrt.approx.f32", {NEG_INF: NAN, 0xBF800000: NAN, NEG_ZERO: NEG_ZERO, 0: 0, INF: INF}),
    ("rsqrt.approx.f32", {NEG_INF: NAN, 0xBF800000: NAN, NEG_ZERO: NEG_INF, 0: INF, INF: 0}),
    ("rsqrt.approx.ftz.f32", {SUBNORMAL: INF, NEG_SUBNORMAL: NEG_INF}),
    ("sin.approx.f32", {NEG_INF: NAN, NEG_ZERO: NEG_ZERO, 0: 0, INF: NAN, SUBNORMAL: SUBNORMAL}),
    ("sin.approx.ftz.f32", {SUBNORMAL: 0, NEG_SUBNORMAL: NEG_ZERO}),
    ("cos.approx.f32", {NEG_INF: NAN, NEG_ZERO: ONE, 0: ONE, INF: NAN}),
    ("tanh.approx.f32", {NEG_INF: 0xBF800000, NEG_ZERO: NEG_ZERO, 0: 0, INF: ONE, SUBNORMAL: SUBNORMAL}),
])  # fmt: skip
def test_special_values_of_approximate_functions(opcode: str, table: dict[int, int]) -> None:
    table = {**table, 0x7FC00001: NAN, 0xFFC00000: NAN}
    got = run32(opcode, list(table))
    assert dict(zip(table, map(hex, got), strict=True)) == {k: hex(v) for k, v in table.items()}


def test_approximate_functions_are_the_nearest_result() -> None:
    rng = np.random.default_rng(11)
    x = rng.uniform(0.01, 6, (1, 500)).astype(np.float32)
    for name, function in (("ex2", lambda v: 2.0**v), ("lg2", math.log2), ("sin", math.sin), ("cos", math.cos),
                           ("tanh", math.tanh), ("rcp", lambda v: 1 / v), ("sqrt", math.sqrt),
                           ("rsqrt", lambda v: 1 / math.sqrt(v))):  # fmt: skip
        bounds = isa.APPROXIMATE[f"{name}.approx.f32"]
        got = evaluate(f"{name}.approx.f32", x)[0].astype(np.float64).tolist()
        for value, result in zip(x[0].tolist(), got, strict=True):
            exact_value = function(value)
            assert abs(result - exact_value) <= 2.0**-24 * abs(exact_value) * (1 + 2.0**-20), (name, value)
            bound = next(b for b in bounds if b.low <= value < b.high)
            allowed = max(bound.absolute, bound.relative * abs(exact_value), bound.ulp * 2.0**-23 * abs(exact_value))
            assert abs(result - exact_value) <= allowed and bound.source.startswith("PTX 9.7.")


def test_approximate_division_flushes_beyond_2_126() -> None:
    big, top, two = 0x7E800000, 0x7F000000, 0x40000000  # 2^126, 2^127, 2
    assert run32("div.approx.f32", [two, two, NEG_ZERO | two, INF, ONE], [big, top, top, top, INF]) == [
        exact.f32(2.0**-125), 0, NEG_ZERO, NAN, 0]  # fmt: skip
    assert run32("div.full.f32", [two, ONE], [top, 0]) == [exact.f32(2.0**-126), INF]


def test_gross_float64_approximations_keep_20_bits() -> None:
    x = np.array([[3.0, 1 + 2.0**-30, -0.0, 5e-324, np.inf, np.nan]])
    got = evaluate("rcp.approx.ftz.f64", x).view(np.uint64)[0]
    assert not np.any(got & np.uint64(0xFFFFFFFF)) and got[5] == 0x7FFFFFFF00000000
    values = got.view(np.float64)
    assert abs(values[0] * 3 - 1) < 2.0**-20 and values[1] == 1.0 and values[2] == -np.inf and values[3] == np.inf
    assert values[4] == 0.0
    roots = evaluate("rsqrt.approx.ftz.f64", x)[0]
    assert abs(roots[0] ** 2 * 3 - 1) < 2.0**-19 and roots[2] == -np.inf and roots[3] == np.inf


def test_nan_is_canonical_and_payloads_pass_in_float64() -> None:
    odd_nan = 0xFFC01234
    for opcode in ("add.f32", "sub.f32", "mul.f32", "div.rn.f32", "max.NaN.f32", "add.rz.f32", "mul.rp.f32"):
        assert run32(opcode, [odd_nan, ONE], [ONE, 0x7FA00000]) == [NAN, NAN], opcode
    for opcode in ("abs.f32", "neg.f32", "sqrt.rn.f32", "rcp.rn.f32", "cvt.rni.f32.f32"):
        assert run32(opcode, [odd_nan]) == [NAN], opcode
    assert run32("sub.f32", [INF], [INF]) == [NAN] and run32("mul.f32", [0], [INF]) == [NAN]
    assert run32("max.f32", [odd_nan, odd_nan, ONE], [ONE, 0x7FA00000, odd_nan]) == [ONE, NAN, ONE]
    half_nan = np.array([[0xFE01]], np.uint16)
    assert evaluate("add.f16", half_nan.view(np.float16), np.ones((1, 1), np.float16)).view(np.uint16).item() == 0x7FFF
    assert evaluate("cvt.f32.f16", half_nan.view(np.float16)).view(np.uint32).item() == NAN
    assert evaluate("cvt.rn.bf16.f32", bits32([0xFFC00000])).item() == 0x7FFF
    assert evaluate("fma.rn.bf16", half_nan | np.uint16(0x7FC0), half_nan, half_nan).item() == 0x7FFF


SIGNALLING, PAYLOAD, MINUS, GENERATED = 0x7FF0000000000001, 0x7FF8000000001234, 0xFFF0000000000005, 0xFFF8000000000000


def bits64(opcode: str, *columns: list[int]) -> list[int]:
    """The result's bits of float64 operands given by theirs."""
    result = evaluate(opcode, *(np.array([column], np.uint64).view(np.float64) for column in columns))
    return result.view(f"u{result.dtype.itemsize}")[0].tolist()


def quieted(bits: int) -> int:
    return bits | 0x0008000000000000


def test_float64_passes_a_nan_operand_made_quiet() -> None:
    one, inf, minus_one = exact.f64(1.0), 0x7FF0000000000000, exact.f64(-1.0)
    nans = [SIGNALLING, PAYLOAD, MINUS]
    for opcode in (
        "add.f64",
        "sub.rm.f64",
        "mul.rn.f64",
        "sub.f64",
        "mul.rz.f64",
        "add.rp.f64",
        "div.rn.f64",
        "div.rz.f64",
    ):
        assert bits64(opcode, nans, [one] * 3) == list(map(quieted, nans)), opcode
        assert bits64(opcode, [one] * 3, nans) == list(map(quieted, nans)), opcode
        first, second = bits64(opcode, [PAYLOAD, MINUS], [SIGNALLING, PAYLOAD])
        wanted = (PAYLOAD, quieted(MINUS)) if opcode.startswith("div") else (quieted(SIGNALLING), PAYLOAD)
        assert (first, second) == wanted, opcode
    for opcode in ("abs.f64", "neg.f64", "rcp.rn.f64", "sqrt.rn.f64", "rcp.rm.f64", "sqrt.rp.f64", "cvt.rni.f64.f64"):
        assert bits64(opcode, nans) == list(map(quieted, nans)), opcode
    for opcode in ("min.f64", "max.f64"):
        assert bits64(opcode, [PAYLOAD, PAYLOAD], [SIGNALLING, one]) == [quieted(SIGNALLING), one], opcode
    for opcode in ("fma.rn.f64", "fma.rp.f64"):
        got = bits64(
            opcode, [PAYLOAD, PAYLOAD, PAYLOAD, one], [SIGNALLING, one, one, one], [MINUS, MINUS, one, SIGNALLING]
        )
        assert got == [quieted(SIGNALLING), quieted(MINUS), PAYLOAD, quieted(SIGNALLING)], opcode
    for opcode, a, b in (
        ("sub.f64", inf, inf),
        ("mul.f64", 0, inf),
        ("div.rn.f64", 0, 0),
        ("add.rz.f64", inf, 0xFFF0000000000000),
    ):
        assert bits64(opcode, [a], [b]) == [GENERATED], opcode
    assert bits64("sqrt.rn.f64", [minus_one]) == [GENERATED]


def test_conversions_of_nan_between_widths() -> None:
    nans = [SIGNALLING, PAYLOAD, MINUS, 0xFFFFFFFFFFFFFFFF]
    assert bits64("cvt.rn.f32.f64", nans) == [0x7FC00000, 0x7FC00000, 0xFFC00000, 0xFFFFFFFF]
    assert bits64("cvt.rz.f16.f64", nans) == [0x7E00, 0x7E00, 0xFE00, 0xFFFF]
    half = np.array([[0x7C01, 0xFC70]], np.uint16).view(np.float16)
    assert evaluate("cvt.f64.f16", half).view(np.uint64)[0].tolist() == [0x7FF8040000000000, 0xFFF9C00000000000]
    assert evaluate("cvt.f64.f32", bits32([0xFF800001])).view(np.uint64).item() == 0xFFF8000020000000
    assert evaluate("cvt.ftz.f64.f32", bits32([0xFF800001])).view(np.uint64).item() == 0x7FFFFFFFE0000000
    assert run32("cvt.ftz.f32.f32", [0xFFC00005, SUBNORMAL, NEG_ZERO, ONE]) == [NAN, 0, NEG_ZERO, ONE]


def test_directed_quotients_are_flushed_before_rounding() -> None:
    least, minus, above = 0x00800000, 0x80800000, 0x3F800001  # 2^-126 and the number after 1
    assert run32("div.rp.ftz.f32", [least], [above]) == [0] and run32("div.rp.f32", [least], [above]) == [least]
    assert run32("div.rm.ftz.f32", [minus], [above]) == [NEG_ZERO]
    assert run32("div.rp.ftz.f32", [least + 2], [above]) == [least + 1]


def test_half_exponentials_are_cut_off() -> None:
    got = evaluate(
        "ex2.approx.f16", np.array([[-18.890625, -24.859375, -16.453125, 3.0, 15.9921875, 16.0]], np.float16)
    )
    assert got[0].tolist() == [34 * 2.0**-24, 0.0, 186 * 2.0**-24, 8.0, 65152.0, np.inf]


def test_flushing_saturation_and_signs() -> None:
    assert run32("add.ftz.f32", [0x007FFFFF, NEG_SUBNORMAL], [0x007FFFFF, NEG_ZERO]) == [0, NEG_ZERO]
    assert run32("mul.ftz.f32", [0x00800000], [0x3F000000]) == [0]  # a normal factor, a subnormal product
    assert run32("mul.f32", [0x00800000], [0x3F000000]) == [0x00400000]
    assert run32("fma.rn.ftz.f32", [0x007FFFFF], [ONE], [ONE]) == [ONE]
    assert run32("add.sat.f32", [ONE, 0xBF800000, INF, NAN], [ONE, 0, NEG_INF, ONE]) == [ONE, 0, 0, 0]
    assert run32("fma.rn.sat.f32", [NAN, ONE], [ONE, ONE], [ONE, 0xBF000000]) == [0, 0x3F000000]
    assert run32("cvt.sat.f32.f32", [0xBF800000, 0x3F000000, 0x40000000, NAN, NEG_ZERO]) == [0, 0x3F000000, ONE, 0, 0]
    assert run32("copysign.f32", [NEG_ZERO, 0], [ONE, 0xBF800000]) == [0xBF800000, ONE]
    assert run32("max.xorsign.abs.f32", [0xBF800000, 0xBF800000], [0x40000000, 0xC0000000]) == [0xC0000000, 0x40000000]
    assert run32("min.ftz.f32", [SUBNORMAL], [ONE]) == [0]
    properties = {
        "finite": [1, 1, 1, 0, 0],
        "infinite": [0, 0, 0, 1, 0],
        "number": [1, 1, 1, 1, 0],
        "notanumber": [0, 0, 0, 0, 1],
        "normal": [1, 1, 0, 0, 0],
        "subnormal": [0, 0, 1, 0, 0],
    }
    for name, wanted in properties.items():
        assert evaluate(f"testp.{name}.f32", bits32([ONE, NEG_ZERO, SUBNORMAL, INF, NAN]))[0].tolist() == wanted


def test_tf32_rounds_ties_away() -> None:
    got = evaluate("cvt.rna.tf32.f32", bits32([0x3F801000, 0xBF801000, 0x3F800FFF, 0x7F7FFFFF, NEG_INF, 0x00001000]))
    assert got[0].tolist() == [0x3F802000, 0xBF802000, 0x3F800000, INF, NEG_INF, 0x00002000]
    nans = evaluate("cvt.rna.tf32.f32", bits32([0x7FC00005, 0xFFFFFFFF, 0x7F800001]))
    assert nans[0].tolist() == [0x7FC00000, 0xFFFFE000, INF]  # bits are cut off, even where none are left
    assert evaluate("cvt.rna.satfinite.tf32.f32", bits32([0x7F7FFFFF])).item() == 0x7F7FE000
    assert evaluate("cvt.rn.tf32.f32", bits32([0x3F801000])).item() == ONE


def test_selection() -> None:
    p = np.array([[True, False]])
    assert run("selp.b32", [1, 1], [2, 2], [True, False]) == [1, 2]
    kept = evaluate("selp.f32", bits32([0x7FA00001] * 2), bits32([0xFFC00002] * 2), p).view(np.uint32)[0].tolist()
    assert kept == [0x7FA00001, 0xFFC00002]  # copies change no NaN
    assert run("slct.s32.s32", [1, 1, 1], [2, 2, 2], [0, -1, 5]) == [1, 2, 1]
    by = bits32([NEG_ZERO, NEG_SUBNORMAL, NAN])
    ones, twos = register([1] * 3, "u32"), register([2] * 3, "u32")
    assert evaluate("slct.b32.f32", ones, twos, by)[0].tolist() == [1, 2, 2]
    assert evaluate("slct.ftz.b32.f32", ones, twos, by)[0].tolist() == [1, 1, 2]


def test_rounding_to_integral_values_and_widening() -> None:
    x = np.array([[-2.5, -0.5, -0.25, 0.5, 1.5, 2.5]], np.float32)
    whole = {
        "rni": [-2.0, -0.0, -0.0, 0.0, 2.0, 2.0],
        "rzi": [-2.0, -0.0, -0.0, 0.0, 1.0, 2.0],
        "rmi": [-3.0, -1.0, -1.0, 0.0, 1.0, 2.0],
        "rpi": [-2.0, -0.0, -0.0, 1.0, 2.0, 3.0],
    }
    for mode, wanted in whole.items():
        got = evaluate(f"cvt.{mode}.f32.f32", x)
        assert got.view(np.uint32)[0].tolist() == [exact.f32(v) for v in wanted]
    assert evaluate("cvt.f32.bf16", np.array([[0xC049]], np.uint16)).item() == -3.140625
    assert evaluate("cvt.f64.f16", np.array([[65504.0]], np.float16)).item() == 65504.0
    assert evaluate("cvt.rn.f16.f32", np.array([[65519.0, 65520.0]], np.float32))[0].tolist() == [65504.0, np.inf]
    assert evaluate("cvt.rz.f16.f32", np.array([[1e9]], np.float32)).item() == 65504.0
    assert evaluate("cvt.rn.satfinite.f16.f32", np.array([[-1e9]], np.float32)).item() == -65504.0
