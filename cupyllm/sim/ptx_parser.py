"""PTX text to the classes of cupyllm/sim/ptx.py, after the grammar in NVIDIA's PTX ISA manual.

One regular expression cuts the text into statements and a dictionary per pair of braces holds the operands met so far,
because a module can have 10,000 instructions over a few thousand different operands. A grammar library was rejected: it
takes seconds for what takes a tenth of one here, and every test would pay.

Source lines: a `.loc` holds until the next one; line 0, the compiler's "no line", keeps the one before. An inlined
`.loc` names only its direct call site. Where that was itself inlined, the latest `.loc` with the call site's file, line
and column says into what, and its chain is the rest of this one's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from cupyllm.sim import ptx_values
from cupyllm.sim.ptx import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Location,
    Module,
    Not,
    Operand,
    Pair,
    Parameter,
    PtxError,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)
from cupyllm.sim.ptx_values import Malformed, quote

MAX_INLINED = 16  # positions kept of a chain: recursive functions can make a `.loc` its own call site
BRANCHES = ("bra", "bra.uni", "brx.idx", "brx.idx.uni")
IGNORED = ("pragma", "alias", "callprototype", "calltargets", "noreturn")

_BRACES = r"[^;{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^;{}]*)*"
# The last group that matches names the kind of statement; the frequent ones come first.
_STATEMENT = re.compile(
    r"\s*(?:"
    r"\.loc\s+(?P<loc>\d+\s+\d+\s+\d+[^\n;]*)"
    r"|(?P<label>[\w$]+)\s*:(?!:)"
    rf"|(?:@(?P<negated>!?)\s*(?P<predicate>[%\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)(?P<operands>(?![\w.:]){_BRACES});"
    r"|(?P<open>\{)"
    r"|(?P<close>\})"
    r"|\.section\s+[^{}]*(?P<section>\{)[^{}]*\}"
    r"|\.(?P<line>(?:file|version|target|address_size)\b[^\n]*)"
    r"|(?P<head>(?:\.(?:visible|weak|extern)\s+)*\.(?:entry|func)\b[^{};]*)(?P<body>[{;])"
    rf"|(?P<directive>\.[a-z]{_BRACES});"
    r"|(?P<end>\Z)"
    r")"
)
_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_BRACE = re.compile(r"[{}]")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_LOC = re.compile(r"(\d+)\s+(\d+)\s+(\d+)(?:.*?inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_HEAD = re.compile(r"[^(]*\.(entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?(.*)\Z", re.DOTALL)
_THREADS = re.compile(r"\.(?:maxntid|reqntid)\s+(\d+(?:\s*,\s*\d+)*)")
# A comma that is neither in {..} or (..), nor in [..], which may itself hold {..}.
_COMMA = re.compile(r",(?![^{(]*[})])(?![^\[]*\])")
_SUM = re.compile(r"(%?[\w$]+)\s*([+-])\s*(-?\w+)\Z")
_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)(?:\.[xyzw])?|laneid|n?warpid|n?smid|gridid|clock(?:_hi|64)?"
    r"|globaltimer(?:_lo|_hi)?|lanemask_(?:eq|le|lt|ge|gt)|cluster_n?ctarank|is_explicit_cluster|pm\d+(?:_64)?"
    r"|envreg\d+|(?:dynamic|total|aggr)_smem_size|reserved_smem_offset_\w+|current_graph_exec)\Z"
)
_WARP_SIZE = Immediate("WARP_SZ", 32)


@dataclass
class _Scope:
    """One pair of braces in a kernel: what it declares, the operands met, the branches whose labels are not final yet.

    Number 0 is the kernel's own pair, whose names stay as they are. branches: index of the instruction, its position.
    """

    number: int
    names: dict[str, Register | Symbol] = field(default_factory=dict)
    operands: dict[str, Operand | None] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    branches: list[tuple[int, int]] = field(default_factory=list)

    def unique(self, name: str) -> str:
        return f"{name}.{self.number}" if self.number else name


class Parser:
    def __init__(self, text: str) -> None:
        self._text = _COMMENT.sub(_without_comment, text)
        self._at = 0  # where the statement at hand starts
        self._files = dict(_FILE.findall(self._text))  # NVRTC writes them at the end
        self._locations: dict[tuple[str, str], Location] = {}
        self._module = Module()
        self._names: dict[str, Symbol] = {}
        self._shared: dict[str, Variable] = {}
        # Of the kernel at hand:
        self._kernel = Kernel("")
        self._scopes: list[_Scope] = []  # empty outside of kernels
        self._opened = 0
        self._where: tuple[Location, ...] = ()
        self._chains: dict[tuple[str, ...], tuple[Location, ...]] = {}
        self._label = ""
        self._tables: dict[str, Vector] = {}
        self._used: dict[str, Variable] = {}

    def parse(self) -> Module:
        position: int | None = 0
        try:
            while position is not None:
                self._at = position
                match = _STATEMENT.match(self._text, position)
                if match is None:
                    raise Malformed("not a statement")
                position = self._statement(match)
        except Malformed as error:
            rest = self._text[self._at :].lstrip()
            line = self._text.count("\n", 0, len(self._text) - len(rest)) + 1
            text = " ".join(rest.split("\n", 1)[0].split())
            raise PtxError(f"PTX line {line}: {error}: `{text}`") from None
        return self._module

    def _statement(self, match: re.Match[str]) -> int | None:
        """Does one statement; gives where the next one starts, None at the end of the text."""
        kind = match.lastgroup
        if kind == "operands":
            self._instruction(match)
        elif kind == "loc":
            self._loc(match["loc"])
        elif kind == "label":
            self._add_label(match["label"])
        elif kind == "directive":
            self._directive(match["directive"])
        elif kind == "body":
            return self._head(match)
        elif kind == "open":
            self._opened += 1
            self._scopes.append(_Scope(self._opened))
        elif kind == "close":
            self._close()
        elif kind == "line":
            words = match["line"].replace(",", " ").split()
            if words[0] == "target" and len(words) > 1:
                self._module.target = words[1]
        elif kind == "end":
            if self._scopes:
                raise Malformed(f"the text ends inside kernel {self._kernel.name}")
            return None
        return match.end()

    # Kernels, scopes, labels

    def _head(self, match: re.Match[str]) -> int:
        """An .entry or .func; gives where to go on: behind the body of a function, which is not looked at."""
        parts = _HEAD.match(match["head"])
        if parts is None or self._scopes:
            raise Malformed("not the head of a kernel or function")
        kind, name, parameters, attributes = parts.groups()
        self._names[name] = Symbol(name)
        if match["body"] == ";":
            return match.end()
        if kind == "func":
            return self._behind_braces(match.end())
        if name in self._module.kernels:
            raise Malformed(f"kernel {name} is there twice")
        threads = _THREADS.search(attributes)
        self._kernel = Kernel(name, max_threads=prod(map(int, threads[1].split(","))) if threads else None)
        self._module.kernels[name] = self._kernel
        self._scopes = [_Scope(0)]
        self._where, self._opened = (), 0
        self._chains, self._tables, self._used = {}, {}, {}
        self._parameters(parameters or "")
        return match.end()

    def _behind_braces(self, position: int) -> int:
        depth = 1
        for brace in _BRACE.finditer(self._text, position):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                return brace.end()
        raise Malformed("a function that does not end")

    def _parameters(self, text: str) -> None:
        end = 0
        for item in filter(str.strip, text.split(",")):
            declared = ptx_values.declaration(item)
            one = ptx_values.variable(declared, declared.rest, self._operand)
            end = -(-end // one.align) * one.align
            self._kernel.parameters.append(Parameter(one.name, declared.type, end, one.nbytes, one.align))
            self._scopes[0].names[one.name] = Symbol(one.name)
            end += one.nbytes

    def _scope(self) -> _Scope:
        if not self._scopes:
            raise Malformed("this belongs into a kernel")
        return self._scopes[-1]

    def _close(self) -> None:
        """Braces end: branches to their labels get the label's unique name, others are left to the braces around."""
        scope = self._scope()
        self._scopes.pop()
        for index, position in scope.branches:
            instruction = self._kernel.body[index]
            if scope.labels:
                operands = tuple(_renamed(operand, scope.labels) for operand in instruction.operands)
                self._kernel.body[index] = instruction = replace(instruction, operands=operands)
            if self._scopes:
                self._scopes[-1].branches.append((index, position))
                continue
            for name in _label_names(instruction.operands):
                if name not in self._kernel.labels:
                    self._at = position
                    raise Malformed(f"there is no label {name}")
        if not self._scopes:
            self._kernel.variables.extend(self._used.values())

    def _add_label(self, name: str) -> None:
        scope = self._scope()
        unique = scope.unique(name)
        if unique in self._kernel.labels:
            raise Malformed(f"label {name} is there twice")
        self._kernel.labels[unique] = len(self._kernel.body)
        if scope.number:
            scope.labels[name] = unique
        self._label = name

    def _loc(self, text: str) -> None:
        parts = _LOC.match(text)
        assert parts is not None  # _STATEMENT has seen the three numbers
        file, line, column, *site = parts.groups()
        if line == "0":
            return
        chain: tuple[Location, ...] = (self._location(file, line),)
        if site[0] is not None:
            outer = self._chains.get(tuple(site)) or (self._location(site[0], site[1]),)
            chain = (chain + outer)[:MAX_INLINED]
        self._where = self._chains[file, line, column] = chain

    def _location(self, file: str, line: str) -> Location:
        location = self._locations.get((file, line))
        if location is None:
            location = Location(self._files.get(file, f"file {file}"), int(line))
            self._locations[file, line] = location
        return location

    # Declarations

    def _directive(self, text: str) -> None:
        kind = text[1:].split(None, 1)[0]
        if kind in IGNORED:
            return
        if kind == "branchtargets":
            names = text.split(None, 1)[1].split(",")
            self._tables[self._label] = Vector(tuple(Label(name.strip()) for name in names))
            return
        declared = ptx_values.declaration(text)
        if kind == "reg":
            scope = self._scope()
            for name in ptx_values.registers(declared):
                unique = scope.unique(name)
                scope.names[name] = Register(unique)
                self._kernel.registers[unique] = declared.type
            scope.operands.clear()
            return
        for variable in ptx_values.variables(declared, self._operand):
            self._declare(variable)

    def _declare(self, variable: Variable) -> None:
        """Into the scope, the kernel or the module; param variables belong to a call and are only named."""
        name = variable.name
        if self._scopes:
            scope = self._scopes[-1]
            variable = replace(variable, name=scope.unique(name))
            scope.names[name] = Symbol(variable.name)
            scope.operands.clear()
        else:
            self._names[name] = Symbol(name)
        if variable.space in ("global", "const"):
            self._module.variables.append(variable)
        elif variable.space in ("shared", "local") and self._scopes:
            self._kernel.variables.append(variable)
        elif variable.space == "shared":
            self._shared[name] = variable

    # Instructions

    def _instruction(self, match: re.Match[str]) -> None:
        negated, name, opcode, rest = match.group("negated", "predicate", "opcode", "operands")
        scope, body = self._scope(), self._kernel.body
        if opcode in BRANCHES:
            operands = self._targets(opcode, rest)
            scope.branches.append((len(body), self._at))
        elif opcode.startswith("call"):
            operands = self._callee(rest)
        else:
            operands = self._operands(rest, scope.operands) if rest else ()
        predicate = None if name is None else self._register(name)
        text = " ".join(match[0][:-1].split())
        body.append(Instruction(opcode, operands, predicate, negated == "!", self._where, text))

    def _targets(self, opcode: str, rest: str) -> tuple[Operand | None, ...]:
        """bra's label; brx.idx's index and, in place of the name of the table, its labels."""
        names = [name.strip() for name in rest.split(",")]
        if opcode.startswith("bra") and len(names) == 1 and names[0]:
            return (Label(names[0]),)
        if opcode.startswith("brx") and len(names) == 2 and names[1] in self._tables:
            return self._register(names[0]), self._tables[names[1]]
        raise Malformed(f"not the targets of {opcode}")

    def _callee(self, rest: str) -> tuple[Operand | None, ...]:
        """A call's operands; functions and prototypes may be named that are declared nowhere."""
        tokens = [token.strip() for token in _COMMA.split(rest)]
        known: set[str] = set(self._names).union(*(scope.names for scope in self._scopes))
        return tuple(
            Symbol(token) if token.isidentifier() and token not in known else self._operand(token) for token in tokens
        )

    def _operands(self, rest: str, known: dict[str, Operand | None]) -> tuple[Operand | None, ...]:
        """All operands of an instruction. `known` has those met before, as they are written, white space included."""
        tokens = _COMMA.split(rest) if "{" in rest or "(" in rest else rest.split(",")
        try:
            return tuple([known[token] for token in tokens])
        except KeyError:
            pass
        if not rest.strip():
            return ()
        for token in tokens:
            if token not in known:
                known[token] = self._operand(token)
        return tuple([known[token] for token in tokens])

    def _operand(self, token: str) -> Operand | None:
        token = token.strip()
        first = token[:1]
        if first == "[":
            return self._address(token)
        if first == "{" or first == "(":
            if token[-1] != ("}" if first == "{" else ")"):
                raise Malformed(f"not an operand: {quote(token)}")
            inner = token[1:-1]
            return Vector(tuple([self._operand(item) for item in inner.split(",")] if inner.strip() else ()))
        if token == "_":
            return None
        if "|" in token:
            one, _, two = token.partition("|")
            return Pair(self._destination(one.strip()), self._destination(two.strip()))
        if first == "!":
            return Not(self._register(token[1:].strip()))
        if first.isdigit() or first == "-" or first == ".":
            return ptx_values.immediate(token)
        base, offset = self._sum(token)
        named = self._named(base)
        if not offset:
            return named
        if not isinstance(named, Symbol):
            raise Malformed(f"not an operand: {quote(token)}")
        return Symbol(named.name, offset)

    def _address(self, token: str) -> Address:
        if token[-1] != "]":
            raise Malformed(f"not an address: {quote(token)}")
        inner, comma, rest = token[1:-1].partition(",")
        coordinates = self._operand(rest) if comma else None
        text, offset = self._sum(inner.strip())
        base = self._operand(text)
        if not isinstance(base, Register | Symbol | Immediate):
            raise Malformed(f"not an address: {quote(token)}")
        if comma and not isinstance(coordinates, Vector):
            raise Malformed(f"not coordinates: {quote(rest)}")
        return Address(base, offset, coordinates if isinstance(coordinates, Vector) else None)

    def _sum(self, text: str) -> tuple[str, int]:
        """name and bytes of `name`, `name+4`, `name-4` or `name+-4`."""
        parts = _SUM.match(text)
        if parts is None:
            return text, 0
        offset = ptx_values.integer(parts[3])
        return parts[1], offset if parts[2] == "+" else -offset

    def _destination(self, name: str) -> Register | None:
        return None if name == "_" else self._register(name)

    def _register(self, name: str) -> Register:
        register = self._named(name)
        if not isinstance(register, Register):
            raise Malformed(f"not a register: {quote(name)}")
        return register

    def _named(self, name: str) -> Register | Special | Symbol | Immediate:
        for scope in reversed(self._scopes):
            if name in scope.names:
                return scope.names[name]
        if name in self._names:
            if name in self._shared and self._scopes:
                self._used[name] = self._shared[name]
            return self._names[name]
        if _SPECIAL.match(name):
            return Special(name)
        if name == "WARP_SZ":
            return _WARP_SIZE
        raise Malformed(f"undeclared name {quote(name)}" if name else "an operand is missing")


def _without_comment(match: re.Match[str]) -> str:
    """A string stays. A comment leaves its line breaks, by which lines are counted."""
    text = match[0]
    return text if text[0] == '"' else " " + "\n" * text.count("\n")


def _renamed(operand: Operand | None, labels: dict[str, str]) -> Operand | None:
    if isinstance(operand, Vector):
        return Vector(tuple(_renamed(item, labels) for item in operand.items))
    if isinstance(operand, Label):
        return Label(labels.get(operand.name, operand.name))
    return operand


def _label_names(operands: tuple[Operand | None, ...]) -> Iterator[str]:
    for operand in operands:
        if isinstance(operand, Label):
            yield operand.name
        elif isinstance(operand, Vector):
            yield from _label_names(operand.items)
