"""Pure instructions for tests: spellings, evaluation on registers, operands and judges made of Python integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cupyllm.sim import isa, numeric

DTYPES: dict[str, Any] = {
    "pred": np.bool_, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "f16x2": np.uint32, "bf16x2": np.uint32, "tf32": np.uint32,
    **{f"b{w}": np.dtype(f"u{w // 8}") for w in (8, 16, 32, 64)},
    **{f"u{w}": np.dtype(f"u{w // 8}") for w in (8, 16, 32, 64)},
    **{f"s{w}": np.dtype(f"i{w // 8}") for w in (8, 16, 32, 64)},
}  # fmt: skip

# Every pure opcode in the PTX of this project's kernels (compute_80).
IN_USE = """abs.f32 add.f32 add.f64 add.s32 add.s64 and.b32 and.b64 and.pred cvt.f32.f16 cvt.f64.f32 cvt.rn.f16.f32
cvt.rn.f32.f64 cvt.rn.f32.s32 cvt.rn.f32.s64 cvt.rn.f64.s64 cvt.rzi.s64.f64 cvt.s64.s32 cvt.sat.f32.f32 cvt.u16.u32
cvt.u32.u16 cvt.u32.u64 cvt.u64.u32 div.rn.f32 div.s32 div.s64 div.u32 ex2.approx.ftz.f32 fma.rm.f32 fma.rn.f32
fma.rn.f64 max.f32 max.s32 max.s64 min.s64 mov.b32 mov.f32 mov.f64 mov.u16 mov.u32 mov.u64 mul.f32 mul.f64 mul.hi.s32
mul.lo.s32 mul.lo.s64 mul.wide.s32 mul.wide.u32 neg.f32 neg.f64 neg.s64 not.b64 not.pred or.b16 or.b32 or.b64 or.pred
prmt.b32 rcp.rn.f32 rem.s64 rem.u32 selp.b16 selp.b32 selp.b64 selp.f32 selp.f64 selp.s32 selp.u32 setp.eq.b64
setp.eq.f32 setp.eq.s32 setp.eq.s64 setp.ge.f32 setp.ge.s32 setp.ge.s64 setp.ge.u32 setp.gt.f32 setp.gt.s32 setp.gt.s64
setp.gt.u32 setp.gt.u64 setp.le.s64 setp.leu.f32 setp.lt.f32 setp.lt.s32 setp.lt.s64 setp.lt.u32 setp.lt.u64
setp.nan.f32 setp.ne.s32 setp.ne.s64 shl.b32 shl.b64 shr.s32 shr.s64 shr.u32 shr.u64 sqrt.rn.f32 sub.f32 sub.s32
sub.s64 xor.pred""".split()

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
ROUNDINGS = ("rn", "rz", "rm", "rp")
ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
FLOAT_ORDERS = (*ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def spellings() -> Iterator[str]:
    """Most of the spellings that the rules accept."""
    for t in INTEGERS:
        for stem in ("add", "sub", "mul.lo", "mul.hi", "mad.lo", "mad.hi", "sad", "div", "rem", "min", "max"):
            yield f"{stem}.{t}"
        yield from (f"set.lt.u32.{t}", f"set.ge.and.f32.{t}", f"shr.{t}", f"slct.{t}.s32", f"slct.ftz.{t}.f32")
        yield from (f"setp.{order}.{t}" for order in ORDERED)
        yield from (f"setp.{order}.{operation}.{t}" for order in ORDERED for operation in ("and", "or", "xor"))
        if t[0] == "u":
            yield from (f"setp.{order}.{t}" for order in ("lo", "ls", "hi", "hs"))
        if t[1:] != "64":
            yield from (f"mul.wide.{t}", f"mad.wide.{t}")
        if t[1:] != "16":
            yield from (f"bfe.{t}", f"bfind.{t}", f"bfind.shiftamt.{t}")
        if t[0] == "s":
            yield from (f"abs.{t}", f"neg.{t}")
    for t in ("b16", "b32", "b64"):
        yield from (f"{stem}.{t}" for stem in ("and", "or", "xor", "not", "cnot", "shl", "shr", "selp", "mov"))
        yield from (f"setp.eq.{t}", f"setp.ne.or.{t}")
        if t != "b16":
            yield from (f"{stem}.{t}" for stem in ("popc", "clz", "brev", "bfi"))
    yield from ("add.sat.s32", "sub.sat.s32", "mad.hi.sat.s32", "mad24.hi.sat.s32", "max.relu.s32", "min.relu.s16x2")
    yield from ("add.u16x2", "max.s16x2", "min.u16x2", "fns.b32", "lop3.b32", "lop3.or.b32", "lop3.and.b32")
    yield from (f"{stem}.{mode}.{t}" for stem in ("mul24", "mad24") for mode in ("lo", "hi") for t in ("u32", "s32"))
    yield from (f"bmsk.{mode}.b32" for mode in ("clamp", "wrap"))
    yield from (f"szext.{mode}.{t}" for mode in ("clamp", "wrap") for t in ("u32", "s32"))
    yield from (f"shf.{way}.{mode}.b32" for way in "lr" for mode in ("clamp", "wrap"))
    for a, b in itertools.product(("u32", "s32"), repeat=2):
        yield from (f"dp4a.{a}.{b}", f"dp2a.lo.{a}.{b}", f"dp2a.hi.{a}.{b}")
    yield from (f"prmt.b32{mode}" for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"))
    yield from float_spellings()
    yield from cvt_spellings()


def float_spellings() -> Iterator[str]:
    for t in ("f32", "f64"):
        for stem, mode in itertools.product(("add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt"), ROUNDINGS):
            yield f"{stem}.{mode}.{t}"
            if t == "f32":
                yield f"{stem}.{mode}.ftz.{t}"
                if stem in ("add", "sub", "mul", "fma", "mad"):
                    yield from (f"{stem}.{mode}.sat.{t}", f"{stem}.{mode}.ftz.sat.{t}")
        yield from (f"{stem}.{t}" for stem in ("add", "sub", "mul", "min", "max", "neg", "abs", "copysign"))
        yield from (
            f"testp.{name}.{t}" for name in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
        )
    for t in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        yield from (f"setp.{order}.{t}" for order in FLOAT_ORDERS)
        yield from (f"setp.{order}.{operation}.{t}" for order in FLOAT_ORDERS for operation in ("and", "or", "xor"))
    for t in ("f32", "f16", "f16x2", "bf16", "bf16x2"):
        yield from (
            f"{stem}{mode}.{t}" for stem in ("min", "max") for mode in ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs")
        )
        yield from (f"set.lt.u32.{t}", f"set.geu.xor.s32.{t}")
    for name in ("ex2", "lg2", "sin", "cos", "rcp", "sqrt", "rsqrt"):
        yield from (f"{name}.approx.f32", f"{name}.approx.ftz.f32")
    yield from ("tanh.approx.f32", "div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32")
    yield from ("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.f64", "ex2.approx.f16", "ex2.approx.f16x2")
    yield from (
        "ex2.approx.ftz.bf16",
        "ex2.approx.ftz.bf16x2",
        *(f"tanh.approx.{t}" for t in ("f16", "f16x2", "bf16", "bf16x2")),
    )
    for t in ("f16", "f16x2"):
        yield from (
            f"{stem}{m}.{t}" for stem in ("add", "sub", "mul") for m in ("", ".rn", ".ftz", ".sat", ".rn.ftz.sat")
        )
        yield from (f"fma.rn{m}.{t}" for m in ("", ".ftz", ".sat", ".relu", ".ftz.relu"))
        yield from (f"neg.{t}", f"abs.ftz.{t}", f"max.ftz.{t}", f"set.eq.{t}.{t}")
    for t in ("bf16", "bf16x2"):
        yield from (f"add.{t}", f"sub.rn.{t}", f"mul.{t}", f"fma.rn.{t}", f"fma.rn.relu.{t}", f"neg.{t}", f"abs.{t}")
    yield from (
        "set.ne.f16.f32",
        "set.ne.bf16.s32",
        "set.lt.u16.f16",
        "selp.f32",
        "selp.f64",
        "slct.f32.f32",
        "mov.pred",
    )


def cvt_spellings() -> Iterator[str]:
    whole = ("u8", "s8", *INTEGERS)
    floats = ("f16", "bf16", "f32", "f64")
    yield from (f"cvt.{a}.{b}" for a in whole for b in whole)
    yield from (f"cvt.sat.{a}.{b}" for a in whole for b in whole)
    yield from (f"cvt.{mode}.{a}.{b}" for mode in ROUNDINGS for a in floats for b in whole)
    yield from (f"cvt.{mode}.{a}.{b}" for mode in ("rni", "rzi", "rmi", "rpi") for a in whole for b in floats)
    yield from (f"cvt.{mode}.{a}.{a}" for mode in ("rni", "rzi", "rmi", "rpi") for a in floats)
    size = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
    for a, b in itertools.permutations(floats, 2):
        if size[a] <= size[b]:
            yield from (f"cvt.{mode}.{a}.{b}" for mode in ROUNDINGS)
        else:
            yield f"cvt.{a}.{b}"
    yield from ("cvt.f32.f32", "cvt.ftz.f32.f32", "cvt.sat.f32.f32", "cvt.ftz.sat.f32.f32", "cvt.sat.f64.f64")
    yield from (
        "cvt.rn.ftz.f16.f32",
        "cvt.ftz.f32.f16",
        "cvt.rn.sat.f32.s32",
        "cvt.rzi.ftz.s32.f32",
        "cvt.rn.ftz.f32.f64",
    )
    for mode, extra, t in itertools.product(
        ("rn", "rz"), ("", ".relu", ".satfinite", ".relu.satfinite"), ("f16", "bf16")
    ):
        yield from (f"cvt.{mode}{extra}.{t}.f32", f"cvt.{mode}{extra}.{t}x2.f32")
    yield from ("cvt.rna.tf32.f32", "cvt.rna.satfinite.tf32.f32", "cvt.rn.tf32.f32", "cvt.rz.relu.tf32.f32")
    for t in ("e4m3x2", "e5m2x2"):
        yield from (f"cvt.rn.satfinite.{t}.{s}" for s in ("f32", "f16x2", "bf16x2"))
        yield from (f"cvt.rn.satfinite.relu.{t}.f32", f"cvt.rn.f16x2.{t}", f"cvt.rn.relu.f16x2.{t}")
    yield from (f"cvt.pack.sat.{t}.s32" for t in ("u16", "s16"))
    yield from (f"cvt.pack.sat.{t}.s32.b32" for t in ("u2", "s2", "u4", "s4", "u8", "s8"))


def evaluate(opcode: str, *operands: Any) -> Any:
    """The result of an instruction; operands are arrays of the rule's input types."""
    rule = isa.rule(opcode)
    assert rule is not None, opcode
    names = [f"v{i}" for i in range(len(rule.inputs))]
    assert len(operands) == len(names), (opcode, rule)
    scope = {"np": np, "num": numeric, "bf16": ml_dtypes.bfloat16, **dict(zip(names, operands, strict=True))}
    for operand, type_ in zip(operands, rule.inputs, strict=True):
        assert operand.dtype == DTYPES[type_], (opcode, operand.dtype, type_)
    return eval(rule.expr.format(*names), scope)


def register(values: Sequence[Any], type_: str) -> Any:
    """A [1, n] register; integers are wrapped to the type, bits of floats stand for themselves."""
    dtype = np.dtype(DTYPES[type_])
    if dtype.kind in "iu":
        bits = 8 * dtype.itemsize
        return np.array([[int(v) % (1 << bits) for v in values]], f"u{dtype.itemsize}").view(dtype)
    return np.array([values], dtype)


def run(opcode: str, *columns: Sequence[Any]) -> list[Any]:
    """The results of an instruction of one output as a list; operands as lists of n values each."""
    rule = isa.rule(opcode)
    assert rule is not None
    result = evaluate(opcode, *(register(c, t) for c, t in zip(columns, rule.inputs, strict=True)))
    assert result.dtype == DTYPES[rule.outputs[0]], opcode
    return result[0].tolist()


def check(opcode: str, cases: Sequence[tuple[int, ...]], expected: Callable[..., int]) -> None:
    """An integer instruction against a function of Python integers; results are compared modulo the width."""
    rule = isa.rule(opcode)
    assert rule is not None
    width = 8 * np.dtype(DTYPES[rule.outputs[0]]).itemsize
    for case, got in zip(cases, run(opcode, *zip(*cases, strict=True)), strict=True):
        want = expected(*case) % (1 << width)
        assert got % (1 << width) == want, (opcode, [hex(x) for x in case], hex(got), hex(want))


def numbers(type_: str, n: int, arity: int = 2, seed: int = 0) -> list[tuple[int, ...]]:
    """Edge and random tuples of an integer type."""
    width, signed = int(type_[1:]), type_[0] == "s"
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if signed else (0, (1 << width) - 1)
    edges = sorted(
        {low, low + 1, high, high - 1, 0, 1, 2, 3, 7, high // 2, -1 if signed else high, -7 if signed else 5}
    )
    cases = list(itertools.product(edges, repeat=min(arity, 2)))
    rng = np.random.default_rng(seed)
    cases = [(*case, *(int(x) for x in rng.choice(edges, arity - 2))) if arity > 2 else case for case in cases]
    for _ in range(n):
        case = rng.integers(low, high, arity, dtype=np.int64 if signed else np.uint64, endpoint=True)
        shift = rng.integers(0, width, arity)
        cases.append(tuple(int(x) >> int(s) for x, s in zip(case, shift, strict=True)))
    return cases


def compare(order: str, a: float, b: float) -> bool:
    unordered = math.isnan(a) or math.isnan(b)
    if order in ("num", "nan"):
        return unordered == (order == "nan")
    if unordered:
        return len(order) == 3
    signs: dict[str, Callable[[float, float], bool]] = {
        "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y, "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
    }  # fmt: skip
    return signs[order[:2]](a, b)
