"""Where a command's words go: results to stdout, progress to stderr, and with --json one object on stdout alone."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cupyllm.engine import LayerCallback

_PLAIN_INTERVAL_SECONDS = 10.0  # between progress lines where stderr is no terminal


class Output:
    """Notes first (backend, weights, text), then one result.

    Notes are held back until `begin`, when all input has been accepted, so that a refusal is one line and nothing else;
    with --json until the first result, so that stderr has one line also when something fails on the way.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._held: list[str] | None = []

    def note(self, line: str) -> None:
        """A line a reader should see before the result; on stderr with --json."""
        if self._held is not None:
            self._held.append(line)
        else:
            print(line, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def begin(self, live: bool = False) -> None:
        """The input is good and the work starts: show the notes, from now on at once. `live`: also with --json."""
        if self.as_json and not live:
            return
        held, self._held = self._held or [], None
        for line in held:
            self.note(line)

    def result(self, values: Mapping[str, Any], lines: Sequence[str]) -> None:
        """The JSON object, or the lines for a reader."""
        if self.as_json:
            print(json.dumps(plain(values), allow_nan=False), flush=True)  # before the notes: it may fail
        self.begin(live=True)
        if not self.as_json:
            print("\n".join(lines), flush=True)


def plain(value: Any) -> Any:
    """The value as JSON can hold it: NumPy scalars as numbers, NaN and infinities as null."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def progress(label: str) -> Iterator[LayerCallback]:
    """Yields a callback (done, total). A bar on a terminal; elsewhere a line now and then, none for short work."""
    if sys.stderr.isatty():
        with _bar(label) as callback:
            yield callback
        return
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PLAIN_INTERVAL_SECONDS:
            last = now
            print(f"{label}: {done}/{total}", file=sys.stderr, flush=True)

    yield report


@contextmanager
def _bar(label: str) -> Iterator[LayerCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def gigabytes(num_bytes: float | None) -> str:
    """Bytes for a reader, decimal units; "n/a" where there is no number."""
    if num_bytes is None:
        return "n/a"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"
