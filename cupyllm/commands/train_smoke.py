"""`cupyllm train-smoke`: a few AdamW steps on one fixed batch; the loss must fall at every one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from typing import Any

import numpy as np

from cupyllm.commands import inputs, session
from cupyllm.commands.output import Output, gigabytes, progress
from cupyllm.config import ModelConfig
from cupyllm.engine import WeightSource
from cupyllm.errors import InputError, OutOfMemory
from cupyllm.hostmem import PeakSampler, available_bytes
from cupyllm.runtime import Runtime
from cupyllm.synth import plan_bytes
from cupyllm.text import builtin_ids
from cupyllm.train.trainer import Trainer, TrainingStopped

LR_TIMES_HIDDEN = 0.03
"""The default rate is this over the hidden size. AdamW's first updates have size lr whatever the gradient is, so a
product's output moves by up to lr * hidden: the same relative step, and a falling loss, at every width."""


def run(
    *,
    model: str | None,
    size: str | None,
    layers: int | None,
    tokens: int | None,
    steps: int | None,
    lr: float | None,
    clip: float,
    backend: str,
    dtype: str | None,
    variants: tuple[str, ...],
    seed: int | None,
    yes: bool,
    as_json: bool,
) -> int:
    """1 unless each of the steps + 1 losses is below the one before, else 0."""
    forced = session.parse_variants(variants)
    simulated = backend == "sim"
    tokens = tokens or (32 if simulated else 256)
    steps = steps or (3 if simulated else 10)
    layers = session.default_layers(backend, model, size, layers)
    output = Output(as_json)
    began = time.perf_counter()
    with PeakSampler() as memory, session.open_runtime(output, backend, dtype, variants) as runtime:

        def check(config: ModelConfig) -> None:
            limit = inputs.max_positions(config)
            if tokens > limit:
                raise InputError(f"--tokens is {tokens}, the model has {limit} positions (max_position_embeddings)")
            _check_memory(config)

        with session.open_weights(
            output, model=model, size=size, layers=layers, seed=seed, yes=yes, check=check
        ) as weights:
            batch = builtin_ids(weights.codec, tokens)[None]
            output.note(f"input: {tokens} tokens of built-in text, {weights.codec.description}")
            chosen = session.choose_dtype(dtype, runtime, weights.checkpoint)
            values = train(
                weights.checkpoint,
                runtime,
                chosen,
                batch,
                steps=steps,
                lr=lr,
                clip=clip,
                forced=forced,
                begin=output.begin,
            )
            device_bytes, allocator_bytes = session.device_peaks(runtime)
            values.update(
                layers=weights.config.num_hidden_layers,
                random_weights=weights.random,
                seconds=time.perf_counter() - began,
                peak_device_bytes=device_bytes,
                peak_allocator_bytes=allocator_bytes,
                peak_host_bytes=memory.peak().anon,
                peak_host_file_bytes=memory.peak().file,
            )
    output.result(values, _lines(values))
    return 0 if values["ok"] else 1


def train(
    source: WeightSource,
    runtime: Runtime,
    dtype: str,
    batch: np.ndarray,
    *,
    steps: int,
    lr: float | None = None,
    clip: float = 1.0,
    forced: dict[str, str] | None = None,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """`steps` updates on ids [B,T]; losses before each and after the last, norms and clip coefficients.

    `begin` is called once the training state is known to fit. Raises OutOfMemory when it does not.

    `ok` unless a loss is not below the one before. A run that stops itself on non-finite gradients is not ok.
    """
    losses: list[float] = []
    norms: list[float] = []
    coefficients: list[float] = []
    skipped: list[str] = []
    rate = LR_TIMES_HIDDEN / source.config.hidden_size if lr is None else lr
    trainer = Trainer(
        lambda state: session.make_engine(state, runtime, dtype, forced),
        source,
        dtype=dtype,
        lr=rate,
        clip=clip,
        available_bytes=available_bytes(),
    )
    begin()
    with closing(trainer), progress("training, steps") as on_step, np.errstate(over="ignore", invalid="ignore"):
        try:
            for step in range(steps):
                result = trainer.step(batch, batch)
                losses.append(result.loss)
                norms.append(result.grad_norm)
                coefficients.append(result.clip_coef)
                skipped += [f"step {step}: {result.skipped}"] if result.skipped else []
                on_step(step + 1, steps)
            losses.append(trainer.evaluate(batch, batch))
        except TrainingStopped as error:
            skipped.append(f"stopped: {error}")
        engine = trainer.engine
    return {
        "ok": len(losses) == steps + 1 and all(after < before for before, after in pairwise(losses)),
        "backend": engine.backend_name,
        "device": engine.device_name,
        "dtype": engine.dtype,
        "tokens": int(batch.size),
        "steps": steps,
        "lr": rate,
        "clip": clip,
        "losses": losses,
        "grad_norms": norms,
        "clip_coefs": coefficients,
        "skipped": skipped,
    }


def _check_memory(config: ModelConfig) -> None:
    """Raise OutOfMemory when float32 masters, moments and gradients, the least there can be, have no room."""
    needed, available = 4 * plan_bytes(config, "float32"), available_bytes()
    if available is not None and needed > available:
        raise OutOfMemory(
            f"training state: needs at least {gigabytes(needed)} of host memory (16 bytes a parameter), "
            f"{gigabytes(available)} are available; train fewer layers (--layers) or a smaller model"
        )


def _lines(values: dict[str, Any]) -> list[str]:
    norms, coefficients = values["grad_norms"], values["clip_coefs"]
    lines = []
    for step, loss in enumerate(values["losses"]):
        update = f"  norm {norms[step]:.4f}  clip {coefficients[step]:.4f}" if step < len(norms) else ""
        lines.append(f"step {step}: loss {loss:.6f}{update}")
    lines += [f"skipped: {line}" for line in values["skipped"]]
    lines.append("ok: every loss is below the one before" if values["ok"] else "FAILED: a step did not lower the loss")
    return [*lines, f"time: {values['seconds']:.1f} s on {values['device']}, {values['dtype']}, lr {values['lr']:g}"]
