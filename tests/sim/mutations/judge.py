"""Runs mutants: one place of a kernel's text taken out, compiled, replayed on the recorded launches.

A place may lie in a header, or in a template that several kernels use: each kernel whose code changes is judged by
itself. Where the PTX is the same, the compiler has proved that nothing can differ.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from cupyllm.backend import compile as kernels
from cupyllm.backend import nvrtc
from cupyllm.backend.sim import SimBackend, SimProgram
from cupyllm.sim.module import SimModule, load_module
from cupyllm.sim.report import SimError
from tests.backend.every_kernel import every_kernel
from tests.sim.mutations.scan import Place, scan
from tests.sim.mutations.traces import AMPERE, Recorded, Replayer, Trace

BUDGET = 200_000_000  # thread instructions of a launch; the recorded ones take less than a tenth
Defines = tuple[tuple[str, str], ...]

_LINE = re.compile(r'^#line (\d+) "([^"]+)"$')
_ENTRY = re.compile(r"\.entry\s+(\w+)\b.*?^\}", re.S | re.M)
_NO_CODE = re.compile(r"^\s*(\.loc|//).*\n", re.M)
_NUMBERED = re.compile(r"(\$L__BB|__local_depot)\d+")  # by the function's place in the module


@dataclass
class Outcome:
    """What became of one mutant in one kernel."""

    kernel: str
    kinds: tuple[str, ...] = ()  # of the reports
    line: str = ""  # the first report
    case: str = ""  # where it was reported, or where the numbers differed
    same_bits: bool = True  # of every launch that was not reported
    launches: int = 0
    seconds: float = 0.0


@dataclass
class Judged:
    """A mutant in every kernel whose code it changes."""

    place: Place
    outcomes: list[Outcome] = field(default_factory=list)
    error: str = ""  # it does not compile

    @property
    def seconds(self) -> float:
        return sum(outcome.seconds for outcome in self.outcomes)


def _simulated() -> list[Path]:
    """Our kernel files that the simulated device is given kernels of."""
    asked = {spec.source for spec in every_kernel(SimBackend.capability)}
    return [path for path in sorted(kernels.CU.glob("*.cu")) if path.name in asked]


def sources() -> dict[str, str]:
    """Kernel files, by name: cupyllm/cu's own name or an absolute path."""
    return {path.name: path.name for path in _simulated()} | {Path(AMPERE).name: AMPERE}


def all_places() -> list[Place]:
    """Every place of every kernel file, and of every header of one, by file and line."""
    texts = [kernels.flatten(path.name) for path in _simulated()]
    headers = [path for path in sorted(kernels.CU.glob("*.cuh")) if any(f'"{path.name}"' in text for text in texts)]
    paths = [*_simulated(), *headers, Path(AMPERE)]
    return [place for path in paths for place in scan(path.name, path.read_text())]


def users(place: Place) -> list[str]:
    """The sources whose text has the place."""
    return [source for source in sources().values() if find(kernels.flatten(source), place) is not None]


def find(text: str, place: Place) -> int | None:
    """Where the place starts in a flattened text; None when its file is not part of it."""
    offset = file_line = 0
    file = ""
    for line in text.splitlines(keepends=True):
        directive = _LINE.match(line.rstrip("\n"))
        if directive:
            file, file_line = directive[2], int(directive[1]) - 1
        else:
            file_line += 1
            if file == place.file and file_line == place.line:
                at = text.find(place.raw, offset + place.column)
                assert at == offset + place.column, f"{place.key}: not at line {place.line}"
                return at
        offset += len(line)
    return None


def mutate(text: str, place: Place) -> str:
    """The flattened text without the place; lines stay where they are."""
    at = find(text, place)
    assert at is not None, place.key
    missing = place.raw.count("\n") - place.replacement.count("\n")
    return text[:at] + place.replacement + "\n" * missing + text[at + len(place.raw) :]


class Judge:
    """Judges mutants on one simulator. `cache`: a folder that keeps compiled mutants, or None."""

    def __init__(self, backend: SimBackend, cache: Path | None = None) -> None:
        self._backend, self._cache = backend, cache
        self._replayer = Replayer(backend)
        self._traces: dict[str, list[Trace]] = {}
        self._plain: dict[tuple[str, Defines], dict[str, str]] = {}  # code of the kernels as they are

    def judge(self, place: Place) -> Judged:
        """Every kernel that the place changes, each until its first report.

        A source is left when all kernels that were seen to change are reported; other macros may still change others.
        """
        judged = Judged(place)
        try:
            for source in users(place):
                judged.outcomes += self._judge_in(source, mutate(kernels.flatten(source), place))
        except RuntimeError as error:  # NVRTC's
            judged.error = str(error).splitlines()[0]
        return judged

    def _judge_in(self, source: str, text: str) -> list[Outcome]:
        if source not in self._traces:
            self._traces[source] = self._replayer.traces(source)
        modules: dict[Defines, SimModule] = {}
        outcomes: dict[str, Outcome] = {}
        for trace in self._traces[source]:
            for index, launch in enumerate(trace.launches):
                spec = launch.kernel
                if spec.source != source:
                    continue
                if spec.defines not in modules:
                    modules[spec.defines] = self._compile(text, source, spec.defines)
                    for name in self._changed(source, spec.defines, modules[spec.defines]):
                        outcomes.setdefault(name, Outcome(name))
                outcome = outcomes.get(_plain_name(spec.symbol, spec.defines))
                if outcome is not None and not outcome.kinds:
                    self._replay(modules[spec.defines], self._replayer.record(trace)[index], outcome)
            if outcomes and all(outcome.kinds for outcome in outcomes.values()):
                break
        return list(outcomes.values())

    def _changed(self, source: str, defines: Defines, module: SimModule) -> list[str]:
        """Names of the kernels whose code is not what it was."""
        if (source, defines) not in self._plain:
            self._plain[source, defines] = _code(self._compile(kernels.flatten(source), source, defines).text)
        plain, code = self._plain[source, defines], _code(module.text)
        return [_plain_name(symbol, defines) for symbol in plain if code[symbol] != plain[symbol]]

    def _compile(self, text: str, source: str, defines: Defines) -> SimModule:
        """Raises RuntimeError where NVRTC refuses the text."""
        macros = [f"-D{macro}={value}" for macro, value in defines]
        options = [f"-arch={kernels.SIMULATED}", *kernels.PTX_OPTIONS, *macros]
        if self._cache is None:
            return load_module(nvrtc.compile_text(text, Path(source).name, options, "ptx")[0].decode())
        key = hashlib.sha256(repr((nvrtc.version(), text, options)).encode()).hexdigest()[:24]
        path = self._cache / f"{Path(source).stem}-{key}.ptx"
        if not path.exists():
            ptx, _ = nvrtc.compile_text(text, Path(source).name, options, "ptx")
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(ptx)
            temporary.replace(path)
        return load_module(path.read_text(), self._cache)

    def _replay(self, module: SimModule, recorded: Recorded, outcome: Outcome) -> None:
        self._replayer.restore(recorded)
        start = time.perf_counter()
        outcome.launches += 1
        try:
            self._backend.run(SimProgram([(module, recorded.launch)]))
            if outcome.same_bits and not self._replayer.same_bits(recorded):
                outcome.same_bits, outcome.case = False, recorded.case
        except SimError as error:
            outcome.kinds = tuple(dict.fromkeys(report.kind for report in error.reports))
            outcome.line, outcome.case = str(error).splitlines()[0], recorded.case
        outcome.seconds += time.perf_counter() - start


def _plain_name(symbol: str, defines: Defines) -> str:
    """A kernel's name without the dtypes."""
    return symbol.removesuffix(dict(defines).get("SUFFIX", ""))


def _code(ptx: str) -> dict[str, str]:
    """Instructions of each kernel of a PTX text, without its source lines and the kernel's number."""
    return {match[1]: _NUMBERED.sub(r"\1", _NO_CODE.sub("", match[0])) for match in _ENTRY.finditer(ptx)}
