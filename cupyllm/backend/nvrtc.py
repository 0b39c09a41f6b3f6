"""NVRTC itself: text to cubin or PTX, in a process of its own.

CuPy's low-level calls are used because they need neither a GPU nor a driver; its higher level asks for a driver, always
adds -ftz=true and never picks sm_90a. Compilation runs in child processes because NVRTC holds one lock per process and
because ill-formed assembly has been seen to crash it. The children are plain `python -c` commands: multiprocessing's
spawn would run the caller's main script again.

A child reads one job a line from stdin and answers one line on stdout, both JSON.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType
from typing import Any

from cupyllm.errors import BackendError

REMEDY = "install the extra that fits the driver: pip install 'cupyllm[cuda12]' (or [cuda13])"


def library() -> ModuleType:
    """cupy.cuda.nvrtc. Raises BackendError when CuPy or NVRTC is not there."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise BackendError(
            f"the kernel compiler needs CuPy, which does not import ({_line(error)}); {REMEDY}"
        ) from error
    return nvrtc


def version() -> tuple[int, int]:
    """NVRTC's version. Raises BackendError when it does not load."""
    nvrtc = library()
    try:
        major, minor = nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise BackendError(f"NVRTC, the kernel compiler, does not load ({_line(error)}); {REMEDY}") from error
    return int(major), int(minor)


def compile_text(text: str, name: str, options: list[str], output: str = "cubin") -> tuple[bytes, str]:
    """(cubin or PTX, log) of one source. Raises RuntimeError with NVRTC's log when it does not compile.

    `output` "ptx" wants a virtual architecture (-arch=compute_80), "cubin" a real one.
    """
    nvrtc = library()
    program = nvrtc.createProgram(text, name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, tuple(options))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(nvrtc.getProgramLog(program) or str(error)) from error
        compiled = nvrtc.getPTX(program) if output == "ptx" else nvrtc.getCUBIN(program)
        return compiled, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def child_command() -> list[str]:
    """The command of a compiling child, which imports from where this process does."""
    code = "import sys; sys.path[:] = sys.argv[1:]; from cupyllm.backend.nvrtc import serve; serve()"
    return [sys.executable, "-c", code, *(os.path.abspath(path) for path in sys.path)]


def serve() -> None:
    """A child: {"text", "name", "options", "target"} in, {"log"} or {"error"} out; what was compiled goes to `target`.

    With "output": "ptx" that is PTX, else a cubin.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        try:
            compiled, log = compile_text(job["text"], job["name"], job["options"], job.get("output", "cubin"))
            with open(job["target"], "wb") as file:
                file.write(compiled)
            answer = {"log": log}
        except (RuntimeError, BackendError) as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"storage": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
