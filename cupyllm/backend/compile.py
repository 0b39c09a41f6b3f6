"""Kernels from source to cubin: headers flattened, compiled once a machine, cached, checked when read.

One cubin holds every kernel of one .cu file under one set of macros. Its key is a hash of the flattened text, the
options, NVRTC's version and the architecture, so a changed header or compiler is a new key. CuPy's own cache was
rejected: its key does not cover included headers, and its compiler asks for a driver and never picks sm_90a.

The simulator takes PTX instead (`compile_ptx_many`): the same units, children and cache, with a virtual architecture.

On disk an entry is kernels/<stem>-<arch>-<key>.json, which names its cubin or PTX by the SHA-256 of the content. Both
are written beside and renamed, so several processes may build the same entry at once: whichever JSON comes last names
bytes that are there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import re
import secrets
import subprocess
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cupyllm.backend import nvrtc
from cupyllm.backend.base import KernelSpec
from cupyllm.errors import BackendError, StorageError
from cupyllm.files import storage_error

CU = Path(__file__).resolve().parent.parent / "cu"
ARCHITECTURES = (
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90a",
    "sm_100",
    "sm_120",
    "sm_121",
)  # what every kernel must compile for
MIN_CAPABILITY = 80
# Without --fmad=false each target and compiler version fuses products and sums as it likes, and the same kernel gives
# other bits; kernels say fmaf where they mean it. -v: resources.py reads what ptxas logs.
OPTIONS = ("-std=c++17", "-lineinfo", "--fmad=false", "--ptxas-options=-v")
SIMULATED = "compute_80"  # the virtual architecture whose PTX the simulator executes
PTX_OPTIONS = OPTIONS[:3]  # there is no ptxas on the way to PTX
MAX_CHILDREN = 32
FORMAT = 1  # of the cache entries

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
_log = logging.getLogger("cupyllm")


@dataclass(frozen=True)
class Cubin:
    """A compiled unit: the file to load, and what ptxas said about each kernel in it."""

    path: Path
    log: str


@dataclass(frozen=True)
class Ptx:
    """A unit as PTX text: the file that holds it."""

    path: Path


@dataclass(frozen=True)
class _Job:
    label: str  # for errors
    stem: str  # of the cache entry
    request: dict[str, object]


def architecture(capability: int) -> str:
    """NVRTC's name for a device of this compute capability (90 for sm_90).

    A cubin runs on later minor revisions of its major one, so a device newer than NVRTC gets the nearest. Raises
    BackendError when the device is too old, or NVRTC is.
    """
    if capability < MIN_CAPABILITY:
        raise BackendError(
            f"the GPU is sm_{capability}, expected sm_{MIN_CAPABILITY} (Ampere) or later; use --backend reference"
        )
    known = [int(arch) for arch in nvrtc.library().getSupportedArchs()]
    fitting = [arch for arch in known if arch // 10 == capability // 10 and arch <= capability]
    if not fitting:
        major, minor = nvrtc.version()
        raise BackendError(
            f"NVRTC {major}.{minor} cannot compile for sm_{capability} (it knows up to sm_{max(known)}); "
            "install newer CuPy and NVRTC wheels: pip install -U 'cupyllm[cuda13]' in place of [cuda12]"
        )
    return "sm_90a" if max(fitting) == 90 else f"sm_{max(fitting)}"  # wgmma and setmaxnreg exist in 90a only


def flatten(source: str) -> str:
    """Text of a kernel file with our headers put in place of their #include lines, each once.

    `source` is a name in cupyllm/cu or an absolute path. The cache key then covers the headers, and NVRTC needs no
    include path. #line keeps the compiler's messages pointing at the real files.
    """
    seen: set[Path] = set()

    def expand(path: Path) -> str:
        seen.add(path)
        text = path.read_text()

        def put(match: re.Match[str]) -> str:
            header = CU / match[1]
            after = text.count("\n", 0, match.end()) + 2
            body = "" if header in seen else expand(header)
            return f'{body}\n#line {after} "{path.name}"'

        return f'#line 1 "{path.name}"\n' + _INCLUDE.sub(put, text)

    return expand(CU / source).replace("#pragma once\n", "\n")


def compile_cubin(spec: KernelSpec, arch: str, folder: Path | None = None) -> Cubin:
    """The cubin that holds `spec`; compiled when the cache has none."""
    return compile_many([spec], arch, folder)[spec]


def compile_many(specs: Iterable[KernelSpec], arch: str, folder: Path | None = None) -> dict[KernelSpec, Cubin]:
    """The cubin of each spec, missing ones compiled in parallel. `folder` stands in for the user's cache.

    Raises BackendError when NVRTC is missing, refuses a kernel or crashes on it, StorageError when the cache cannot be
    written.
    """
    return {spec: cubin for (spec, _), cubin in compile_pairs([(spec, arch) for spec in specs], folder).items()}


def compile_pairs(
    pairs: Iterable[tuple[KernelSpec, str]], folder: Path | None = None
) -> dict[tuple[KernelSpec, str], Cubin]:
    """compile_many over (spec, architecture) pairs."""
    pairs = list(dict.fromkeys(pairs))
    if not pairs:
        return {}
    folder = _kernel_folder() if folder is None else folder
    version = nvrtc.version()
    jobs = {_unit(pair): pair for pair in pairs}
    entries = {unit: _job(*unit, version) for unit in jobs}
    found = {unit: _read(folder, job.stem) for unit, job in entries.items()}
    missing = [job for unit, job in entries.items() if found[unit] is None]
    if missing:
        _log.info("compiling %d kernel files with NVRTC %d.%d", len(missing), *version)
        _build(missing, folder)
        for unit, job in entries.items():
            found[unit] = found[unit] or _read(folder, job.stem)
            if found[unit] is None:
                raise StorageError(
                    f"{folder}: the kernel just compiled ({job.label}) reads back damaged; check the disk"
                )
    return {pair: cubin for pair in pairs if (cubin := found[_unit(pair)]) is not None}


def compile_ptx_many(specs: Iterable[KernelSpec], folder: Path | None = None) -> dict[KernelSpec, Ptx]:
    """The PTX of each spec for the simulator, missing ones compiled in parallel; neither GPU nor driver is asked for.

    Raises as compile_many.
    """
    found = compile_pairs([(spec, SIMULATED) for spec in specs], folder)
    return {spec: Ptx(unit.path) for (spec, _), unit in found.items()}


def _kernel_folder() -> Path:
    from cupyllm.cache import cache_subdir  # here, since it imports the checkpoint reader

    return cache_subdir("kernels")


_Unit = tuple[str, tuple[tuple[str, str], ...], str]  # source, defines, architecture


def _unit(pair: tuple[KernelSpec, str]) -> _Unit:
    return pair[0].source, pair[0].defines, pair[1]


def _job(source: str, defines: tuple[tuple[str, str], ...], arch: str, version: tuple[int, int]) -> _Job:
    name = Path(source).name
    macros = [f"-D{macro}={value}" for macro, value in defines]
    options = PTX_OPTIONS if arch == SIMULATED else OPTIONS
    request: dict[str, object] = {
        "text": flatten(source),
        "name": name,
        "options": [f"-arch={arch}", *options, *macros],
    }
    if arch == SIMULATED:
        request["output"] = "ptx"
    key = hashlib.sha256(json.dumps([FORMAT, version, request]).encode()).hexdigest()[:24]
    label = f"{name} for {arch} with {' '.join(macros) or 'no macros'}"
    return _Job(label, f"{Path(source).stem}-{arch}-{key}", request)


def _read(folder: Path, stem: str) -> Cubin | None:
    """A whole, undamaged entry, or None."""
    try:
        entry = json.loads((folder / f"{stem}.json").read_text())
        path = folder / str(entry["cubin"])
        content = path.read_bytes()
        whole = content[:4] == b"\x7fELF" if path.suffix == ".cubin" else b"\n.version" in content
        if whole and hashlib.sha256(content).hexdigest() == entry["sha256"]:
            return Cubin(path, str(entry["log"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged: built again
    return None


def _publish(folder: Path, stem: str, built: Path, log: str) -> None:
    """Move a compiled file into the cache under its content's name, then the entry that points to it."""
    content = built.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    name = f"{stem}-{digest[:16]}{built.suffix}"
    os.replace(built, folder / name)
    entry = built.with_suffix(".json")
    entry.write_text(json.dumps({"cubin": name, "sha256": digest, "log": log}))
    os.replace(entry, folder / f"{stem}.json")


def _build(jobs: Sequence[_Job], folder: Path) -> None:
    """Compile every job, several children at a time; the first failure stops all."""
    waiting: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    for job in sorted(jobs, key=lambda job: -len(str(job.request["text"]))):  # long ones first: a shorter tail
        waiting.put(job)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    children = [_Child(waiting, folder) for _ in range(min(cores, len(jobs), MAX_CHILDREN))]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join()
    finally:
        for child in children:
            child.stop()
    for child in children:
        if child.failure is not None:
            raise child.failure


class _Child(threading.Thread):
    """Feeds one compiling process with jobs until there are none left."""

    def __init__(self, waiting: queue.SimpleQueue[_Job], folder: Path) -> None:
        super().__init__(name="cupyllm-compile", daemon=True)
        self.failure: Exception | None = None
        self._waiting, self._folder = waiting, folder
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self) -> None:
        try:
            self._process = _start_child()
            while not self._stopped:
                self._compile(self._process, self._waiting.get_nowait())
        except queue.Empty:
            pass
        except ValueError as error:  # what a broken child prints is no answer
            self.failure = BackendError(f"kernel compiler: got an answer that is not JSON ({error}); run again")
        except (BackendError, StorageError) as error:
            self.failure = error
            while not self._waiting.empty():  # the other children finish what they have and stop
                self._drop()
        except OSError as error:
            self.failure = storage_error(self._folder, error)

    def stop(self) -> None:
        """End the process. Its work, if any is left, is not wanted any more."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()

    def _drop(self) -> None:
        try:
            self._waiting.get_nowait()
        except queue.Empty:
            pass

    def _compile(self, process: subprocess.Popen[str], job: _Job) -> None:
        built = self._folder / f".building-{secrets.token_hex(8)}.{job.request.get('output', 'cubin')}"
        try:
            answer = self._ask(process, {**job.request, "target": str(built)})
            if answer is None:
                raise BackendError(
                    f"the kernel compiler crashed (exit status {process.wait()}) on {job.label}; take another variant "
                    "with --variant, or another NVRTC version"
                )
            if "error" in answer:
                raise BackendError(f"{job.label} does not compile: {_first_error(answer['error'])}")
            if "storage" in answer:
                raise StorageError(f"cannot write a compiled kernel: {answer['storage']}")
            _publish(self._folder, job.stem, built, answer["log"])
        finally:
            built.unlink(missing_ok=True)

    def _ask(self, process: subprocess.Popen[str], request: dict[str, object]) -> dict[str, str] | None:
        """The child's answer; None when it died."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        line = process.stdout.readline()
        return json.loads(line) if line else None


def _start_child() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(nvrtc.child_command(), stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
    except OSError as error:
        raise BackendError(f"cannot start the kernel compiler ({error}); free some memory or processes") from error


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
