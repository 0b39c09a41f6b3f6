"""Find the first node of a decoder layer where a backend and the float64 reference part.

    python scripts/diff_layer.py [--backend cuda|sim|emulator] [--dtype float32|bfloat16] [--tokens 128]
                                 [--size 32b | --model DIR [--layer N]] [--variant OP=NAME]

Walks the layer's nodes forward, then in reverse, and compares every output and every gradient. Each node gets the
reference's values, rounded to the backend's dtype, as inputs, so an error shows at the node that makes it and not at
those that read it. Comparing two full runs node by node was rejected: after the first wrong node everything differs.

Exit status 1 when a node is past its limit (check.py derives the limits), 0 when none is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cupyllm import check, ops
from cupyllm.backend.base import NUMPY_DTYPE, Backend
from cupyllm.backend.eager import run_op
from cupyllm.commands.session import parse_variants
from cupyllm.config import ModelConfig, published
from cupyllm.errors import CupyllmError, InputError
from cupyllm.graph import Node
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.decoder import layer_nodes
from cupyllm.model.names import layer_params, layer_prefix
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.synth import parameter_values
from cupyllm.text import builtin_ids, open_codec

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One compared tensor."""

    node: str
    op: str
    tensor: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error < self.limit


def compare_layer(
    config: ModelConfig,
    layer: int,
    x: np.ndarray,
    params: Arrays,
    backend: Backend,
    dtype: str,
    forced: dict[str, str] | None = None,
) -> list[Row]:
    """Rows of every output (forward order), then every gradient (reverse order). x [T,C] and `params` as stored."""
    tokens = x.shape[0]
    nodes = layer_nodes(config, layer, 1, tokens, False)
    cos, sin = check.rope_tables(config, tokens, np.float32)
    values: Arrays = {"x": x.astype(np.float64), "cos": cos, "sin": sin}
    rows: list[Row] = []
    for node in nodes:
        module = import_module(f"cupyllm.reference.{node.op}")
        inputs, weights = _arguments(node, values, params, dtype)
        run = run_op(backend, ops.get(node.op), inputs, weights, node.attrs, forced=forced)
        outputs, _ = module.forward(*_wide(inputs), *_wide(weights), **node.attrs)
        for name, got, want in zip(node.outputs, run.outputs, _tuple(outputs), strict=True):
            rows.append(_row(node, name, got, want, dtype))
            values[name] = want.reshape(-1, want.shape[-1])
    d_values: Arrays = {"y": np.random.default_rng(1).standard_normal(x.shape)}
    for node in reversed(nodes):
        module = import_module(f"cupyllm.reference.{node.op}")
        inputs, weights = _arguments(node, values, params, dtype)
        d_outputs = [_seen(node, d_values[name].astype(NUMPY_DTYPE[dtype])) for name in node.outputs]
        run = run_op(backend, ops.get(node.op), inputs, weights, node.attrs, d_outputs, forced=forced)
        _, saved = module.forward(*_wide(inputs), *_wide(weights), **node.attrs)
        wanted = module.backward(saved, *_wide(d_outputs))
        names = [*node.inputs, *node.params]
        # The reference also answers for a bias that a linear node does not have: with None, at the end.
        for name, d_got, want in zip(names, [*run.d_inputs, *run.d_params], wanted, strict=False):
            if d_got is None or want is None:
                continue
            rows.append(_row(node, f"d_{name}", d_got, want, dtype))
            flat = want.reshape(-1, want.shape[-1])
            d_values[name] = d_values[name] + flat if name in d_values else flat
    return rows


def random_layer(config: ModelConfig, tokens: int) -> tuple[np.ndarray, Arrays]:
    """x [tokens,C] and one layer's parameters with the synthetic checkpoints' statistics."""
    one = config.with_layers(1)
    shapes = layer_params(one)
    params = {name: parameter_values(one, layer_prefix(0) + name, 0).reshape(shape) for name, shape in shapes.items()}
    return np.random.default_rng(0).standard_normal((tokens, config.hidden_size)), params


def checkpoint_layer(model: str, layer: int, tokens: int) -> tuple[ModelConfig, np.ndarray, Arrays]:
    """The layer's configuration, parameters, and its real input on the built-in text."""
    with Checkpoint.open(model, layer + 1) as checkpoint:
        config = checkpoint.config
        ids = builtin_ids(open_codec(checkpoint.tokenizer_file, config.vocab_size), tokens)[None]
        hidden = ReferenceEngine(checkpoint).forward(ids, want_hidden=(layer,)).hidden[layer]
        params = {name: np.array(checkpoint.tensor(layer_prefix(layer) + name)) for name in layer_params(config)}
    return config, hidden[0], params


def open_backend(name: str) -> Backend:
    """The GPU, the simulator, or the tests' emulator (in a checkout only)."""
    if name == "emulator":
        from tests.hostcuda.backend import HostBackend

        return HostBackend()
    from cupyllm.runtime import Runtime

    backend = Runtime.open(name).backend
    assert backend is not None
    return backend


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The first node of a layer where a backend leaves the reference.")
    parser.add_argument("--backend", choices=["cuda", "sim", "emulator"], default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--size", help="a published Qwen3 shape with random weights")
    parser.add_argument("--model", help="a checkpoint; its own weights, and its own activations as input")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--variant", action="append", default=[], metavar="OP=NAME")
    options = parser.parse_args(arguments)
    try:
        if options.tokens < 1 or options.layer < 0:
            raise InputError(f"got --tokens {options.tokens}, --layer {options.layer}, expected >= 1 and >= 0")
        forced = parse_variants(options.variant)
        if options.model is not None:
            config, x, params = checkpoint_layer(options.model, options.layer, options.tokens)
        else:
            config = check.small_layer() if options.size is None else published(options.size).with_layers(1)
            x, params = random_layer(config, options.tokens)
        layer = options.layer if options.model is not None else 0
        rows = compare_layer(config, layer, x, params, open_backend(options.backend), options.dtype, forced)
    except CupyllmError as error:
        print(f"diff_layer: error: {error}", file=sys.stderr)
        return 2
    return report(rows)


def report(rows: Sequence[Row]) -> int:
    """Print the table and the verdict; the exit status."""
    for row in rows:
        print(f"{'ok  ' if row.ok else 'FAIL'} {row.node:<26} {row.op:<14} {row.tensor:<36} {row.error:.2e}")
    first = next((row for row in rows if not row.ok), None)
    if first is None:
        print(f"no node diverges: {len(rows)} tensors, largest relative error {max(r.error for r in rows):.2e}")
        return 0
    print(
        f"first diverging node: {first.node} (op {first.op}), {first.tensor}: relative error {first.error:.2e}, "
        f"limit {first.limit:.1e}"
    )
    return 1


def _arguments(
    node: Node, values: Mapping[str, np.ndarray], params: Arrays, dtype: str
) -> tuple[list[np.ndarray | None], list[np.ndarray]]:
    """What the op is given: reference values rounded to `dtype` (rope tables stay float32), parameters as stored."""
    inputs: list[np.ndarray | None] = []
    for name in node.inputs:
        kept = name in ("cos", "sin")
        inputs.append(_seen(node, values[name] if kept else values[name].astype(NUMPY_DTYPE[dtype])) if name else None)
    return inputs, [params[name] for name in node.params]


def _seen(node: Node, value: np.ndarray) -> np.ndarray:
    return value if node.rows is None else value.reshape(*node.rows, -1)


def _wide(arrays: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    return [None if a is None else a.astype(np.float64) for a in arrays]


def _tuple(value: Any) -> tuple[np.ndarray, ...]:
    return value if isinstance(value, tuple) else (value,)


def _row(node: Node, tensor: str, got: np.ndarray, want: np.ndarray, dtype: str) -> Row:
    error = check.relative_error(got.reshape(-1), np.asarray(want).reshape(-1))
    return Row(node.name, node.op, tensor, error, check.PARITY_LIMIT[dtype])


if __name__ == "__main__":
    sys.exit(main())
