"""The numeric functions against correct rounding by definition (tests/sim/exact.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cupyllm.sim import fma as fma_module
from cupyllm.sim import numeric as num
from tests.sim import exact

MODES = ("rn", "rz", "rm", "rp")
# Encodings: zeros, subnormals, the ends of the normal range, ties around 1, infinities, NaN.
EDGES32 = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00000003, 0x007FFFFF, 0x00800000, 0x80800001, 0x0C800001,
    0x33800000, 0x33800001, 0xB3FFFFFF, 0x3F7FFFFF, 0x3F800000, 0xBF800001, 0x3F800003, 0x40490FDB, 0x4B7FFFFF,
    0x7EFFFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFA00001,
]  # fmt: skip
EDGES64 = [
    0, 1 << 63, 1, (1 << 63) | 3, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x8010000000000001, 0x1FF0000000000001,
    0x2000000000000003, 0x3CA0000000000000, 0x3CA0000000000001, 0xBCAFFFFFFFFFFFFF, 0x3FEFFFFFFFFFFFFF,
    0x3FF0000000000000, 0xBFF0000000000001, 0x3FF0000000000003, 0x5FEFFFFFFFFFFFFF, 0x7FE0000000000000,
    0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000,
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def floats(bits: Any, name: str = "f32") -> Any:
    """Encodings as a [1, n] register."""
    dtype = {"f32": np.uint32, "f64": np.uint64, "f16": np.uint16, "bf16": np.uint16}[name]
    array = np.array([bits], dtype).reshape(1, -1)
    return array if name == "bf16" else array.view(f"f{array.dtype.itemsize}")


def random_bits(rng: np.random.Generator, n: int, name: str = "f32", spread: int = 20) -> list[int]:
    """Finite encodings with exponents around 1, one in four anywhere, some mantissas with few bits (ties)."""
    e, m = exact.FORMATS[name]
    near = ((1 << e - 1) - 1) + rng.integers(-spread, spread, n)
    field = np.where(rng.random(n) < 0.25, rng.integers(0, (1 << e) - 1, n), near)
    mantissa = rng.integers(0, 1 << m, n)
    mantissa = np.where(rng.random(n) < 0.3, mantissa >> (m - 3) << (m - 3), mantissa)
    sign = rng.integers(0, 2, n)
    return [int(s) << (e + m) | int(f) << m | int(k) for s, f, k in zip(sign, field, mantissa, strict=True)]


def expected_sum(terms: list[int], product: bool, name: str, mode: str) -> int | None:
    """a + b (or a b + c) of encodings; None where IEEE gives NaN."""
    e, m = exact.FORMATS[name]
    sign_of = lambda bits: bits >> (e + m)  # noqa: E731
    inf = exact.infinity(name)
    is_inf = [bits & (1 << e + m) - 1 == inf for bits in terms]
    if any(exact.is_nan(bits, name) for bits in terms):
        return None
    values = [exact.value(bits, name) for bits in terms]
    if product:
        p_sign = sign_of(terms[0]) ^ sign_of(terms[1])
        p_inf = is_inf[0] or is_inf[1]
        if p_inf and 0 in values[:2]:
            return None
        p_value = None if p_inf else values[0] * values[1]  # type: ignore[operator]
    else:
        p_sign, p_inf, p_value = sign_of(terms[0]), is_inf[0], values[0]
    c_sign, c_inf, c_value = sign_of(terms[-1]), is_inf[-1], values[-1]
    if p_inf or c_inf:
        if p_inf and c_inf and p_sign != c_sign:
            return None
        return (p_sign if p_inf else c_sign) << (e + m) | inf
    zero = p_sign if p_sign == c_sign else int(mode == "rm")
    return exact.rounded(p_value + c_value, name, mode, zero << (e + m))  # type: ignore[operator]


def check_bits(result: Any, expected: list[int | None], name: str, inputs: Any) -> None:
    """Equal encodings; None means the canonical NaN, or for f64 any."""
    bits = result.view(f"u{result.dtype.itemsize}").reshape(-1).tolist()
    for got, want, case in zip(bits, expected, inputs, strict=True):
        if want is None:
            good = exact.is_nan(got, name) if name == "f64" else got == exact.NAN[name]
        else:
            good = got == want
        assert good, (name, [hex(x) for x in case], hex(got), want if want is None else hex(want))


def hard_fmas() -> list[tuple[int, int, int]]:
    """Sums that lie a hair off a float32 midpoint, so that float64 rounds them onto it; and subnormal ones."""
    up, down = exact.f32(1 + 2.0**-23), exact.f32(1 - 2.0**-23)
    cases = []
    for shift in (24, 25, 40, 100):
        for a in (up, down):
            b = exact.f32((1 - 2.0**-23) * 2.0**-shift) if a == up else exact.f32((1 + 2.0**-22) * 2.0**-shift)
            for k, sign in itertools.product(range(8), (0, 1 << 31)):
                c = exact.f32((1 + k * 2.0**-23) * 2.0 ** (24 - shift))
                cases += [(a, b, c), (a | 1 << 31, b, c ^ sign)]
    for k in range(8):  # c subnormal (k 2^-149), a b = 2^-150 (1 - 2^-46) and its neighbours
        for a in (up, down, exact.f32(1.0)):
            cases += [(a, exact.f32(2.0**-149), k), (a, exact.f32(2.0**-126), k)]
            half = exact.f32((1 - 2.0**-23) * 2.0**-75)
            cases += [(exact.f32((1 + 2.0**-23) * 2.0**-75), half, k), (half, half, k), (half | 1 << 31, half, k)]
    largest = exact.f32(3.4028234663852886e38)
    cases += [(exact.f32(2.0**103), exact.f32(1.0), largest), (exact.f32(2.0**103), down, largest)]
    return cases


def test_fma_f32_rounds_once() -> None:
    rng = np.random.default_rng(1)
    cases = list(itertools.product(EDGES32[::2], EDGES32[1::2], EDGES32[::3])) + hard_fmas()
    cases += list(zip(*(random_bits(rng, 1500) for _ in range(3)), strict=True))
    a, b, c = (floats(column) for column in zip(*cases, strict=True))
    expected = [expected_sum(list(case), True, "f32", "rn") for case in cases]
    check_bits(num.fma_f32(a, b, c), expected, "f32", cases)
    twice = (a.astype(np.float64) * b + c).astype(np.float32).view(np.uint32).reshape(-1).tolist()
    assert sum(x != y for x, y in zip(twice, expected, strict=True) if y is not None) > 20  # the trap is there
    for mode in MODES[1:]:
        expected = [expected_sum(list(case), True, "f32", mode) for case in cases]
        check_bits(num.nan32(num.fma_f32_directed(a, b, c, mode)), expected, "f32", cases)


def test_fma_f32_of_bfloat16_values_has_many_ties() -> None:
    rng = np.random.default_rng(2)
    columns = [[bits & 0xFFFF0000 for bits in random_bits(rng, 1500, spread=6)] for _ in range(3)]
    cases = list(zip(*columns, strict=True))
    a, b, c = (floats(column) for column in zip(*cases, strict=True))
    expected = [expected_sum(list(case), True, "f32", "rn") for case in cases]
    check_bits(num.fma_f32(a, b, c), expected, "f32", cases)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 64), (2, 96), (1, 512), (3, 1000)])
def test_fma_f32_many_is_fma_f32_row_by_row(shape: tuple[int, int], stacked: bool) -> None:
    rng = np.random.default_rng(3)
    hard = np.array(hard_fmas(), np.uint32).view(np.float32)

    def draw(kind: int) -> Any:
        """A register of the full shape or of one that broadcasts to it, hard triples among random values."""
        register = rng.standard_normal(shape).astype(np.float32)
        register[0, : min(40, shape[1])] = hard[: min(40, shape[1]), kind]
        return register

    for n in (1, 3, 17, 64):
        a = [draw(0) if i % 3 else draw(0)[:1] for i in range(min(n, 8))]
        b = [draw(1) if i % 2 else draw(1)[:, :1] for i in range(min(n, 8))]
        a, b = [a[i // 8 % len(a)] for i in range(n)], [b[i % len(b)] for i in range(n)]
        rows = np.stack([draw(2) for _ in range(n)])
        addends: Any = rows if stacked else [row if i % 5 else row[:, :1] for i, row in enumerate(rows)]
        result = num.fma_f32_many(a, b, addends)
        assert result.dtype == np.float32 and result.shape == (n, *shape)
        for i in range(n):
            single = np.broadcast_to(num.fma_f32(a[i], b[i], addends[i]), shape)
            assert np.array_equal(result[i].view(np.uint32), single.view(np.uint32)), (n, i)


def test_fma_f32_many_chains_and_settles_every_block() -> None:
    hard = hard_fmas()
    a, b, c = (floats(column) for column in zip(*hard, strict=True))
    n = 2 * (fma_module.BLOCK // a.size) + 3  # three blocks, the last one short
    expected = [expected_sum(list(case), True, "f32", "rn") for case in hard]
    result = num.fma_f32_many([a] * n, [b] * n, [c] * n)
    for row in (0, n // 2, n - 1):
        check_bits(result[row], expected, "f32", hard)
    again = num.fma_f32_many([a] * n, [b] * n, result)
    assert np.array_equal(again[n - 1].view(np.uint32), num.fma_f32(a, b, result[n - 1]).view(np.uint32))


def test_fma_f32_makes_nan_canonical() -> None:
    nan = floats([0xFFC00001, 0x7F800001, 0x3F800000, 0x3F800000])
    one = floats([0x3F800000] * 4)
    inf = floats([0x3F800000, 0x3F800000, 0x7F800000, 0x3F800000])
    expected = [0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF, 0x40000000]
    minus = floats([0x3F800000, 0x3F800000, 0xFF800000, 0x3F800000])
    assert num.fma_f32(nan, inf, minus).view(np.uint32).tolist()[0] == expected
    many = num.fma_f32_many([nan, one], [inf, inf], [minus, minus])
    assert many[0].view(np.uint32).tolist()[0] == expected


def test_fma_f64_rounds_once() -> None:
    rng = np.random.default_rng(4)
    cases = list(itertools.product(EDGES64[::2], EDGES64[1::2], EDGES64[::3]))
    cases += list(itertools.product(EDGES64[1::3], EDGES64[::3], EDGES64[1::2]))
    cases += list(zip(*(random_bits(rng, 1200, "f64", 60) for _ in range(3)), strict=True))
    one, up, down = exact.f64(1.0), exact.f64(1 + 2.0**-52), exact.f64(1 - 2.0**-52)
    for shift, k in itertools.product((53, 54, 106, 300, 1000), range(4)):  # off midpoints by 2^-104 of the sum
        b = exact.f64((1 - 2.0**-52) * 2.0**-shift)
        c = exact.f64((1 + k * 2.0**-52) * 2.0 ** (53 - shift))
        cases += [(up, b, c), (down, b, c), (up, b | 1 << 63, c), (one, b, c), (up, b, c ^ (1 << 63))]
    for columns in (cases, [x for x in cases if all(0x3000 < (t >> 48 & 0x7FFF) < 0x4800 for t in x)]):
        a, b, c = (floats(column, "f64") for column in zip(*columns, strict=True))
        expected = [expected_sum(list(case), True, "f64", "rn") for case in columns]
        check_bits(num.fma_f64(a, b, c), expected, "f64", columns)
    assert len(columns) > 100  # the second round took the path without scaling


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("mode", MODES[1:])
def test_directed_sums_products_quotients_and_roots(name: str, mode: str) -> None:
    rng = np.random.default_rng(5)
    edges = [bits for bits in (EDGES32 if name == "f32" else EDGES64) if exact.value(bits, name) is not None]
    pairs = list(itertools.product(edges, edges))
    pairs += list(zip(random_bits(rng, 300, name), random_bits(rng, 300, name), strict=True))
    a, b = (floats(column, name) for column in zip(*pairs, strict=True))
    call = (lambda op, *args: getattr(num, f"{op}_f32")(*args, mode)) if name == "f32" else (
        lambda op, *args: num.exact_f64(op, mode, *args))  # fmt: skip
    e, m = exact.FORMATS[name]
    check_bits(call("add", a, b), [expected_sum(list(x), False, name, mode) for x in pairs], name, pairs)

    def fraction(op: str, x: int, y: int) -> int | None:
        left, right = exact.value(x, name), exact.value(y, name)
        assert left is not None and right is not None
        sign = (x ^ y) >> (e + m) << (e + m)
        if op == "div" and right == 0:
            return None if left == 0 else sign | exact.infinity(name)
        return exact.rounded(left * right if op == "mul" else left / right, name, mode, sign)

    for op in ("mul", "div"):
        result = call(op, a, b)
        result = num.nan32(result) if name == "f32" else result
        check_bits(result, [fraction(op, *pair) for pair in pairs], name, pairs)
    roots = [bits & ~(1 << (e + m)) for bits, _ in pairs]
    wanted: list[int | None] = []
    for bits in roots:
        size = exact.value(bits, name)
        assert size is not None
        wanted.append(exact.rounded(exact.root_neighbours(size), name, mode))
    check_bits(call("sqrt", floats(roots, name)), wanted, name, [[bits] for bits in roots])


@pytest.mark.parametrize("target", ["f16", "bf16", "tf32", "e5m2", "f32"])
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_narrowing(source: str, target: str) -> None:
    rng = np.random.default_rng(6)
    inputs = [x for x in (EDGES32 if source == "f32" else EDGES64) if not exact.is_nan(x, source)]
    inputs += random_bits(rng, 400, source, 18)
    for wanted in random_bits(rng, 200, target, 18):  # numbers of the target, midpoints, and a hair off them
        number, above = exact.value(wanted, target), exact.value(wanted + 1, target)
        if number is None or above is None:
            continue
        middle = exact.rounded((number + above) / 2, source)
        inputs += [middle, middle + 1, middle - 1]
    inputs = [x for x in inputs if exact.value(x, source) is not None]
    x = floats(inputs, source)
    for mode in (*MODES, "rna"):
        if target == "f32":
            if mode == "rna" or source == "f32":
                continue
            result = num.round32(x, mode).view(np.uint32)
        else:
            result = num.narrow(x, target, mode)
        signs = exact.FORMATS[source][0] + exact.FORMATS[source][1]
        place = sum(exact.FORMATS[target])
        expected: list[int | None] = []
        for bits in inputs:
            number = exact.value(bits, source)
            assert number is not None
            expected.append(exact.rounded(number, target, mode, bits >> signs << place))
        bits = result.view(f"u{result.dtype.itemsize}")
        if target == "tf32":
            bits = bits >> np.uint32(13)
        check_bits(bits, expected, target, [[i] for i in inputs])


def test_e4m3_to_nearest_with_clamping() -> None:
    grid = num.small_to_f64(np.arange(127, dtype=np.uint8)[None], "e4m3")[0]
    assert grid[1] == 2.0**-9 and grid[8] == 2.0**-6 and grid[126] == 448.0 and np.all(np.diff(grid) > 0)
    rng = np.random.default_rng(7)
    middles = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([grid, middles, rng.uniform(0, 500, 60), [1e30, np.inf, 2.0**-11]]).astype(np.float32)
    codes = num.narrow(x[None], "e4m3", "rn", finite=True)[0]
    for number, code in zip(x.tolist(), codes.tolist(), strict=True):
        distance = [abs(Fraction(min(number, 448.0)) - Fraction(point)) for point in grid.tolist()]
        best = [i for i, d in enumerate(distance) if d == min(distance)]
        assert code == next((i for i in best if i % 2 == 0), best[0]), number
    assert num.narrow(-x[None], "e4m3", "rn", finite=True)[0].tolist() == [c | 128 for c in codes.tolist()]
    assert num.narrow(np.array([[np.nan]]), "e4m3", "rn", finite=True).tolist() == [[0x7F]]


def test_integers_to_floats() -> None:
    rng = np.random.default_rng(8)
    edges = [0, 1, 255, 2049, 65519, 65520, 2**24 + 1, 2**24 + 3, 2**31 - 1, 2**53 + 1, 2**60 + 2**36, 2**63 - 1]
    values = edges + [-x for x in edges] + [int(x) >> int(s) for x, s in zip(
        rng.integers(-(2**63), 2**63 - 1, 300), rng.integers(0, 62, 300), strict=True)]  # fmt: skip
    big = [x % 2**64 for x in values] + [2**64 - 1, 2**63 + 2**39, 2**63 + 2**39 + 1, 2**63 + 2**10 + 1]
    signed, unsigned = np.array([values], np.int64), np.array([big], np.uint64)
    for array, numbers in ((signed, values), (unsigned, big)):
        for target, mode in itertools.product(("f16", "bf16", "f32", "f64"), MODES):
            result = num.int_to_float(array, target, mode)
            expected: list[int | None] = [exact.rounded(Fraction(x), target, mode) for x in numbers]
            check_bits(result, expected, target, [[x % 2**64] for x in numbers])


@pytest.mark.parametrize("source", ["f16", "f32", "f64"])
@pytest.mark.parametrize("target", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_floats_to_integers(source: str, target: str) -> None:
    rng = np.random.default_rng(9)
    inputs = random_bits(rng, 300, source, 30 if source != "f16" else 12)
    powers = [2.0**k for k in (7, 8, 15, 16, 31, 32, 63, 64)] + [0.5, 1.5, 2.5, 0.25, 0.75, 126.5, 254.5]
    near = [float(np.nextafter(x, to)) for x in powers for to in (0.0, np.inf)] + powers
    extra = np.array(near + [-x for x in near] + [0.0, -0.0, np.inf, -np.inf, np.nan])
    x = np.concatenate([floats(inputs, source)[0], extra.astype(f"f{2 if source == 'f16' else int(source[1:]) // 8}")])
    info = np.iinfo(target)
    for mode in ("rni", "rzi", "rmi", "rpi"):
        result = num.float_to_int(x[None], target, mode)
        assert result.dtype == np.dtype(target)
        for number, got in zip(x.tolist(), result[0].tolist(), strict=True):
            if number != number:
                bits = 1 << (info.bits - 1) if source == "f64" or info.bits == 64 else 0
                want = bits - (1 << info.bits) if info.min < 0 and bits else bits
            elif abs(number) == np.inf:
                want = info.max if number > 0 else info.min
            else:
                exact_value = Fraction(number)
                floor = exact_value.numerator // exact_value.denominator
                whole = {
                    "rni": round(exact_value),
                    "rzi": floor + (exact_value < 0 and floor != exact_value),
                    "rmi": floor,
                    "rpi": floor + (floor != exact_value),
                }[mode]
                want = min(max(whole, info.min), info.max)
            assert got == want, (number, mode, got, want)


def test_half_precision_arithmetic_rounds_once() -> None:
    rng = np.random.default_rng(10)
    for name, functions in (
        ("f16", (lambda a, b: num.nan16(a + b), lambda a, b: num.nan16(a * b), num.fma_f16)),
        ("bf16", (num.add_bf16, num.mul_bf16, num.fma_bf16)),
    ):
        e, m = exact.FORMATS[name]
        top = 1 << (e + m)
        edges = [0, top, 1, top | 1, (1 << m) - 1, 1 << m, exact.infinity(name) - 1, exact.infinity(name)]
        edges += [exact.infinity(name) + 1, ((1 << e - 1) - 1) << m, (((1 << e - 1) - 1) << m) + 1]
        cases = list(itertools.product(edges, edges, edges))
        cases += list(zip(*(random_bits(rng, 800, name, 10) for _ in range(3)), strict=True))
        a, b, c = (floats(column, name) for column in zip(*cases, strict=True))
        sums = [expected_sum([x, y], False, name, "rn") for x, y, _ in cases]
        minus_zero = [(x ^ y) & top for x, y, _ in cases]
        products = [expected_sum([x, y, z], True, name, "rn") for (x, y, _), z in zip(cases, minus_zero, strict=True)]
        fused = [expected_sum(list(case), True, name, "rn") for case in cases]
        add, multiply, fma = functions
        check_bits(add(a, b), sums, name, cases)
        check_bits(multiply(a, b), products, name, cases)
        check_bits(fma(a, b, c), fused, name, cases)


def test_minima_and_maxima_order_zeros_and_drop_nan() -> None:
    for name, dtype in (("f16", np.float16), ("f32", np.float32), ("f64", np.float64)):
        x = np.array([[-0.0, 0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]], dtype)
        a, b = np.repeat(x, 7, axis=1), np.tile(x, 7)
        order = {(v, s): i for i, (v, s) in enumerate(
            [(-np.inf, True), (-1.0, True), (0.0, True), (0.0, False), (1.0, False), (np.inf, False)])}  # fmt: skip
        key = lambda v: order[(float(v), bool(np.signbit(v)))]  # noqa: B023, E731
        functions = {num.minimum: min, num.maximum: max, num.minimum_nan: min, num.maximum_nan: max}
        for function, pick in functions.items():
            nan_wins = function in (num.minimum_nan, num.maximum_nan)
            for p, q, got in zip(a[0], b[0], function(a, b)[0], strict=True):
                numbers = [v for v in (p, q) if v == v]
                if not numbers or (nan_wins and len(numbers) < 2):
                    bits = got.view(f"u{got.dtype.itemsize}")
                    assert got != got and (name == "f64" or bits == exact.NAN[name])
                else:
                    want = pick(numbers, key=key)
                    assert got == want and np.signbit(got) == np.signbit(want), (p, q)


def test_flush_and_saturate() -> None:
    x = floats([0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80000000, 0x7FC00000, 0x3F800001, 0xFF800000, 0x3F000000])
    assert num.flush(x).view(np.uint32).tolist()[0][:4] == [0, 0x80000000, 0x00800000, 0x80000000]
    got = num.saturate(x).view(np.uint32).tolist()[0]
    assert got == [0x007FFFFF, 0, 0x00800000, 0, 0, 0x3F800000, 0, 0x3F000000]
    assert num.flush(x) is not x and x.view(np.uint32)[0, 0] == 0x007FFFFF  # operands are never written
