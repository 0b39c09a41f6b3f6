"""`cupyllm synth`: a seeded random checkpoint of a published or given shape, on disk in the Hugging Face layout."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from cupyllm.commands import session
from cupyllm.commands.output import Output, gigabytes, progress
from cupyllm.config import ModelConfig, RopeConfig, published
from cupyllm.errors import InputError
from cupyllm.files import show_path
from cupyllm.synth import plan_bytes, synthesize


def run(
    *,
    size: str | None,
    hidden: int | None,
    layers: int | None,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    ffn: int | None,
    vocab: int | None,
    tied: bool | None,
    dtype: str,
    out: str,
    seed: int | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Always 0: what can go wrong raises, and leaves nothing at `out`."""
    shape = {"hidden": hidden, "heads": heads, "kv-heads": kv_heads, "head-dim": head_dim, "ffn": ffn, "vocab": vocab}
    if size is not None:
        config = _published(size, layers, [name for name, value in shape.items() if value is not None], tied)
    else:
        config = _given(hidden, layers, heads, kv_heads, head_dim, ffn, vocab, bool(tied))
    config = replace(config, dtype=cast(Literal["float32", "bfloat16", "float16"], dtype))
    output = Output(as_json)
    seed = seed or 0
    session.require_consent(output, config, Path(out).absolute().parent, yes)
    began = time.perf_counter()
    with progress("bytes") as on_bytes:
        synthesize(config, out, seed, progress=on_bytes)
    seconds = time.perf_counter() - began
    count = plan_bytes(config)
    values = {
        "out": show_path(out),
        "layers": config.num_hidden_layers,
        "dtype": dtype,
        "seed": seed,
        "parameter_bytes": count,
        "seconds": seconds,
        "mb_per_s": count / seconds / 1e6,
    }
    line = f"{config.num_hidden_layers} layers, {gigabytes(count)} of {dtype}, {values['mb_per_s']:.0f} MB/s"
    output.result(values, [f"{show_path(out)}: {line}"])
    return 0


def _published(size: str, layers: int | None, given: list[str], tied: bool | None) -> ModelConfig:
    if given or tied is not None:
        names = [*given, *([] if tied is None else ["tied/--untied"])]
        raise InputError(f"--size and --{names[0]} were given, expected a published or a given shape; leave out one")
    config = published(size)
    return config if layers is None else config.with_layers(layers)


def _given(
    hidden: int | None,
    layers: int | None,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    ffn: int | None,
    vocab: int | None,
    tied: bool,
) -> ModelConfig:
    required = {"hidden": hidden, "layers": layers, "heads": heads, "ffn": ffn, "vocab": vocab}
    missing = [f"--{name}" for name, value in required.items() if value is None]
    if missing:
        raise InputError(f"{', '.join(missing)} missing, expected --size or a whole shape; see `cupyllm synth --help`")
    assert hidden and layers and heads and ffn and vocab
    if head_dim is None and hidden % heads:
        raise InputError(f"--hidden {hidden} is no multiple of --heads {heads}, expected --head-dim then; add it")
    return ModelConfig(
        family="qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        rope=RopeConfig(theta=1e6),
        tie_word_embeddings=tied,
        layer_windows=(None,) * layers,
    )
