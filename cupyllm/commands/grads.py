"""`cupyllm grads`: the gradient of the mean loss for every parameter, written as it leaves the backward pass."""

from __future__ import annotations

import time
from contextlib import closing

import numpy as np

from cupyllm.commands import inputs, session
from cupyllm.commands.output import Output, gigabytes, progress
from cupyllm.errors import InputError
from cupyllm.files import require_space, show_path
from cupyllm.stream.safetensors import SafetensorsWriter

NONFINITE = "note: NaN or infinity in the gradients; the weights hold such values or lead to them"


def run(
    *,
    model: str,
    ids: str,
    labels: str | None,
    out: str,
    layers: int | None,
    backend: str,
    dtype: str | None,
    variants: tuple[str, ...],
    as_json: bool,
) -> int:
    """Always 0: what can go wrong raises."""
    inputs.check_writable(out, "--out")
    inputs.check_not_read(out, "--out", [ids, labels])
    forced = session.parse_variants(variants)
    output = Output(as_json)
    with session.open_runtime(output, backend, dtype, variants) as runtime:
        with session.open_weights(output, model=model, size=None, layers=layers) as weights:
            source, config = weights.checkpoint, weights.config
            inputs.check_not_read(out, "--out", weights.files())
            batch, _ = inputs.token_ids(config, weights.codec, None, None, ids)
            targets = batch if labels is None else inputs.load_ids(labels, "--labels", config.vocab_size, labels=True)
            if targets.shape != batch.shape:
                raise InputError(f"--labels has shape {list(targets.shape)}, expected {list(batch.shape)} as --ids")
            specs = {name: (np.dtype(np.float32), source.spec(name)[1]) for name in source.names()}
            num_bytes = sum(4 * int(np.prod(shape)) for _, shape in specs.values())
            require_space(inputs.parent(out), num_bytes)
            chosen = session.choose_dtype(dtype, runtime, source)
            output.begin()
            finite = True
            began = time.perf_counter()
            with (
                closing(session.make_engine(source, runtime, chosen, forced)) as engine,
                SafetensorsWriter(out, specs) as writer,
                progress("gradients") as on_layer,
            ):

                def keep(name: str, gradient: np.ndarray) -> None:
                    nonlocal finite
                    finite = finite and bool(np.isfinite(gradient).all())
                    writer.write(name, gradient)

                with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # told as `nonfinite`
                    result = engine.loss_and_grads(batch, targets, keep, on_layer=on_layer)
            if not finite:
                output.note(NONFINITE)
            values = {
                "backend": engine.backend_name,
                "device": engine.device_name,
                "dtype": engine.dtype,
                "layers": config.num_hidden_layers,
                "tokens": int(batch.size),
                "num_targets": result.num_targets,
                "loss": result.loss,
                "nonfinite": not finite,
                "tensors": len(specs),
                "bytes": num_bytes,
                "seconds": time.perf_counter() - began,
                "out": show_path(out),
            }
    output.result(
        values,
        [
            f"loss: {result.loss:.6f} over {result.num_targets} targets",
            f"gradients: {len(specs)} tensors, {gigabytes(num_bytes)}, {show_path(out)} ({values['seconds']:.2f} s)",
        ],
    )
    return 0
