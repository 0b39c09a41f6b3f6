"""A compiled PTX module as runnable kernels, and the cache that spares a warm run the work.

A kernel is parsed, analysed and translated when it is first launched; what running needs of it (parameters, variables,
the plan of its blocks, sites and byte code) is kept in the cache under a hash of the PTX, of the simulator's own
sources and of the Python version. An entry starts with the SHA-256 of the rest: a damaged one is built again. That is
against accidents only: entries are code, like Python's own .pyc files, and belong where nobody else can write.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import pickle
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupyllm.files import storage_error
from cupyllm.sim import flow as analysis
from cupyllm.sim import memory, numeric, ptx, targets
from cupyllm.sim.flow import EXIT, Flow
from cupyllm.sim.ptx import Immediate, Instruction, Kernel, Location, Module, Register
from cupyllm.sim.report import Site
from cupyllm.sim.translate import TOKENS, storage_tokens, translate

DTYPES: dict[str, Any] = {token: np.dtype(token) for token in set(TOKENS.values()) - {"b1", "bf"}}
DTYPES |= {"b1": np.dtype(bool), "bf": np.dtype(ml_dtypes.bfloat16)}
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)")
_MEMBERS = {"shfl": 4, "vote": 2, "match": 2, "redux": 2, "elect": 1}
_SLOW = {"atom": 100, "red": 100, "mma": 20, "match": 20}
_FORMAT = 1


@dataclass(frozen=True)
class SegmentPlan:
    """How a segment is run. `members` is the number of the register with the member mask, or the mask."""

    name: str
    block: int
    cost: int  # instructions
    following: int  # the next segment of its block; EXIT at the block's end
    meeting: str = ""  # "", "warp" or "cta": which lanes must enter together
    members: int | None = None  # register number; None: `mask`
    mask: int = 0xFFFFFFFF
    site: Site | None = None
    beyond: frozenset[int] = frozenset()  # blocks with instructions that may run after this meeting


@dataclass(frozen=True)
class BlockPlan:
    """How a block ends: an unconditional one goes to `taken`."""

    name: str  # of the function that runs all of it
    cost: int
    segments: tuple[int, ...]
    conditional: bool
    taken: int
    following: int
    where: tuple[Location, ...] = ()  # of its last instruction


@dataclass
class SimKernel:
    """A kernel ready to run. `kernel` has parameters and variables, and no body."""

    kernel: Kernel
    storage: list[str]  # token of each register
    blocks: list[BlockPlan]
    segments: list[SegmentPlan]
    sites: list[Site]
    stores: list[frozenset[int | str] | None]  # what each store to device memory may address; None: unknown
    code: Any
    source: str = ""
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def bind(self) -> SimKernel:
        """Make the functions of the code; done once."""
        if not self.functions:
            scope: dict[str, Any] = {"np": np, "num": numeric, "S": self.sites, "bf16": ml_dtypes.bfloat16, **DTYPES}
            scope |= {"SHARED_WINDOW": np.uint64(memory.SHARED_WINDOW), "LOCAL_WINDOW": np.uint64(memory.LOCAL_WINDOW)}
            exec(self.code, scope)
            self.functions = scope
        return self

    def registers(self) -> list[np.ndarray]:
        """Zeros of every register's type."""
        zeros = {token: np.zeros((1, 1), DTYPES[token]) for token in set(self.storage)}
        return [zeros[token] for token in self.storage]


class SimModule:
    """The kernels of one PTX text."""

    def __init__(self, text: str, cache: Path | None) -> None:
        self.text, self._cache = text, cache
        self.digest = hashlib.sha256(f"{_version()}\n{text}".encode()).hexdigest()[:24]
        self.kernels: Mapping[str, SimKernel] = _Kernels(self)
        self._parsed: Module | None = None

    def parsed(self) -> Module:
        """The whole module. Raises PtxError."""
        if self._parsed is None:
            self._parsed = ptx.parse(self.text)
        return self._parsed

    def build(self, name: str) -> SimKernel:
        """The kernel called `name`, from the cache or anew. Raises UnknownInstruction, PtxError."""
        path = None if self._cache is None else self._cache / f"{self.digest}-{_short(name)}.sim"
        found = None if path is None else _read(path)
        if found is None:
            found = _build(self.parsed(), name)
            if path is not None:
                _write(path, found)
        return found.bind()

    @cached_property
    def variables(self) -> list[ptx.Variable]:
        """__device__ and __constant__ variables."""
        if self._parsed is None and not re.search(r"^\s*(\.\w+\s+)*\.(global|const)\b", self.text, re.M):
            return []
        return self.parsed().variables


class _Kernels(Mapping[str, SimKernel]):
    def __init__(self, module: SimModule) -> None:
        self._module = module
        self._names = _ENTRY.findall(module.text)
        self._built: dict[str, SimKernel] = {}

    def __getitem__(self, name: str) -> SimKernel:
        if name not in self._built:
            if name not in self._names:
                raise KeyError(name)
            self._built[name] = self._module.build(name)
        return self._built[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_module(text: str, cache: Path | None = None) -> SimModule:
    """The module of a PTX text; kernels are translated at their first use. `cache`: folder of ready ones."""
    return SimModule(text, cache)


def _build(module: Module, name: str) -> SimKernel:
    kernel = module.kernels[name]
    flow = analysis.analyse(kernel, [variable.name for variable in module.variables])
    source, sites = translate(kernel, flow)
    tokens = storage_tokens(kernel)
    number = {register: i for i, register in enumerate(kernel.registers)}
    bare = Kernel(kernel.name, kernel.parameters, {}, kernel.variables, [], {}, kernel.max_threads)
    code = compile(source, f"<{name}>", "exec", optimize=2)
    segments = [_segment(kernel, flow, index, number) for index in range(len(flow.segments))]
    storage, stores = [tokens[r] for r in kernel.registers], [targets.written_by([s]) for s in sites if _stores(s)]
    return SimKernel(bare, storage, _blocks(flow), segments, sites, stores, code, source)


def _stores(site: Site) -> bool:
    return site.opcode.split(".", 1)[0] in ("st", "atom", "red") and site.space not in ("shared", "local")


def _blocks(flow: Flow) -> list[BlockPlan]:
    plans = []
    for block in flow.blocks:
        several = len(block.segments) > 1
        name = f"w{block.index}" if several else f"s{block.segments[0]}"
        taken = block.following if block.branch is None else block.taken
        cost = _cost(block.instructions) + (block.branch is not None)
        last = block.branch or (block.instructions[-1] if block.instructions else None)
        where = () if last is None else last.where
        plans.append(BlockPlan(name, cost, tuple(block.segments), block.conditional, taken, block.following, where))
    return plans


def _cost(instructions: list[Instruction]) -> int:
    """Instructions, the slow ones counted as what they take."""
    return sum(_SLOW.get(instruction.opcode.split(".", 1)[0], 1) for instruction in instructions)


def _segment(kernel: Kernel, flow: Flow, index: int, number: dict[str, int]) -> SegmentPlan:
    segment = flow.segments[index]
    inside = flow.blocks[segment.block].segments
    following = index + 1 if index != inside[-1] else EXIT
    first, cost = segment.meeting, _cost(segment.instructions) + 1
    if first is None:
        return SegmentPlan(f"s{index}", segment.block, cost, following)
    site = Site(kernel.name, first.text, first.where)
    stem, *rest = first.opcode.split(".")
    beyond = _beyond(flow, segment.block)
    if stem in ("bar", "barrier") and rest[0] != "warp":
        return SegmentPlan(f"s{index}", segment.block, cost, following, "cta", site=site, beyond=beyond)
    register, mask = _members(first, stem)
    members = None if register is None else number[register.name]
    return SegmentPlan(f"s{index}", segment.block, cost, following, "warp", members, mask, site, beyond)


def _beyond(flow: Flow, block: int) -> frozenset[int]:
    """Blocks with instructions that can be reached from the end of a block."""
    found: set[int] = set()
    waiting = [successor for successor in flow.blocks[block].successors() if successor != EXIT]
    while waiting:
        at = waiting.pop()
        if at not in found:
            found.add(at)
            waiting += [successor for successor in flow.blocks[at].successors() if successor != EXIT]
    return frozenset(at for at in found if flow.blocks[at].instructions)


def _members(instruction: Instruction, stem: str) -> tuple[Register | None, int]:
    place = 0 if stem in ("bar", "barrier") else _MEMBERS.get(stem)
    operand = instruction.operands[place] if place is not None else None
    if isinstance(operand, Register):
        return operand, 0xFFFFFFFF
    return None, int(operand.value) & 0xFFFFFFFF if isinstance(operand, Immediate) else 0xFFFFFFFF


@lru_cache(maxsize=1)
def _version() -> str:
    """Changes with anything that the translation depends on."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"{_FORMAT} {sys.version} {np.__version__} {digest.hexdigest()}"


def _read(path: Path) -> SimKernel | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        return None
    kernel, storage, blocks, segments, sites, stores, code, source = pickle.loads(content[32:])
    return SimKernel(kernel, storage, blocks, segments, sites, stores, marshal.loads(code), source)


def _write(path: Path, kernel: SimKernel) -> None:
    fields = (kernel.kernel, kernel.storage, kernel.blocks, kernel.segments, kernel.sites, kernel.stores)
    content = pickle.dumps((*fields, marshal.dumps(kernel.code), kernel.source))
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path.parent, error) from error


def _short(name: str) -> str:
    """A file name for a kernel: mangled names of templates exceed what file systems take."""
    return f"{name[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
