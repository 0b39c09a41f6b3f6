"""Compile a .cu file of cupyllm/cu for this machine's CPU: hostcuda.h in front, one launcher per kernel behind.

The compiler is g++ or clang++ where there is one, else the one in the `ziglang` wheel, so that the tests need nothing
that pip cannot install. Results are cached by source, flags and compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from cupyllm.backend.compile import flatten

HEADER = Path(__file__).parent / "hostcuda.h"
KERNEL_NAME = re.compile(r"__global__\s+void\s+(\w+)\s*\(")
Defines = tuple[tuple[str, str], ...]


@lru_cache(maxsize=None)
def compiler() -> tuple[str, ...]:
    """Command of the host compiler with the flags that every kernel gets."""
    for name in ("g++", "clang++"):
        if shutil.which(name):
            command: tuple[str, ...] = (name,)
            break
    else:
        if importlib.util.find_spec("ziglang") is None:
            raise RuntimeError("the kernel tests need a C++ compiler: g++ or clang++ on PATH, or: pip install ziglang")
        command = (sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=undefined", "-nostdlib++")
    flags = ["-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-exceptions", "-w"]
    flags.append("-fvisibility=hidden")  # or a kernel called index would be libc's
    if platform.machine() == "x86_64" and _has_v3():  # fmaf as an instruction; no effect on results
        flags.append("-mcpu=x86_64_v3" if "ziglang" in command else "-march=x86-64-v3")
    return (*command, *flags)


def _has_v3() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return all(f" {flag}" in text for flag in ("avx2", "fma", "bmi2", "f16c"))


@lru_cache(maxsize=None)
def cache_folder() -> Path:
    """Where compiled kernels stay between test runs."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "cupyllm-hostcuda"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="cupyllm-hostcuda-"))
    return folder


def build(source: str, defines: Defines) -> Path:
    """The shared library of one source and its macros. Raises RuntimeError with the compiler's messages."""
    text = flatten(source)
    macros = [f"-D{name}={value}" for name, value in (*defines, ("CUPYLLM_HOST", "1"))]
    command = [*compiler(), *macros]
    digest = hashlib.sha256()
    for part in (*command, HEADER.read_text(), text):
        digest.update(part.encode() + b"\0")
    folder = cache_folder()
    stem = f"{Path(source).stem}-{digest.hexdigest()[:24]}"
    target = folder / f"{stem}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as work:
        unit = Path(work) / "unit.cpp"
        head = f'#include "{HEADER}"\n{text}\n'
        unit.write_text(head)
        scanned = _call([*command, "-DHOSTCUDA_SCAN", "-E", "-P", str(unit)], source)
        symbols = dict.fromkeys(KERNEL_NAME.findall(scanned))
        unit.write_text(head + "".join(f"HOSTCUDA_EXPORT({symbol})\n" for symbol in symbols))
        library = Path(work) / "unit.so"
        _call([*command, "-shared", "-o", str(library), str(unit)], source)
        library.replace(target)
    return target


def _call(command: list[str], source: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source} does not compile for the host:\n{done.stderr[:4000]}")
    return done.stdout
