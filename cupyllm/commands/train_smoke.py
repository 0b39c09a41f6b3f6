"""`cupyllm train-smoke`: a few AdamW steps on one fixed batch; the loss must fall at every one of them."""

from __future__ import annotations

import time
from contextlib import closing

from cupyllm.commands import inputs, session
from cupyllm.commands.output import Output, progress
from cupyllm.errors import InputError
from cupyllm.hostmem import PeakSampler, available_bytes
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
    tokens: int,
    steps: int,
    lr: float | None,
    clip: float,
    backend: str,
    dtype: str | None,
    variants: tuple[str, ...],
    seed: int,
    yes: bool,
    as_json: bool,
) -> int:
    """1 unless each of the steps + 1 losses is below the one before, else 0."""
    forced = session.parse_variants(variants)
    output = Output(as_json)
    began = time.perf_counter()
    with PeakSampler() as memory, session.open_runtime(output, backend, dtype, variants) as runtime:
        with session.open_weights(output, model=model, size=size, layers=layers, seed=seed, yes=yes) as weights:
            limit = inputs.max_positions(weights.config)
            if tokens > limit:
                raise InputError(f"--tokens is {tokens}, the model has {limit} positions (max_position_embeddings)")
            batch = builtin_ids(weights.codec, tokens)[None]
            output.note(f"input: {tokens} tokens of built-in text, {weights.codec.description}")
            chosen = session.choose_dtype(dtype, runtime, weights.checkpoint)
            losses, grad_norms, clip_coefs, skipped = [], [], [], []
            with closing(
                Trainer(
                    lambda source: session.make_engine(source, runtime, chosen, forced),
                    weights.checkpoint,
                    dtype=chosen,
                    lr=LR_TIMES_HIDDEN / weights.config.hidden_size if lr is None else lr,
                    clip=clip,
                    available_bytes=available_bytes(),
                )
            ) as trainer:
                with progress("training, steps") as on_step:
                    try:
                        for step in range(steps):
                            result = trainer.step(batch, batch)
                            losses.append(result.loss)
                            grad_norms.append(result.grad_norm)
                            clip_coefs.append(result.clip_coef)
                            skipped += [f"step {step}: {result.skipped}"] if result.skipped else []
                            on_step(step + 1, steps)
                        losses.append(trainer.evaluate(batch, batch))
                    except TrainingStopped as error:
                        skipped.append(f"stopped: {error}")
                engine = trainer.engine
                device_bytes, allocator_bytes = session.device_peaks(runtime)
            ok = len(losses) == steps + 1 and all(after < before for before, after in zip(losses, losses[1:]))
            values = {
                "ok": ok,
                "backend": engine.backend_name,
                "device": engine.device_name,
                "dtype": engine.dtype,
                "layers": weights.config.num_hidden_layers,
                "tokens": tokens,
                "steps": steps,
                "lr": trainer.lr,
                "clip": clip,
                "losses": losses,
                "grad_norms": grad_norms,
                "clip_coefs": clip_coefs,
                "skipped": skipped,
                "random_weights": weights.random,
                "seconds": time.perf_counter() - began,
                "peak_device_bytes": device_bytes,
                "peak_allocator_bytes": allocator_bytes,
                "peak_host_bytes": memory.peak().anon,
                "peak_host_file_bytes": memory.peak().file,
            }
    lines = [
        f"step {i}: loss {loss:.6f}" + (f"  norm {grad_norms[i]:.4f}  clip {clip_coefs[i]:.4f}" if i < len(grad_norms) else "")
        for i, loss in enumerate(losses)
    ]
    lines += [f"skipped: {line}" for line in skipped]
    lines.append(f"{'ok: every loss is below the one before' if ok else 'FAILED: a loss is not below the one before'}")
    output.result(values, [*lines, f"time: {values['seconds']:.1f} s on {engine.device_name}, {engine.dtype}"])
    return 0 if ok else 1
