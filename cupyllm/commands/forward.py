"""`cupyllm forward`: one pass, streamed or resident; loss, next tokens, speed and memory."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import numpy as np

from cupyllm.commands import inputs, session
from cupyllm.commands.output import Output, gigabytes, progress
from cupyllm.engine import Engine, ForwardResult
from cupyllm.hostmem import PeakSampler
from cupyllm.text import Codec

NUM_TOP_TOKENS = 5
NONFINITE = "note: NaN or infinity in the loss or the logits; the weights hold such values or lead to them"


def run(
    *,
    model: str | None,
    size: str | None,
    layers: int | None,
    backend: str,
    dtype: str | None,
    prompt: str | None,
    prompt_file: str | None,
    ids: str | None,
    stream: bool | None,
    check_lossless: bool,
    logits_out: str | None,
    variants: tuple[str, ...],
    batch_invariant: bool,
    seed: int | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Exit status: 1 when --check-lossless finds a bit that differs, else 0."""
    inputs.exclusive(prompt=prompt, prompt_file=prompt_file, ids=ids)
    inputs.exclusive(resident=stream is False, check_lossless=check_lossless)
    if logits_out is not None:
        inputs.check_writable(logits_out, "--logits-out")
        inputs.check_not_read(logits_out, "--logits-out", [prompt_file, ids])
    forced = session.parse_variants(variants)
    output = Output(as_json)
    with PeakSampler() as memory, session.open_runtime(output, backend, dtype, variants, batch_invariant) as runtime:
        layers = session.default_layers(backend, model, size, layers)
        with session.open_weights(output, model=model, size=size, layers=layers, seed=seed, yes=yes) as weights:
            if logits_out is not None:
                inputs.check_not_read(logits_out, "--logits-out", weights.files())
            batch, origin = inputs.token_ids(weights.config, weights.codec, prompt, prompt_file, ids)
            output.note(f"input: {batch.size} tokens in {batch.shape[0]} row(s), {origin}")
            chosen = session.choose_dtype(dtype, runtime, weights.checkpoint)
            output.begin()
            with (
                closing(
                    session.make_engine(weights.checkpoint, runtime, chosen, forced, weights.codec, batch_invariant)
                ) as engine,
                np.errstate(over="ignore", invalid="ignore", divide="ignore"),  # told as `nonfinite`
            ):
                wanted = logits_out is not None or check_lossless
                result = _pass(engine, batch, "resident" if stream is False else "stream", wanted)
                lossless = _same_bits(engine, batch, result) if check_lossless else None
                nonfinite = not _finite(result)
                if nonfinite:
                    output.note(NONFINITE)
                device_bytes, allocator_bytes = session.device_peaks(runtime)
                values = {
                    "backend": engine.backend_name,
                    "device": engine.device_name,
                    "dtype": engine.dtype,
                    "layers": weights.config.num_hidden_layers,
                    "tokens": int(batch.size),
                    "rows": int(batch.shape[0]),
                    "num_targets": result.num_targets,
                    "loss": result.loss,
                    "nonfinite": nonfinite,
                    "random_weights": weights.random,
                    "ln_vocab": float(np.log(weights.config.vocab_size)),
                    "top_tokens": top_tokens(result.last_logits[0], weights.codec),
                    "seconds": result.seconds,
                    "tokens_per_s": batch.size / result.seconds,
                    "mode": "resident" if stream is False else "stream",
                    "streamed_bytes": result.streamed_bytes,
                    "stream_gb_per_s": result.streamed_bytes / result.seconds / 1e9,
                    "transfer_seconds": result.transfer_seconds,
                    "peak_device_bytes": device_bytes,
                    "peak_allocator_bytes": allocator_bytes,
                    "peak_host_bytes": memory.peak().anon,
                    "peak_host_file_bytes": memory.peak().file,
                    "lossless": lossless,
                }
    if logits_out is not None:
        assert result.logits is not None
        inputs.save_npy(logits_out, result.logits.astype(np.float32, copy=False))
    output.result(values, _lines(values, logits_out))
    return 1 if lossless is False else 0


def top_tokens(logits: np.ndarray, codec: Codec, count: int = NUM_TOP_TOKENS) -> list[dict[str, Any]]:
    """The likeliest next tokens of logits [V]: id, text, logit, and probability under the whole vocabulary's softmax.

    Equal logits are ordered by id; ids that only pad the vocabulary are not offered.
    """
    values = logits.astype(np.float64)
    exponentials = np.exp(values - values.max())
    probabilities = exponentials / exponentials.sum()
    best = np.argsort(-values[: codec.valid_vocab], kind="stable")[:count]
    return [
        {"id": int(i), "text": codec.decode(int(i)), "probability": float(probabilities[i]), "logit": float(values[i])}
        for i in best
    ]


def _finite(result: ForwardResult) -> bool:
    """Of what was computed for the caller: the loss where there are targets, the logits that were wanted."""
    logits = [result.last_logits, *([] if result.logits is None else [result.logits])]
    loss = result.loss if result.num_targets and result.loss is not None else 0.0
    return math.isfinite(loss) and all(np.isfinite(values).all() for values in logits)


def _pass(engine: Engine, batch: np.ndarray, mode: Any, want_logits: bool) -> ForwardResult:
    with progress(f"forward ({mode})") as on_layer:
        return engine.forward(batch, labels=batch, mode=mode, want_logits=want_logits, on_layer=on_layer)


def _same_bits(engine: Engine, batch: np.ndarray, streamed: ForwardResult) -> bool:
    """Whether the resident pass gives every bit of the streamed pass's logits."""
    resident = _pass(engine, batch, "resident", True)
    assert streamed.logits is not None and resident.logits is not None
    return bool(np.array_equal(streamed.logits.view(np.uint8), resident.logits.view(np.uint8)))


def _lines(values: dict[str, Any], logits_out: str | None) -> list[str]:
    tokens = "  ".join(f"{t['text']!r} {t['probability']:.4f}" for t in values["top_tokens"])
    loss = f"{values['loss']:.6f}" if values["num_targets"] else "none (a row of one token has no next one)"
    lines = [
        f"loss: {loss}   (ln V = {values['ln_vocab']:.4f})",
        f"next: {tokens}",
        f"time: {values['seconds']:.3f} s, {values['tokens_per_s']:.1f} tokens/s",
        f"device: {values['device']}, {values['dtype']}",
        f"weights: {gigabytes(values['streamed_bytes'])} read ({values['mode']}), {values['stream_gb_per_s']:.3f} GB/s",
        f"peak memory: device {gigabytes(values['peak_device_bytes'])} "
        f"(ours {gigabytes(values['peak_allocator_bytes'])}), "
        f"host {gigabytes(values['peak_host_bytes'])} + {gigabytes(values['peak_host_file_bytes'])} of mapped files",
    ]
    if values["lossless"] is not None:
        verdict = "yes, every bit of streamed = resident" if values["lossless"] else "NO, streamed and resident differ"
        lines.append(f"lossless: {verdict}")
    if logits_out is not None:
        lines.append(f"logits: {logits_out}")
    return lines
