"""Times linear's wgmma designs on this GPU and writes the table that the launcher chooses by (ops/linear_tiles.json).

    python scripts/tune_linear.py --measure tiles.json [--seconds 300]   on the GPU: every design a product may want
    python scripts/tune_linear.py --table tiles.json                     anywhere: fit the model, prune designs, write

Products are the projections of Qwen3-32B, 8B and 0.6B at 512, 2048, 4096 and 8192 rows, forward, dgrad and wgrad. Of
all designs, the fewest are kept that lose less than 0.5% (geometric mean) and 5% (worst) to all of them, a form each:
every one is a kernel to compile and to test. The table has only products for which the cost model chooses 1% worse than
the best; the others are left to the model, and so is every shape that was not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyllm.config import published
from cupyllm.ops.linear_sm90 import DEFAULT_ORDER, TABLE, Choice, design, predict, product

DESIGNS = (
    *("128x256", "128x256c21", "256x128c12", "256x192c12", "256x160c12", "192x128c12", "128x192c12", "128x160c21"),
    *("128x128c21", "128x96c21", "128x64c21", "64x64", "64x64c21", "64x64c12", "64x128", "64x128c21", "64x128c12"),
    *("128x64", "128x128"),
)
SIZES, ROWS = ("32b", "8b", "0.6b"), (512, 2048, 4096, 8192)
HEAD = ("64x64c21", "128x128c21", "128x256c21")  # of float32 logits: the model chooses among three
ORDERS = ((4, 0), (16, 0), (8, 1), (4, 1))
MEAN_LOSS, WORST_LOSS, TABLE_LOSS = 1.005, 1.05, 1.01
L2_BYTES = 128 << 20  # rotate operands past it
Row = dict[str, Any]  # form, rows, cols, depth, us: {"128x256c21 8 0": microseconds}


def products() -> list[tuple[str, int, int, int]]:
    """(form, rows, cols, depth) of every projection, each once."""
    found: dict[tuple[str, int, int, int], None] = {}
    for size in SIZES:
        c = published(size)
        hidden, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        for n in ROWS:
            for out, depth in (  # gate and up alone and together
                *((q, hidden), (kv, hidden), (hidden, q)),
                *((c.intermediate_size, hidden), (2 * c.intermediate_size, hidden), (hidden, c.intermediate_size)),
            ):
                found |= {("forward", n, out, depth): None, ("dgrad", n, depth, out): None}
                found[("wgrad", out, depth, n)] = None
    return list(found)


def label(choice: Choice) -> str:
    return f"{choice.design} {choice.group} {choice.by_columns}"


def choice_of(text: str) -> Choice:
    name, group, by_columns = text.split()
    return Choice(design(name), int(group), int(by_columns))


# ---- measuring ----


def candidates(form: str, rows: int, cols: int, depth: int, num_sms: int, model: Mapping[str, float]) -> list[Choice]:
    """Designs within 1.4 of the model's best, the best first."""
    us = {name: predict(design(name), form, rows, cols, depth, num_sms, dict(model)) for name in DESIGNS}
    near = sorted((t, name) for name, t in us.items() if t <= 1.4 * min(us.values()))
    return [Choice(design(name), *DEFAULT_ORDER) for _, name in near[:8]]


class Timer:
    """Times launches of one product over rotated operands."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def time(self, form: str, rows: int, cols: int, depth: int, choices: Sequence[Choice], reps: int = 7) -> Row:
        """Median microseconds of each choice, the choices in turn within every repetition."""
        from cupyllm.backend.base import ITEMSIZE
        from cupyllm.backend.eager import Session
        from cupyllm.backend.record import Recorder
        from cupyllm.ops.linear_sm90 import FORMS

        nbytes = 2 * depth * (rows + cols) + ITEMSIZE[FORMS[form][2]] * rows * cols
        sets = max(2, min(48, -(-2 * L2_BYTES // nbytes)))
        rng, backend = np.random.default_rng(0), self.backend
        with Session(backend) as session:
            operands = [self._operands(session, rng, form, rows, cols, depth) for _ in range(sets)]
            programs = []
            for choice in choices:
                rec = Recorder.of(backend)
                for index in range(max(sets, 20)):
                    product(rec, form, *operands[index % sets], choice=choice)
                programs.append((backend.load(rec.launches), len(rec.launches)))
            start, stop, stream = backend.event(), backend.event(), backend.stream()
            took: list[list[float]] = [[] for _ in choices]
            for rep in range(reps + 1):
                for index, (program, count) in enumerate(programs):
                    backend.record(start, stream)
                    backend.run(program, stream)
                    backend.record(stop, stream)
                    if rep:  # the first warms up
                        took[index].append(backend.elapsed_ms(start, stop) * 1e3 / count)
                    else:
                        backend.wait_host(stop)
        us = {label(choice): statistics.median(times) for choice, times in zip(choices, took, strict=True)}
        return {"form": form, "rows": rows, "cols": cols, "depth": depth, "us": us}

    @staticmethod
    def _operands(session: Any, rng: np.random.Generator, form: str, rows: int, cols: int, depth: int) -> list[Any]:
        from cupyllm.backend.base import NUMPY_DTYPE, Spec
        from cupyllm.ops.linear_sm90 import FORMS

        a_mn, b_mn, dtype = FORMS[form]
        a, b = (depth, rows) if a_mn else (rows, depth), (depth, cols) if b_mn else (cols, depth)
        block = rng.standard_normal(1 << 20, np.float32).astype(NUMPY_DTYPE["bfloat16"])
        return [*(session.put(np.resize(block, shape)) for shape in (a, b)), session.empty(Spec((rows, cols), dtype))]


def measure(seconds: float) -> dict[str, Any]:
    """Every product: its candidates in the default order, then other orders of the fastest."""
    from cupyllm.backend.cuda import CudaBackend

    backend = CudaBackend()
    timer, until = Timer(backend), time.monotonic() + seconds
    model = json.loads(TABLE.read_text(encoding="utf-8"))["model"]
    rows: list[Row] = []
    for form, m, n, k in products():
        if time.monotonic() > until:
            print(f"out of time: {len(rows)} of {len(products())} products", file=sys.stderr)
            break
        row = timer.time(form, m, n, k, candidates(form, m, n, k, backend.num_sms, model))
        best = choice_of(min(row["us"], key=row["us"].__getitem__))
        if best.design.tiles(m, n) * best.design.cluster > 1.5 * backend.num_sms:
            others = [best, *(Choice(best.design, *order) for order in ORDERS)]
            again = timer.time(form, m, n, k, others)["us"]
            scale = row["us"][label(best)] / again[label(best)]
            row["us"] |= {name: us * scale for name, us in again.items() if name != label(best)}
        rows.append(row)
        print(f"{form} {m} {n} {k}: {min(row['us'], key=row['us'].__getitem__)} {min(row['us'].values()):.1f} us")
    return {"gpu": backend.device_name, "num_sms": backend.num_sms, "rows": rows}


# ---- from times to a table ----


def predicted(row: Row, name: str, num_sms: int, model: dict[str, float]) -> float:
    return predict(design(name), row["form"], row["rows"], row["cols"], row["depth"], num_sms, model)


def in_default_order(row: Row) -> dict[str, float]:
    """Design -> microseconds."""
    return {t.split()[0]: us for t, us in row["us"].items() if choice_of(t) == Choice(design(t.split()[0]), 8, 0)}


def fit(rows: Sequence[Row], num_sms: int, model: dict[str, float], rounds: int = 1000) -> dict[str, float]:
    """Constants that predict the measured times best: random search over the mean of |log(predicted / measured)|."""
    cases = [(row, name, us) for row in rows for name, us in in_default_order(row).items()]

    def loss(m: dict[str, float]) -> float:
        return sum(abs(math.log(predicted(row, name, num_sms, m) / us)) for row, name, us in cases) / len(cases)

    rng, best, low = random.Random(1), dict(model), loss(model)
    for index in range(rounds):
        step = 0.3 * (1 - index / rounds) + 0.01
        tried = {key: x * math.exp(rng.gauss(0, step)) if rng.random() < 0.4 else x for key, x in best.items()}
        if (value := loss(tried)) < low:
            best, low = tried, value
    print(f"model: off by {100 * low:.1f}% (mean |log|) in {len(cases)} times")
    return {key: float(f"{x:.4g}") for key, x in best.items()}


def prune(rows: Sequence[Row], num_sms: int, model: dict[str, float]) -> list[str]:
    """The fewest designs within MEAN_LOSS and WORST_LOSS of all, dropped one by one. What was not measured counts as
    the model says, scaled to the measured ones, and never as the best."""
    full = []
    for row in rows:
        have = in_default_order(row)
        logs = [math.log(us / predicted(row, name, num_sms, model)) for name, us in have.items()]
        scale, best = 1.02 * math.exp(sum(logs) / len(logs)), min(have.values())
        full.append({name: have.get(name, max(predicted(row, name, num_sms, model) * scale, best)) for name in DESIGNS})

    def losses(kept: Sequence[str]) -> tuple[float, float]:
        x = [min(us[name] for name in kept) / min(us.values()) for us in full]
        return math.exp(sum(map(math.log, x)) / len(x)), max(x)

    kept = list(DESIGNS)
    while len(kept) > 1:
        rest = min(([k for k in kept if k != name] for name in kept), key=losses)
        if losses(rest)[0] > MEAN_LOSS or losses(rest)[1] > WORST_LOSS:
            break
        kept = rest
    print(f"{rows[0]['form']}: {' '.join(kept)}: loses {losses(kept)[0] - 1:.2%}, at worst {losses(kept)[1] - 1:.1%}")
    return kept


def exceptions(rows: Sequence[Row], kept: Sequence[str], num_sms: int, model: dict[str, float]) -> dict[str, list[Any]]:
    """Products for which the model does not choose what is within TABLE_LOSS of the fastest kept design."""
    found = {}
    for row in rows:
        us = {t: time for t, time in row["us"].items() if t.split()[0] in kept}
        if not us:
            continue  # only others were measured
        default = in_default_order(row)
        chosen = min(kept, key=lambda name: predicted(row, name, num_sms, model))
        plain = min((time, name) for name, time in default.items() if name in kept)
        best = min(us, key=us.__getitem__)
        if us[best] > plain[0] / TABLE_LOSS:  # another order must win clearly
            best = f"{plain[1]} 8 0"
        if default.get(chosen, math.inf) > TABLE_LOSS * us[best]:
            choice = choice_of(best)
            key = f"{row['rows']} {row['cols']} {row['depth']}"
            found[key] = [str(choice.design), choice.group, choice.by_columns]
    return found


def make_table(measured: dict[str, Any], model: dict[str, float], refit: bool = True) -> dict[str, Any]:
    num_sms, rows = measured["num_sms"], measured["rows"]
    if refit:
        model = fit(rows, num_sms, model)
    made: dict[str, Any] = {"gpu": measured["gpu"], "num_sms": num_sms, "model": model}
    made["head"] = {"designs": list(HEAD), "products": {}}
    for form in ("forward", "dgrad", "wgrad"):
        own = [row for row in rows if row["form"] == form]
        kept = prune(own, num_sms, model)
        made[form] = {"designs": kept, "products": exceptions(own, kept, num_sms, model)}
        print(f"{form}: {len(made[form]['products'])} of {len(own)} products in the table")
    return made


def render(made: dict[str, Any]) -> str:
    """JSON, a product a line."""
    parts = []
    for key, value in made.items():
        if isinstance(value, dict) and "products" in value:
            lines = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in value["products"].items()]
            body = "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"
            parts.append(f' "{key}": {{\n  "designs": {json.dumps(value["designs"])},\n  "products": {body}\n }}')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", type=Path, help="write measured times here")
    what.add_argument("--table", type=Path, help="make the table from these times")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--no-fit", action="store_true", help="keep the model's constants")
    args = parser.parse_args(argv)
    if args.measure:
        args.measure.write_text(json.dumps(measure(args.seconds)), encoding="utf-8")
        return 0
    model = json.loads(TABLE.read_text(encoding="utf-8"))["model"]
    measured = json.loads(args.table.read_text(encoding="utf-8"))
    TABLE.write_text(render(make_table(measured, model, not args.no_fit)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
