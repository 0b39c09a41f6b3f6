"""Measures linear against torch at the shapes that matter, and writes benchmarks/linear.json.

    python scripts/bench_linear.py [--out FILE] [--seconds 140] [--only SECTION,...]    on the GPU, with torch

Sections, the same code as `cupyllm bench op linear` under each:

    forward, dgrad, wgrad   projections of Qwen3-32B, 8B and 0.6B, 512 to 8192 rows
    mma                     the variant of every other GPU, forced, beside torch: 32B's
    few rows                1 to 64 rows, with the share of the read bandwidth
    float32                 beside torch without TF32
    skinny                  LoRA's products of rank 8, 16 and 64, and their gradients
    quantised               int8, int4 and nf4 beside our own product with the unpacked weight

A section has its goal, the geometric mean and the worst of its ratios (torch's time over ours) and whether the goal is
met. What --seconds leaves no time for is listed as not measured, and its goal as not met.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyllm.bench import linear, quantized_linear, report
from cupyllm.bench.cases import Case, Wanted
from cupyllm.bench.device import Bench, Contender, Ours
from cupyllm.bench.peers import Torch
from cupyllm.doctor import ask_driver

ROOT = Path(__file__).resolve().parents[1]
SIZES, ROWS = ("32b", "8b", "0.6b"), (512, 2048, 4096, 8192)
FEW_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
RANKS, LORA_ROWS = (8, 16, 64), 4096
NEVER_SLOWER, UNPACKED = 0.98, "unpacked"
CEILINGS = {"NVIDIA H200": 4545.0}  # GB/s of pure reads at their best; the read beside a section varies by 8 %
READ_GOALS = {"gate-up": 0.90, "down": 0.90, "qkv": 0.86, "o": 0.86}  # of 32B, 1 and 16 rows
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Section:
    name: str
    goal: str
    cases: Sequence[tuple[str, Case]]  # (size, case)
    met: Callable[[Rows], bool]
    ours: str = report.OURS  # the contender
    peer: str = "torch"  # or our own unpacked product


def sections() -> list[Section]:
    """Those with a goal of their own first, since --seconds may leave out the last ones."""
    found = []
    few = _projections(SIZES, FEW_ROWS, "forward")
    found.append(Section("few rows", "worst >= 0.98; 32B at 1 and 16 rows: share of the read bandwidth", few, _few_met))
    wanted = Wanted("32b", (1, 4096), ("forward",), ("gate-up", "down"), "bfloat16")
    packed = [("32b", case) for case in quantized_linear.cases(wanted)]
    goal = "1 row: >= 0.75 of the read bandwidth on packed bytes; 4096: >= 0.80 of our bfloat16 product"
    found.append(Section("quantised", goal, packed, _quantised_met, peer=UNPACKED))
    wide = [pair for form in linear.FORMS for pair in _projections(("8b",), (1024,), form, "float32")]
    found.append(Section("float32", "geometric mean >= 1.5", wide, lambda rows: _mean(rows) >= 1.5))
    found += [
        Section(
            form,
            "geometric mean >= 0.95, worst >= 0.85",
            _projections(SIZES, ROWS, form),
            lambda rows: _mean(rows) >= 0.95 and _worst(rows) >= 0.85,
        )
        for form in linear.FORMS
    ]
    skinny = [("32b", case) for rank in RANKS for case in lora(rank, 5120, 8192)]
    found.append(Section("skinny", "worst >= 0.98", skinny, lambda rows: _worst(rows) >= NEVER_SLOWER))
    forced = [pair for form in linear.FORMS for pair in _projections(("32b",), ROWS, form)]
    found.append(Section("mma", "geometric mean >= 0.55", forced, lambda rows: _mean(rows) >= 0.55, "mma"))
    return found


def _projections(
    sizes: Sequence[str], rows: Sequence[int], form: str, dtype: str = "bfloat16"
) -> list[tuple[str, Case]]:
    """Equal shapes once."""
    found: dict[tuple[int, int, int], tuple[str, Case]] = {}
    for size in sizes:
        for case in linear.cases(Wanted(size, tuple(rows), (form,), linear.PROJECTIONS, dtype)):
            found.setdefault((case.labels["M"], case.labels["out"], case.labels["in"]), (size, case))
    return list(found.values())


def lora(rank: int, depth: int, out: int) -> list[Case]:
    """y += (x A^T) B^T with A [r,in] and B [out,r]: both products, both gradients of each."""
    made = []
    for form in linear.FORMS:
        made.append(linear.case(f"A, r {rank}", form, LORA_ROWS, rank, depth))
        made.append(linear.case(f"B, r {rank}", form, LORA_ROWS, out, rank))
    return made


def _mean(rows: Rows) -> float:
    return float(report.summary(rows)["geometric_mean"] or 0)


def _worst(rows: Rows) -> float:
    return float(report.summary(rows)["worst"] or 0)


def _few_met(rows: Rows) -> bool:
    """Never slower than torch, and the read bandwidth is used."""
    shares = [
        row["read_share"] >= READ_GOALS[row["projection"]]
        for row in rows
        if row["size"] == "32b" and row["M"] in (1, 16) and row["projection"] in READ_GOALS
    ]
    return _worst(rows) >= NEVER_SLOWER and len(shares) == 2 * len(READ_GOALS) and all(shares)


def _quantised_met(rows: Rows) -> bool:
    return all(row["read_share"] >= 0.75 if row["M"] == 1 else row["ratio"] >= 0.80 for row in rows)


def measure(chosen: Sequence[Section], seconds: float) -> dict[str, Any]:
    """Every section, the first ones first, until the time is up."""
    from cupyllm.backend.cuda import CudaBackend

    began, backend, torch = time.monotonic(), CudaBackend(), Torch()
    made: dict[str, Any] = {}
    ready = [(section, _contenders(section, torch)) for section in chosen]
    kernels = [
        kernel
        for section, contenders in ready
        for _, case in section.cases
        for contender in contenders
        for kernel in contender.kernels(backend, case)
    ]
    backend.compile(dict.fromkeys(kernels))  # of all sections at once, in parallel
    print(f"compiled after {time.monotonic() - began:.1f} s", flush=True)
    read = 0.0
    for section, contenders in ready:
        rows, start = [], time.monotonic()
        cases = [case for _, case in section.cases]
        with Bench(backend, cases, contenders) as bench:
            read = max(read, bench.read_gb_per_s, CEILINGS.get(backend.device_name, 0.0))
            for size, case in section.cases:
                if time.monotonic() - began > seconds:
                    break
                rows.append({"size": size, **report.values(bench.row(case), read, section.peer, section.ours)})
        made[section.name] = _outcome(section, rows)
        print(f"{_line(section.name, made[section.name])}, {time.monotonic() - start:.1f} s", flush=True)
    return {
        "device": backend.device_name,
        "driver": ask_driver()[0],
        "torch": torch.version,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "cpus": os.cpu_count(),
        "read_gb_per_s": read,
        "seconds": time.monotonic() - began,
        "sections": made,
    }


def _contenders(section: Section, torch: Torch) -> list[Contender]:
    ours = Ours(section.ours, {} if section.ours == report.OURS else {"linear": section.ours})
    return [ours, torch if section.peer == "torch" else Ours(section.peer, unpacked=True)]


def _outcome(section: Section, rows: Rows) -> dict[str, Any]:
    measured = [row for row in rows if "skipped" not in row]
    complete = len(measured) == len(section.cases)
    return {
        "goal": section.goal,
        "met": complete and section.met(measured) and all(row["agrees"] for row in measured),
        "agrees": all(row["agrees"] for row in measured),
        "not_measured": len(section.cases) - len(measured),
        "geometric_mean": _mean(measured) or None,
        "worst": _worst(measured) or None,
        "rows": rows,
    }


def _line(name: str, made: dict[str, Any]) -> str:
    mean, worst = made["geometric_mean"], made["worst"]
    figures = "nothing measured" if mean is None else f"geometric mean {mean:.3f}, worst {worst:.3f}"
    left = f", {made['not_measured']} not measured" if made["not_measured"] else ""
    wrong = "" if made["agrees"] else ", RESULTS DIFFER"
    return f"{name}: {figures}{left}{wrong} (goal: {made['goal']}): {'met' if made['met'] else 'NOT met'}"


def _commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "linear.json")
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    wanted = [name.strip() for name in given.only.split(",") if name.strip()]
    known = sections()
    unknown = set(wanted) - {section.name for section in known}
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: expected some of {', '.join(section.name for section in known)}")
    made = measure([section for section in known if not wanted or section.name in wanted], given.seconds)
    given.out.write_text(json.dumps(made, indent=1) + "\n")
    return 0 if all(section["met"] for section in made["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
