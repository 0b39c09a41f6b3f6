"""PTX instructions that only read and write registers, as NumPy expressions.

    rule("mad.lo.s32") = Rule("{0} * {1} + {2}", ("u32", "u32", "u32"), ("u32",))

The semantics are those of the PTX ISA manual, version 9.1, chapter 9.7 ("PTX" below), which holds every instruction of
8.x; what needs sm_90 or more is here where it costs nothing. Everything is bit for bit what the hardware gives, but
for the functions of APPROXIMATE. Not supported, and refused by name: carry chains (add.cc, addc, ...; C++ gives none
for sm_80), packed f32x2 and mixed precision (sm_100), the video instructions.

Rejected: one table of all spellings. There are some thousand; reading the parts of an opcode and refusing what is left
over covers them in three short files of rules, and an unknown modifier can never be ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cupyllm.sim import rules_float, rules_integer, rules_move
from cupyllm.sim.opcode import Opcode, Rule
from cupyllm.sim.report import UnknownInstruction

__all__ = ["APPROXIMATE", "Bound", "Rule", "rule"]

FLOAT_TYPES = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "f32x2")
# Pure, but beyond the rules: the carry chains' other halves, and the video instructions.
REFUSED = frozenset(
    "addc subc madc vadd vsub vabsdiff vmin vmax vshl vshr vmad vset vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vset2 "
    "vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4 vset4".split()
)


@dataclass(frozen=True)
class Bound:
    """How far the hardware may be from the exact value for inputs of magnitude `low` to `high`.

    The greatest of: `ulp` units in the last place of the result, `relative` times it, `absolute`. The simulator gives
    the exact value rounded to nearest (ex2.approx.f16: towards zero), so that the two may differ by this and half a
    unit.
    """

    ulp: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0
    low: float = 0.0
    high: float = float("inf")
    source: str = ""


# By opcode without .ftz; where there are several bounds the first whose range holds the input counts.
APPROXIMATE: dict[str, tuple[Bound, ...]] = {
    "ex2.approx.f32": (Bound(ulp=2, source="PTX 9.7.3.21: 2 ulp from the correctly rounded result, full range"),),
    "lg2.approx.f32": (
        Bound(absolute=2**-22, low=0.5, high=2.0, source="PTX 9.7.3.20: absolute error 2^-22 in (0.5, 2)"),
        Bound(relative=2**-22, source="PTX 9.7.3.20: relative error 2^-22 outside of (0.5, 2)"),
    ),
    "sin.approx.f32": (
        Bound(absolute=2**-20.5, high=2 * math.pi, source="PTX 9.7.3.18: absolute error 2^-20.5 in [-2 pi, 2 pi]"),
        Bound(
            absolute=2**-14.7, high=100 * math.pi, source="PTX 9.7.3.18: absolute error 2^-14.7 in [-100 pi, 100 pi]"
        ),
    ),
    "cos.approx.f32": (
        Bound(absolute=2**-20.5, high=2 * math.pi, source="PTX 9.7.3.19: absolute error 2^-20.5 in [-2 pi, 2 pi]"),
        Bound(
            absolute=2**-14.7, high=100 * math.pi, source="PTX 9.7.3.19: absolute error 2^-14.7 in [-100 pi, 100 pi]"
        ),
    ),
    "tanh.approx.f32": (Bound(relative=2**-11, source="PTX 9.7.3.22: relative error 2^-11"),),
    "rcp.approx.f32": (Bound(ulp=1, source="PTX 9.7.3.13: 1 ulp, full range"),),
    "sqrt.approx.f32": (Bound(relative=2**-23, source="PTX 9.7.3.15: relative error 2^-23"),),
    "rsqrt.approx.f32": (Bound(relative=2**-22.9, source="PTX 9.7.3.16: relative error 2^-22.9"),),
    "div.approx.f32": (
        Bound(ulp=2, low=2.0**-126, high=2.0**126, source="PTX 9.7.3.8: 2 ulp for a divisor in [2^-126, 2^126]"),
    ),
    "div.full.f32": (Bound(ulp=2, source="PTX 9.7.3.8: 2 ulp, full range"),),
    "ex2.approx.f16": (Bound(relative=2**-9.9, source="PTX 9.7.4.10: relative error 2^-9.9"),),
    "ex2.approx.bf16": (Bound(relative=2**-7, source="PTX 9.7.4.10: relative error 2^-7"),),
    "tanh.approx.f16": (Bound(absolute=2**-10.987, source="PTX 9.7.4.9: absolute error 2^-10.987"),),
    "tanh.approx.bf16": (Bound(absolute=2**-8, source="PTX 9.7.4.9: absolute error 2^-8"),),
    # The manual calls these "fast, gross" and gives no number; 20 bits of the operand and of the result are kept.
    "rcp.approx.f64": (Bound(relative=2**-18, source="PTX 9.7.3.14: 20 bits of operand and result are kept"),),
    "rsqrt.approx.f64": (Bound(relative=2**-18, source="PTX 9.7.3.17: 20 bits of operand and result are kept"),),
}


@lru_cache(maxsize=None)
def rule(opcode: str) -> Rule | None:
    """The rule of a pure register instruction; None for memory, control flow, warp, barrier and matrix instructions.

    Raises UnknownInstruction for a pure instruction, or a modifier of one, that is not supported.
    """
    op = Opcode(opcode)
    if op.stem in REFUSED:
        raise UnknownInstruction(opcode)
    integer, floating = rules_integer.RULES.get(op.stem), rules_float.RULES.get(op.stem)
    handler = rules_move.RULES.get(op.stem)
    if handler is None:
        is_float = bool(op.left) and any(part in FLOAT_TYPES for part in op.left)
        handler = floating if is_float or integer is None else integer
        if handler is None:
            if integer is None:
                return None
            raise UnknownInstruction(opcode)
    return handler(op)
