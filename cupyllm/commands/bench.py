"""`cupyllm bench op NAME`: an op's speed on this GPU, beside a peer's in the same run."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

from cupyllm.bench import OPS
from cupyllm.bench.cases import Wanted
from cupyllm.commands.inputs import check_writable, save_json
from cupyllm.commands.output import Output, progress
from cupyllm.errors import BackendError, InputError


def run_op(
    *,
    name: str,
    peer: str | None,
    size: str,
    rows: tuple[int, ...],
    forms: tuple[str, ...],
    projections: tuple[str, ...],
    dtype: str,
    variant: str | None,
    formats: tuple[str, ...],
    as_json: bool,
    out: str | None,
) -> int:
    """0; 1 when the results of ours and the peer differ by more than rounding explains."""
    from cupyllm import ops

    if name not in OPS:
        raise InputError(f"bench op {name}: there is no benchmark of it, expected one of {', '.join(OPS)}")
    known = [found.name for found in ops.get(name).variants]
    if variant is not None and variant not in known:
        raise InputError(f"--variant {variant}: {name} has no such variant, expected one of {', '.join(known)}")
    if out is not None:
        check_writable(out, "--out")
    output = Output(as_json)
    cases = import_module(OPS[name]).cases(Wanted(size, rows, forms, projections, dtype, formats))
    backend = open_gpu()
    try:
        values, lines = _measure(output, backend, name, cases, peer, variant)
    finally:
        backend.close()
    values |= {"size": size, "dtype": dtype}
    if out is not None:
        save_json(Path(out), values)
    output.result(values, lines)
    return 0 if values["agrees"] else 1


def open_gpu() -> Any:
    """The GPU's backend. Raises BackendError that says what to do where there is none."""
    from cupyllm.runtime import why_no_gpu

    obstacle = why_no_gpu()
    if obstacle is not None:
        raise BackendError(f"bench measures a GPU, and {obstacle}")
    from cupyllm.backend.cuda import CudaBackend

    return CudaBackend()


def _measure(
    output: Output, backend: Any, op: str, cases: list[Any], peer: str | None, variant: str | None
) -> tuple[dict[str, Any], list[str]]:
    from cupyllm.bench import report
    from cupyllm.bench.device import Bench, Ours
    from cupyllm.bench.peers import peer as peer_called

    began = time.perf_counter()
    contenders: list[Any] = [Ours(report.OURS, {} if variant is None else {op: variant})]
    if peer is not None:
        contenders.append(peer_called(peer))
    output.note(f"GPU: {backend.device_name} (sm_{backend.capability}), {backend.num_sms} SMs")
    output.begin()
    with Bench(backend, cases, contenders) as bench, progress(f"bench {op}") as report_progress:
        rows = []
        for index, row in enumerate(bench.run(cases)):
            rows.append(report.values(row, bench.read_gb_per_s, peer))
            report_progress(index + 1, len(cases))
        read, samples = bench.read_gb_per_s, bench.samples
    values = {
        "op": op,
        "device": backend.device_name,
        "capability": backend.capability,
        "num_sms": backend.num_sms,
        "l2_bytes": backend.l2_bytes,
        "read_gb_per_s": read,
        "samples": samples,
        "peer": peer,
        "peer_version": getattr(contenders[-1], "version", None),
        "seconds": time.perf_counter() - began,
        "summary": report.summary(rows),
        "agrees": all(row.get("agrees", True) for row in rows),
        "rows": rows,
    }
    return values, [*report.lines(rows, peer), *_last_lines(values)]


def _last_lines(values: dict[str, Any]) -> list[str]:
    found = [
        f"medians of {values['samples']} interleaved samples on random inputs rotated past the L2 "
        f"({values['l2_bytes'] / 1e6:.0f} MB); +-%: half the distance of the quartiles",
        f"measured read bandwidth: {values['read_gb_per_s']:.0f} GB/s",
    ]
    if values["summary"]["rows"]:
        found.append(
            f"ratio ({values['peer']}'s time / ours; over 1 is faster): geometric mean "
            f"{values['summary']['geometric_mean']:.3f}, worst {values['summary']['worst']:.3f}"
        )
    if not values["agrees"]:
        wrong = [row for row in values["rows"] if not row.get("agrees", True)]
        found.append(f"FAILED: {len(wrong)} results differ from {values['peer']}'s, at most by {_worst(wrong):.1e}")
    return found


def _worst(rows: list[dict[str, Any]]) -> float:
    return max(float(row["difference"]) for row in rows)
