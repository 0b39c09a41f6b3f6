"""Rows as a table for a reader and as values for JSON, and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyllm.bench.device import Row
from cupyllm.bench.measure import Times, geometric_mean

OURS = "ours"


def values(row: Row, read_gb_per_s: float, peer: str | None, ours: str = OURS) -> dict[str, Any]:
    """One row for JSON: microseconds with their quartiles, rates, and the peer's time over that of contender `ours`."""
    case, found = row.case, {"op": row.case.op, **row.case.labels}
    found |= {"flops": case.cost.flops, "bytes": case.cost.bytes}
    if row.skipped:
        return {**found, "skipped": row.skipped}
    times = row.times[ours]
    gb_per_s = case.cost.bytes / times.median / 1e3
    found |= {"variant": row.variants[ours], "sets": row.sets, "calls": row.calls, **_times("", times)}
    found |= {
        "tflops": case.cost.flops / times.median / 1e6,
        "gb_per_s": gb_per_s,
        "read_share": gb_per_s / read_gb_per_s if case.few_rows else None,
    }
    if peer is not None and peer in row.times:
        found |= _times("peer_", row.times[peer])
        found |= {
            "peer_note": row.notes[peer],
            "ratio": row.times[peer].median / times.median,
            "difference": row.differences.get(peer),
            "agrees": row.agrees,
        }
    return found


def _times(prefix: str, times: Times) -> dict[str, Any]:
    low, high = times.quartiles
    return {
        f"{prefix}us": times.median,
        f"{prefix}us_quartiles": [low, high],
        f"{prefix}spread": times.spread,
        f"{prefix}samples": len(times.us),
    }


def lines(rows: Sequence[dict[str, Any]], peer: str | None) -> list[str]:
    """A table; columns that no row has are left out."""
    labels = [name for name in rows[0] if name not in _NO_LABELS] if rows else []
    table = [[*labels, "variant", "us", "+-%", "TFLOP/s", "GB/s", "% read", *((peer, "+-%", "ratio") if peer else ())]]
    notes: dict[str, str] = {}
    for row in rows:
        cells = [str(row[name]) for name in labels]
        if "skipped" in row:
            table.append([*cells, f"not measured: {row['skipped']}"])
            continue
        share = "" if row["read_share"] is None else f"{100 * row['read_share']:.0f}"
        cells += [row["variant"], _us(row["us"]), f"{100 * row['spread']:.1f}", f"{row['tflops']:.1f}"]
        cells += [f"{row['gb_per_s']:.0f}", share]
        if peer:
            mark = ""
            if row["peer_note"]:
                mark = notes.setdefault(row["peer_note"], "*" * (len(notes) + 1))
            cells += [_us(row["peer_us"]) + mark, f"{100 * row['peer_spread']:.1f}", f"{row['ratio']:.2f}"]
        table.append(cells)
    return [*_aligned(table, len(labels)), *(f"{mark} {peer} {detail}" for detail, mark in notes.items())]


_NO_LABELS = (
    frozenset(
        (
            "op",
            "flops",
            "bytes",
            "skipped",
            "variant",
            "sets",
            "calls",
            "us",
            "us_quartiles",
            "spread",
            "samples",
            "tflops",
        )
    )
    | frozenset(
        (
            "gb_per_s",
            "read_share",
            "peer_us",
            "peer_us_quartiles",
            "peer_spread",
            "peer_samples",
            "peer_note",
            "ratio",
        )
    )
    | frozenset(("difference", "agrees"))
)


def _us(us: float) -> str:
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def _aligned(table: Sequence[Sequence[str]], num_texts: int) -> list[str]:
    """Labels and the variant to the left, numbers to the right."""
    columns = len(table[0])
    widths = [
        max((len(row[i]) for row in table if i < len(row) and len(row) == columns), default=0) for i in range(columns)
    ]
    for row in table:
        for i, cell in enumerate(row[:num_texts]):
            widths[i] = max(widths[i], len(cell))
    return ["  ".join(_cell(cell, widths[i], i <= num_texts) for i, cell in enumerate(row)).rstrip() for row in table]


def _cell(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left and not text.isdigit() else text.rjust(width)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to the peer over the rows that have one: geometric mean and the worst."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if not ratios:
        return {"geometric_mean": None, "worst": None, "rows": 0}
    return {"geometric_mean": geometric_mean(ratios), "worst": min(ratios), "rows": len(ratios)}
