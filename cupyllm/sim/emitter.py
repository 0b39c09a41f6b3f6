"""The lines of one generated function as they grow: registers as Python variables, typed views, grouped fmas.

Every definition of a register is a new variable, so `mov` costs nothing and instructions without side effects may be
reordered. Fused multiply-adds wait until something else needs one of them; by then those that do not depend on one
another form levels, and a level is one NumPy operation on a stacked array (numeric.fma_f32_many). A level whose addends
are the rows of an earlier one, in order, takes that array as it is: an unrolled inner product never unpacks its sums.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from cupyllm.sim.ptx import Immediate, Instruction, Not, Register, Special, Symbol
from cupyllm.sim.report import Site, UnknownInstruction


class _Tokens(dict[str, str]):
    """PTX types to tokens; a type that is not there is refused by name."""

    def __missing__(self, type_: str) -> str:
        raise UnknownInstruction(f"the type .{type_}")


TOKENS = _Tokens({"u8": "u1", "u16": "u2", "u32": "u4", "u64": "u8", "s8": "i1", "s16": "i2", "s32": "i4", "s64": "i8"})
TOKENS |= {"b8": "u1", "b16": "u2", "b32": "u4", "b64": "u8", "f16": "f2", "bf16": "bf", "f32": "f4", "f64": "f8"}
TOKENS |= {"pred": "b1", "f16x2": "u4", "bf16x2": "u4", "tf32": "u4", "u16x2": "u4", "s16x2": "u4"}
WIDTH = {
    "b1": 1,
    "u1": 1,
    "i1": 1,
    "u2": 2,
    "i2": 2,
    "f2": 2,
    "bf": 2,
    "u4": 4,
    "i4": 4,
    "f4": 4,
    "u8": 8,
    "i8": 8,
    "f8": 8,
}
_GROUP = 3  # as few independent fmas as are worth one operation


class Emitter:
    """One function. `kernel` names it in errors; `storage` and `number` are those of the kernel's registers."""

    def __init__(
        self, kernel: str, storage: dict[str, str], number: dict[str, int], constant: Callable[[str, int], str]
    ) -> None:
        self.kernel, self.storage, self.number, self.constant = kernel, storage, number, constant
        self.lines: list[str] = []
        self.values: dict[str, tuple[str, str]] = {}  # register -> variable, token; what it holds now
        self.written: set[str] = set()
        self._views: dict[tuple[str, str], str] = {}
        self._count = 0
        self._now: Instruction | None = None
        self._pending: dict[str, int] = {}  # result of an fma that is not emitted yet -> its level
        self._levels: list[list[tuple[str, str, str, str]]] = []  # fmas by level: result, a, b, c
        self._rows: dict[str, tuple[str, int]] = {}  # result that is still a row of a group's array

    def refuse(self, what: str) -> UnknownInstruction:
        """The error of something that is not simulated, at the present instruction."""
        now = self._now
        site = None if now is None else Site(self.kernel, now.text, now.where)
        return UnknownInstruction(what, site)

    # ---- values ----

    def new(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def let(self, expr: str) -> str:
        name = self.new()
        self.emit(f"{name} = {expr}")
        return name

    def held(self, register: str) -> tuple[str, str]:
        """Variable and token of a register's present value."""
        if register not in self.values:
            if register not in self.number:
                raise self.refuse(f"register {register} without a declaration")
            token = self.storage[register]
            self.values[register] = self.let(f"R[{self.number[register]}]"), token
        return self.values[register]

    def ready(self, name: str) -> str:
        """`name`, with whatever defines it emitted."""
        if name in self._pending:
            self.flush()
        if name in self._rows:
            group, row = self._rows.pop(name)
            self.emit(f"{name} = {group}[{row}]")
        return name

    def fetch(self, operand: object, type_: str) -> str:
        """An expression for an operand, as an array of PTX type `type_`."""
        token = TOKENS[type_]
        if isinstance(operand, Register):
            name, held = self.held(operand.name)
            return self.view(self.ready(name), held, token)
        if isinstance(operand, Not):
            return self.let(f"~{self.fetch(operand.operand, 'pred')}")
        if isinstance(operand, Immediate):
            return self._immediate(operand, token)
        if isinstance(operand, Special):
            name = f"X.{special_name(operand.name)}"
            if operand.name.startswith(("%clock", "%globaltimer")):
                name = self.let(name)  # read once, here
            return self.view(name, "u8" if _is_long(operand.name) else "u4", token)
        if isinstance(operand, Symbol):
            return self.view(self.let(f"X.address({operand.name!r}, {operand.offset})"), "u8", token)
        raise self.refuse(f"the operand {operand!r}")

    def _immediate(self, operand: Immediate, token: str) -> str:
        if token == "b1":
            bits = int(bool(operand.value))
        elif operand.raw is not None and operand.text[:2].lower() == f"0{'f' if WIDTH[token] == 4 else 'd'}":
            bits = operand.raw
        elif token in ("f4", "f8"):
            bits = int.from_bytes(struct.pack("<f" if token == "f4" else "<d", operand.value), "little")
        else:
            bits = int(operand.value)
        return self.constant(token, bits)

    def view(self, name: str, held: str, token: str) -> str:
        """`name` read as another type: the same bits, or the low ones."""
        if held == token:
            return name
        key = (name, token)
        if key not in self._views:
            if held == "b1" or token == "b1":
                raise self.refuse("a predicate used as a number, or the reverse,")
            expr = name
            if WIDTH[token] < WIDTH[held]:
                if held.startswith(("f", "i", "b")):
                    expr = f"{expr}.view(u{WIDTH[held]})"
                expr = f"{expr}.astype(u{WIDTH[token]})"
                held = f"u{WIDTH[token]}"
            elif WIDTH[token] > WIDTH[held]:
                unsigned = expr if held.startswith("u") else f"{expr}.view(u{WIDTH[held]})"
                expr, held = f"{unsigned}.astype(u{WIDTH[token]})", f"u{WIDTH[token]}"
            self._views[key] = self.let(expr if held == token else f"{expr}.view({token})")
        return self._views[key]

    def store(self, target: object, name: str, token: str, guard: str | None = None) -> None:
        """A register takes the value of variable `name`; with a guard, where that holds."""
        if target is None:
            return
        assert isinstance(target, Register), target
        kept = self.storage[target.name]
        if token != kept and (kept == "b1" or token == "b1" or WIDTH[token] != WIDTH[kept]):
            if kept == "b1" or token == "b1":
                raise self.refuse("a predicate written as a number, or the reverse,")
            if WIDTH[token] < WIDTH[kept]:  # sign or zero extended
                letter = "i" if token.startswith("i") else "u"
                source = name if token[0] in "iu" else f"{name}.view(u{WIDTH[token]})"
                name, token = self.let(f"{source}.astype({letter}{WIDTH[kept]})"), f"{letter}{WIDTH[kept]}"
            else:
                name, token = self.view(name, token, f"u{WIDTH[kept]}"), f"u{WIDTH[kept]}"
        if guard is not None:
            old, held = self.held(target.name)
            name = self.let(f"np.where({guard}, {name}, {self.view(self.ready(old), held, token)})")
        self.values[target.name] = name, token
        self.written.add(target.name)

    # ---- fused multiply-adds ----

    def _fma(self, instruction: Instruction) -> None:
        target, *operands = instruction.operands
        a, b = (self._operand(operand) for operand in operands[:2])
        c = self._operand(operands[2])
        level = 1 + max(self._pending.get(name, -1) for name in (a, b, c))
        for name in (a, b):
            if name in self._rows:
                self.ready(name)
        result = self.new()
        while len(self._levels) <= level:
            self._levels.append([])
        self._levels[level].append((result, a, b, c))
        self._pending[result] = level
        assert isinstance(target, Register)
        if self.storage[target.name] == "f4":
            self.values[target.name] = result, "f4"
            self.written.add(target.name)
        else:
            self.store(target, self.ready(result), "f4")

    def _operand(self, operand: object) -> str:
        """An fma's operand as float32 without forcing what it waits for."""
        if isinstance(operand, Register):
            name, held = self.held(operand.name)
            if held == "f4":
                return name
        return self.fetch(operand, "f32")

    def flush(self) -> None:
        """Emit the fmas that wait, level by level."""
        levels, self._levels = self._levels, []
        self._pending = {}
        stacked = self._stacks()
        for level in levels:
            if not level:
                continue
            if len(level) < _GROUP:
                for result, *operands in level:
                    self.emit(f"{result} = num.fma_f32({', '.join(self.ready(name) for name in operands)})")
                continue
            keys = tuple(c for _, _, _, c in level)
            addend = stacked.get(keys)
            a, b = (", ".join(self.ready(fma[i]) for fma in level) for i in (1, 2))
            if addend is None:
                addend = f"({', '.join(self.ready(c) for c in keys)},)"
            group = self.let(f"num.fma_f32_many(({a},), ({b},), {addend})")
            names = tuple(result for result, *_ in level)
            stacked[names] = group
            for row, name in enumerate(names):
                self._rows[name] = group, row

    def _stacks(self) -> dict[tuple[str, ...], str]:
        """Groups of earlier flushes of which every row is still unread: they can be passed on whole."""
        rows: dict[str, list[tuple[int, str]]] = {}
        for name, (group, row) in self._rows.items():
            rows.setdefault(group, []).append((row, name))
        return {tuple(name for _, name in sorted(found)): group for group, found in rows.items()}

    # ---- the end ----

    def finish(self, live_after: frozenset[str], branch: Instruction | None) -> None:
        condition = None
        if branch is not None and branch.predicate is not None:
            condition = self.fetch(branch.predicate, "pred")
            if branch.negated:
                condition = self.let(f"~{condition}")
        kept = []
        for name in sorted(self.written & live_after, key=self.number.__getitem__):
            variable, token = self.values[name]
            kept.append((self.number[name], self.view(self.ready(variable), token, self.storage[name])))
        if kept:
            self.emit("if merge:")
            for number, variable in kept:
                self.emit(f"    R[{number}] = np.where(m, {variable}, R[{number}])")
            self.emit("else:")
            for number, variable in kept:
                self.emit(f"    R[{number}] = {variable}")
        if condition is not None:
            self.emit(f"return {condition}")


def unsigned(token: str) -> str:
    """The token of as many bits."""
    return f"u{WIDTH[token]}"


def _is_long(name: str) -> bool:
    return name in ("%clock64", "%globaltimer")


def special_name(name: str) -> str:
    """The attribute of batch.Batch that holds a special register: %tid.x is tid_x."""
    return name.lstrip("%").replace(".", "_")
