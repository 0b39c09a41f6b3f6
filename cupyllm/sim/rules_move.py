"""Rules of comparison, selection, conversion and register moves."""

from __future__ import annotations

from cupyllm.sim.opcode import BITS, HALVES, INTEGERS, ROUNDINGS, Opcode, Rule, numpy_type, unsigned, width

INTEGER_ORDERS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# Float comparisons are false with a NaN, the unordered ones true: the complement of the opposite ordered one.
FLOAT_COMPARISONS = {
    "eq": "({0} == {1})",
    "ne": "(({0} < {1}) | ({0} > {1}))",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "equ": "~(({0} < {1}) | ({0} > {1}))",
    "neu": "({0} != {1})",
    "ltu": "~({0} >= {1})",
    "leu": "~({0} > {1})",
    "gtu": "~({0} <= {1})",
    "geu": "~({0} < {1})",
    "num": "(({0} == {0}) & ({1} == {1}))",
    "nan": "(({0} != {0}) | ({1} != {1}))",
}
BOOLEANS = {"and": "&", "or": "|", "xor": "^"}
SMALL = ("u8", "s8", *INTEGERS)
FLOATS = ("f16", "bf16", "f32", "f64")
EIGHTS = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}


def _comparison(op: Opcode, type_: str) -> tuple[str, tuple[str, ...]]:
    """The comparison of {0} and {1} as an expression of a bool array, and its two input types."""
    if type_ in ("f32", "f64", *HALVES):
        text = FLOAT_COMPARISONS[op.need(*FLOAT_COMPARISONS)]
        scalar = type_.removesuffix("x2")
        a, b = "{0}", "{1}"
        input_ = type_
        if scalar != type_:
            input_ = "b32"
            a, b = (f"num.split({x}, np.{'uint16' if scalar == 'bf16' else 'float16'})" for x in (a, b))
        if scalar == "bf16":
            a, b = f"num.bf16_to_f32({a})", f"num.bf16_to_f32({b})"
            input_ = "b16" if scalar == type_ else "b32"
        elif type_ != "f64" and op.take("ftz"):
            a, b = f"num.flush({a})", f"num.flush({b})"
        return text.format(a, b), (input_, input_)
    order = op.need("eq", "ne") if type_ in BITS else op.need(*SIGNS, *INTEGER_ORDERS)
    if order in INTEGER_ORDERS and type_[0] != "u":
        op.refuse()
    order = INTEGER_ORDERS.get(order, order)
    input_ = unsigned(type_) if order in ("eq", "ne") else type_
    return f"({{0}} {SIGNS[order]} {{1}})", (input_, input_)


def setp(op: Opcode) -> Rule:
    """setp: p, and q from the complement. With a predicate to combine both outputs are given (p comes first); without
    one q is ~p, the caller's to negate. Packed pairs give the lower half's p and the upper half's q."""
    type_ = op.last(*INTEGERS, *BITS, "f32", "f64", *HALVES)
    expr, inputs = _comparison(op, type_)
    operation = op.take(*BOOLEANS)
    sign = BOOLEANS.get(operation, "")
    if type_.endswith("x2"):
        combine = f" {sign} {{2}}" if sign else ""
        pair = f"(lambda t: (t[..., 0]{combine}, t[..., 1]{combine}))({expr})"
        return op.end(pair, inputs + (("pred",) if sign else ()), "pred", "pred")
    if not sign:
        return op.end(expr[1:-1] if expr[0] == "(" else expr, inputs, "pred")
    return op.end(f"(lambda t: (t {sign} {{2}}, ~t {sign} {{2}}))({expr})", (*inputs, "pred"), "pred", "pred")


def set_(op: Opcode) -> Rule:
    """set: all ones, or 1.0, where the comparison holds."""
    type_ = op.last(*INTEGERS, *BITS, "f32", "f64", *HALVES)
    result = op.last("u16", "s16", "u32", "s32", "f32", *HALVES)
    expr, inputs = _comparison(op, type_)
    operation = op.take(*BOOLEANS)
    if operation:
        combined = "{2}[..., None]" if type_.endswith("x2") else "{2}"
        expr, inputs = f"({expr} {BOOLEANS[operation]} {combined})", (*inputs, "pred")
    if type_.endswith("x2"):  # integer results of pairs have 16 bits a half
        lane = result.removesuffix("x2") if result in HALVES else "u16"
        return op.end(f"num.unsplit(num.ones({expr}, {lane!r}))", inputs, "b32")
    output = "b16" if result in ("f16", "bf16") else unsigned(result)
    return op.end(f"num.ones({expr}, {result!r})", inputs, output)


def selp(op: Opcode) -> Rule:
    type_ = unsigned(op.last(*BITS, *INTEGERS, "f32", "f64", "f16", "bf16"))
    type_ = "b16" if type_ in ("f16", "bf16") else type_
    return op.end("np.where({2}, {0}, {1})", (type_, type_, "pred"), type_)


def slct(op: Opcode) -> Rule:
    """By the sign of the third operand: >= 0 takes the first, NaN the second."""
    by = op.last("s32", "f32")
    type_ = unsigned(op.last(*BITS, *INTEGERS, "f32", "f64"))
    third = "num.flush({2})" if by == "f32" and op.take("ftz") else "{2}"
    return op.end(f"np.where({third} >= 0, {{0}}, {{1}})", (type_, type_, by), type_)


def mov(op: Opcode) -> Rule:
    type_ = unsigned(op.last("pred", *BITS, *INTEGERS, "f32", "f64"))
    return op.end("{0}", (type_,), type_)


def cvt(op: Opcode) -> Rule:
    """cvt between scalars, to packed halves and to and from packed bytes; cvt.pack."""
    if op.take("pack"):
        return _pack(op)
    source = op.last(*SMALL, *FLOATS, "f16x2", "bf16x2", *EIGHTS)
    target = op.last(*SMALL, *FLOATS, "f16x2", "bf16x2", "tf32", *EIGHTS)
    if target in ("f16x2", "bf16x2", *EIGHTS) or source in EIGHTS:
        return _to_pair(op, target, source)
    if target == "tf32" or (target in ("f16", "bf16") and source == "f32"):
        return _from_f32(op, target, source)
    if target in FLOATS:
        return _to_float(op, target, source) if source in FLOATS else _int_to_float(op, target, source)
    if source in FLOATS:
        mode = op.need("rni", "rzi", "rmi", "rpi")
        ftz = source == "f32" and bool(op.take("ftz"))
        op.take("sat")  # conversions to integers always clamp
        value, input_ = _readable("{0}", source)
        return op.end(f"num.float_to_int({value}, {numpy_type(target)}, {mode!r}, {ftz})", (input_,), target)
    if op.take("sat"):
        return op.end(f"num.saturate_int({{0}}, {numpy_type(target)})", (source,), target)
    if width(source) == width(target):  # the same bits
        return op.end("{0}", (target,), target)
    return op.end(f"{{0}}.astype({numpy_type(target)})", (source,), target)


def _readable(text: str, source: str) -> tuple[str, str]:
    """A float operand as a NumPy float array, and the type it comes in (bf16 as bits)."""
    return (f"num.bf16_to_f32({text})", "b16") if source == "bf16" else (text, source)


def _int_to_float(op: Opcode, target: str, source: str) -> Rule:
    mode = op.need(*ROUNDINGS)
    op.take("ftz")  # no integer is subnormal
    sat = op.take("sat")
    expr = f"num.int_to_float({{0}}, {target!r}, {mode!r})"
    if mode == "rn" and target in ("f32", "f64"):
        expr = f"{{0}}.astype(np.float{target[1:]})"
    if sat and target != "bf16":
        expr = f"num.saturate({expr})"
    return op.end(expr, (source,), "b16" if target == "bf16" else target)


def _from_f32(op: Opcode, target: str, source: str) -> Rule:
    """f32 to f16, bf16 and tf32, with .relu, .satfinite, .ftz and .sat."""
    if source != "f32":
        op.refuse()
    mode = op.need("rna", "rn", "rz") if target == "tf32" else op.need(*ROUNDINGS)
    relu, finite = bool(op.take("relu")), bool(op.take("satfinite"))
    value = "num.flush({0})" if op.take("ftz") else "{0}"
    extra = f", {relu}, {finite}" if relu or finite else ""
    expr = f"num.narrow({value}, {target!r}, {mode!r}{extra})"
    if target == "f16" and op.take("sat"):
        expr = f"num.saturate({expr})"
    return op.end(expr, ("f32",), {"f16": "f16", "bf16": "b16", "tf32": "b32"}[target])


def _to_float(op: Opcode, target: str, source: str) -> Rule:
    """Float to float, widening, narrowing, or rounding to an integral value."""
    integral = op.take("rni", "rzi", "rmi", "rpi")
    mode = op.take(*ROUNDINGS)
    ftz = bool(op.take("ftz"))
    sat = target != "bf16" and bool(op.take("sat"))
    expr, input_ = _readable("{0}", source)
    if ftz and source == "f32":
        expr = f"num.nan32(num.flush({expr}).copy())"
    if integral:
        if source != target:
            op.refuse()
        function = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[integral]
        expr = f"np.{function}({expr})"
        expr = f"num.nan{target[1:]}({expr})" if target in ("f16", "f32") else expr
    if source != target:
        if width(target.removeprefix("b")) <= width(source.removeprefix("b")) and not mode:
            op.refuse()  # digits are lost
        expr = _resized(expr, target, source, mode)
    elif target == "bf16" and integral:
        expr = f"num.f32_to_bf16({expr})"
    elif target == "bf16":
        expr = "{0}"
    if ftz and target == "f32":
        expr = f"num.flush({expr})"
    if sat:
        expr = f"num.saturate({expr})"
    return op.end(expr, (input_,), "b16" if target == "bf16" else target)


def _resized(expr: str, target: str, source: str, mode: str) -> str:
    """A float expression (bf16 already as float32) in another format; NaN canonical, but from and to f64 it passes."""
    if target == "f16" and source == "f64":
        return f"num.f64_to_f16({expr}, {mode!r})"
    if target in ("f16", "bf16"):
        return f"num.narrow({expr}, {target!r}, {mode!r})"
    if target == "f32" and source == "f64":
        return f"num.round32({expr}, {mode!r})"
    if source == "bf16" and target == "f32":
        return expr
    return f"num.nan32({expr}.astype(np.float32))" if target == "f32" else f"num.to_f64({expr})"


def _to_pair(op: Opcode, target: str, source: str) -> Rule:
    """Two values into one register, the first operand in its upper half."""
    relu, finite = bool(op.take("relu")), bool(op.take("satfinite"))
    if target not in EIGHTS and source == "f32":
        mode = op.need("rn", "rz")
        halves = [f"num.narrow({{{i}}}, {target[:-2]!r}, {mode!r}, {relu}, {finite})" for i in (0, 1)]
        return op.end(f"num.join({halves[0]}, {halves[1]})", ("f32", "f32"), "b32")
    op.need("rn")
    if target in EIGHTS and source in ("f32", "f16x2", "bf16x2"):
        call = f"num.narrow({{}}, {EIGHTS[target]!r}, 'rn', {relu}, {finite})"
        if source == "f32":
            return op.end(f"num.join({call.format('{0}')}, {call.format('{1}')})", ("f32", "f32"), "b16")
        dtype = "np.float16" if source == "f16x2" else "np.uint16"
        values = f"num.split({{0}}, {dtype})"
        values = f"num.bf16_to_f32({values})" if source == "bf16x2" else values
        return op.end(f"{call.format(values)}.view(np.uint16)[..., 0]", ("b32",), "b16")
    if target != "f16x2" or source not in EIGHTS or finite:
        op.refuse()
    value = f"num.encode(num.small_to_f64({{0}}[..., None].view(np.uint8), {EIGHTS[source]!r}), 'f16')"
    return op.end(f"num.unsplit({f'num.relu_f16({value})' if relu else value})", ("b16",), "b32")


def _pack(op: Opcode) -> Rule:
    op.need("sat")
    third = op.take("b32")
    op.last("s32")
    names = ("u2", "s2", "u4", "s4", "u8", "s8") if third else ("u16", "s16")
    name = op.last(*names)
    rest = "{2}" if third else "None"
    inputs = ("s32", "s32", "b32") if third else ("s32", "s32")
    return op.end(f"num.pack({{0}}, {{1}}, {rest}, {name!r})", inputs, "b32")


RULES = {"setp": setp, "set": set_, "selp": selp, "slct": slct, "mov": mov, "cvt": cvt}
