"""What the commands do on this machine, measured: times, rates, errors, sanitizer reports, as one JSON file.

    python scripts/measure_spine.py [--out benchmarks/spine.json] [--only NAME ...] [--sanitizer]

Every command runs as a user would run it, in a process of its own, with a cache that starts empty; `wall_seconds` is
the whole process. Needs a GPU. The numbers in README come from the file this writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMANDS: dict[str, list[str]] = {
    # The order matters: the first one compiles, the second finds the compiled kernels.
    "forward, 4 layers, nothing compiled": ["forward", "--layers", "4"],
    "forward, 4 layers, compiled before": ["forward", "--layers", "4"],
    "forward, 64 layers, first time": ["forward", "--layers", "64"],
    "forward, 64 layers, lossless": ["forward", "--layers", "64", "--check-lossless"],
    "forward, 64 layers, lossless, float32": ["forward", "--layers", "64", "--check-lossless", "--dtype", "float32"],
    "grad-check": ["grad-check"],
    "grad-check, layer of Qwen3-32B, float32": ["grad-check", "--layer", "--size", "32b", "--dtype", "float32"],
    "grad-check, layer of Qwen3-32B, bfloat16": ["grad-check", "--layer", "--size", "32b", "--dtype", "bfloat16"],
    "train-smoke, bfloat16": ["train-smoke"],
    "train-smoke, float32": ["train-smoke", "--dtype", "float32"],
    "forward, 8 layers of Qwen3-32B's shape": ["forward", "--size", "32b", "--layers", "8", "--yes"],
    "verify": ["verify", "--out", "{scratch}/verify"],
    "synth, Qwen3-4B, to disk": ["synth", "--size", "4b", "--out", "{scratch}/4b", "--yes"],
    "synth, Qwen3-4B, to memory": ["synth", "--size", "4b", "--out", "/dev/shm/cupyllm-4b", "--yes"],
    # A virtual machine's memory is slow the first time it is touched; this one finds pages that were used before.
    "synth, Qwen3-4B, to memory, again": ["synth", "--size", "4b", "--out", "/dev/shm/cupyllm-4b", "--yes"],
    "forward, Qwen3-4B": ["forward", "--model", "{scratch}/4b"],
}


def run_command(arguments: list[str], backend: bool, environment: dict[str, str]) -> dict[str, Any]:
    """One command with --json: its object, exit status and wall time."""
    command = [sys.executable, "-m", "cupyllm", *arguments, "--json", *(["--backend", "cuda"] if backend else [])]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    wall = time.perf_counter() - began
    try:
        result = json.loads(done.stdout)
    except ValueError:
        result = {"stdout": done.stdout[-2000:]}
    row: dict[str, Any] = {"command": " ".join(["cupyllm", *arguments]), "exit_status": done.returncode}
    row |= {"wall_seconds": round(wall, 3), "result": result}
    if done.returncode != 0:
        row["stderr"] = done.stderr[-2000:]
    return row


def sanitize(tool: str, environment: dict[str, str]) -> dict[str, Any]:
    """scripts/sanitize.py under compute-sanitizer; its error summary."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "scripts/sanitize.py"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "=====" in line or "op calls" in line]
    return {
        "exit_status": done.returncode,
        "wall_seconds": round(time.perf_counter() - began, 1),
        "summary": lines[-4:],
        "tail": (done.stdout + done.stderr)[-1500:] if done.returncode else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "spine.json")
    parser.add_argument("--only", nargs="*", default=list(COMMANDS))
    parser.add_argument("--sanitizer", action="store_true")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": commit or None,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "commands": {},
    }
    scratch = Path(tempfile.mkdtemp(prefix="cupyllm-measure-"))
    environment = {**os.environ, "XDG_CACHE_HOME": str(scratch / "cache"), "PYTHONPATH": str(ROOT)}
    ok = True
    try:
        for name in args.only:
            arguments = [a.format(scratch=scratch) for a in COMMANDS[name]]
            shutil.rmtree("/dev/shm/cupyllm-4b", ignore_errors=True)
            row = run_command(arguments, arguments[0] not in ("synth",), environment)
            report["commands"][name] = row
            ok &= row["exit_status"] == 0
            print(f"{name}: exit {row['exit_status']}, {row['wall_seconds']} s", flush=True)
            if row["exit_status"]:
                print(row["stderr"], flush=True)
        if args.sanitizer:
            for tool in ("memcheck", "racecheck"):
                report[f"compute-sanitizer {tool}"] = row = sanitize(tool, environment)
                ok &= row["exit_status"] == 0
                print(tool, row["exit_status"], row["wall_seconds"], *row["summary"], row["tail"], flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree("/dev/shm/cupyllm-4b", ignore_errors=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
