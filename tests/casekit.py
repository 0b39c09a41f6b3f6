"""Neutral names for the numeric failure cases (tests/test_cases.py), mapped to our API.

Every function takes `backend`: None is the NumPy reference in float32, else a device (the emulator or a GPU). Arrays
are float32 unless a case says otherwise; shapes: B batch, T tokens, H heads, D head size, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyllm import ops
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.config import ModelConfig, RopeConfig
from cupyllm.engine import Engine, GradientSink, LossResult, WeightSource
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.engine import DeviceEngine
from cupyllm.ops import adamw as device_adamw
from cupyllm.ops import cross_entropy as device_cross_entropy
from cupyllm.ops import grad_norm as device_grad_norm
from cupyllm.ops import rope as device_rope
from cupyllm.reference import adamw as reference_adamw
from cupyllm.reference import attention as reference_attention
from cupyllm.reference import cross_entropy as reference_cross_entropy
from cupyllm.reference import grad_norm as reference_grad_norm
from cupyllm.reference import rmsnorm as reference_rmsnorm
from cupyllm.reference import rope as reference_rope
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.train.trainer import Trainer

IGNORE_INDEX = -100


def expect_raises(kind: type[BaseException], call: Callable[[], object], contains: str = "") -> BaseException:
    """The exception of `kind` that `call` raises; its message is one line and contains `contains`."""
    try:
        call()
    except kind as error:
        assert contains in str(error), f"{contains!r} is not in {str(error)!r}"
        assert "\n" not in str(error), f"more than one line: {error}"
        return error
    raise AssertionError(f"expected {kind.__name__} containing {contains!r}, nothing was raised")


# ---- rope ----


def rope_table(
    positions: Sequence[int], theta: float, dim: int, backend: Backend | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """cos, sin float32 [N, dim/2] as a model of this theta and head size gets them."""
    where = np.array(positions, np.int32)
    if backend is None:
        inv_freq, factor = reference_rope.inverse_frequencies(RopeConfig(theta), dim)
        return reference_rope.table(where, inv_freq, factor, np.float32)
    inv_freq, factor = device_rope.inverse_frequencies(RopeConfig(theta), dim)
    with Session(backend) as session:
        cos, sin = (session.empty(Spec((where.size, dim // 2), "float32")) for _ in range(2))
        rec = Recorder.of(backend)
        device_rope.rope_table(rec, session.put(where), session.put(inv_freq), factor, cos, sin)
        session.execute(rec)
        return session.get(cos), session.get(sin)


def rope(x: np.ndarray, position: int, theta: float, backend: Backend | None = None) -> np.ndarray:
    """One head x [D] turned to `position`."""
    cos, sin = rope_table([position], theta, x.size, backend)
    row = x.astype(np.float32)[None]
    if backend is None:
        (turned, _), _ = reference_rope.forward(row, row, cos, sin, head_dim=x.size)
        return turned[0]
    run = run_op(backend, ops.get("rope"), [row, row, cos, sin], (), {"head_dim": x.size})
    return run.outputs[0][0]


def rmsnorm(x: np.ndarray, weight: np.ndarray, eps: float, backend: Backend | None = None) -> np.ndarray:
    """x [N,H*D], weight [D] -> [N,H*D]."""
    if backend is None:
        return reference_rmsnorm.forward(x, weight, eps=eps)[0]
    return run_op(backend, ops.get("rmsnorm"), [x], [weight], {"eps": eps}).outputs[0]


# ---- attention ----


@dataclass
class Attended:
    """Output and gradients as [B,T,H,D]."""

    out: np.ndarray
    d_q: np.ndarray
    d_k: np.ndarray
    d_v: np.ndarray


def attn_fwd_bwd(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    mask: np.ndarray | None = None,
    backend: Backend | None = None,
    **attrs: Any,
) -> Attended:
    """q, d_out [B,Tq,HQ,D], k and v [B,Tk,HK,D]; mask [B,Tk] of 0 (padding) and 1, the queries being its tail."""
    attrs = {"num_heads": q.shape[2], "num_kv_heads": k.shape[2], **attrs}
    segments = None if mask is None else np.where(mask, 0, -1).astype(np.int32)
    tail = None if segments is None else np.ascontiguousarray(segments[:, k.shape[1] - q.shape[1] :])
    flat = [np.ascontiguousarray(a.reshape(*a.shape[:2], -1)) for a in (q, k, v, d_out)]
    inputs = [*flat[:3], tail, segments]
    if backend is None:
        out, saved = reference_attention.forward(*inputs, **attrs)
        gradients: Sequence[np.ndarray | None] = reference_attention.backward(saved, flat[3])
    else:
        run = run_op(backend, ops.get("attention"), inputs, (), attrs, [flat[3]])
        out, gradients = run.outputs[0], run.d_inputs
    shapes = (q.shape, q.shape, k.shape, k.shape)
    arrays = [out, *(g for g in gradients[:3] if g is not None)]
    return Attended(*(a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, backend: Backend | None = None, **attrs: Any) -> np.ndarray:
    """The output only, [B,Tq,HQ,D]."""
    return attn_fwd_bwd(q, k, v, np.zeros_like(q), backend=backend, **attrs).out


def attn_mean(
    W: int | None, T: int, num_queries: int | None = None, backend: Backend | None = None, head_dim: int = 16
) -> np.ndarray:
    """q = k = 0 and v[j] = j: the mean of the visible positions, for the last `num_queries` (all) of T tokens."""
    keys = np.zeros((1, T, 1, head_dim), np.float32)
    v = np.broadcast_to(np.arange(T, dtype=np.float32)[None, :, None, None], keys.shape)
    out = attention(keys[:, : num_queries or T], keys, v, backend=backend, window=W)
    assert (out == out[..., :1]).all()
    return out[0, :, 0, 0]


# ---- loss ----


def ce(logits: np.ndarray, labels: Sequence[int], backend: Backend | None = None) -> tuple[float, int, np.ndarray]:
    """logits [N,V] -> (mean loss over scored rows, how many those are, its gradient [N,V]). 0.0 when there are none."""
    targets = np.array(labels, np.int32)
    num = int((targets != IGNORE_INDEX).sum())
    d_loss = np.full(len(targets), 1 / max(num, 1), np.float32)
    if backend is None:
        (loss, _), saved = reference_cross_entropy.forward(logits, targets)
        gradient = reference_cross_entropy.backward(saved, d_loss)[0]
    else:
        device_cross_entropy.check_labels(targets, logits.shape[1])
        run = run_op(backend, ops.get("cross_entropy"), [logits, targets], (), {}, [d_loss, None])
        loss, d_logits = run.outputs[0], run.d_inputs[0]
        assert d_logits is not None
        gradient = d_logits
    return float(loss.sum() / max(num, 1)), num, gradient


# ---- clipping and the optimizer ----


def sums_of_squares(gradients: Sequence[np.ndarray], backend: Backend | None = None) -> list[float]:
    """float64 sum of squares of each gradient."""
    if backend is None:
        return [reference_grad_norm.sum_of_squares(g) for g in gradients]
    with Session(backend) as session:
        out = session.empty(Spec((len(gradients),), "float64"))
        rec = Recorder.of(backend)
        for slot, gradient in enumerate(gradients):
            device_grad_norm.sum_of_squares(rec, session.put(gradient), out, slot)
        session.execute(rec)
        return [float(x) for x in session.get(out)]


def clip(
    gradients: Sequence[np.ndarray], max_norm: float, backend: Backend | None = None
) -> tuple[float, list[np.ndarray]]:
    """(global norm, clipped gradients), as torch.nn.utils.clip_grad_norm_. Raises InputError on inf or NaN."""
    norm = device_grad_norm.global_norm(sums_of_squares(gradients, backend))
    if backend is None:
        coefficient = reference_grad_norm.clip_coefficient(norm, max_norm)
        return norm, [g * np.float32(coefficient) for g in gradients]
    coefficient = device_grad_norm.clip_coefficient(norm, max_norm)
    with Session(backend) as session:
        tensors = [session.put(g) for g in gradients]
        factor = session.put(device_grad_norm.as_factor(coefficient))
        rec = Recorder.of(backend)
        for tensor in tensors:
            device_grad_norm.scale(rec, tensor, factor)
        session.execute(rec)
        return norm, [session.get(t) for t in tensors]


def adamw_run(
    param: np.ndarray, gradients: Sequence[np.ndarray], backend: Backend | None = None, **numbers: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(p, m, v) after one AdamW step per gradient. numbers: lr, beta1, beta2, eps, weight_decay."""
    p, m, v = param.copy(), np.zeros_like(param), np.zeros_like(param)
    for step, gradient in enumerate(gradients, 1):
        if backend is None:
            reference_adamw.update(p, gradient, m, v, step=step, **numbers)
            continue
        with Session(backend) as session:
            tensors = [session.put(a) for a in (p, gradient, m, v)]
            scalars = session.put(device_adamw.pack_scalars(step=step, **numbers))
            rec = Recorder.of(backend)
            device_adamw.adamw(rec, *tensors, scalars)
            session.execute(rec)
            p, _, m, v = (session.get(t) for t in tensors)
    return p, m, v


class Weights:
    """A WeightSource of a few arrays, for a trainer without a model."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = dict(arrays)
        self.config = ModelConfig("qwen3", 8, 1, 1, 1, 8, 8, 8, RopeConfig(1e4))

    def names(self) -> list[str]:
        return list(self.arrays)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.arrays[name].dtype.name, self.arrays[name].shape

    def tensor(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        out[:] = self.arrays[name].reshape(-1).view(np.uint8)[start : start + out.size]

    def check_unchanged(self) -> None:
        """These arrays never change."""


class GivenGradients:
    """An engine whose backward hands out given gradients; norms and updates are the reference's or the device's own."""

    def __init__(self, source: WeightSource, backend: Backend | None) -> None:
        self.config, self.backend, self.dtype = source.config, backend, "float32"
        self.backend_name = self.device_name = "given gradients"
        self.gradients: Mapping[str, np.ndarray] = {}
        self.loss = 1.0

    def loss_and_grads(self, ids: np.ndarray, labels: np.ndarray, sink: GradientSink, **options: Any) -> LossResult:
        for name, gradient in self.gradients.items():
            sink(name, gradient)
        return LossResult(self.loss, 1)

    def sum_of_squares(self, gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
        return dict(zip(gradients, sums_of_squares(list(gradients.values()), self.backend), strict=True))

    def adamw(self, param: np.ndarray, grad: np.ndarray, m: np.ndarray, v: np.ndarray, **numbers: Any) -> None:
        if self.backend is None:
            reference_adamw.update(param, grad, m, v, **numbers)
            return
        with Session(self.backend) as session:
            tensors = [session.put(a) for a in (param, grad, m, v)]
            rec = Recorder(self.backend.capability)
            device_adamw.adamw(rec, *tensors, session.put(device_adamw.pack_scalars(**numbers)))
            session.execute(rec)
            for array, tensor in zip((param, grad, m, v), tensors, strict=True):
                array[...] = session.get(tensor)

    def close(self) -> None:
        """Nothing is held."""


def trainer_of(weights: Mapping[str, np.ndarray], backend: Backend | None, **options: Any) -> Trainer:
    """A trainer over `weights` whose `.engine` is a GivenGradients."""
    return Trainer(lambda source: GivenGradients(source, backend), Weights(weights), **options)  # type: ignore[arg-type,return-value]


def state(trainer: Trainer) -> dict[str, bytes | int]:
    """Every bit of parameters and moments, and the step count."""
    kept = {"master": trainer.state.master, "m": trainer.state.m, "v": trainer.state.v, "w": trainer.state.compute}
    bits: dict[str, bytes | int] = {
        f"{kind} {name}": array.tobytes() for kind, arrays in kept.items() for name, array in arrays.items()
    }
    return {**bits, "step": trainer.state.step}


# ---- models ----


def check_cfg(keys: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a tiny Qwen3 whose config.json holds `keys` beside the usual ones."""
    tiny = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 320, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "torch_dtype": "float32", "tie_word_embeddings": False,
    }  # fmt: skip
    return ModelConfig.from_hf({**tiny, **keys})


def load(path: Path) -> Checkpoint:
    """An opened checkpoint directory. Raises CheckpointError."""
    return Checkpoint.open(path)


def engine_of(source: WeightSource, backend: Backend | None = None) -> Engine:
    """float32 engine on the reference or a device."""
    return ReferenceEngine(source) if backend is None else DeviceEngine(source, backend)


def logits(source: WeightSource, ids: np.ndarray, backend: Backend | None = None) -> np.ndarray:
    """float32 [B,T,V]."""
    engine = engine_of(source, backend)
    try:
        result = engine.forward(ids, want_logits=True).logits
    finally:
        engine.close()
    assert result is not None
    return result


def low(array: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16 and back: what a model cast to bf16 would hold."""
    return array.astype(NUMPY_DTYPE["bfloat16"]).astype(np.float32)
