"""`cupyllm grad-check`: every op and a whole layer, against finite differences and the float64 reference."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from cupyllm import check
from cupyllm.commands import session
from cupyllm.commands.output import Output
from cupyllm.config import published
from cupyllm.errors import InputError

SIZE_TOKENS, SMALL_TOKENS = 128, 12


def run(*, ops: tuple[str, ...], layer: bool, size: str | None, backend: str, dtype: str | None, as_json: bool) -> int:
    """1 when any tensor fails, else 0. Neither --op nor --layer: everything."""
    unknown = [name for name in ops if name not in check.OPS]
    if unknown:
        raise InputError(f"--op {unknown[0]}: there is no such op, expected one of {', '.join(check.OPS)}")
    if size is not None and ops and not layer:
        raise InputError("--size is the layer's shape and --op alone checks no layer; add --layer or leave out --size")
    output = Output(as_json)
    with session.open_runtime(output, backend, dtype) as runtime:
        output.begin()
        names = list(dict.fromkeys(ops)) if ops or layer else None
        report, seconds = examine(runtime, names, layer or not ops, size, dtype or "float32")
        values = {
            "backend": runtime.name,
            "device": session.device_name(runtime),
            "dtype": dtype or "float32",
            "seconds": seconds,
            **summary(report),
        }
    output.result(values, lines(report))
    return 0 if report.ok else 1


def examine(
    runtime: session.Runtime, op_names: Sequence[str] | None, layer: bool, size: str | None, dtype: str
) -> tuple[check.Report, float]:
    """The report and how long it took. A published `size` is checked at 128 tokens on a device."""
    began = time.perf_counter()
    on_device = runtime.name != "reference"
    report = check.grad_check(
        op_names,
        layer,
        runtime.backend if on_device else None,
        dtype=dtype,
        config=None if size is None else published(size).with_layers(1),
        tokens=SIZE_TOKENS if size is not None and on_device else SMALL_TOKENS,
        progress=_progress,
    )
    _progress("")
    return report, time.perf_counter() - began


def summary(report: check.Report) -> dict[str, Any]:
    """For JSON: per op its worst tensor, for the layer every tensor's error (its output apart: not a gradient)."""
    ops: dict[str, Any] = {}
    for finding in report.findings:
        if finding.subject == "layer":
            continue
        entry = ops.setdefault(finding.subject, {"ok": True, "tensors": 0, "worst": None})
        entry["tensors"] += 1
        entry["ok"] &= finding.ok
        if entry["worst"] is None or not finding.error <= entry["worst"]["error"]:
            entry["worst"] = {
                "check": finding.check,
                "case": finding.case,
                "tensor": finding.tensor,
                "error": finding.error,
                "limit": finding.limit,
            }
    found = [f for f in report.findings if f.subject == "layer"]
    gradients = [f for f in found if f.tensor != "y"]
    layer = None
    if found:
        layer = {
            "ok": all(f.ok for f in found),
            "check": found[0].check,
            "case": found[0].case,
            "limit": found[0].limit,
            "tensors": len(gradients),
            "passed": sum(f.ok for f in gradients),
            "output_error": next((f.error for f in found if f.tensor == "y"), None),
            "errors": {f.tensor: f.error for f in gradients},
        }
    parity = report.parity or "checked"
    return {
        "ok": report.ok,
        "failed": report.failed,
        "parity": parity,
        "ops": ops,
        "inference_only": report.inference_only,
        "layer": layer,
    }


def lines(report: check.Report) -> list[str]:
    """For a reader: a line per op and check with its largest error, a line per tensor of the layer."""
    result = []
    groups: dict[tuple[str, str], list[check.Finding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.subject, finding.check), []).append(finding)
    for (subject, kind), found in groups.items():
        worst = max(found, key=lambda f: f.error if f.error == f.error else float("inf"))
        gradients = [f for f in found if subject != "layer" or f.tensor != "y"]
        passed = sum(f.ok for f in gradients)
        mark = "ok  " if all(f.ok for f in found) else "FAIL"
        result.append(
            f"{mark} {subject:<14} {kind:<18} {passed} of {len(gradients)} tensors, largest relative error "
            f"{worst.error:.2e} (limit {worst.limit:.2e}; {worst.case}, {worst.tensor})"
        )
        shown = found if subject == "layer" else [f for f in found if not f.ok]
        for f in shown:
            where = f.tensor if subject == "layer" else f"{f.case}, {f.tensor}"
            result.append(f"     {'ok  ' if f.ok else 'FAIL'} {where}: {f.error:.2e}")
    if report.inference_only:
        compared = "their outputs were not compared" if report.parity else "only their outputs were compared"
        result.append(f"no gradient, for inference only: {', '.join(report.inference_only)}; {compared}")
    if report.parity:
        result.append(f"parity: {report.parity}")
    result.append("ok" if report.ok else f"FAILED: {', '.join(report.failed)}")
    return result


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="\r", file=sys.stderr, flush=True)
