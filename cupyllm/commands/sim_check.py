"""`cupyllm sim-check`: any CUDA C kernel, or every case of one of our ops, simulated and checked."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from cupyllm.backend.compile import CU
from cupyllm.commands.inputs import check_not_read, check_writable, save_npy
from cupyllm.commands.output import Output
from cupyllm.errors import InputError
from cupyllm.files import show_path
from cupyllm.sim.report import Report, Site
from cupyllm.simcheck import ops as op_checks
from cupyllm.simcheck.arguments import Array, Given, Same, parse
from cupyllm.simcheck.declarations import cpp_name
from cupyllm.simcheck.kernel import DEFAULT_BUDGET, Found, Prepared, Request
from cupyllm.simcheck.source import source_line

MAX_PLACES = 8  # source lines under a report
MAX_JSON_ELEMENTS = 1 << 16  # of a shown array


def run(
    *,
    kernel: str | None,
    grid: str,
    block: str | None,
    args: str,
    arg: tuple[str, ...],
    shared_bytes: int,
    defines: tuple[str, ...],
    includes: tuple[str, ...],
    show: tuple[str, ...],
    save: tuple[str, ...],
    ops: tuple[str, ...],
    variant: str | None,
    dtype: str | None,
    budget: int | None,
    as_json: bool,
) -> int:
    """1 when the checks found anything, else 0."""
    if (kernel is None) == (not ops):
        raise InputError("expected --kernel FILE.cu:NAME or --op NAME, one of the two")
    output = Output(as_json)
    if kernel is None:
        only_kernel = {"block": block, "args": args, "arg": arg, "shared-bytes": shared_bytes, "show": show}
        only_kernel |= {"save": save, "define": defines, "include": includes}
        _refuse("--op", [name for name, value in only_kernel.items() if value])
        return _check_ops(output, ops, variant, dtype, budget)
    _refuse("--kernel", [name for name, value in (("variant", variant), ("dtype", dtype)) if value])
    if block is None:
        raise InputError("--kernel: --block is missing, expected the threads of a block, as in --block 128")
    # Names of C++ have colons too: what follows the first .cu: is one.
    file, colon, name = kernel.partition(".cu:")
    file = f"{file}.cu" if colon else file
    if not colon:
        file, colon, name = kernel.rpartition(":")
    if not colon:
        file, name = kernel, ""
    request = Request(
        *(file, name, _size("--grid", grid), _size("--block", block), parse(args, arg)),
        *(shared_bytes, defines, includes, DEFAULT_BUDGET if budget is None else budget),
    )
    return _check_kernel(output, Prepared(request), show, save)


def _refuse(option: str, given: Sequence[str]) -> None:
    if given:
        raise InputError(f"{option} and --{given[0]} were given, which do not go together; leave out one")


def _size(option: str, text: str) -> tuple[int, int, int]:
    """(x, y, z) of "4", "4,2" or "4,2,1"; x may stand for the comma."""
    if not re.fullmatch(r"\d{1,18}([,x]\d{1,18}){0,2}", text):
        raise InputError(f"{option} is {text!r}, expected up to three sizes, as in 4,1,1")
    x, y, z = (*(int(size) for size in re.split("[,x]", text)), 1, 1)[:3]
    return x, y, z


# -- one kernel ---------------------------------------------------------------------------------------------------


def _check_kernel(output: Output, prepared: Prepared, show: Sequence[str], save: Sequence[str]) -> int:
    request = prepared.request
    arrays = {item.name: item.value for item in prepared.given if isinstance(item.value, Array)}
    read = [request.file, *(array.fill for array in arrays.values() if array.fill.endswith(".npy"))]
    saved = [_saved(item, list(arrays), read) for item in save]
    for name in show:
        _known_array("--show", name, list(arrays))
        if output.as_json and math.prod(arrays[name].shape) > MAX_JSON_ELEMENTS:
            raise InputError(f"--show {name}: {arrays[name]} is too large for JSON; use --save {name}=FILE.npy")
    output.note(f"kernel: {cpp_name(prepared.symbol)} in {show_path(request.file)}, {_geometry(request)}")
    if prepared.given:
        output.note(f"args: {', '.join(_described(item) for item in prepared.given)}")
    found = prepared.run()
    for name, path in saved:
        save_npy(path, _plain_dtype(found.arrays[name]))
    shown = {name: found.arrays[name] for name in show}
    output.result(_kernel_values(prepared, found, shown), _kernel_lines(request, found, shown))
    return 1 if found.total else 0


def _saved(item: str, names: Sequence[str], read: Sequence[str]) -> tuple[str, str]:
    name, equals, path = item.partition("=")
    if not equals or not path:
        raise InputError(f"--save {item}: expected NAME=FILE.npy")
    _known_array("--save", name, names)
    check_not_read(path, "--save", read)
    check_writable(path, "--save")
    return name, path


def _known_array(option: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise InputError(f"{option} {name}: there is no such array, expected one of {', '.join(names) or 'none'}")


def _geometry(request: Request) -> str:
    grid, block = (",".join(map(str, size)) for size in (request.grid, request.block))
    dynamic = f", {request.shared_bytes} bytes of dynamic shared memory" if request.shared_bytes else ""
    return f"grid ({grid}), block ({block}){dynamic}"


def _described(item: Given) -> str:
    if isinstance(item.value, Array):
        return f"{item.name} {item.value} {show_path(item.value.fill)}"
    if isinstance(item.value, Same):
        return f"{item.name} the same as {item.value.target}"
    return f"{item.name} {item.value.text}{' ' if item.value.dtype else ''}{item.value.dtype}"


def _kernel_lines(request: Request, found: Found, shown: Mapping[str, np.ndarray]) -> list[str]:
    lines = [line.replace(found.symbol, cpp_name(found.symbol)) for line in _report_lines(found.reports, found.total)]
    for name, count in found.unwritten.items():
        if count:
            lines.append(f"note: {count} of {found.arrays[name].size} elements of {name} were never written")
    for name, array in shown.items():
        lines += [f"{name} =", np.array2string(array, threshold=64, max_line_width=100)]
    if found.total:
        lines.append(f"{_findings(found.total)}, in {found.seconds:.2f} s")
    else:
        ctas, threads = (x * y * z for x, y, z in (request.grid, request.block))
        lines.append(f"clean: {ctas} CTAs x {threads} threads, in {found.seconds:.2f} s")
    return lines


def _kernel_values(prepared: Prepared, found: Found, shown: Mapping[str, np.ndarray]) -> dict[str, Any]:
    request = prepared.request
    return {
        "kernel": found.symbol,
        "file": show_path(request.file),
        "grid": request.grid,
        "block": request.block,
        "shared_bytes": request.shared_bytes,
        "arguments": {item.name: item.text for item in found.given},
        "clean": not found.total,
        "findings": found.total,
        "reports": [_report_values(report) for report in found.reports],
        "unwritten": found.unwritten,
        "seconds": found.seconds,
        "show": {name: _plain_dtype(array).tolist() for name, array in shown.items()},
    }


def _plain_dtype(array: np.ndarray) -> np.ndarray:
    """bfloat16 as float32, which every reader of .npy and JSON knows."""
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


# -- reports ------------------------------------------------------------------------------------------------------


def _report_lines(reports: Sequence[Report], total: int, folder: Path | None = None) -> list[str]:
    """Each report, and under it the source lines that it names; `folder` as in source_line."""
    lines = []
    for report in reports:
        lines.append(str(report))
        places = [place for site in (report.site, report.other) if site is not None for place in site.where]
        texts = {f"{PurePosixPath(p.file).name}:{p.line}": source_line(p, folder) for p in places[:MAX_PLACES]}
        width = max(map(len, texts), default=0)
        lines += [f"    {place:<{width}} | {text}" for place, text in texts.items() if text is not None]
    if total > len(reports):
        lines.append(f"and {total - len(reports)} further findings")
    return lines


def _findings(count: int) -> str:
    return "1 finding" if count == 1 else f"{count} findings"


def _report_values(report: Report, folder: Path | None = None) -> dict[str, Any]:
    return {
        "kind": report.kind,
        "message": report.line,
        "cta": report.cta,
        "thread": report.thread,
        "element": report.what,
        "count": report.count,
        "at": _site_values(report.site, folder),
        "other": None if report.other is None else _site_values(report.other, folder),
    }


def _site_values(site: Site, folder: Path | None) -> dict[str, Any]:
    """The instruction, and where it is from: innermost first, then the places that it is inlined at."""
    where = [{"file": show_path(p.file), "line": p.line, "text": source_line(p, folder)} for p in site.where]
    return {"kernel": site.kernel, "instruction": site.text, "where": where}


# -- our ops ------------------------------------------------------------------------------------------------------


def _check_ops(
    output: Output, wanted: Sequence[str], variant: str | None, dtype: str | None, budget: int | None
) -> int:
    from cupyllm.backend.sim import SimBackend

    names = op_checks.NAMES if "all" in wanted else tuple(dict.fromkeys(wanted))
    for name in names:
        if name not in op_checks.NAMES:
            raise InputError(f"--op {name}: there is no such op, expected all or one of {', '.join(op_checks.NAMES)}")
    if variant is not None and len(names) > 1:
        raise InputError(f"--variant {variant} with {len(names)} ops, expected one --op; leave out the others")
    chosen = {name: op_checks.variants(name, variant) for name in names}
    began = time.perf_counter()
    backend = SimBackend(budget=budget)
    output.begin()
    cases = []
    try:
        for name in names:
            for which in chosen[name]:
                for activations in op_checks.dtypes(name, dtype):
                    for case in op_checks.check_op(backend, name, which, activations):
                        cases.append(case)
                        if not output.as_json:
                            print("\n".join(_case_lines(case)), flush=True)
    finally:
        backend.close()
    if not cases:
        raise InputError(
            f"--variant {variant} --dtype {dtype}: it takes no case of {names[0]} in {dtype}; leave one out"
        )
    total = sum(case.total for case in cases)
    seconds = time.perf_counter() - began
    values = {
        "clean": not total,
        "findings": total,
        "seconds": seconds,
        "cases": [_case_values(case) for case in cases],
    }
    end = _findings(total) if total else "clean"
    output.result(values, [f"{end}: {len(cases)} cases of {', '.join(names)}, in {seconds:.1f} s"])
    return 1 if total else 0


def _case_lines(case: op_checks.Checked) -> list[str]:
    end = _findings(case.total) if case.total else "clean"
    head = f"{case.op} {case.variant} {case.case} {case.dtype}: {end}, {case.seconds:.2f} s"
    return [head, *(f"  {line}" for line in _report_lines(case.reports, case.total, CU))]


def _case_values(case: op_checks.Checked) -> dict[str, Any]:
    return {
        "op": case.op,
        "variant": case.variant,
        "case": case.case,
        "dtype": case.dtype,
        "seconds": case.seconds,
        "findings": case.total,
        "reports": [_report_values(report, CU) for report in case.reports],
    }
