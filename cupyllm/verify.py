"""All proofs on this machine, as one report: what `cupyllm verify` runs.

Each proof returns whether it holds, one line for a reader and the numbers behind it. An error inside a proof, whatever
its kind, is a proof that does not hold, with the error as its line: the others still run, and the report is written.
What no proof can do without, a cache that can be written, is looked for before the first of them.
Models are synthetic and small, so that everything takes minutes on two CPU cores, and on the simulator they see fewer
tokens and steps; `--model` adds the statistics of every weight of a real checkpoint and one pass over text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupyllm import check, doctor
from cupyllm.cache import cache_subdir, cached_synthetic, synthetic_entry
from cupyllm.commands import grad_check, train_smoke
from cupyllm.commands.output import plain
from cupyllm.commands.session import make_engine
from cupyllm.config import default_proportions
from cupyllm.engine import Engine, WeightSource
from cupyllm.errors import CupyllmError
from cupyllm.files import make_directory, output_file, show_path, storage_error, temporary_beside
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.runtime import Runtime
from cupyllm.stream.pieces import PieceReader, widen_into
from cupyllm.text import builtin_ids, open_codec

LAYERS, SMOKE_LAYERS = 3, 4


@dataclass(frozen=True)
class Amount:
    """How much of a proof is run: tokens of a pass, repetitions, and tokens and steps of training."""

    tokens: int
    repeats: int
    smoke_tokens: int
    smoke_steps: int


FULL, SIMULATED = Amount(96, 20, 256, 10), Amount(16, 2, 16, 3)


@dataclass
class Proof:
    """One line of the report, and the numbers behind it."""

    name: str
    ok: bool
    line: str
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Report:
    """Everything that goes into verify.json and verify.md."""

    machine: dict[str, Any]
    commit: str | None
    backend: str
    device: str
    when: str
    proofs: list[Proof] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(proof.ok for proof in self.proofs)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "when": self.when,
            "commit": self.commit,
            "backend": self.backend,
            "device": self.device,
            "errors": [f"{p.name}: {p.line}" for p in self.proofs if not p.ok],
            "seconds": sum(p.seconds for p in self.proofs),
            "proofs": [
                {"name": p.name, "ok": p.ok, "line": p.line, "seconds": p.seconds, "details": p.details}
                for p in self.proofs
            ],
            "machine": self.machine,
        }

    def to_markdown(self) -> str:
        machine = self.machine
        gpus = ", ".join(f"{g['name']} (sm_{g['capability']})" for g in machine["gpus"]) or "none"
        packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
        head = [
            f"# cupyllm verify: {'all proofs hold' if self.ok else 'SOME PROOFS FAIL'}",
            "",
            f"- when: {self.when}",
            f"- cupyllm {machine['cupyllm']}, commit {self.commit or 'unknown (not a checkout)'}",
            f"- backend: {self.backend} on {self.device}",
            f"- machine: {machine['platform']}, Python {machine['python']}, {machine['cpu_cores']} cores",
            f"- driver: {machine['driver'] or 'none'}; GPUs: {gpus}; NVRTC {machine['nvrtc'] or 'none'}",
            f"- packages: {packages}",
            "",
            "| proof | holds | seconds | |",
            "|---|---|---|---|",
        ]
        rows = [f"| {p.name} | {'yes' if p.ok else 'NO'} | {p.seconds:.1f} | {_cell(p.line)} |" for p in self.proofs]
        tables = [_statistics_table(p) for p in self.proofs if "tensors" in p.details and p.name == "weights"]
        return "\n".join([*head, *rows, *tables]) + "\n"


def verify(checkpoint: Checkpoint | None, runtime: Runtime, say: Callable[[str], None]) -> Report:
    """Run every proof, those on `checkpoint` too where there is one; `say` gets one line for each as it ends.

    Raises StorageError, before the first proof, when models are missing from a cache that cannot be written.
    """
    check_cache()
    machine = doctor.examine()
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    report = Report(machine, commit(), runtime.name, _device_name(runtime), when)
    dtypes = ["float32"] if runtime.name == "reference" else ["float32", "bfloat16"]
    for name, proof in _plan(checkpoint, runtime, machine, dtypes):
        began = time.perf_counter()
        try:
            done = proof()
        except CupyllmError as error:
            done = Proof(name, False, _one_line(error))
        except Exception as error:  # a bug, in the proof or in what it proves: a report without it would hide the rest
            done = Proof(name, False, f"{type(error).__name__}: {_one_line(error)}", {"traceback": _traceback(error)})
        done.name, done.seconds = name, time.perf_counter() - began
        report.proofs.append(done)
        say(f"{'ok  ' if done.ok else 'FAIL'} {name}: {done.line} ({done.seconds:.1f} s)")
    return report


def check_cache() -> None:
    """Raise StorageError when the proofs' models are not in the cache and cannot be put there."""
    if not all(synthetic_entry(default_proportions(layers), 0).is_dir() for layers in (LAYERS, SMOKE_LAYERS)):
        cache_subdir("synthetic")


def write(report: Report, out: str) -> tuple[Path, Path]:
    """verify.json and verify.md in the directory `out` (made when absent). Raises StorageError."""
    directory = make_directory(Path(out))
    texts = {"verify.json": json.dumps(plain(report.to_json()), indent=1) + "\n", "verify.md": report.to_markdown()}
    for name, text in texts.items():
        target = output_file(directory / name)
        temporary = temporary_beside(target)
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        except OSError as error:
            raise storage_error(directory / name, error) from error
        finally:
            temporary.unlink(missing_ok=True)
    return directory / "verify.json", directory / "verify.md"


def commit() -> str | None:
    """The checkout's commit, "-dirty" when files differ from it; None for an installed package or without git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _plan(
    checkpoint: Checkpoint | None, runtime: Runtime, machine: dict[str, Any], dtypes: list[str]
) -> Iterator[tuple[str, Callable[[], Proof]]]:
    yield "installation", partial(_installation, machine)
    yield "kernel variants", _variants
    for dtype in dtypes:
        suffix = "" if len(dtypes) == 1 else f" ({dtype})"
        yield f"gradients of every op and a layer{suffix}", partial(_gradients, runtime, dtype)
        yield f"gradients of a whole model{suffix}", partial(_model_gradients, runtime, dtype)
        yield f"streamed = resident{suffix}", partial(_lossless, runtime, dtype)
        yield f"repeatable{suffix}", partial(_repeatable, runtime, dtype)
        yield f"training{suffix}", partial(_training, runtime, dtype)
    if checkpoint is not None:
        yield "weights", partial(_weights, checkpoint)
        yield "forward", partial(_forward, checkpoint, runtime)


def _installation(machine: dict[str, Any]) -> Proof:
    problems = [f"{p['what']}; {p['remedy']}" for p in machine["problems"]]
    return Proof("", not problems, " / ".join(problems) or "nothing is missing", {"problems": problems})


def _variants() -> Proof:
    table = doctor.variants()
    return Proof("", True, f"{len(table)} variants of {len({v['op'] for v in table})} ops", {"variants": table})


def _gradients(runtime: Runtime, dtype: str) -> Proof:
    report, _ = grad_check.examine(runtime, None, True, None, dtype)
    summary = grad_check.summary(report)
    layer = summary["layer"]
    good = sum(op["ok"] for op in summary["ops"].values())
    line = (
        f"{good} of {len(summary['ops'])} ops; layer: {layer['passed']} of {layer['tensors']} tensors "
        f"by {layer['check']}, largest relative error {max(layer['errors'].values()):.2e}; parity {summary['parity']}"
    )
    return Proof("", report.ok, line if report.ok else f"FAILED: {', '.join(report.failed)}; {line}", summary)


def _model_gradients(runtime: Runtime, dtype: str) -> Proof:
    """Loss and every gradient against the reference in float64 on the same weights.

    Errors of a chain of layers add up at worst, so the limit is a layer's (check.py) times the layers plus two, for
    the embedding and the head.
    """
    limit = check.LAYER_LIMIT[dtype] * (LAYERS + 2)
    with _tiny() as source:
        ids = _ids(source, runtime)
        want, want_loss = _collect(source, Runtime.open("reference"), "float64", ids)
        got, got_loss = _collect(source, runtime, dtype, ids)
    errors = {name: check.relative_error(got[name], want[name]) for name in want}
    worst = max(errors, key=lambda name: errors[name])
    loss_error = abs(got_loss - want_loss) / want_loss
    ok = set(got) == set(want) and errors[worst] < limit and loss_error < limit
    line = f"{len(errors)} tensors against float64, largest relative error {errors[worst]:.2e} in {worst} ({limit:.1e})"
    return Proof("", ok, line, {"errors": errors, "loss_error": loss_error, "limit": limit})


def _lossless(runtime: Runtime, dtype: str) -> Proof:
    with _tiny() as source, closing(make_engine(source, runtime, dtype)) as engine:
        ids = _ids(source, runtime)
        streamed, resident = (engine.forward(ids, labels=ids, mode=m, want_logits=True) for m in ("stream", "resident"))
    assert streamed.logits is not None and resident.logits is not None
    ok = streamed.logits.tobytes() == resident.logits.tobytes() and streamed.loss == resident.loss
    return Proof("", ok, f"{'every bit' if ok else 'NOT every bit'} of {streamed.logits.size} logits and of the loss")


def _repeatable(runtime: Runtime, dtype: str) -> Proof:
    with _tiny() as source, closing(make_engine(source, runtime, dtype)) as engine:
        ids, repeats = _ids(source, runtime), _amount(runtime).repeats
        digests = {_digest(engine, ids) for _ in range(repeats)}
    line = f"{repeats} forwards and backwards gave {len(digests)} different result(s)"
    return Proof("", len(digests) == 1, line, {"sha256": sorted(digests)})


def _training(runtime: Runtime, dtype: str) -> Proof:
    amount = _amount(runtime)
    with Checkpoint.open(cached_synthetic(default_proportions(SMOKE_LAYERS), 0)) as source:
        batch = builtin_ids(open_codec(None, source.config.vocab_size), amount.smoke_tokens)[None]
        result = train_smoke.train(source, runtime, dtype, batch, steps=amount.smoke_steps)
    line = f"loss {result['losses'][0]:.4f} to {result['losses'][-1]:.4f} in {amount.smoke_steps} steps"
    line += ", lower at every step" if result["ok"] else ", NOT lower at every step"
    return Proof("", result["ok"], line, result)


def _weights(checkpoint: Checkpoint) -> Proof:
    """min, max, standard deviation and non-finite count of every parameter, one piece in memory per thread."""
    names = checkpoint.names()
    checkpoint.check_unchanged()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(partial(tensor_statistics, checkpoint), names)
        statistics = dict(zip(names, found, strict=True))
    checkpoint.check_unchanged()
    bad = {name: s["nonfinite"] for name, s in statistics.items() if s["nonfinite"]}
    total = sum(s["elements"] for s in statistics.values())
    line = f"{len(names)} tensors, {total} values of {show_path(checkpoint.path)}: "
    line += f"NaN or infinite values in {', '.join(list(bad)[:3])}" if bad else "all finite"
    return Proof("", not bad, line, {"tensors": statistics})


def tensor_statistics(source: WeightSource, name: str) -> dict[str, Any]:
    """elements, nonfinite, and of the finite values min, max, absmax, mean, std (float64 sums)."""
    dtype, shape = source.spec(name)
    elements = math.prod(shape)
    low, high, total, squares, bad = math.inf, -math.inf, 0.0, 0.0, 0
    for piece in PieceReader(source).pieces(name):
        values = np.empty(piece.size, np.float32)
        widen_into(piece, values)
        finite = np.isfinite(values)
        if not finite.all():
            bad += int(values.size - finite.sum())
            values = values[finite]
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            total += float(values.sum(dtype=np.float64))
            squares += float(np.square(values, dtype=np.float64).sum())
    count = elements - bad
    mean = total / count if count else math.nan
    return {
        "dtype": dtype,
        "shape": list(shape),
        "elements": elements,
        "nonfinite": bad,
        "min": low if count else math.nan,
        "max": high if count else math.nan,
        "absmax": max(abs(low), abs(high)) if count else math.nan,
        "mean": mean,
        "std": math.sqrt(max(0.0, squares / count - mean * mean)) if count else math.nan,
    }


def _forward(checkpoint: Checkpoint, runtime: Runtime) -> Proof:
    codec = open_codec(checkpoint.tokenizer_file, checkpoint.config.vocab_size)
    ids = builtin_ids(codec, min(_amount(runtime).tokens, checkpoint.config.max_position_embeddings))[None]
    with closing(make_engine(checkpoint, runtime, "float32", codec=codec)) as engine:
        result = engine.forward(ids, labels=ids)
    assert result.loss is not None
    ok = math.isfinite(result.loss) and bool(np.isfinite(result.last_logits).all())
    uniform = math.log(checkpoint.config.vocab_size)
    line = f"loss {result.loss:.4f} over {result.num_targets} targets (ln V = {uniform:.4f})"
    return Proof("", ok, line, {"loss": result.loss, "seconds": result.seconds, "codec": codec.description})


def _tiny() -> Checkpoint:
    return Checkpoint.open(cached_synthetic(default_proportions(LAYERS), 0))


def _amount(runtime: Runtime) -> Amount:
    return SIMULATED if runtime.name == "sim" else FULL


def _ids(source: WeightSource, runtime: Runtime) -> np.ndarray:
    return builtin_ids(open_codec(None, source.config.vocab_size), _amount(runtime).tokens)[None]


def _collect(
    source: WeightSource, runtime: Runtime, dtype: str, ids: np.ndarray
) -> tuple[dict[str, np.ndarray], float]:
    gradients: dict[str, np.ndarray] = {}
    with closing(make_engine(source, runtime, dtype)) as engine:
        loss = engine.loss_and_grads(ids, ids, lambda name, grad: gradients.update({name: np.array(grad)})).loss
    return gradients, loss


def _digest(engine: Engine, ids: np.ndarray) -> str:
    """SHA-256 of the logits, the loss and every gradient of one forward and one backward."""
    digest = hashlib.sha256()
    result = engine.forward(ids, labels=ids, want_logits=True)
    assert result.logits is not None
    digest.update(result.logits.tobytes())
    gradients: dict[str, bytes] = {}
    loss = engine.loss_and_grads(ids, ids, lambda name, grad: gradients.update({name: grad.tobytes()})).loss
    digest.update(repr((result.loss, loss)).encode())
    for name in sorted(gradients):
        digest.update(gradients[name])
    return digest.hexdigest()


def _device_name(runtime: Runtime) -> str:
    return "CPU (NumPy)" if runtime.backend is None else runtime.backend.device_name


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"


def _traceback(error: Exception) -> list[str]:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _statistics_table(proof: Proof) -> str:
    rows = [
        f"| {name} | {s['dtype']} {s['shape']} | {s['nonfinite']} | {s['min']:.4g} | {s['max']:.4g} | {s['std']:.4g} |"
        for name, s in proof.details["tensors"].items()
    ]
    head = ["", "## Weights", "", "| tensor | stored | not finite | min | max | std |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows])
