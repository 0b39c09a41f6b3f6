"""An opcode taken apart, and what a pure instruction becomes: a NumPy expression with typed inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from cupyllm.sim.report import UnknownInstruction

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
BITS = ("b16", "b32", "b64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
ROUNDINGS = ("rn", "rz", "rm", "rp")


@dataclass(frozen=True)
class Rule:
    """`expr` is Python over {0}, {1}, ...: the source operands as arrays of the PTX types `inputs`.

    It gives a fresh array of type outputs[0] (a mov or a min of equal bits may return an operand), or a tuple of
    arrays when there are two outputs. Types name bits where the sign does not matter (add.s32 takes u32), so that
    most registers need no view; an immediate must be wrapped to the type. An operand wider than its type is cut to
    its low bits, and a result narrower than its register extended as its type has it: that is the caller's.
    """

    expr: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def width(type_: str) -> int:
    """Bits of a scalar type (pred: 1)."""
    return 1 if type_ == "pred" else int(type_.lstrip("busf"))


def unsigned(type_: str) -> str:
    """The unsigned type of the same width; float types and pred as they are."""
    return f"u{width(type_)}" if type_[0] in "bsu" and type_ != "bf16" else type_


def numpy_type(type_: str) -> str:
    """An integer type as an expression for its NumPy dtype."""
    return f"np.{'int' if type_[0] == 's' else 'uint'}{width(type_)}"


class Opcode:
    """The parts of an opcode; each reader takes away what it understands, and `end` refuses what is left."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.stem, *self.left = text.split(".")

    def take(self, *names: str, default: str = "") -> str:
        """The first part that is one of `names`, taken away; `default` when there is none."""
        for part in self.left:
            if part in names:
                self.left.remove(part)
                return part
        return default

    def need(self, *names: str) -> str:
        """As `take`, but the part must be there."""
        return self.take(*names) or self.refuse()

    def last(self, *names: str) -> str:
        """The last part, taken away; it must be one of `names`."""
        if not self.left or self.left[-1] not in names:
            self.refuse()
        return self.left.pop()

    def end(self, expr: str, inputs: tuple[str, ...], *outputs: str) -> Rule:
        """The rule, when every part has been understood."""
        if self.left:
            self.refuse()
        return Rule(expr, inputs, outputs)

    def refuse(self) -> str:
        raise UnknownInstruction(self.text)
