"""The command as a process: how fast it answers, what it imports, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from cupyllm import __version__
from cupyllm.cli import cli as commands
from cupyllm.commands import doctor, output

HELP_SECONDS = 0.3
HEAVY = ("numpy", "cupy", "ml_dtypes", "tokenizers", "rich")
COMMANDS = ("forward", "generate", "chat", "grads", "grad-check", "train-smoke", "synth", "verify", "doctor")


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


def test_version() -> None:
    ran = subprocess.run([sys.executable, "-m", "cupyllm", "--version"], capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"cupyllm {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    result = CliRunner().invoke(commands, [command, "--help"])
    assert result.exit_code == 0 and "--json" in result.stdout


def test_a_reader_that_went_away() -> None:
    """No traceback and no complaint at exit when stdout is a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "cupyllm", "doctor", "--variants"], stdout=write, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(write)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    result = CliRunner().invoke(commands, ["doctor"])
    assert result.exit_code == 130
    assert result.stderr.strip() == "cupyllm: error: interrupted"


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
