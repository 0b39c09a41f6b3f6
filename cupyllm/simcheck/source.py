"""Anyone's CUDA C as PTX: headers found, compiled by NVRTC in a child process, cached.

NVRTC finds the includes itself: beside the including file, in the folders given, among CUDA's own headers and among the
stand-ins for C's (standard.py). Which file that is may depend on macros, so headers are read here only for the cache's
key, which covers the text of every header of the user's that can be reached. Flattening them as compile.py does for our
own kernels was rejected: a header that is meant to be included twice, or under an #if, would come out wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from cupyllm.backend import nvrtc
from cupyllm.backend.compile import PTX_OPTIONS, SIMULATED
from cupyllm.errors import BackendError, InputError, StorageError
from cupyllm.files import read_regular, show_path, storage_error, why_missing
from cupyllm.sim.ptx import Location
from cupyllm.simcheck.standard import standard_headers

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
_ERROR = re.compile(r"^(.*?(?:catastrophic )?error(?: #[\w-]+)?: .*)$", re.MULTILINE)
_FORMAT = 1  # of the cache entries


@dataclass(frozen=True)
class Source:
    """A compiled file. `texts`: it and the headers that are not CUDA's, by path, it first."""

    name: str  # as the user gave it
    texts: dict[Path, str]
    ptx: str


def compile_source(
    name: str, defines: Sequence[str] = (), includes: Sequence[str] = (), cache: Path | None = None
) -> Source:
    """The PTX of the file called `name` for the simulated device. `defines`: NAME or NAME=VALUE; `cache`: a folder.

    Raises InputError where the file, a folder or a macro is not good or the text does not compile, BackendError when
    NVRTC is missing or crashes, StorageError when the cache cannot be written.
    """
    path = Path(name).absolute()
    text = _read(path, name)
    folders = [path.parent, *(_folder(include) for include in includes)]
    texts = dict(_reached(path, text, folders[1:]))
    options = [f"-arch={SIMULATED}", *PTX_OPTIONS, *(f"-D{_macro(define)}" for define in defines)]
    cache = _cache_folder() if cache is None else cache
    options += [f"-I{folder}" for folder in (*folders, *cuda_headers(), standard_headers(cache))]
    request: dict[str, object] = {"text": text, "name": name, "options": options, "output": "ptx"}
    contents = {str(header): content for header, content in texts.items()}
    key = hashlib.sha256(json.dumps([_FORMAT, nvrtc.version(), request, contents]).encode()).hexdigest()
    entry = cache / f"{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)[:40]}-{key[:24]}.ptx"
    ptx = _cached(entry)
    if ptx is None:
        ptx = _compile(request, name, cache)
        _store(entry, ptx)
    return Source(name, texts, ptx)


@lru_cache(maxsize=1)
def cuda_headers() -> tuple[Path, ...]:
    """Folders with CUDA's headers: those of the wheels beside NVRTC, else of a toolkit in its usual place."""
    major, _ = nvrtc.version()
    spec = find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    wheels = [root / name / "include" for root in roots for name in ("cuda_runtime", f"cu{major}")]
    found = [folder for folder in (*wheels, Path("/usr/local/cuda/include")) if (folder / "cuda_fp16.h").is_file()]
    first = found[:1]
    return (*first, *(folder / "cccl" for folder in first if (folder / "cccl").is_dir()))


def source_line(place: Location, folder: Path | None = None) -> str | None:
    """The text of a source line without its indentation; None where the file is not there.

    `folder`: where the file is whatever its path says. Our own kernels carry a bare name, which NVRTC completes with
    the folder that the compiler ran in.
    """
    path = Path(place.file) if folder is None else folder / Path(place.file).name
    try:
        lines = read_regular(path).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    return lines[place.line - 1].strip() if 0 < place.line <= len(lines) else None


def _read(path: Path, name: str) -> str:
    try:
        return read_regular(path).decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"--kernel: {why_missing(name)}; give a .cu file") from None
    except OSError as error:
        raise InputError(f"--kernel: cannot read {show_path(name)}: {error.strerror}; give a .cu file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--kernel {show_path(name)} is not UTF-8 at byte {error.start}; convert it") from None


def _folder(include: str) -> Path:
    if not os.path.isdir(include):
        raise InputError(f"--include {show_path(include)}: there is no such folder; give one with headers in it")
    return Path(include).absolute()


def _macro(define: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*(=.*)?", define, re.DOTALL):
        raise InputError(f"--define {define}: expected NAME or NAME=VALUE")
    return define


def _reached(path: Path, text: str, folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """The file and, whatever macros say, every header that it may include from its own or the given folders."""
    waiting, seen = [(path, text)], {path}
    while waiting:
        current, content = waiting.pop()
        yield current, content
        for quoted, angled in _INCLUDE.findall(content):
            for folder in (current.parent, path.parent, *folders):
                header = (folder / (quoted or angled)).absolute()
                if header.is_file():
                    if header not in seen:
                        seen.add(header)
                        waiting.append((header, header.read_bytes().decode("utf-8", "replace")))
                    break


def _compile(request: dict[str, object], name: str, folder: Path) -> str:
    """PTX from a child process, since ill-formed assembly can crash NVRTC."""
    target = folder / f".building-{secrets.token_hex(8)}.ptx"
    try:
        line = json.dumps({**request, "target": str(target)}) + "\n"
        child = subprocess.run(nvrtc.child_command(), input=line, capture_output=True, encoding="utf-8")
        if child.returncode or not child.stdout:
            raise BackendError(
                f"the kernel compiler crashed (exit status {child.returncode}) on {show_path(name)}; "
                "check its inline assembly"
            )
        answer = json.loads(child.stdout.splitlines()[0])
        if "error" in answer:
            raise InputError(_refusal(name, str(answer["error"])))
        if "storage" in answer:
            raise StorageError(f"cannot write a compiled kernel: {answer['storage']}")
        return target.read_bytes().decode("utf-8")
    except OSError as error:
        raise BackendError(f"cannot start the kernel compiler ({error}); free some memory or processes") from error
    finally:
        target.unlink(missing_ok=True)


def _refusal(name: str, log: str) -> str:
    """The compiler's first error, with its file and line, and what mends the usual one."""
    errors = _ERROR.findall(log)
    first = errors[0].strip() if errors else " ".join(log.split())[:200] or "no message"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    remedy = ""
    if "open source file" in first:
        remedy = "; name its folder with --include"
        if not cuda_headers():
            remedy += f", or, if it is one of CUDA's, install {_headers_wheel()}"
    if "execution space" in first:
        remedy = "; NVRTC compiles device code only: keep host code in a file of its own"
    return f"{show_path(name)} does not compile: {first}{more}{remedy}"


def _headers_wheel() -> str:
    return "nvidia-cuda-runtime-cu12" if nvrtc.version()[0] == 12 else "nvidia-cuda-runtime"


def _cache_folder() -> Path:
    from cupyllm.cache import cache_subdir  # here, since it imports the checkpoint reader

    return cache_subdir("kernels")


def _cached(entry: Path) -> str | None:
    """The PTX of a whole, undamaged entry, whose first line is the hash of the rest. Its bytes count: read as text, it
    would depend on the locale, and line ends would change."""
    try:
        digest, _, content = entry.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content.decode("utf-8") if digest == _digest(content) else None


def _store(entry: Path, ptx: str) -> None:
    content = ptx.encode("utf-8")
    temporary = entry.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(_digest(content) + b"\n" + content)
        os.replace(temporary, entry)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(entry.parent, error) from error


def _digest(content: bytes) -> bytes:
    return f"// sha256 {hashlib.sha256(content).hexdigest()}".encode()
