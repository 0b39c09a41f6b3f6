"""A kernel's segments as NumPy source: one Python function a segment, and one for each block that has several.

`s7(R, X, m, merge)` runs segment 7. R is the list of registers, X the batch (machine.py), X.M its memory. `m` masks the
lanes that run (None: all); arithmetic is done for every lane and memory is touched for those of `m`; with `merge` the
registers of other lanes keep their values. A function returns the condition of the block's branch, if it has one.
How registers become variables: emitter.py. Generating source was chosen over a list of closures: a variable costs
30 ns, a call 100, and source can be read.
"""

from __future__ import annotations

from collections.abc import Iterable

from cupyllm.sim import isa
from cupyllm.sim.emitter import TOKENS, WIDTH, Emitter, unsigned
from cupyllm.sim.flow import Flow, Segment, is_meeting, results, sources
from cupyllm.sim.ptx import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Pair,
    Register,
    Symbol,
    Vector,
)
from cupyllm.sim.report import Site, UnknownInstruction

_SPACES = ("global", "shared", "local", "const", "param")
_ATOMIC = ("volatile", "relaxed", "acquire", "release", "mmio", "acq_rel")
_SILENT = (
    "membar",
    "fence",
    "prefetch",
    "prefetchu",
    "discard",
    "applypriority",
    "nanosleep",
    "pmevent",
    "griddepcontrol",
)


def translate(kernel: Kernel, flow: Flow) -> tuple[str, list[Site]]:
    """Source of every function of a kernel, and the sites that it names as S[i]. Raises UnknownInstruction."""
    return _Translator(kernel, flow).translate()


def storage_tokens(kernel: Kernel) -> dict[str, str]:
    """How each register is kept: as floats where most of its definitions are floats, else as unsigned integers."""
    floats: dict[str, int] = {}
    for instruction in kernel.body:
        vote = 1 if instruction.opcode.rsplit(".", 1)[-1] in ("f32", "f64") or ".f32." in instruction.opcode else -1
        for name in results(instruction):
            floats[name] = floats.get(name, 0) + vote
    tokens = {}
    for name, declared in kernel.registers.items():
        token = TOKENS[declared]
        if token in ("f4", "f8", "u4", "u8", "i4", "i8"):
            letter = "f" if declared.startswith("f") or floats.get(name, 0) > 0 else "u"
            token = f"{letter}{WIDTH[token]}"
        elif token in ("i1", "i2", "f2", "bf"):
            token = f"u{WIDTH[token]}"
        tokens[name] = token
    return tokens


class _Translator:
    """What the functions of one kernel share: numbers of registers, constants, sites."""

    def __init__(self, kernel: Kernel, flow: Flow) -> None:
        self.kernel, self.flow = kernel, flow
        self.storage = storage_tokens(kernel)
        self.number = {name: i for i, name in enumerate(kernel.registers)}
        self.offset = {p.name: p.offset for p in kernel.parameters}
        self.read = {name for instruction in kernel.body for name in sources(instruction)}
        self.sites: list[Site] = []
        self.constants: dict[tuple[str, int], str] = {}

    def translate(self) -> tuple[str, list[Site]]:
        functions = [self._function(f"s{s.index}", [s], s.index == self._last(s)) for s in self.flow.segments]
        for block in self.flow.blocks:
            if len(block.segments) > 1:
                segments = [self.flow.segments[i] for i in block.segments]
                functions.append(self._function(f"w{block.index}", segments, True))
        constants = [
            f"{name} = np.array([[{bits}]], {unsigned(token)}).view({token})"
            for (token, bits), name in self.constants.items()
        ]
        return "\n".join([*constants, *functions, ""]), self.sites

    def _last(self, segment: Segment) -> int:
        return self.flow.blocks[segment.block].segments[-1]

    def _function(self, name: str, segments: list[Segment], ends: bool) -> str:
        body = _Function(self)
        for segment in segments:
            for instruction in segment.instructions:
                body.instruction(instruction)
        block = self.flow.blocks[segments[-1].block]
        body.finish(segments[-1].live_after, block.branch if ends else None)
        return "\n".join([f"def {name}(R, X, m, merge):", "    M = X.M", *(f"    {line}" for line in body.lines)])

    def constant(self, token: str, bits: int) -> str:
        """Name of a uniform array with these bits, cut to the token's width."""
        key = token, bits & ((1 << 8 * WIDTH[token]) - 1)
        return self.constants.setdefault(key, f"K{len(self.constants)}")

    def site(self, instruction: Instruction, address: Address | None = None) -> str:
        params, symbols = (None, None) if address is None else self.flow.origin(address)
        self.sites.append(Site(self.kernel.name, instruction.text, instruction.where, params, symbols))
        return f"S[{len(self.sites) - 1}]"


class _Function(Emitter):
    """One function, with what each instruction becomes."""

    def __init__(self, owner: _Translator) -> None:
        super().__init__(owner.kernel.name, owner.storage, owner.number, owner.constant)
        self.owner = owner

    # ---- instructions ----

    def instruction(self, instruction: Instruction) -> None:
        self._now = instruction
        opcode = instruction.opcode
        if opcode == "fma.rn.f32" and instruction.predicate is None:
            self._fma(instruction)
            return
        stem = opcode.split(".", 1)[0]
        if stem in _SILENT:
            return
        if instruction.predicate is not None and is_meeting(instruction):
            raise self.refuse(f"{opcode} under a predicate")  # who enters would depend on more than the place
        special = getattr(self, f"_do_{stem}", None)
        if special is not None and special(instruction, opcode.split(".")):
            return
        self._pure(instruction)

    def guard(self, instruction: Instruction) -> str | None:
        if instruction.predicate is None:
            return None
        name = self.fetch(instruction.predicate, "pred")
        return self.let(f"~{name}") if instruction.negated else name

    def _pure(self, instruction: Instruction) -> None:
        try:
            rule = isa.rule(instruction.opcode)
        except UnknownInstruction as error:
            raise self.refuse(error.opcode) from error
        target, *operands = instruction.operands
        if rule is None or len(operands) != len(rule.inputs):
            raise self.refuse(instruction.opcode)
        values = [self.fetch(operand, type_) for operand, type_ in zip(operands, rule.inputs, strict=True)]
        expr = rule.expr.format(*values)
        guard = self.guard(instruction)
        tokens = [TOKENS[type_] for type_ in rule.outputs]
        if isinstance(target, Pair):
            if len(tokens) == 1:
                first, second = self.let(expr), ""
                tokens *= 2
                second = self.let(f"~{first}")
            else:
                first, second = self.new(), self.new()
                self.emit(f"{first}, {second} = {expr}")
            self.store(target.first, first, tokens[0], guard)
            self.store(target.second, second, tokens[1], guard)
            return
        name = self.let(f"({expr})[0]" if len(tokens) > 1 else expr)
        self.store(target, name, tokens[0], guard)

    def _do_mov(self, instruction: Instruction, parts: list[str]) -> bool:
        target, source = instruction.operands
        guard = self.guard(instruction)
        type_ = parts[-1]
        if isinstance(target, Vector):
            self._unpack(target, source, type_, guard)
        elif isinstance(source, Vector):
            self.store(target, self._pack(source, type_), TOKENS[type_], guard)
        else:
            name = self.fetch(source, type_)
            self.store(target, name, TOKENS[type_], guard)
        return True

    def _unpack(self, target: Vector, source: object, type_: str, guard: str | None) -> None:
        width = WIDTH[TOKENS[type_]] // len(target.items)
        whole = self.fetch(source, f"b{8 * WIDTH[TOKENS[type_]]}")
        for place, item in enumerate(target.items):
            if item is None:
                continue
            shift = self.constant(unsigned(TOKENS[type_]), 8 * width * place)
            part = whole if place == 0 else f"({whole} >> {shift})"
            self.store(item, self.let(f"{part}.astype(u{width})"), f"u{width}", guard)

    def _pack(self, source: Vector, type_: str) -> str:
        total = WIDTH[TOKENS[type_]]
        width = total // len(source.items)
        parts = []
        for place, item in enumerate(source.items):
            part = f"{self.fetch(item, f'b{8 * width}')}.astype(u{total})"
            shift = self.constant(f"u{total}", 8 * width * place)
            parts.append(part if place == 0 else f"({part} << {shift})")
        name = self.let(" | ".join(parts))
        return self.view(name, f"u{total}", TOKENS[type_])

    def _do_cvta(self, instruction: Instruction, parts: list[str]) -> bool:
        target, source = instruction.operands
        space, type_ = parts[-2].split("::")[0], parts[-1]
        name = self.fetch(source, type_)
        if space in ("shared", "local"):
            sign = "-" if parts[1] == "to" else "+"
            name = self.let(f"{name} {sign} {space.upper()}_WINDOW")
        elif space == "param":
            raise self.refuse(instruction.opcode)
        self.store(target, name, TOKENS[type_], self.guard(instruction))
        return True

    def _do_isspacep(self, instruction: Instruction, parts: list[str]) -> bool:
        target, source = instruction.operands
        name = self.let(f"X.is_space({parts[-1].split('::')[0]!r}, {self.fetch(source, 'u64')})")
        self.store(target, name, "b1", self.guard(instruction))
        return True

    # ---- memory ----

    def address(self, operand: object) -> str:
        """The address as an array: offsets of shared and local memory, device addresses of the rest."""
        if not isinstance(operand, Address):
            raise self.refuse(f"the address {operand!r}")
        if isinstance(operand.base, Register):
            held = self.storage[operand.base.name]
            type_ = "u64" if WIDTH[held] == 8 else "u32"
            name = self.fetch(operand.base, type_)
            if operand.offset == 0:
                return name
            bits = 64 if type_ == "u64" else 32
            return self.let(f"{name} + {self.constant(TOKENS[type_], operand.offset % (1 << bits))}")
        if isinstance(operand.base, Symbol):
            return self.let(f"X.address({operand.base.name!r}, {operand.base.offset + operand.offset})")
        return self.fetch(operand.base, "u64")

    def masked(self, instruction: Instruction) -> tuple[str, str | None]:
        """(mask variable, guard) of a memory instruction; under a guard the mask variable may be False: no lane."""
        guard = self.guard(instruction)
        return ("m", None) if guard is None else (self.let(f"X.both({guard}, m)"), guard)

    def _do_ld(self, instruction: Instruction, parts: list[str]) -> bool:
        target, source = instruction.operands[:2]
        assert isinstance(source, Address)
        space, vec, type_ = _space(parts), _vector(parts), parts[-1]
        items = target.items if isinstance(target, Vector) else (target,)
        if space == "param":
            self._load_param(instruction, items, source, type_)
            return True
        first = next(item for item in items if item is not None)
        if isinstance(first, Register):  # load in the form the register is kept in, where that is a matter of naming
            kept = self.storage[first.name]
            if kept.startswith("f") and TOKENS[type_] == f"u{WIDTH[kept]}":
                type_ = f"f{8 * WIDTH[kept]}"
        where = self.address(source)
        mask, guard = self.masked(instruction)
        site = self.owner.site(instruction, source)
        extra = ", atomic=True" if any(part in _ATOMIC for part in parts) else ""
        call = f"M.load({space!r}, {site}, {where}, {mask}, {type_!r}, {vec}{extra})"
        names = [self.new() for _ in items]
        left = ", ".join(names)
        if guard is None:
            self.emit(f"{left} = {call}")
        else:
            zero = self.constant(TOKENS[type_], 0)
            nothing = zero if len(items) == 1 else f"({', '.join([zero] * len(items))})"
            self.emit(f"{left} = {nothing} if {mask} is False else {call}")
        for item, name in zip(items, names, strict=True):
            self.store(item, name, TOKENS[type_], guard)
        return True

    _do_ldu = _do_ld

    def _load_param(self, instruction: Instruction, items: Iterable[object], source: Address, type_: str) -> None:
        base = source.base
        if not isinstance(base, Symbol) or base.name not in self.owner.offset:
            raise self.refuse("a parameter at a computed address")
        start = self.owner.offset[base.name] + base.offset + source.offset
        for place, item in enumerate(items):
            token = TOKENS[type_]
            name = self.let(f"X.param({start + place * WIDTH[token]}, {token})")
            self.store(item, name, token, self.guard(instruction))

    def _do_st(self, instruction: Instruction, parts: list[str]) -> bool:
        target, source = instruction.operands[:2]
        space, type_ = _space(parts), parts[-1]
        if space == "param":
            raise self.refuse("st.param (the call of a function)")
        items = source.items if isinstance(source, Vector) else (source,)
        values = [self.fetch(item, type_) for item in items]
        where = self.address(target)
        mask, guard = self.masked(instruction)
        assert isinstance(target, Address)
        site = self.owner.site(instruction, target)
        extra = ", atomic=True" if any(part in _ATOMIC for part in parts) else ""
        if guard is not None:
            self.emit(f"if {mask} is not False:")
        indent = "    " if guard is not None else ""
        self.emit(f"{indent}M.store({space!r}, {site}, {where}, {mask}, {type_!r}, ({', '.join(values)},){extra})")
        return True

    def _do_atom(self, instruction: Instruction, parts: list[str]) -> bool:
        operands = list(instruction.operands)
        target = operands.pop(0) if parts[0] == "atom" else None
        address = operands.pop(0)
        op = next((p for p in parts[1:] if p in "add min max and or xor exch cas inc dec".split()), None)
        if op is None:
            raise self.refuse(instruction.opcode)
        type_ = parts[-1]
        values = [self.fetch(operand, type_) for operand in operands]
        where = self.address(address)
        mask, guard = self.masked(instruction)
        assert isinstance(address, Address)
        site = self.owner.site(instruction, address)
        name = self.new()
        used = isinstance(target, Register) and target.name in self.owner.read
        arguments = f"{_space(parts)!r}, {site}, {op!r}, {type_!r}, {where}, {mask}, {', '.join(values)}, result={used}"
        call = f"M.atom({arguments})"
        zero = self.constant(TOKENS[type_], 0)
        self.emit(f"{name} = {zero} if {mask} is False else {call}")
        if target is not None:
            self.store(target, name, TOKENS[type_], guard)
        return True

    _do_red = _do_atom

    def _do_cp(self, instruction: Instruction, parts: list[str]) -> bool:
        if parts[1] != "async" or "bulk" in parts or "mbarrier" in parts:
            raise self.refuse(instruction.opcode)
        mask, guard = self.masked(instruction)
        if "commit_group" in parts:
            call = f"M.cp_commit({mask})"
        elif "wait_all" in parts:
            call = f"M.cp_wait({self.owner.site(instruction)}, 0, {mask}, everything=True)"
        elif "wait_group" in parts:
            pending = instruction.operands[0]
            assert isinstance(pending, Immediate)
            call = f"M.cp_wait({self.owner.site(instruction)}, {int(pending.value)}, {mask})"
        else:
            call = self._copy_async(instruction, mask)
        self.emit(call if guard is None else f"if {mask} is not False: {call}")
        return True

    def _copy_async(self, instruction: Instruction, mask: str) -> str:
        target, source, size, *rest = instruction.operands
        assert isinstance(source, Address) and isinstance(target, Address) and isinstance(size, Immediate)
        if ".L2::cache_hint" in instruction.opcode:
            rest = rest[:-1]
        filled = self.fetch(rest[0], "u32") if rest else "None"
        shared, device = self.address(target), self.address(source)
        sites = self.owner.site(instruction, target), self.owner.site(instruction, source)
        size_bytes = int(size.value)
        return f"M.cp_async({sites[0]}, {shared}, {device}, {size_bytes}, {filled}, {mask}, source={sites[1]})"

    # ---- lanes together ----

    def _do_bar(self, instruction: Instruction, parts: list[str]) -> bool:
        if parts[1] == "warp":
            self.emit(f"X.warp_sync({self.owner.site(instruction)}, {self._members(instruction, 0)}, m)")
            return True
        operands = list(instruction.operands)
        if parts[1] == "red":
            target, *operands = operands
            pred = self.fetch(operands[-1], "pred")
            operands = operands[:-1]
        if parts[1] not in ("sync", "red") or (parts[0] == "barrier" and "aligned" not in parts):
            raise self.refuse(f"{instruction.text} (barriers of part of a CTA)")
        threads = self.fetch(operands[1], "u32") if len(operands) > 1 else "None"
        self.emit(f"X.barrier({self.owner.site(instruction)}, {threads}, m)")
        if parts[1] == "red":
            name = self.let(f"X.reduce({parts[2]!r}, {pred}, m)")
            self.store(target, name, "u4" if parts[2] == "popc" else "b1")
        return True

    _do_barrier = _do_bar

    def _members(self, instruction: Instruction, place: int) -> str:
        """The member mask, or None when it names every lane."""
        operand = instruction.operands[place]
        if isinstance(operand, Immediate) and int(operand.value) & 0xFFFFFFFF == 0xFFFFFFFF:
            return "None"
        return self.fetch(operand, "u32")

    def _do_shfl(self, instruction: Instruction, parts: list[str]) -> bool:
        target, value, source, clamp = instruction.operands[:4]
        operands = [self.fetch(operand, "u32") for operand in (value, source, clamp)]
        members = self._members(instruction, 4)
        first, second = self.new(), self.new()
        site = self.owner.site(instruction)
        self.emit(f"{first}, {second} = X.shuffle({site}, {parts[2]!r}, {', '.join(operands)}, {members}, m)")
        guard = self.guard(instruction)
        if isinstance(target, Pair):
            self.store(target.first, first, "u4", guard)
            self.store(target.second, second, "b1", guard)
        else:
            self.store(target, first, "u4", guard)
        return True

    def _do_vote(self, instruction: Instruction, parts: list[str]) -> bool:
        target, pred = instruction.operands[:2]
        site, members = self.owner.site(instruction), self._members(instruction, 2)
        name = self.let(f"X.vote({site}, {parts[2]!r}, {self.fetch(pred, 'pred')}, {members}, m)")
        self.store(target, name, "u4" if parts[2] == "ballot" else "b1", self.guard(instruction))
        return True

    def _do_activemask(self, instruction: Instruction, parts: list[str]) -> bool:
        self.store(instruction.operands[0], self.let("X.active(m)"), "u4", self.guard(instruction))
        return True

    def _do_match(self, instruction: Instruction, parts: list[str]) -> bool:
        target, value = instruction.operands[:2]
        site, members = self.owner.site(instruction), self._members(instruction, 2)
        first, second = self.new(), self.new()
        call = f"X.match({site}, {parts[1]!r}, {self.fetch(value, parts[-1])}, {members}, m)"
        self.emit(f"{first}, {second} = {call}")
        if isinstance(target, Pair):
            self.store(target.first, first, "u4")
            self.store(target.second, second, "b1")
        else:
            self.store(target, first, "u4")
        return True

    def _do_redux(self, instruction: Instruction, parts: list[str]) -> bool:
        target, value = instruction.operands[:2]
        site, members = self.owner.site(instruction), self._members(instruction, 2)
        name = self.let(f"X.redux({site}, {parts[2]!r}, {self.fetch(value, parts[-1])}, {members}, m)")
        self.store(target, name, TOKENS[parts[-1]])
        return True

    def _do_mma(self, instruction: Instruction, parts: list[str]) -> bool:
        types = [part for part in parts if part in TOKENS][-4:]
        tokens = [_fragment(type_) for type_ in types]
        target, *operands = instruction.operands
        lists = []
        for operand, token in zip(operands, tokens[1:], strict=True):
            items = operand.items if isinstance(operand, Vector) else (operand,)
            lists.append(f"[{', '.join(self.fetch(item, _PTX[token]) for item in items)}]")
        results_ = target.items if isinstance(target, Vector) else (target,)
        names = [self.new() for _ in results_]
        call = f"X.mma({self.owner.site(instruction)}, {instruction.opcode!r}, {', '.join(lists)}, m)"
        self.emit(f"{', '.join(names)}, = {call}")
        for item, name in zip(results_, names, strict=True):
            self.store(item, name, tokens[0])
        return True

    def _do_ldmatrix(self, instruction: Instruction, parts: list[str]) -> bool:
        target, source = instruction.operands
        items = target.items if isinstance(target, Vector) else (target,)
        names = [self.new() for _ in items]
        where = self.address(source)
        if _space(parts) == "generic":
            where = self.let(f"{where} - SHARED_WINDOW")
        assert isinstance(source, Address)
        arguments = f"{self.owner.site(instruction, source)}, {where}, {len(items)}, {'trans' in parts}, m"
        self.emit(f"{', '.join(names)}, = X.ldmatrix({arguments})")
        for item, name in zip(items, names, strict=True):
            self.store(item, name, "u4")
        return True

    def _do_movmatrix(self, instruction: Instruction, parts: list[str]) -> bool:
        target, source = instruction.operands
        name = self.let(f"X.movmatrix({self.owner.site(instruction)}, {self.fetch(source, 'b32')}, m)")
        self.store(target, name, "u4")
        return True

    def _do_trap(self, instruction: Instruction, parts: list[str]) -> bool:
        mask, _ = self.masked(instruction)
        self.emit(f"if {mask} is not False: X.trap({self.owner.site(instruction)}, {mask})")
        return True

    _do_brkpt = _do_trap

    def _do_call(self, instruction: Instruction, parts: list[str]) -> bool:
        raise self.refuse("call (printf, assert, or a function that was not inlined: mark it __forceinline__)")


_PTX = {"u4": "b32", "f4": "f32", "f8": "f64"}


def _fragment(type_: str) -> str:
    return {"f32": "f4", "f64": "f8"}.get(type_, "u4")


def _space(parts: list[str]) -> str:
    return next((part.split("::")[0] for part in parts[1:] if part.split("::")[0] in _SPACES), "generic")


def _vector(parts: list[str]) -> int:
    return next((int(part[1]) for part in parts if part in ("v2", "v4", "v8")), 1)
