"""Times linear's wgmma designs on this GPU and writes the table that the launcher chooses by (ops/linear_tiles.json).

    python scripts/tune_linear.py --measure tiles.json [--rows 16 32 64] [--forms forward] [--seconds 300]   on the GPU
    python scripts/tune_linear.py --table tiles.json [more.json] [--fit few] [--keep 64x96]                  anywhere

Products are the projections of Qwen3-32B, 8B and 0.6B at 512, 2048, 4096 and 8192 rows, forward, dgrad and wgrad, and
at 16, 32 and 64 rows forward, with the LM head. Of all designs, the fewest are kept that lose less than 1% (geometric
mean) and 5% (worst) to all of them, a form each: every one is a kernel to compile and to test. The table has only
products for which the cost model chooses 1% worse than the best; the others are left to the model, and so is every
shape that was not measured. "products" are chosen among the designs that do not split K, "split" among all, where those
win. A table made from some of the products keeps what it had of the others.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cupyllm.bench import linear
from cupyllm.bench.cases import Case, Record, Way
from cupyllm.bench.device import Bench, Contender, Ours
from cupyllm.bench.measure import Batch, measure, turns
from cupyllm.config import published
from cupyllm.ops.linear_sm90 import DEFAULT_ORDER, TABLE, Choice, choose, design, is_few, predict, product
from cupyllm.ops.linear_sm90 import model as model_of

MANY = (  # designs for many rows
    *("128x256", "128x256c21", "256x128c12", "256x192c12", "256x160c12", "192x128c12", "128x192c12", "128x160c21"),
    *("128x128c21", "128x96c21", "128x64c21", "64x64", "64x64c21", "64x64c12", "64x128", "64x128c21", "64x128c12"),
    *("128x64", "128x128"),
    *("64x64k2", "64x128k2", "64x256k2", "128x64k2", "128x128k2", "128x160k4", "64x160c21k2", "64x64c21k2"),
)
FEW = (  # and for few: one row of tiles
    *("64x40", "64x48", "64x64", "64x80", "64x96", "64x128"),
    *("64x64k2", "64x80k2", "64x96k2", "64x128k2", "64x64k4"),
)
DESIGNS = tuple(dict.fromkeys(MANY + FEW))
SIZES, ROWS, FEW_ROWS = ("32b", "8b", "0.6b"), (512, 2048, 4096, 8192), (16, 32, 64)
FORMS_MEASURED = ("forward", "dgrad", "wgrad", "head")
HEAD = ("64x64c21", "128x128c21", "128x256c21")  # of many float32 logits: the model chooses among three
ORDERS = ((4, 0), (16, 0), (8, 1), (4, 1))
MEAN_LOSS, WORST_LOSS, TABLE_LOSS = 1.01, 1.05, 1.01
NEAR, MOST = 1.08, 8  # what is timed well: within NEAR of the fastest of a first look, at most MOST
Shape = tuple[str, int, int, int]  # form, rows, cols, depth
Models = Mapping[str, dict[str, float]]  # "model" and "few": the table's
Row = dict[str, Any]  # form, rows, cols, depth, us: {"128x256c21 8 0": microseconds}


def products(rows: Sequence[int] = (*FEW_ROWS, *ROWS)) -> list[Shape]:
    """(form, rows, cols, depth) of every projection, each once."""
    found: dict[Shape, None] = {}
    for size in SIZES:
        c = published(size)
        hidden, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        for n in rows:
            for out, depth in (  # q, k and v, gate and up alone and together
                *((q, hidden), (kv, hidden), (q + 2 * kv, hidden), (hidden, q)),
                *((c.intermediate_size, hidden), (2 * c.intermediate_size, hidden), (hidden, c.intermediate_size)),
            ):
                found[("forward", n, out, depth)] = None
                if n not in FEW_ROWS:
                    found |= {("dgrad", n, depth, out): None, ("wgrad", out, depth, n): None}
            if n in FEW_ROWS:
                found[("head", n, c.vocab_size, hidden)] = None
    return list(found)


def label(choice: Choice) -> str:
    return f"{choice.design} {choice.group} {choice.by_columns}"


def choice_of(text: str) -> Choice:
    name, group, by_columns = text.split()
    return Choice(design(name), int(group), int(by_columns))


# ---- measuring ----


def candidates(form: str, rows: int, cols: int, depth: int, num_sms: int, most: int = 24) -> list[Choice]:
    """Designs within 1.4 of the model's best, or 1.8 for few rows, whose model is young; the best first, and the best
    that does not split K among them."""
    few = is_few(form, rows)
    able = [made for made in map(design, FEW if few else MANY) if made.can(depth)]
    us = {made: predict(made, form, rows, cols, depth, num_sms, model_of(form, rows)) for made in able}
    near = sorted(able, key=us.__getitem__)
    chosen = [made for made in near if us[made] <= (1.8 if few else 1.4) * us[near[0]]][:most]
    chosen += [made for made in near if made.ck == 1 and made not in chosen][
        : max(0, 2 - sum(m.ck == 1 for m in chosen))
    ]
    return [Choice(made, *DEFAULT_ORDER) for made in chosen]


def case_of(form: str, rows: int, cols: int, depth: int) -> Case:
    """The product as a case of `cupyllm bench`."""
    if form == "wgrad":
        return linear.case("", form, depth, rows, cols)
    out, into = (cols, depth) if form != "dgrad" else (depth, cols)
    case = linear.case("", "dgrad" if form == "dgrad" else "forward", rows, out, into)
    if form != "head":
        return case
    logits = replace(case.outputs[0], dtype="float32")
    return replace(case, outputs=(logits,), torch=lambda torch, inputs, outputs: _torch_head(torch, *inputs, *outputs))


def _torch_head(torch: Any, x: Any, weight: Any, logits: Any) -> list[Way]:
    return [("", lambda: torch.mm(x, weight.t(), out_dtype=torch.float32, out=logits))]


class Chosen(Ours):
    """One choice of ours."""

    def __init__(self, form: str, choice: Choice) -> None:
        super().__init__(label(choice))
        self.form, self.choice = form, choice

    def _work(self, case: Case) -> Record:
        return lambda rec, inputs, outputs: product(rec, self.form, *inputs, *outputs, choice=self.choice)


def num_calls(case: Case) -> int:
    """Of a graph: 20 or more, or 2 ms; 600 us at least."""
    us = max(case.cost.bytes / 4.5e6, case.cost.flops / 8e8) + 2
    return max(math.ceil(600 / us), min(20, math.ceil(2000 / us)))


class Timer:
    """Times choices of one product, each in graphs over the same rotated operands, by the method of `cupyllm bench`."""

    def __init__(self, backend: Any, shapes: Sequence[Shape]) -> None:
        self.backend, self.bench = backend, Bench(backend, [case_of(*shape) for shape in shapes], [])

    def time(self, shape: Shape, choices: Sequence[Choice], peers: Sequence[Contender] = (), near: float = NEAR) -> Row:
        """Median microseconds of each choice and peer; of what a first look finds far from the fastest, what it took
        there."""
        form, case, bench = shape[0], case_of(*shape), self.bench
        sets, calls = bench.operands(case), num_calls(case)
        order, plain = turns(len(sets), calls), {label(choice) for choice in choices if choice.design.ck == 1}
        with ExitStack() as stack:
            batches: dict[str, list[Batch]] = {}
            for contender in (*(Chosen(form, choice) for choice in choices), *peers):
                ready = contender.prepare(bench, case, sets)
                stack.callback(ready.close)
                batches[contender.name] = ready.batches(order)
            us = {name: min(bench.clock.time([own[0]] * 4)[1:]) / own[0].calls for name, own in batches.items()}
            ours = sorted((label(choice) for choice in choices), key=us.__getitem__)
            least = us[ours[0]], min((us[name] for name in ours if name in plain), default=0.0)
            kept = [name for name in ours if us[name] <= near * least[0]][:MOST]
            kept += [name for name in ours if name in plain and us[name] <= near * least[1] and name not in kept][:3]
            kept += [peer.name for peer in peers]
            us |= {n: times.median for n, times in measure({n: batches[n] for n in kept}, bench.clock).items()}
            self.backend.synchronize()
        return dict(zip(("form", "rows", "cols", "depth"), shape, strict=True)) | {"us": us}


def measure_all(seconds: float, rows: Sequence[int], forms: Sequence[str]) -> dict[str, Any]:
    """Every product: its candidates in the default order, then other orders of the fastest."""
    from cupyllm.backend.cuda import CudaBackend

    backend = CudaBackend()
    wanted = [shape for shape in products(rows) if shape[0] in forms]
    chosen = {(s[0], choice.design) for s in wanted for choice in candidates(*s, backend.num_sms)}
    backend.compile([made.kernel(form) for form, made in chosen])
    timer, until = Timer(backend, wanted), time.monotonic() + seconds
    found: list[Row] = []
    for shape in wanted:
        if time.monotonic() > until:
            print(f"out of time: {len(found)} of {len(wanted)} products", file=sys.stderr)
            break
        found.append(measure_product(timer, *shape))
        us = found[-1]["us"]
        print(f"{' '.join(map(str, shape))}: {min(us, key=us.__getitem__)} {min(us.values()):.1f} us", flush=True)
    return {"gpu": backend.device_name, "num_sms": backend.num_sms, "rows": found}


def measure_product(timer: Timer, form: str, rows: int, cols: int, depth: int) -> Row:
    num_sms, shape = timer.backend.num_sms, (form, rows, cols, depth)
    row = timer.time(shape, candidates(*shape, num_sms))
    best = choice_of(min(row["us"], key=row["us"].__getitem__))
    if rows > max(FEW_ROWS) and best.design.tiles(rows, cols) > 1.5 * best.design.clusters(num_sms):
        others = [best, *(Choice(best.design, *order) for order in ORDERS)]
        again = timer.time(shape, others)["us"]
        scale = row["us"][label(best)] / again[label(best)]
        row["us"] |= {name: us * scale for name, us in again.items() if name != label(best)}
    return row


# ---- from times to a table ----


def predicted(row: Row, name: str, num_sms: int, models: Models) -> float:
    model = models[constants_of(row)]
    return predict(design(name), row["form"], row["rows"], row["cols"], row["depth"], num_sms, model)


def constants_of(row: Row) -> str:
    """Which of the table's cost models has this product."""
    return "few" if is_few(row["form"], row["rows"]) else "model"


def in_default_order(row: Row) -> dict[str, float]:
    """Design -> microseconds."""
    return {t.split()[0]: us for t, us in row["us"].items() if choice_of(t) == Choice(design(t.split()[0]), 8, 0)}


def fit(rows: Sequence[Row], num_sms: int, models: Models, which: str, rounds: int = 1000) -> dict[str, float]:
    """Constants that predict the measured times best: random search over the mean of |log(predicted / measured)|."""
    cases = [(r, name, us) for r in rows if constants_of(r) == which for name, us in in_default_order(r).items()]

    def loss(m: dict[str, float]) -> float:
        return sum(abs(math.log(predicted(row, name, num_sms, {which: m}) / us)) for row, name, us in cases) / len(
            cases
        )

    rng, best, low = random.Random(1), dict(models[which]), loss(models[which])
    for index in range(rounds):
        step = 0.3 * (1 - index / rounds) + 0.01
        tried = {key: x * math.exp(rng.gauss(0, step)) if rng.random() < 0.4 else x for key, x in best.items()}
        if (value := loss(tried)) < low:
            best, low = tried, value
    print(f"{which}: off by {100 * low:.1f}% (mean |log|) in {len(cases)} times")
    return {key: float(f"{x:.4g}") for key, x in best.items()}


def prune(rows: Sequence[Row], num_sms: int, models: Models, needed: Sequence[str]) -> list[str]:
    """The fewest designs within MEAN_LOSS and WORST_LOSS of all, dropped one by one, and the `needed` ones. What was
    not measured counts as the model says, scaled to the measured ones, and never as the best. Products whose rows are
    tokens count twice: once among the designs that do not split K."""
    full: list[list[float]] = []  # of every product, every design's time over the fastest's; infinity: it cannot
    for row in rows:
        have = in_default_order(row)
        logs = [math.log(us / predicted(row, name, num_sms, models)) for name, us in have.items()]
        scale, best = 1.02 * math.exp(sum(logs) / len(logs)), min(have.values())
        listed = FEW if is_few(row["form"], row["rows"]) else MANY
        able = [name for name in DESIGNS if name in listed and design(name).can(row["depth"])]
        us = {name: have.get(name, max(predicted(row, name, num_sms, models) * scale, best)) for name in able}
        full.append([us.get(name, math.inf) / best for name in DESIGNS])
        if row["form"] != "wgrad":
            plain = {name: us for name, us in us.items() if design(name).ck == 1}
            full.append([plain.get(name, math.inf) / min(plain.values()) for name in DESIGNS])
    table = np.array(full)

    def losses(columns: Sequence[int]) -> tuple[float, float]:
        x = table[:, columns].min(axis=1)
        return float(np.exp(np.log(x).mean())), float(x.max())

    kept = list(range(len(DESIGNS)))
    while len(kept) > 1:
        spare = [column for column in kept if DESIGNS[column] not in needed]
        rest = min(([k for k in kept if k != column] for column in spare), key=losses, default=None)
        if rest is None or losses(rest)[0] > MEAN_LOSS or losses(rest)[1] > WORST_LOSS:
            break
        kept = rest
    names = [DESIGNS[column] for column in kept]
    print(f"{rows[0]['form']}: {' '.join(names)}: loses {losses(kept)[0] - 1:.2%}, at worst {losses(kept)[1] - 1:.1%}")
    return names


def key_of(row: Row) -> str:
    return f"{row['rows']} {row['cols']} {row['depth']}"


def exceptions(
    rows: Sequence[Row],
    kept: Sequence[str],
    num_sms: int,
    models: Models,
    listed: Mapping[str, list[Any]] | None = None,
) -> dict[str, list[Any]]:
    """Products for which neither `listed` nor the model among `kept` takes what is within TABLE_LOSS of the fastest."""
    found = {}
    for row in rows:
        us = {t: time for t, time in row["us"].items() if t.split()[0] in kept}
        if not us:
            continue  # only others were measured
        default, able = in_default_order(row), [name for name in kept if design(name).can(row["depth"])]
        plain = min((time, name) for name, time in default.items() if name in kept)
        best = min(us, key=us.__getitem__)
        if us[best] > plain[0] / TABLE_LOSS:  # another order must win clearly
            best = f"{plain[1]} 8 0"
        chosen = min(able, key=lambda name: predicted(row, name, num_sms, models))
        before = f"{chosen} 8 0"
        if listed is not None and (entry := listed.get(key_of(row))):
            before = " ".join(map(str, entry))
        if row["us"].get(before, math.inf) > TABLE_LOSS * us[best]:
            choice = choice_of(best)
            found[key_of(row)] = [str(choice.design), choice.group, choice.by_columns]
    return found


def make_table(
    measured: Sequence[dict[str, Any]], old: dict[str, Any], fitted: Sequence[str] = (), wanted: Sequence[str] = ()
) -> dict[str, Any]:
    """From what was measured, and of the rest from the table there was. `fitted`: cost models to fit again; `wanted`:
    designs that are kept where they were measured."""
    num_sms, rows = measured[0]["num_sms"], [row for part in measured for row in part["rows"]]
    assert all(part["num_sms"] == num_sms for part in measured), "GPUs of one width"
    models = {which: old[which] for which in ("model", "few")}
    for which in fitted:
        models[which] = fit(rows, num_sms, models, which)
    made: dict[str, Any] = {"gpu": measured[0]["gpu"], "num_sms": num_sms, **models}
    for form in ("head", "forward", "dgrad", "wgrad"):
        own = [row for row in rows if row["form"] == form]
        done = {key_of(row) for row in own}
        rest = {
            kind: {key: x for key, x in old[form][kind].items() if key not in done} for kind in ("products", "split")
        }
        needed = {entry[0] for kind in rest.values() for entry in kind.values()} | (
            set(HEAD) if form == "head" else set()
        )
        needed |= {
            str(
                choose(*shape, num_sms, split).design
            )  # what the old model takes for many rows, and nobody measured now
            for shape in products(ROWS)
            for split in (False, True)
            if shape[0] == form and " ".join(map(str, shape[1:])) not in done
        }
        needed |= {name for row in own for name in in_default_order(row) if name in wanted}
        kept = prune(own, num_sms, models, sorted(needed)) if own else list(old[form]["designs"])
        plain = [name for name in kept if design(name).ck == 1]
        listed = exceptions(own, plain, num_sms, models)
        split = exceptions(own, kept, num_sms, models, listed)
        made[form] = {"designs": kept, "products": rest["products"] | listed, "split": rest["split"] | split}
        print(f"{form}: {len(listed)} and {len(split)} (split) of {len(own)} products in the table")
    return made


def render(made: dict[str, Any]) -> str:
    """JSON, a product a line."""
    parts = []
    for key, value in made.items():
        if isinstance(value, dict) and "products" in value:
            body = f'  "designs": {json.dumps(value["designs"])}'
            for kind in ("products", "split"):
                lines = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in value[kind].items()]
                body += f',\n  "{kind}": ' + ("{\n" + ",\n".join(lines) + "\n  }" if lines else "{}")
            parts.append(f' "{key}": {{\n{body}\n }}')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", type=Path, help="write measured times here")
    what.add_argument("--table", type=Path, nargs="+", help="make the table from these times")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rows", type=int, nargs="+", default=[*FEW_ROWS, *ROWS], help="of the products to measure")
    parser.add_argument("--forms", nargs="+", default=FORMS_MEASURED, choices=FORMS_MEASURED)
    parser.add_argument("--fit", nargs="+", default=(), choices=("few", "model"), help="cost models to fit again")
    parser.add_argument("--keep", nargs="+", default=(), help="designs to keep, although others are nearly as fast")
    args = parser.parse_args(argv)
    if args.measure:
        args.measure.write_text(json.dumps(measure_all(args.seconds, args.rows, args.forms)), encoding="utf-8")
        return 0
    old = json.loads(TABLE.read_text(encoding="utf-8"))
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in args.table]
    TABLE.write_text(render(make_table(measured, old, args.fit, args.keep)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
