"""What a model can be asked to do, whichever backend does it.

`Engine` is implemented twice and shares no maths: reference/engine.py (NumPy, converts layer by layer) and
model/engine.py (device kernels, streams layers through slots). Commands, the trainer and `verify` talk to this page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from cupyllm.config import ModelConfig

IGNORE_INDEX = -100  # a label that is not scored


class WeightSource(Protocol):
    """Where an engine reads weights: an opened checkpoint, or the trainer's host arrays.

    Parameter names are Hugging Face's full names. A tied model has no lm_head.weight here (`names()` lists each
    buffer once); the engine uses model.embed_tokens.weight for the head.
    """

    config: ModelConfig

    def names(self) -> list[str]: ...

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype in {"float32", "bfloat16", "float16"}, shape) of a parameter."""
        ...

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        """Fill `out` (uint8, 1-D) with the tensor's little-endian bytes from `start` on, without mapping pages."""
        ...

    def check_unchanged(self) -> None:
        """Raise CheckpointError when a file's size, inode or mtime differs from when it was opened."""
        ...


@dataclass
class ForwardResult:
    """B rows, T tokens, V vocabulary. Every array is a host array owned by the caller."""

    argmax: np.ndarray  # int64 [B,T], lowest id wins ties, never a padded vocabulary id
    last_logits: np.ndarray  # float32 [B,V], at each row's last non-padded token
    logits: np.ndarray | None = None  # float32 [B,T,V] when asked for
    loss: float | None = None  # mean over scored targets; 0.0 when there are none
    num_targets: int = 0
    hidden: dict[int, np.ndarray] = field(default_factory=dict)  # float32 [B,T,C]; 0 = layer 0's input, L+1 = normed
    seconds: float = 0.0
    streamed_bytes: int = 0  # stored bytes of layers, final norm and LM head that were read or uploaded
    transfer_seconds: float = 0.0  # time the copies themselves took


@dataclass
class LossResult:
    """`loss` is the sum over scored targets divided by num_targets (0.0 when there are none)."""

    loss: float
    num_targets: int
    streamed_bytes: int = 0


GradientSink = Callable[[str, np.ndarray], None]  # (full parameter name, float32 gradient, which the sink then owns)
LayerCallback = Callable[[int, int], None]  # (layer passes done, of how many: L forward, L more backward)


class Engine(Protocol):
    """B rows of T ids. `segments` int32 [B,T]: tokens attend only inside their own segment; negative = padding.

    `positions` int32 [B,T] (default: counts within each segment run, 0,1,2,…; padding 0). `labels` int64 [B,T] are
    UNSHIFTED: logits at t are scored against labels at t+1; -100 is ignored; a pair whose two tokens lie in
    different segments, or in padding, is not scored.
    Raises InputError on ids or labels out of range (before any work).
    """

    config: ModelConfig
    backend_name: str
    device_name: str
    dtype: str  # activations: "float32" | "bfloat16" | "float64" (reference only)

    def forward(
        self,
        ids: np.ndarray,
        *,
        labels: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        mode: Literal["stream", "resident"] = "stream",
        want_logits: bool = False,
        want_hidden: Iterable[int] = (),
        on_layer: LayerCallback | None = None,
    ) -> ForwardResult: ...

    def loss_and_grads(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        sink: GradientSink,
        *,
        segments: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        on_layer: LayerCallback | None = None,
    ) -> LossResult:
        """Gradient of the mean loss for every parameter of the source, layer by layer, handed to `sink` once each."""
        ...

    def sum_of_squares(self, gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
        """float64 sum of squares of each float32 gradient; inf or nan when it holds any."""
        ...

    def adamw(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        m: np.ndarray,
        v: np.ndarray,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
    ) -> None:
        """One AdamW update (decoupled decay first, then bias-corrected step), float32 arrays updated in place."""
        ...

    def close(self) -> None: ...
