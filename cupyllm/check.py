"""Gradient checks: finite differences on the reference, parity of a backend with it, op by op and for a whole layer.

Finite differences run in float64 on the reference alone: L = sum(outputs * cotangents), central differences. A tensor
of up to 512 elements is checked element by element, a larger one along 64 random directions. With h = 6e-6 (the cube
root of float64's eps) truncation is about h^2 and rounding about eps |L| / h, both below 1e-8 of the gradient here, so
the limit of 1e-6 leaves room for neither a wrong factor nor a missing term.

Parity compares what a backend computes with the float64 reference on the very same (already rounded) inputs: relative
L2 error of every output and gradient. Limit in float32: 2e-6, some ten times what a two-level sum of thousands of terms
makes. In bfloat16 each stored intermediate is rounded by at most 2^-8, a relative L2 error of about 2^-8/sqrt(3); an op
makes at most three such roundings in a row (limit 2^-7), a layer's longest chain forward and backward about 24, which
add in quadrature (limit 2^-8 sqrt(24/3), doubled).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from cupyllm import graph, ops
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec, Tensor
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.config import ModelConfig, RopeConfig
from cupyllm.errors import InputError
from cupyllm.model.decoder import layer_nodes
from cupyllm.model.names import layer_params
from cupyllm.ops.cases import draw, draw_cotangents, op_attrs, widen
from cupyllm.ops.op import Case
from cupyllm.reference import qwen3
from cupyllm.reference import rope as reference_rope

ELEMENTWISE, DIRECTIONS = 512, 64
STEP = 6e-6
DIFFERENCE_LIMIT = 1e-6
PARITY_LIMIT = {"float32": 2e-6, "bfloat16": 2.0**-7}
LAYER_LIMIT = {"float32": 2e-6, "bfloat16": 2 * 2.0**-8 * math.sqrt(24 / 3)}
OPS = ops.GRAPH_OPS
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """One compared tensor. `error` is relative L2."""

    subject: str  # op name, or "layer"
    case: str
    check: str  # "finite differences" or "parity"
    tensor: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error < self.limit  # NaN fails


@dataclass
class Report:
    """All findings; `parity` says why there is none where there is none."""

    findings: list[Finding] = field(default_factory=list)
    parity: str = ""
    inference_only: list[str] = field(default_factory=list)  # ops without a gradient: only their outputs are compared

    @property
    def ok(self) -> bool:
        return bool(self.findings) and all(f.ok for f in self.findings)

    @property
    def failed(self) -> list[str]:
        """Subjects with a failing tensor, in order, each once."""
        return list(dict.fromkeys(f.subject for f in self.findings if not f.ok))


def small_layer() -> ModelConfig:
    """A layer whose sizes are all different, q width unlike hidden, GQA 2."""
    return ModelConfig(
        family="qwen3",
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=72,
        vocab_size=320,
        rope=RopeConfig(theta=1e6),
    )


def grad_check(
    op_names: Sequence[str] | None,
    layer: bool,
    backend: Backend | None,
    *,
    dtype: str = "float32",
    config: ModelConfig | None = None,
    tokens: int = 12,
    seed: int = 0,
    forced: dict[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> Report:
    """Check `op_names` (None: all) and, with `layer`, one whole decoder layer of `config`.

    `backend` None is the reference: the layer's tensors are then checked by finite differences, and there is no
    parity. An op for inference only has no gradient: its outputs are compared where there is a backend. Raises
    InputError on an unknown op, or when nothing is left to check.
    """
    report = Report(parity="" if backend else "not applicable: the reference is what parity is measured against")
    for name in OPS if op_names is None else op_names:
        if name not in OPS:
            raise InputError(f"--op: got {name!r}, expected one of {', '.join(OPS)}")
        if ops.get(name).inference_only:
            report.inference_only.append(name)
        for case in (c for c in ops.get(name).cases() if c.size == "small"):
            progress(f"{name} {case.name}")
            if not ops.get(name).inference_only:
                report.findings += op_differences(name, case, seed)
            if backend is not None:
                report.findings += op_parity(name, case, backend, dtype, seed, forced)
    if layer:
        config = config or small_layer()
        progress("layer")
        if backend is None:
            report.findings += layer_differences(config, tokens, seed)
        else:
            report.findings += layer_parity(config, tokens, backend, dtype, seed, forced)
    if report.inference_only and not report.findings:
        raise InputError(
            f"--op {', '.join(report.inference_only)}: got no op with a gradient, expected one; outputs alone are "
            "compared with --backend cuda"
        )
    return report


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 error; absolute where `want` is zero. inf where one is finite and the other is not."""
    got, want = got.astype(np.float64, copy=False), want.astype(np.float64, copy=False)
    if got.shape != want.shape or not np.isfinite(got).all() or not np.isfinite(want).all():
        return math.inf
    norm = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / (norm or 1.0)


# -- finite differences -------------------------------------------------------------------------------------------


def op_differences(op: str, case: Case, seed: int = 0) -> list[Finding]:
    """The reference's backward of `op` against central differences of its forward."""
    module = import_module(f"cupyllm.reference.{op}")
    drawn = draw(case, "float64", seed=seed)
    arrays: list[Any] = [*drawn.inputs, *drawn.params]
    outputs, saved = module.forward(*arrays, **case.attrs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = draw_cotangents([Spec(o.shape, o.dtype.name) for o in outputs], seed + 1)
    gradients = module.backward(saved, *cotangents)
    if case.attrs.get("padding_idx") is not None:
        # By definition the padding row gets no gradient although the output depends on it: its tokens do not count.
        ids, d_y = arrays[0], cotangents[0]
        assert d_y is not None
        cotangents = [np.where((ids == case.attrs["padding_idx"])[:, None], 0, d_y)]

    def loss() -> float:
        values, _ = module.forward(*arrays, **case.attrs)
        values = values if isinstance(values, tuple) else (values,)
        return math.fsum(float(np.vdot(v, c)) for v, c in zip(values, cotangents, strict=True) if c is not None)

    findings = []
    for index, gradient in enumerate(gradients):
        if gradient is None or arrays[index] is None:
            continue
        which = f"d_input{index}" if index < len(drawn.inputs) else f"d_param{index - len(drawn.inputs)}"
        if arrays[index].dtype != np.float64 or gradient.size == 0:
            continue
        error = difference_error(loss, arrays[index], gradient, f"{op}/{case.name}/{which}")
        findings.append(Finding(op, case.name, "finite differences", which, error, DIFFERENCE_LIMIT))
    return findings


def layer_differences(config: ModelConfig, tokens: int, seed: int = 0) -> list[Finding]:
    """dx and every parameter gradient of a whole reference layer against central differences."""
    x, params, d_y = layer_inputs(config, tokens, "float64", seed)
    call = reference_layer(config, tokens, np.float64)
    _, saved = call(x, params)
    d_x, d_params = qwen3.layer_backward(saved, d_y)

    def loss() -> float:
        return float(np.vdot(call(x, params)[0], d_y))

    findings, case = [], _layer_case(config, tokens)
    for name, array, gradient in [("dx", x, d_x), *((n, params[n], d_params[n]) for n in params)]:
        error = difference_error(loss, array, gradient, f"layer/{name}")
        findings.append(Finding("layer", case, "finite differences", name, error, DIFFERENCE_LIMIT))
    return findings


def difference_error(loss: Callable[[], float], array: np.ndarray, gradient: np.ndarray, key: str) -> float:
    """Relative L2 error between `gradient` and central differences of `loss` in `array` (changed and restored)."""
    original = array.copy()
    scale = max(1.0, float(np.abs(original).max()))
    got, want = [], []
    if array.size <= ELEMENTWISE:
        directions: Iterable[Any] = (np.unravel_index(i, array.shape) for i in range(array.size))
        for at in directions:
            values = []
            for sign in (1, -1):
                array[at] = original[at] + sign * STEP * scale
                values.append(loss())
            array[at] = original[at]
            want.append((values[0] - values[1]) / (2 * STEP * scale))
            got.append(float(gradient[at]))
    else:
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        for _ in range(DIRECTIONS):
            direction = rng.standard_normal(array.shape)
            direction *= 1 / np.linalg.norm(direction)
            # Along a unit vector the function is as smooth as along one element; a larger step costs no accuracy.
            step = STEP * scale * 10
            values = []
            for sign in (1, -1):
                array[...] = original + sign * step * direction
                values.append(loss())
            array[...] = original
            want.append((values[0] - values[1]) / (2 * step))
            got.append(float(np.vdot(gradient, direction)))
    return relative_error(np.array(got), np.array(want))


# -- parity -------------------------------------------------------------------------------------------------------


def op_parity(
    op: str, case: Case, backend: Backend, dtype: str, seed: int = 0, forced: dict[str, str] | None = None
) -> list[Finding]:
    """Every output and gradient of a backend's op against the float64 reference on the same rounded inputs."""
    module = import_module(f"cupyllm.reference.{op}")
    drawn = draw(case, dtype, seed=seed)
    attrs = op_attrs(op, case, dtype)
    launcher = ops.get(op)
    specs = launcher.infer(_specs(drawn.inputs), [Spec(p.shape, p.dtype.name) for p in drawn.params], attrs)
    cotangents = draw_cotangents(specs, seed + 1)
    run = run_op(backend, launcher, drawn.inputs, drawn.params, attrs, cotangents, forced=forced)
    outputs, saved = module.forward(*widen(drawn.inputs), *widen(drawn.params), **case.attrs)
    gradients = () if launcher.inference_only else module.backward(saved, *widen(cotangents))
    pairs: list[tuple[str, np.ndarray | None, Any]] = []
    wanted = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs += [(f"output{i}", got, want) for i, (got, want) in enumerate(zip(run.outputs, wanted, strict=True))]
    count = len(drawn.inputs)
    pairs += [(f"d_input{i}", got, gradients[i]) for i, got in enumerate(run.d_inputs)]
    pairs += [(f"d_param{i}", got, gradients[count + i]) for i, got in enumerate(run.d_params)]
    return [
        Finding(op, case.name, "parity", name, relative_error(got, np.asarray(want)), PARITY_LIMIT[dtype])
        for name, got, want in pairs
        if got is not None and want is not None
    ]


def layer_parity(
    config: ModelConfig,
    tokens: int,
    backend: Backend,
    dtype: str,
    seed: int = 0,
    forced: dict[str, str] | None = None,
) -> list[Finding]:
    """y, dx and every parameter gradient of one decoder layer on a backend against the float64 reference."""
    x, params, d_y = layer_inputs(config, tokens, dtype, seed)
    got = device_layer(config, x, params, d_y, backend, forced)
    call = reference_layer(config, tokens, np.float64)
    y, saved = call(x.astype(np.float64), {name: p.astype(np.float64) for name, p in params.items()})
    d_x, d_params = qwen3.layer_backward(saved, d_y.astype(np.float64))
    want = {"y": y, "dx": d_x, **d_params}
    case, limit = _layer_case(config, tokens), LAYER_LIMIT[dtype]
    return [
        Finding("layer", case, "parity", name, relative_error(got.pop(name), want[name]), limit)
        for name in ["y", "dx", *params]
    ]


def device_layer(
    config: ModelConfig,
    x: np.ndarray,
    params: dict[str, np.ndarray],
    d_y: np.ndarray,
    backend: Backend,
    forced: dict[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """One layer forward and backward on a backend: "y", "dx" and every parameter's gradient."""
    tokens = x.shape[0]
    cos, sin = rope_tables(config, tokens, np.float32)
    with Session(backend) as session:
        values = {"x": session.put(x), "cos": session.put(cos), "sin": session.put(sin)}
        weights = {name: session.put(p, name) for name, p in params.items()}
        nodes = layer_nodes(config, 0, 1, tokens, False)
        rec = Recorder.of(backend, forced)
        y = session.empty(Spec(x.shape, x.dtype.name), "y")
        d_x = session.empty(Spec(x.shape, x.dtype.name), "dx")
        known, saved = graph.forward(rec, nodes, values, weights, {"y": y})
        d_params: dict[str, Tensor] = {
            name: session.empty(Spec(p.shape, "float32"), f"d_{name}") for name, p in params.items()
        }
        graph.backward(rec, nodes, known, saved, {"y": session.put(d_y)}, d_params, ["x"], {"x": d_x})
        session.execute(rec)
        return {name: session.get(t) for name, t in {"y": y, "dx": d_x, **d_params}.items()}


def rope_tables(config: ModelConfig, tokens: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [tokens, D/2] of positions 0.. as the reference makes them."""
    frequencies, factor = reference_rope.inverse_frequencies(config.rope, config.head_dim)
    cos, sin = reference_rope.table(np.arange(tokens), frequencies, factor, dtype)
    return cos, sin


def reference_layer(config: ModelConfig, tokens: int, dtype: Any) -> Callable[..., tuple[np.ndarray, dict[str, Any]]]:
    cos, sin = rope_tables(config, tokens, dtype)

    def call(x: np.ndarray, params: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, Any]]:
        return qwen3.layer_forward(x, params, config, batch=1, cos=cos, sin=sin)

    return call


def layer_inputs(
    config: ModelConfig, tokens: int, dtype: str, seed: int
) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """x, parameters and d_y with values that keep every stage at order one: weights 1/sqrt(fan-in), norms near 1."""
    rng = np.random.default_rng(seed)
    target = NUMPY_DTYPE[dtype]

    def normal(shape: tuple[int, ...], scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * np.float32(scale) + np.float32(mean)).astype(target)

    x = normal((tokens, config.hidden_size))
    params = {
        name: normal(shape, shape[1] ** -0.5) if len(shape) == 2 else normal(shape, 0.1, 0.0 if "bias" in name else 1.0)
        for name, shape in layer_params(config).items()
    }
    return x, params, normal((tokens, config.hidden_size))


def _layer_case(config: ModelConfig, tokens: int) -> str:
    heads = f"{config.num_attention_heads}/{config.num_key_value_heads}x{config.head_dim}"
    return f"hidden {config.hidden_size}, heads {heads}, ffn {config.intermediate_size}, {tokens} tokens"


def _specs(arrays: Sequence[np.ndarray | None]) -> list[Spec | None]:
    return [None if a is None else Spec(a.shape, a.dtype.name) for a in arrays]
