"""`cupyllm doctor`: what is installed and found, what is missing, and the command that mends it."""

from __future__ import annotations

from typing import Any

from cupyllm import cache, doctor
from cupyllm.commands.output import Output, gigabytes
from cupyllm.errors import InputError
from cupyllm.files import show_path


def run(*, variants: bool, clean: bool, as_json: bool) -> int:
    """0 when nothing is missing that this machine could use, else 1."""
    if variants and clean:
        raise InputError("--variants and --clean were given, expected at most one of them; leave out the other")
    output = Output(as_json)
    if variants:
        table = doctor.variants()
        output.result({"variants": table}, _variant_lines(table))
        return 0
    if clean:
        freed = cache.clean()
        path = show_path(cache.cache_dir())
        output.result({"path": path, "freed_bytes": freed}, [f"{path}: {freed} bytes removed ({gigabytes(freed)})"])
        return 0
    report = doctor.examine()
    output.result(report, _report_lines(report))
    return 1 if report["problems"] else 0


def _variant_lines(table: list[dict[str, Any]]) -> list[str]:
    rows = [("op", "variant", "file", "from", "simulated", "note")]
    rows += [
        (v["op"], v["variant"], v["source"], _from(v), "yes" if v["simulated"] else "no", v["note"]) for v in table
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows]


def _from(variant: dict[str, Any]) -> str:
    only = " only" if variant["max_capability"] == variant["min_capability"] else ""
    return f"sm_{variant['min_capability']}{only}"


def _report_lines(report: dict[str, Any]) -> list[str]:
    lines = [
        f"cupyllm {report['cupyllm']}, Python {report['python']}, {report['platform']}",
        "packages: " + ", ".join(_package(name, version) for name, version in report["packages"].items()),
        f"CPU: {report['cpu_cores']} cores, host memory {gigabytes(report['host_memory_bytes'])}",
        f"driver: {report['driver'] or 'none found'}",
    ]
    lines += [
        f"GPU {gpu['index']}: {gpu['name']}, sm_{gpu['capability']}, {gigabytes(gpu['memory_bytes'])}"
        for gpu in report["gpus"]
    ] or ["GPU: none found; the NumPy reference is used"]
    lines += [
        f"NVRTC: {report['nvrtc'] or 'not found'}",
        "simulator (--backend sim): " + ("can run" if report["simulator"] else "cannot run: it needs CuPy and NVRTC"),
        f"cache: {report['cache']['path']}, {gigabytes(report['cache']['bytes'])}, "
        f"{gigabytes(report['cache']['free_bytes'])} free" + ("" if report["cache"]["writable"] else ", NOT WRITABLE"),
        f"Hugging Face cache: {report['huggingface_cache']['path']}, "
        + (", ".join(report["huggingface_cache"]["models"]) or "no models"),
    ]
    lines += [f"problem: {p['what']}; {p['remedy']}" for p in report["problems"]] or ["problems: none"]
    return lines


def _package(name: str, version: str | None) -> str:
    if version is None:
        return f"{name} {'MISSING' if name in doctor.REQUIRED else '(not installed)'}"
    return f"{name} {version}"
