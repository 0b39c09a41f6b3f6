"""What forward, grads and train-smoke share: weights, backend, activation dtype and engine from the same options."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cupyllm.cache import cache_dir, cached_synthetic, synthetic_entry
from cupyllm.commands.output import Output, gigabytes, progress
from cupyllm.config import ModelConfig, default_proportions, published
from cupyllm.engine import Engine, WeightSource
from cupyllm.errors import InputError
from cupyllm.files import free_space, show_path
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.ops.op import SIMULATED_CAPABILITY
from cupyllm.runtime import Runtime
from cupyllm.synth import CONSENT_BYTES, plan_bytes
from cupyllm.text import Codec, open_codec

DEFAULT_LAYERS = 64
SIMULATED_LAYERS = 2  # on the simulator, where a layer takes seconds


@dataclass
class Weights:
    """An opened checkpoint, its codec, and whether its weights are random."""

    checkpoint: Checkpoint
    codec: Codec
    random: bool
    name: str

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def files(self) -> list[Path]:
        """Every file of the checkpoint, wherever its links lead."""
        return [*self.checkpoint.path.iterdir(), *(file.path for file in self.checkpoint.files)]


@contextmanager
def open_weights(
    output: Output,
    *,
    model: str | None,
    size: str | None,
    layers: int | None,
    seed: int | None = None,
    yes: bool = False,
    check: Callable[[ModelConfig], None] = lambda config: None,
) -> Iterator[Weights]:
    """The checkpoint that --model, --size or neither names, with --layers layers.

    `check` refuses a shape, before random weights of it are made.
    """
    if model is not None and (seed is not None or yes):
        given = "--seed" if seed is not None else "--yes"
        raise InputError(f"--model and {given} were given, expected {given} with random weights only; leave it out")
    seed = seed or 0
    if model is not None and size is not None:
        raise InputError("--model and --size were given, expected at most one of them; leave out the other")
    if model is not None:
        checkpoint, name = Checkpoint.open(model, layers), model
    else:
        config = default_proportions(layers or DEFAULT_LAYERS) if size is None else published(size)
        if size is not None and layers is not None:
            config = config.with_layers(layers)
        name = "Qwen3-32B's proportions at hidden size 160" if size is None else f"Qwen3-{size.upper()}'s shape"
        check(config)
        if not synthetic_entry(config, seed).is_dir():
            require_consent(output, config, cache_dir(), yes)
        with progress("making random weights, bytes") as on_bytes:
            checkpoint = Checkpoint.open(cached_synthetic(config, seed, progress=on_bytes))
    with checkpoint:
        config = checkpoint.config
        check(config)
        weights = Weights(checkpoint, open_codec(checkpoint.tokenizer_file, config.vocab_size), model is None, name)
        if weights.random:
            output.note(
                f"model: {name}, {config.num_hidden_layers} layers, RANDOM weights (seed {seed}): expect a loss near "
                f"ln V = {math.log(config.vocab_size):.4f} (V = {config.vocab_size}) and meaningless tokens"
            )
        else:
            output.note(f"model: {name}, {config.num_hidden_layers} layers")
        for line in checkpoint.notes:
            output.note(f"note: {line}")
        yield weights


def require_consent(output: Output, config: ModelConfig, directory: Path, yes: bool) -> None:
    """Say what a synthetic checkpoint over 8 GiB takes; raises InputError unless --yes was given."""
    needed = plan_bytes(config)
    if needed <= CONSENT_BYTES:
        return
    plan = f"{gigabytes(needed)} of random weights to be written, {gigabytes(free_space(directory))} free"
    if not yes:
        raise InputError(f"{plan} at {show_path(directory)}: over 8 GiB, add --yes or take fewer --layers")
    output.note(f"disk: {plan} at {show_path(directory)}")


def default_layers(backend: str, model: str | None, size: str | None, layers: int | None) -> int | None:
    """`layers`; where it is not given, few for the built-in shape on the simulator, else all of the model's."""
    return SIMULATED_LAYERS if layers is None and backend == "sim" and model is None and size is None else layers


def open_runtime(
    output: Output, backend: str, dtype: str | None, variants: Sequence[str] = (), batch_invariant: bool = False
) -> Runtime:
    """The runtime, announced with the reason; refuses what its backend cannot do."""
    if backend == "sim":
        _refuse_unsimulated(parse_variants(variants))
    runtime = Runtime.open(backend)
    output.note(f"backend: {runtime.name}, {runtime.reason}")
    if runtime.name == "reference" and dtype == "bfloat16":
        raise InputError("--dtype bfloat16 with the reference backend: it computes in float32; leave --dtype out")
    if runtime.name == "reference" and variants:
        raise InputError("--variant with the reference backend: it has no kernels; use --backend cuda or sim")
    if runtime.name == "reference" and batch_invariant:
        raise InputError(
            "--batch-invariant with the reference backend: NumPy sums as it likes; use --backend cuda or sim"
        )
    return runtime


def parse_variants(variants: Sequence[str]) -> dict[str, str]:
    """{op: variant} of OP=NAME options. Raises InputError that lists what there is."""
    from cupyllm import ops

    forced: dict[str, str] = {}
    for item in variants:
        op, separator, name = item.partition("=")
        if not separator or op not in ops.GRAPH_OPS:
            raise InputError(f"--variant {item}: expected OP=NAME with OP one of {', '.join(ops.GRAPH_OPS)}")
        known = [variant.name for variant in ops.get(op).variants]
        if name not in known:
            raise InputError(f"--variant {item}: {op} has no variant {name!r}, expected one of {', '.join(known)}")
        if forced.get(op, name) != name:
            raise InputError(f"--variant {op} was given twice ({forced[op]} and {name}), expected once")
        forced[op] = name
    return forced


def choose_dtype(requested: str | None, runtime: Runtime, source: WeightSource) -> str:
    """What was requested, else bfloat16 on cuda and sim with 16-bit weights, else float32."""
    if requested is not None:
        return requested
    stored = source.spec("model.embed_tokens.weight")[0]
    return "bfloat16" if runtime.name != "reference" and stored in ("bfloat16", "float16") else "float32"


def make_engine(
    source: WeightSource,
    runtime: Runtime,
    dtype: str,
    forced: dict[str, str] | None = None,
    codec: Codec | None = None,
    batch_invariant: bool = False,
) -> Engine:
    """The engine of `runtime`. `codec` tells which ids are padding of the vocabulary and never the argmax."""
    valid_vocab = None if codec is None else codec.valid_vocab
    if runtime.backend is None:
        from cupyllm.reference.engine import ReferenceEngine

        return ReferenceEngine(source, "float64" if dtype == "float64" else "float32", valid_vocab=valid_vocab)
    from cupyllm.model.engine import DeviceEngine

    return DeviceEngine(
        source, runtime.backend, dtype, forced=forced, batch_invariant=batch_invariant, valid_vocab=valid_vocab
    )


def device_peaks(runtime: Runtime) -> tuple[int | None, int | None]:
    """Peak device bytes of the process (context included) and of our allocator; None on the reference."""
    if runtime.backend is None:
        return None, None
    return runtime.backend.process_peak_bytes(), runtime.backend.peak_bytes()


def device_name(runtime: Runtime) -> str:
    """What computes, for the result."""
    return f"CPU ({platform.machine()}, NumPy)" if runtime.backend is None else runtime.backend.device_name


def _refuse_unsimulated(forced: dict[str, str]) -> None:
    """Raises InputError when a forced variant needs a newer GPU than the simulator is."""
    from cupyllm import ops

    for op, name in forced.items():
        variant = next(variant for variant in ops.get(op).variants if variant.name == name)
        if not variant.simulated:
            raise InputError(
                f"--variant {op}={name} with --backend sim: {variant.why_not_simulated} "
                f"(the simulator is an sm_{SIMULATED_CAPABILITY}); leave it out, or use such a GPU"
            )
