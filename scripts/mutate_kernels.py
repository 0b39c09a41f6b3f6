"""Take every barrier, cp.async wait and condition out of every kernel, one at a time: does the checker see it?

    python scripts/mutate_kernels.py                        # everything: 6 minutes with 2 processes
    python scripts/mutate_kernels.py --only attention.cu    # places whose name has this in it

Prints a line for each mutant and kernel: the place, what was reported, seconds. Compares with what is expected
(tests/sim/mutations/expected.txt): exit status 1 where a mutant that should be reported is not, an escape, or one that
is called equal or free is. --write adds lines for new places there, to be read and completed by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.sim.mutations import expected
from tests.sim.mutations.judge import BUDGET, Judge, Judged, all_places
from tests.sim.mutations.scan import Place
from tests.simulated import new_simulator

_judge: Judge | None = None  # of a worker process


def start_worker(cache: str) -> None:
    global _judge
    backend = new_simulator(budget=BUDGET).__enter__()
    _judge = Judge(backend, Path(cache))


def judge(place: Place) -> Judged:
    assert _judge is not None
    try:
        return _judge.judge(place)
    except Exception as error:  # one mutant that the simulator fails on must not end the run
        return Judged(place, error=f"{type(error).__name__}: {error}")


def judge_all(places: Sequence[Place], processes: int, cache: Path) -> Iterator[Judged]:
    """Each place's outcomes, in order."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers run side by side; they load NumPy after this
    workers = ProcessPoolExecutor(processes, get_context("spawn"), initializer=start_worker, initargs=(str(cache),))
    with workers as pool:
        yield from pool.map(judge, places)


def rows(judged: Judged, complaints: Sequence[str]) -> Iterator[str]:
    """The lines of the table for one mutant."""
    mark = "FAIL" if complaints else "ok"
    where = f"{judged.place.file}:{judged.place.line}"
    if judged.error or not judged.outcomes:
        yield f"{mark:4} {where:24} {judged.place.text[:44]:44} {judged.error or 'no code changes'}"
    for outcome in judged.outcomes:
        result = ", ".join(outcome.kinds) or ("silent, equal bits" if outcome.same_bits else "silent, other numbers")
        tail = f"{outcome.kernel:30} {result:44} {outcome.seconds:6.2f} s"
        yield f"{mark:4} {where:24} {judged.place.text[:44]:44} {tail}"


def as_json(judged: Judged, complaints: Sequence[str]) -> dict[str, object]:
    place = judged.place
    return {
        **{"place": place.key, "file": place.file, "line": place.line, "kind": place.kind},
        **{"replacement": place.replacement, "error": judged.error, "complaints": list(complaints)},
        "kernels": [vars(outcome) for outcome in judged.outcomes],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="places whose name contains this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every outcome there")
    parser.add_argument("--cache", type=Path, help="folder that keeps compiled mutants; default: none are kept")
    parser.add_argument("--write", action="store_true", help="add a line to expected.txt for each new place")
    arguments = parser.parse_args()
    verdicts, places = expected.read(), all_places()
    failures = [] if arguments.write or arguments.only else expected.unclassified(places, verdicts)
    chosen = [place for place in places if arguments.only in place.key]
    tried = [p for p in chosen if p.key not in verdicts or verdicts[p.key].name != "untried"]
    results, counts, start = [], Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cache = arguments.cache or Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        for judged in judge_all(tried, arguments.processes, cache):
            key = judged.place.key
            found = expected.complaints(judged, verdicts[key]) if key in verdicts else [f"{key}: not judged yet"]
            print(*rows(judged, found), sep="\n", flush=True)
            results.append(as_json(judged, found))
            failures += found
            counts.update("reported" if outcome.kinds else "silent" for outcome in judged.outcomes)
            if arguments.write and key not in verdicts:
                with expected.PATH.open("a") as file:
                    file.write(expected.draft(judged) + "\n")
    minutes = (time.monotonic() - start) / 60
    print(*failures, sep="\n")
    print(
        f"{len(tried)} mutants in {minutes:.1f} minutes, {len(chosen) - len(tried)} untried; in kernels: "
        f"{counts['reported']} reported, {counts['silent']} silent; {len(failures)} against expected.txt"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
