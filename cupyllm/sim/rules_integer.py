"""Rules of the integer, logic, shift and permute instructions."""

from __future__ import annotations

from cupyllm.sim.opcode import BITS, INTEGERS, Opcode, Rule, numpy_type, unsigned, width

PAIRS = ("u16x2", "s16x2")
WORDS = ("u32", "s32", "u64", "s64")


def add(op: Opcode) -> Rule:
    """add, sub: two's complement does not know the sign; .sat and the packed pairs do."""
    sign = "+" if op.stem == "add" else "-"
    type_ = op.last(*INTEGERS, *PAIRS)
    if type_ in PAIRS:
        expr = f"num.unsplit(num.split({{0}}, np.uint16) {sign} num.split({{1}}, np.uint16))"
        return op.end(expr, ("b32", "b32"), "b32")
    if type_ == "s32" and op.take("sat"):
        return op.end(f"num.integer.sat_s32({{0}}.astype(np.int64) {sign} {{1}})", ("s32", "s32"), "s32")
    u = unsigned(type_)
    return op.end(f"{{0}} {sign} {{1}}", (u, u), u)


def mul(op: Opcode) -> Rule:
    """mul and mad, .lo .hi .wide."""
    type_ = op.last(*INTEGERS)
    mode = op.need("lo", "hi", "wide")
    addend = " + {2}" if op.stem == "mad" else ""
    if mode == "lo":
        u = unsigned(type_)
        return op.end("{0} * {1}" + addend, (u, u, u)[: 3 if addend else 2], u)
    if mode == "hi":
        product, result = "num.integer.mul_high({0}, {1})", type_
        if op.stem == "mad" and type_ == "s32" and op.take("sat"):
            expr = f"num.integer.sat_s32({product}.astype(np.int64) + {{2}})"
            return op.end(expr, (type_, type_, type_), type_)
    else:
        if width(type_) == 64:
            op.refuse()
        result = f"{type_[0]}{2 * width(type_)}"
        product = f"np.multiply({{0}}, {{1}}, dtype={numpy_type(result)})"
    inputs = (type_, type_, result) if addend else (type_, type_)
    return op.end(product + addend, inputs, result)


def mul24(op: Opcode) -> Rule:
    type_ = op.last("u32", "s32")
    mode = op.need("lo", "hi")
    product = f"num.integer.mul24({{0}}, {{1}}, {mode == 'hi'})"
    if op.stem == "mul24":
        return op.end(product, (type_, type_), type_)
    if mode == "hi" and type_ == "s32" and op.take("sat"):
        return op.end(f"num.integer.sat_s32({product}.astype(np.int64) + {{2}})", (type_,) * 3, type_)
    return op.end(f"{product} + {{2}}", (type_,) * 3, type_)


def sad(op: Opcode) -> Rule:
    type_ = op.last(*INTEGERS)
    return op.end("{2} + np.where({0} < {1}, {1} - {0}, {0} - {1})", (type_,) * 3, type_)


def div(op: Opcode) -> Rule:
    type_ = op.last(*INTEGERS)
    function = "divide" if op.stem == "div" else "remainder"
    return op.end(f"num.integer.{function}({{0}}, {{1}})", (type_, type_), type_)


def negate(op: Opcode) -> Rule:
    """abs and neg; the lowest integer is its own."""
    type_ = op.last("s16", "s32", "s64")
    if op.stem == "abs":
        return op.end("np.abs({0})", (type_,), type_)
    return op.end("-{0}", (unsigned(type_),), unsigned(type_))


def minmax(op: Opcode) -> Rule:
    type_ = op.last(*INTEGERS, *PAIRS)
    relu = type_ in ("s32", "s16x2") and op.take("relu")
    expr = f"np.{op.stem}imum({{0}}, {{1}})"
    if type_ in PAIRS:
        dtype = numpy_type(type_[:-2])
        expr = expr.format(f"num.split({{0}}, {dtype})", f"num.split({{1}}, {dtype})")
    if relu:
        expr = f"np.maximum({expr}, 0)"
    if type_ in PAIRS:
        return op.end(f"num.unsplit({expr})", ("b32", "b32"), "b32")
    return op.end(expr, (type_, type_), type_)


def count(op: Opcode) -> Rule:
    """popc, clz, bfind, brev."""
    if op.stem == "bfind":
        type_ = op.last(*WORDS)
        return op.end(f"num.integer.find({{0}}, {bool(op.take('shiftamt'))})", (type_,), "u32")
    type_ = op.last("b32", "b64")
    if op.stem == "popc":
        return op.end("np.bitwise_count({0}).astype(np.uint32)", (type_,), "u32")
    if op.stem == "clz":
        return op.end(f"np.uint32({width(type_)}) - num.integer.bit_length({{0}})", (type_,), "u32")
    return op.end("num.integer.reverse({0})", (type_,), type_)


def fields(op: Opcode) -> Rule:
    """bfe, bfi, bmsk, szext, fns."""
    if op.stem == "bfe":
        type_ = op.last(*WORDS)
        return op.end("num.integer.extract({0}, {1}, {2})", (type_, "u32", "u32"), type_)
    if op.stem == "bfi":
        type_ = op.last("b32", "b64")
        return op.end("num.integer.insert({0}, {1}, {2}, {3})", (type_, type_, "u32", "u32"), type_)
    if op.stem == "fns":
        op.last("b32")
        return op.end("num.integer.find_nth({0}, {1}, {2})", ("b32", "u32", "s32"), "b32")
    type_ = op.last("b32") if op.stem == "bmsk" else op.last("u32", "s32")
    clamp = op.need("clamp", "wrap") == "clamp"
    function = "bit_mask" if op.stem == "bmsk" else "extend"
    return op.end(f"num.integer.{function}({{0}}, {{1}}, {clamp})", (type_, "u32"), type_)


def dot(op: Opcode) -> Rule:
    """dp4a and dp2a: signed when one of the two is."""
    b = op.last("u32", "s32")
    a = op.last("u32", "s32")
    c = "u32" if a == b == "u32" else "s32"
    if op.stem == "dp4a":
        return op.end("num.integer.dot_bytes({0}, {1}, {2})", (a, b, c), c)
    mode = op.need("lo", "hi")
    return op.end(f"num.integer.dot_halves({{0}}, {{1}}, {{2}}, {mode == 'hi'})", (a, b, c), c)


def logic(op: Opcode) -> Rule:
    """and, or, xor, not, cnot."""
    if op.stem == "cnot":
        type_ = op.last(*BITS)
        return op.end(f"({{0}} == 0).astype({numpy_type(type_)})", (type_,), type_)
    type_ = op.last("pred", *BITS)
    if op.stem == "not":
        return op.end("~{0}", (type_,), type_)
    sign = {"and": "&", "or": "|", "xor": "^"}[op.stem]
    return op.end(f"{{0}} {sign} {{1}}", (type_, type_), type_)


def lop3(op: Opcode) -> Rule:
    op.last("b32")
    expr = "num.integer.logic3({0}, {1}, {2}, {3})"
    operation = op.take("or", "and")
    if not operation:
        return op.end(expr, ("b32", "b32", "b32", "u32"), "b32")
    sign = "|" if operation == "or" else "&"
    # The lambda names the result that both outputs need.
    expr = f"(lambda d: (d, (d != 0) {sign} {{4}}))({expr})"
    return op.end(expr, ("b32", "b32", "b32", "u32", "pred"), "b32", "pred")


def shift(op: Opcode) -> Rule:
    """shl and shr. NumPy too gives 0, or the sign, for shifts of the width or more; the amount is 32 bits wide."""
    if op.stem == "shl":
        type_ = op.last(*BITS)
        sign = "<<"
    else:
        type_ = op.last(*BITS, *INTEGERS)
        sign = ">>"
    expr = f"{{0}} {sign} {{1}}"
    if width(type_) == 16:  # NumPy widens to the amount's 32 bits
        expr = f"({expr}).astype({numpy_type(type_)})"
    # int32 >> uint32 would become int64; as an int32 an amount from 2^31 on is negative, which NumPy takes as large.
    amount = "s32" if type_ in ("s16", "s32") else "u32"
    return op.end(expr, (type_, amount), type_)


def funnel(op: Opcode) -> Rule:
    op.last("b32")
    direction = {"l": "left", "r": "right"}[op.need("l", "r")]
    clamp = op.need("clamp", "wrap") == "clamp"
    return op.end(f"num.integer.funnel_{direction}({{0}}, {{1}}, {{2}}, {clamp})", ("b32", "b32", "u32"), "b32")


def prmt(op: Opcode) -> Rule:
    mode = op.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    op.last("b32")
    extra = f", {mode!r}" if mode else ""
    return op.end(f"num.integer.permute({{0}}, {{1}}, {{2}}{extra})", ("b32", "b32", "u32"), "b32")


RULES = {
    "add": add,
    "sub": add,
    "mul": mul,
    "mad": mul,
    "mul24": mul24,
    "mad24": mul24,
    "sad": sad,
    "div": div,
    "rem": div,
    "abs": negate,
    "neg": negate,
    "min": minmax,
    "max": minmax,
    "popc": count,
    "clz": count,
    "bfind": count,
    "brev": count,
    "bfe": fields,
    "bfi": fields,
    "bmsk": fields,
    "szext": fields,
    "fns": fields,
    "dp4a": dot,
    "dp2a": dot,
    "and": logic,
    "or": logic,
    "xor": logic,
    "not": logic,
    "cnot": logic,
    "lop3": lop3,
    "shl": shift,
    "shr": shift,
    "shf": funnel,
    "prmt": prmt,
}
