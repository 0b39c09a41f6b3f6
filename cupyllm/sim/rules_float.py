"""Rules of float arithmetic: f32, f64 and the half types, alone and in pairs."""

from __future__ import annotations

from collections.abc import Callable

from cupyllm.sim.opcode import HALVES, ROUNDINGS, Opcode, Rule

ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "rcp": 1, "sqrt": 1, "neg": 1, "abs": 1}
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
APPROXIMATIONS = {
    "ex2": "exp2",
    "lg2": "log2",
    "sin": "sine",
    "cos": "cosine",
    "tanh": "tanh",
    "rcp": "reciprocal",
    "sqrt": "root",
    "rsqrt": "reciprocal_root",
}


def arithmetic(op: Opcode) -> Rule:
    """add sub mul fma mad div rcp sqrt, in every rounding mode."""
    type_ = op.last("f32", "f64", *HALVES)
    if op.left and op.left[-1] == "f32":
        op.refuse()  # mixed precision, add.f32.bf16: sm_100
    if type_ in HALVES:
        return _half(op, type_)
    if op.take("approx"):
        return _approximate(op, type_)
    if op.stem == "div" and op.take("full"):
        return _flushed(op, type_, lambda a, b: f"num.nan32({a} / {b})", 2)
    needs_mode = op.stem in ("fma", "mad", "div", "rcp", "sqrt")
    mode = op.need(*ROUNDINGS) if needs_mode else op.take(*ROUNDINGS, default="rn")
    saturated = op.stem in ("add", "sub", "mul", "fma", "mad") and type_ == "f32" and bool(op.take("sat"))
    ftz = "ftz" in op.left
    return _flushed(op, type_, lambda *args: _core(op.stem, type_, mode, ftz, args), ARITY[op.stem], saturated)


def _flushed(op: Opcode, type_: str, core: Callable[..., str], arity: int, saturated: bool = False) -> Rule:
    """The rule of a core expression with .ftz and .sat around it, f32 only."""
    ftz = type_ == "f32" and bool(op.take("ftz"))
    args = [f"num.flush({{{i}}})" if ftz else f"{{{i}}}" for i in range(arity)]
    expr = core(*args)
    if ftz:
        expr = f"num.flush({expr})"
    if saturated:
        expr = f"num.saturate({expr})"
    return op.end(expr, (type_,) * arity, type_)


def _core(stem: str, type_: str, mode: str, ftz: bool, args: tuple[str, ...]) -> str:
    """One correctly rounded operation of operands that are flushed already, with the NaN of its type."""
    single = type_ == "f32"
    if stem in ("fma", "mad"):
        if mode == "rn":
            return f"num.fma_{type_}({', '.join(args)})"
        directed = f"num.fma_f32_directed({', '.join(args)}, {mode!r})"
        return f"num.nan32({directed})" if single else f"num.exact_f64('fma', {mode!r}, {', '.join(args)})"
    if stem == "rcp":
        one = "np.ones((1, 1), np.float32)" if single else "np.ones((1, 1))"
        stem, args = "div", (one, *args)
        plain = f"1 / {args[1]}"
    elif stem == "sqrt":
        plain = f"np.sqrt({args[0]})"
    else:
        plain = f"{args[0]} {SIGNS[stem]} {args[1]}"
    if mode == "rn":
        return f"num.nan32({plain})" if single else f"num.nan64({stem!r}, {plain}, {', '.join(args)})"
    if single and stem == "sub":
        stem, args = "add", (args[0], f"-{args[1]}")
    if single:
        flushes = ", True" if ftz and stem == "div" else ""
        return f"num.nan32(num.{stem}_f32({', '.join(args)}, {mode!r}{flushes}))"
    return f"num.exact_f64({stem!r}, {mode!r}, {', '.join(args)})"


def _approximate(op: Opcode, type_: str) -> Rule:
    """The approximate reciprocals, roots and division."""
    if type_ == "f64":
        if op.stem in ("rcp", "rsqrt") and op.take("ftz"):
            return op.end(f"num.approx.upper_half({{0}}, {op.stem!r})", ("f64",), "f64")
        if op.stem != "rsqrt":
            op.refuse()
        return op.end("num.approx.reciprocal_root_f64({0})", ("f64",), "f64")
    if op.stem == "div":
        return _flushed(op, type_, lambda a, b: f"num.approx.divide({a}, {b})", 2)
    if op.stem not in APPROXIMATIONS:
        op.refuse()
    return _flushed(op, type_, lambda a: f"num.approx.{APPROXIMATIONS[op.stem]}({a})", 1)


def function(op: Opcode) -> Rule:
    """ex2 lg2 sin cos tanh rsqrt, which are approximate only."""
    op.need("approx")
    type_ = op.last("f32", "f64", *HALVES)
    if type_ not in HALVES:
        return _approximate(op, type_)
    if op.stem not in ("ex2", "tanh"):
        op.refuse()
    name = f"num.approx.{APPROXIMATIONS[op.stem]}"
    if type_.startswith("f16"):
        exp2 = "num.approx.exp2_f16({})" if op.stem == "ex2" else f"num.half({name}, {{}})"
        return _lanes(op, type_, exp2.format, 1)
    if op.stem == "ex2":
        op.need("ftz")
        return _lanes(op, type_, lambda a: f"num.flush_bf16(num.via_f32({name}, num.flush_bf16({a})))", 1)
    return _lanes(op, type_, lambda a: f"num.via_f32({name}, {a})", 1)


def _half(op: Opcode, type_: str) -> Rule:
    """add sub mul fma of f16 and bf16: .rn only, with .ftz (f16), .sat (f16) and .relu (fma)."""
    stem = op.stem
    if stem not in ("add", "sub", "mul", "fma"):
        op.refuse()
    op.take("rn")
    relu = stem == "fma" and op.take("relu")
    if type_.startswith("bf16"):
        name = f"num.{stem}_bf16"
        wrap = "num.relu_bf16({})" if relu else "{}"
        return _lanes(op, type_, lambda *args: wrap.format(f"{name}({', '.join(args)})"), ARITY[stem])
    ftz, sat = op.take("ftz"), op.take("sat")

    def core(*args: str) -> str:
        if ftz:
            args = tuple(f"num.flush({x})" for x in args)
        joined = ", ".join(args)
        expr = f"num.fma_f16({joined})" if stem == "fma" else f"num.nan16({args[0]} {SIGNS[stem]} {args[1]})"
        if ftz:
            expr = f"num.flush({expr})"
        if relu:
            expr = f"num.relu_f16({expr})"
        return f"num.saturate({expr})" if sat else expr

    return _lanes(op, type_, core, ARITY[stem])


def _lanes(op: Opcode, type_: str, core: Callable[..., str], arity: int) -> Rule:
    """A half-precision rule, or the same over both halves of pair registers. bf16 travels as its bits."""
    scalar = "b16" if type_.startswith("bf16") else "f16"
    args = [f"{{{i}}}" for i in range(arity)]
    if not type_.endswith("x2"):
        return op.end(core(*args), (scalar,) * arity, scalar)
    dtype = "np.uint16" if scalar == "b16" else "np.float16"
    expr = core(*(f"num.split({x}, {dtype})" for x in args))
    return op.end(f"num.unsplit({expr})", ("b32",) * arity, "b32")


def negate(op: Opcode) -> Rule:
    """neg and abs."""
    type_ = op.last("f32", "f64", *HALVES)
    if type_ == "f64":
        return op.end(f"num.{op.stem}_f64({{0}})", ("f64",), "f64")
    plain = "-{}" if op.stem == "neg" else "np.abs({})"
    if type_ == "f32":
        return _flushed(op, type_, lambda a: f"num.nan32({plain.format(a)})", 1)
    if type_.startswith("bf16"):
        return _lanes(op, type_, lambda a: f"num.{op.stem}_bf16({a})", 1)
    ftz = op.take("ftz")
    return _lanes(op, type_, lambda a: f"num.nan16({plain.format(f'num.flush({a})' if ftz else a)})", 1)


def minmax(op: Opcode) -> Rule:
    """min and max, with .NaN and .xorsign.abs."""
    type_ = op.last("f32", "f64", *HALVES)
    name = f"num.{op.stem}imum"
    sign = False
    if type_ != "f64":
        name += "_nan" if op.take("NaN") else ""
        sign = bool(op.take("xorsign"))
        if sign:
            op.need("abs")
    call = f"num.xorsign({name}, {{}}, {{}})" if sign else f"{name}({{}}, {{}})"
    if type_ == "f64":
        return op.end(call.format("{0}", "{1}"), ("f64", "f64"), "f64")
    if type_ == "f32":
        return _flushed(op, type_, lambda a, b: call.format(a, b), 2)
    if type_.startswith("bf16"):
        pick = f"num.pick_bf16(lambda a, b: {call.format('a', 'b')}, "
        return _lanes(op, type_, lambda a, b: f"{pick}{a}, {b})", 2)
    ftz = op.take("ftz")

    def core(a: str, b: str) -> str:
        return f"num.flush({call.format(f'num.flush({a})', f'num.flush({b})')})" if ftz else call.format(a, b)

    return _lanes(op, type_, core, 2)


def copysign(op: Opcode) -> Rule:
    """The sign of the first operand on the second."""
    type_ = op.last("f32", "f64")
    return op.end("np.copysign({1}, {0})", (type_, type_), type_)


def testp(op: Opcode) -> Rule:
    type_ = op.last("f32", "f64")
    name = op.need("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    return op.end(f"num.test({{0}}, {name!r})", (type_,), "pred")


RULES = {
    "add": arithmetic,
    "sub": arithmetic,
    "mul": arithmetic,
    "fma": arithmetic,
    "mad": arithmetic,
    "div": arithmetic,
    "rcp": arithmetic,
    "sqrt": arithmetic,
    "rsqrt": function,
    "sin": function,
    "cos": function,
    "lg2": function,
    "ex2": function,
    "tanh": function,
    "neg": negate,
    "abs": negate,
    "min": minmax,
    "max": minmax,
    "copysign": copysign,
    "testp": testp,
}
