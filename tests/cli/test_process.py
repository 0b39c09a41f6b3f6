"""The command as a process: how fast it answers, what it imports, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cupyllm import __version__, cli, config
from cupyllm.cli import cli as commands
from cupyllm.commands import doctor, output

HELP_SECONDS = 0.3
HEAVY = ("numpy", "cupy", "ml_dtypes", "tokenizers", "rich")
COMMANDS = (
    "forward",
    "generate",
    "chat",
    "grads",
    "grad-check",
    "train-smoke",
    "synth",
    "verify",
    "sim-check",
    "doctor",
)


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)


def test_help_is_quick() -> None:
    """CPU time of the fastest of five, so that a busy machine does not decide."""
    times = []
    for _ in range(5):
        before = os.times()
        ran = subprocess.run([sys.executable, "-m", "cupyllm", "--help"], capture_output=True, text=True, timeout=60)
        after = os.times()
        assert ran.returncode == 0 and all(name in ran.stdout for name in COMMANDS)
        times.append(after.children_user - before.children_user + after.children_system - before.children_system)
    print(f"--help: {min(times):.3f} s")
    assert min(times) < HELP_SECONDS


@pytest.mark.parametrize("arguments", [["--help"], ["forward", "--help"], ["--version"], ["forward", "--layers", "0"]])
def test_nothing_heavy_is_imported_to_answer(arguments: list[str]) -> None:
    code = f"""
import sys
from cupyllm.cli import cli
try:
    cli.main({arguments!r})
except SystemExit as stop:
    status = stop.code
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"status {{status}}, imported {{heavy}}" if heavy else 0)
"""
    ran = python(code)
    assert ran.returncode == 0, ran.stderr


def test_importing_the_package_starts_no_device() -> None:
    ran = python("import cupyllm, sys; sys.exit(any(n in sys.modules for n in ('cupy', 'numpy', 'ctypes')))")
    assert ran.returncode == 0


def test_what_is_repeated_to_import_nothing_heavy_agrees() -> None:
    assert cli.SIZES == config.PUBLISHED_SIZES and cli.MAX_LAYERS == config.MAX_LAYERS
    assert float(np.finfo(np.float32).max) == cli.FLOAT32_MAX


def test_version() -> None:
    ran = subprocess.run([sys.executable, "-m", "cupyllm", "--version"], capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"cupyllm {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    result = CliRunner().invoke(commands, [command, "--help"])
    assert result.exit_code == 0 and "--json" in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--variants"], ["doctor", "--variants", "--json"]])
def test_a_stdout_that_takes_nothing(arguments: list[str]) -> None:
    """Full: exit status 2 and one line. Closed: the same. Nobody reads: 141 and none."""
    command = [sys.executable, "-m", "cupyllm", *arguments]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1 and "ENOSPC" in ran.stderr, ran.stderr
    ran = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and ran.stderr.splitlines() == [
        "cupyllm: error: stdout is closed, expected somewhere to print to; use >/dev/null to discard the output"
    ]
    read, write = os.pipe()
    os.close(read)
    try:
        ran = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert (ran.returncode, ran.stderr) == (141, "")


def test_a_stderr_that_is_closed_does_not_spoil_stdout() -> None:
    command = 'exec "$0" -m cupyllm forward --frobnicate 2>&-'
    ran = subprocess.run(["sh", "-c", command, sys.executable], stdout=subprocess.PIPE, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, b"")


def test_an_interrupt_during_imports() -> None:
    code = """
import runpy, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
runpy.run_module("cupyllm", run_name="__main__")
"""
    ran = python(code)
    assert (ran.returncode, ran.stderr) == (130, "cupyllm: error: interrupted\n")


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    result = CliRunner().invoke(commands, ["doctor"])
    assert result.exit_code == 130
    assert result.stderr == "cupyllm: error: interrupted\n"


def test_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(**options: Any) -> int:
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(doctor, "run", allocate)
    result = CliRunner().invoke(commands, ["doctor"])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0].startswith("cupyllm: error: not enough host memory: Unable to allocate 9 TiB")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(**options: Any) -> int:
        raise AssertionError("a bug")

    monkeypatch.setattr(doctor, "run", bug)
    with pytest.raises(AssertionError, match="a bug"):
        CliRunner().invoke(commands, ["doctor"], catch_exceptions=False)


def test_progress_without_a_terminal_is_brief(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with output.progress("layers") as report:
        report(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "_PLAIN_INTERVAL_SECONDS", 0.0)
    with output.progress("layers") as report:
        report(2, 2)
    assert capsys.readouterr() == ("", "layers: 2/2\n")
