"""`cupyllm import`: a GGUF file to a Hugging Face checkpoint directory."""

from __future__ import annotations

import time

from cupyllm.commands.output import Output, gigabytes, progress
from cupyllm.convert.gguf_import import import_gguf
from cupyllm.files import show_path
from cupyllm.synth import plan_bytes


def run(*, file: str, out: str, dtype: str | None, as_json: bool) -> int:
    """Always 0: what can go wrong raises, and leaves nothing at `out`."""
    output = Output(as_json)
    began = time.perf_counter()
    with progress("bytes") as on_bytes:
        done = import_gguf(file, out, dtype, on_bytes)
    seconds = time.perf_counter() - began
    config = done.config
    for note in done.notes:
        output.note(f"note: {note}")
    values = {
        "file": show_path(file),
        "out": show_path(out),
        "family": config.family,
        "layers": config.num_hidden_layers,
        "dtype": config.dtype,
        "types": done.types,
        "parameter_bytes": plan_bytes(config),
        "tokenizer": done.tokenizer,
        "chat_template": done.has_chat_template,
        "seconds": seconds,
    }
    types = ", ".join(f"{count} {name}" for name, count in done.types.items())
    chat = "with a chat template" if done.has_chat_template else "no chat template"
    output.result(
        values,
        [
            f"{show_path(out)}: {config.family}, {config.num_hidden_layers} layers, {gigabytes(plan_bytes(config))} of "
            f"{config.dtype} from {types} tensors",
            f"tokenizer: {done.tokenizer}, {chat}" if done.tokenizer else "tokenizer: none",
        ],
    )
    return 0
