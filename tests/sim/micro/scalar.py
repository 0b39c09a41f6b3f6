"""Micro-kernels of the register-to-register instructions: a table of opcodes, operand types and operand sets.

Thread i computes element i. Operands are passed in untyped registers, so the same few constraints serve every type.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from tests.sim.micro import CONSTRAINT, CTYPE, INPUTS, OUTPUTS, Micro, dtype_of, identifier, kernel, values

BLOCK = 128
UNARY, BINARY, TERNARY, DENSE, FUSED = 256, 512, 512, 2048, 1024  # elements

Entry = tuple[str, str, tuple[str, ...], tuple[str, ...], str]  # family, opcode, sources, results, immediate


def micros() -> Iterator[Micro]:
    for entry in (*integers(), *logic(), *floats(), *approximate(), *comparisons(), *conversions()):
        yield _micro(*entry)


# ---- the table ----


def integers() -> Iterator[Entry]:
    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        wide = {"16": "32", "32": "64"}.get(t[1:])
        for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
            yield _entry("integer", f"{op}.{t}", 2, t)
        for op in ("div", "rem"):
            yield _entry("division", f"{op}.{t}", 2, t)
        for op in ("mad.lo", "mad.hi"):
            yield _entry("integer", f"{op}.{t}", 3, t)
        yield _entry("integer", f"sad.{t}", 3, t)
        if wide:
            yield "integer", f"mul.wide.{t}", (t, t), (t[0] + wide,), ""
            yield "integer", f"mad.wide.{t}", (t, t, t[0] + wide), (t[0] + wide,), ""
        if t[0] == "s":
            yield _entry("integer", f"abs.{t}", 1, t)
            yield _entry("integer", f"neg.{t}", 1, t)
    for op in ("add.sat.s32", "sub.sat.s32"):
        yield _entry("integer", op, 2, "s32")
    yield _entry("integer", "mad.hi.sat.s32", 3, "s32")
    for t, half in product(("u32", "s32"), ("lo", "hi")):
        yield _entry("integer", f"mul24.{half}.{t}", 2, t)
        yield _entry("integer", f"mad24.{half}.{t}", 3, t)
    for a, b in product("us", "us"):
        result = "s32" if "s" in a + b else "u32"
        yield "integer", f"dp4a.{a}32.{b}32", (f"{a}32", f"{b}32", result), (result,), ""
        for half in ("lo", "hi"):
            yield "integer", f"dp2a.{half}.{a}32.{b}32", (f"{a}32", f"{b}32", result), (result,), ""


def logic() -> Iterator[Entry]:
    for bits in (16, 32, 64):
        for op in ("and", "or", "xor"):
            yield _entry("logic", f"{op}.b{bits}", 2, f"b{bits}")
        for op in ("not", "cnot"):
            yield _entry("logic", f"{op}.b{bits}", 1, f"b{bits}")
        for op, kind in (("shl", "b"), ("shr", "b"), ("shr", "u"), ("shr", "s")):
            yield "shift", f"{op}.{kind}{bits}", (f"{kind}{bits}", "u32"), (f"{kind}{bits}",), ""
    for op in ("and", "or", "xor", "not"):
        yield _entry("logic", f"{op}.pred", 1 if op == "not" else 2, "pred")
    for side, mode in product("lr", ("clamp", "wrap")):
        yield "shift", f"shf.{side}.{mode}.b32", ("b32", "b32", "u32"), ("b32",), ""
    for bits in (32, 64):
        for op in ("popc", "clz"):
            yield "bits", f"{op}.b{bits}", (f"b{bits}",), ("u32",), ""
        yield _entry("bits", f"brev.b{bits}", 1, f"b{bits}")
        yield "bits", f"bfi.b{bits}", (f"b{bits}", f"b{bits}", "u32", "u32"), (f"b{bits}",), ""
        for kind in "us":
            yield "bits", f"bfe.{kind}{bits}", (f"{kind}{bits}", "u32", "u32"), (f"{kind}{bits}",), ""
            for shift in ("", ".shiftamt"):
                yield "bits", f"bfind{shift}.{kind}{bits}", (f"{kind}{bits}",), ("u32",), ""
    for mode in ("clamp", "wrap"):
        yield "bits", f"bmsk.{mode}.b32", ("u32", "u32"), ("b32",), ""
        for t in ("u32", "s32"):
            yield "bits", f"szext.{mode}.{t}", (t, "u32"), (t,), ""
    yield "bits", "fns.b32", ("b32", "u32", "s32"), ("b32",), ""
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield "bits", f"prmt.b32{mode}", ("b32", "b32", "b32"), ("b32",), ""
    for table in (0x96, 0xE8, 0xCA, 0x01, 0x80, 0x3C, 0xFE, 0x2A):
        yield "logic", "lop3.b32", ("b32", "b32", "b32"), ("b32",), f"0x{table:02x}"


def floats() -> Iterator[Entry]:
    for t, flushes in (("f32", ("", ".ftz")), ("f64", ("",))):
        roundings = ("rn", "rz", "rm", "rp")
        for r, ftz in product(roundings, flushes):
            for op in ("add", "sub", "mul", "div"):
                yield _entry("float", f"{op}.{r}{ftz}.{t}", 2, t)
            yield _entry("fma", f"fma.{r}{ftz}.{t}", 3, t)
            for op in ("rcp", "sqrt"):
                yield _entry("float", f"{op}.{r}{ftz}.{t}", 1, t)
        yield _entry("float", f"copysign.{t}", 2, t)
        for op in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            yield "comparison", f"testp.{op}.{t}", (t,), ("pred",), ""
    for ftz in ("", ".ftz"):
        for op in ("add", "sub", "mul"):
            yield _entry("float", f"{op}.rn{ftz}.sat.f32", 2, "f32")
        yield _entry("fma", f"fma.rn{ftz}.sat.f32", 3, "f32")
    for op in ("add", "sub", "mul"):
        for t in ("f32", "f64"):
            yield _entry("float", f"{op}.{t}", 2, t)
        for t, more in product(("f16", "f16x2"), ("", ".rn", ".ftz", ".sat", ".ftz.sat")):
            yield _entry("half", f"{op}{more}.{t}", 2, t)
    for t, more in product(("f16", "f16x2"), ("", ".ftz", ".sat", ".ftz.sat", ".relu", ".ftz.relu")):
        yield _entry("fma", f"fma.rn{more}.{t}", 3, t)
    for t, more in product(("bf16", "bf16x2"), ("", ".relu")):
        yield _entry("fma", f"fma.rn{more}.{t}", 3, t)
    for t in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
        ftzs = ("", ".ftz") if t in ("f32", "f16", "f16x2") else ("",)
        for op, ftz in product(("neg", "abs"), ftzs):
            yield _entry("float" if t[0] == "f" and "16" not in t else "half", f"{op}{ftz}.{t}", 1, t)
        for op, ftz, nan in product(("min", "max"), ftzs, ("", ".NaN") if t != "f64" else ("",)):
            yield _entry("minmax", f"{op}{ftz}{nan}.{t}", 2, t)


def approximate() -> Iterator[Entry]:
    for ftz in ("", ".ftz"):
        for op in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos"):
            yield _entry("approximate", f"{op}.approx{ftz}.f32", 1, "f32")
        for op in ("div.approx", "div.full"):
            yield _entry("approximate", f"{op}{ftz}.f32", 2, "f32")
    yield _entry("approximate", "tanh.approx.f32", 1, "f32")
    for t in ("f16", "f16x2"):
        for op in ("ex2", "tanh"):
            yield _entry("approximate", f"{op}.approx.{t}", 1, t)
    for op in ("rcp", "rsqrt"):
        yield _entry("approximate", f"{op}.approx.ftz.f64", 1, "f64")


ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def comparisons() -> Iterator[Entry]:
    table = [("b", ("eq", "ne")), ("s", ORDERED), ("u", (*ORDERED, "lo", "ls", "hi", "hs"))]
    for (kind, compares), bits in product(table, (16, 32, 64)):
        for compare in compares:
            yield "comparison", f"setp.{compare}.{kind}{bits}", (f"{kind}{bits}",) * 2, ("pred",), ""
    for t in ("f32", "f64", "f16", "f16x2"):  # bf16 needs more than sm_80
        results = ("pred", "pred") if t == "f16x2" else ("pred",)
        for compare in (*ORDERED, *UNORDERED):
            yield "comparison", f"setp.{compare}.{t}", (t, t), results, ""
        if t != "f64":
            yield "comparison", f"setp.lt.ftz.{t}", (t, t), results, ""
    for t in ("u32", "s64", "f32"):
        for compare in ("lt", "eq") if t != "f32" else ("lt", "leu"):
            yield "comparison", f"setp.{compare}.{t}", (t, t), ("pred", "pred"), ""
    for combine in ("and", "or", "xor"):
        yield "comparison", f"setp.lt.{combine}.s32", ("s32", "s32", "pred"), ("pred", "pred"), ""
        yield "comparison", f"setp.geu.{combine}.f32", ("f32", "f32", "pred"), ("pred", "pred"), ""
    for result, t in product(("u32", "s32", "f32"), ("u32", "s32", "f32")):
        yield "comparison", f"set.le.{result}.{t}", (t, t), (result,), ""
    yield "comparison", "set.ltu.u32.f64", ("f64", "f64"), ("u32",), ""
    yield "comparison", "set.gt.f16x2.f16x2", ("f16x2", "f16x2"), ("f16x2",), ""
    for t in ("b16", "b32", "b64", "u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64"):
        yield "select", f"selp.{t}", (t, t, "pred"), (t,), ""
    for t in ("b16", "b32", "b64", "u32", "f32", "f64"):
        yield "select", f"slct.{t}.s32", (t, t, "s32"), (t,), ""
        yield "select", f"slct.{t}.f32", (t, t, "f32"), (t,), ""
    yield "select", "slct.ftz.b32.f32", ("b32", "b32", "f32"), ("b32",), ""


def conversions() -> Iterator[Entry]:
    ints = [f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in "us"]
    floats_ = ("f16", "f32", "f64")
    for d, a in product(ints, ints):
        yield "cvt", f"cvt.{d}.{a}", (a,), (d,), ""
        if (
            int(d[1:]) < int(a[1:]) or d[0] + a[0] == "us" or (d[0] + a[0] == "su" and d[1:] == a[1:])
        ):  # else nothing to clamp
            yield "cvt", f"cvt.sat.{d}.{a}", (a,), (d,), ""
    for r, d, a in product(("rni", "rzi", "rmi", "rpi"), ints, floats_):
        yield "cvt", f"cvt.{r}.{d}.{a}", (a,), (d,), ""
    for d in ("s32", "u32", "s64", "u8"):
        yield "cvt", f"cvt.rzi.ftz.{d}.f32", ("f32",), (d,), ""
        yield "cvt", f"cvt.rni.sat.{d}.f32", ("f32",), (d,), ""
    for r, d, a in product(("rn", "rz", "rm", "rp"), floats_, ints):
        yield "cvt", f"cvt.{r}.{d}.{a}", (a,), (d,), ""
    for d, a in product(floats_, floats_):
        if WIDER[d] < WIDER[a]:
            for r, more in product(("rn", "rz", "rm", "rp"), ("", ".sat")):
                yield "cvt", f"cvt.{r}{more}.{d}.{a}", (a,), (d,), ""
        elif d == a:
            for r, more in product(("rni", "rzi", "rmi", "rpi"), ("", ".sat")):
                yield "cvt", f"cvt.{r}{more}.{d}.{a}", (a,), (d,), ""
            yield "cvt", f"cvt.sat.{d}.{a}", (a,), (d,), ""
        else:
            yield "cvt", f"cvt.{d}.{a}", (a,), (d,), ""
            yield "cvt", f"cvt.sat.{d}.{a}", (a,), (d,), ""
    for opcode, a, d in (("rn.ftz.f32.f64", "f64", "f32"),
                         ("ftz.f32.f16", "f16", "f32"), ("ftz.f64.f32", "f32", "f64"),
                         ("rni.ftz.f32.f32", "f32", "f32"), ("ftz.f32.f32", "f32", "f32"),
                         ("sat.ftz.f32.f32", "f32", "f32")):  # fmt: skip
        yield "cvt", "cvt." + opcode.replace("sat.ftz", "ftz.sat"), (a,), (d,), ""
    for r, more in product(("rn", "rz"), ("", ".relu")):
        yield "cvt", f"cvt.{r}{more}.bf16.f32", ("f32",), ("bf16",), ""
        yield "cvt", f"cvt.{r}{more}.f16.f32" if more else f"cvt.{r}.ftz.f16.f32", ("f32",), ("f16",), ""
        for d in ("f16x2", "bf16x2"):
            yield "cvt", f"cvt.{r}{more}.{d}.f32", ("f32", "f32"), (d,), ""
    yield "cvt", "cvt.rna.tf32.f32", ("f32",), ("b32",), ""
    for d in ("u16", "s16"):
        yield "cvt", f"cvt.pack.sat.{d}.s32", ("s32", "s32"), ("b32",), ""
    for d in ("u8", "s8"):
        yield "cvt", f"cvt.pack.sat.{d}.s32.b32", ("s32", "s32", "b32"), ("b32",), ""


WIDER = {"f16": 0, "f32": 1, "f64": 2}


# ---- an entry as a kernel ----


def _entry(family: str, opcode: str, count: int, type_: str) -> Entry:
    """Every operand and the result have one type."""
    return family, opcode, (type_,) * count, (type_,), ""


def _micro(family: str, opcode: str, sources: tuple[str, ...], results: tuple[str, ...], immediate: str) -> Micro:
    pair = "both" if opcode.startswith("setp") and len(results) == 2 else ""
    name = "_".join(filter(None, (identifier(opcode), immediate, pair)))
    seed = zlib.crc32(" ".join(sources).encode())  # instructions of one signature share operands: fewer bytes to store
    draw: Callable[[], tuple[values.Array, ...]]
    if family == "fma":
        n = FUSED
        draw = partial(values.fused, sources[0], n, seed)
    elif family == "approximate" and len(sources) == 1:
        n = DENSE
        draw = partial(values.dense, sources[0], n, seed)
    else:
        n = UNARY if len(sources) == 1 else BINARY if len(sources) == 2 else TERNARY
        draw = partial(values.operands, sources, n, seed)
    inputs = [dtype_of(t) for t in sources]
    outputs = [dtype_of(t) for t in results]
    return Micro(
        name=name,
        family=family,
        source=kernel(name, inputs, outputs, _body(opcode, sources, results, immediate)),
        draw=draw,
        outputs=tuple((dtype, n) for dtype in outputs),
        grid=n // BLOCK,
        block=BLOCK,
        opcode=f"{opcode} {immediate}".strip(),
        sources=sources,
        results=results,
    )


def _body(opcode: str, sources: tuple[str, ...], results: tuple[str, ...], immediate: str) -> str:
    """The asm statement; predicates travel as 0 and 1 in 32-bit registers."""
    before, after, operands, destinations = "", "", [], []
    for k, type_ in enumerate(results):
        if type_ == "pred":
            before += f".reg .pred r{k}; "
            after += f" selp.b32 %{k}, 1, 0, r{k};"
            destinations.append(f"r{k}")
        else:
            destinations.append(f"%{k}")
    for k, type_ in enumerate(sources):
        place = len(results) + k
        if type_ == "pred":
            before += f".reg .pred q{k}; setp.ne.u32 q{k}, %{place}, 0; "
            operands.append(f"q{k}")
        else:
            operands.append(f"%{place}")
    if immediate:
        operands.append(immediate)
    out = ", ".join(f'"={CONSTRAINT[values.WIDTH[t]]}"({r})' for t, r in zip(results, "xy", strict=False))
    into = ", ".join(f'"{CONSTRAINT[values.WIDTH[t]]}"({_read(t, a)})' for t, a in zip(sources, INPUTS, strict=False))
    declared = "".join(f"  {_ctype(t)} {r};\n" for t, r in zip(results, "xy", strict=False))
    text = f"{{{before}{opcode} {'|'.join(destinations)}, {', '.join(operands)};{after}}}"
    stores = "".join(f"  {d}[i] = {r};\n" for d, r in zip(OUTPUTS, "xy"[: len(results)], strict=False))
    return f'{declared}  asm volatile("{text}" : {out} : {into});\n{stores}'


def _ctype(type_: str) -> str:
    return CTYPE["u4"] if values.WIDTH[type_] == 8 else CTYPE[dtype_of(type_)]


def _read(type_: str, name: str) -> str:
    return f"(unsigned int){name}[i]" if values.WIDTH[type_] == 8 else f"{name}[i]"
