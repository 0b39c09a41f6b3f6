"""One optimizer step over a model that is streamed layer by layer.

Forward and backward stream the weights twice; gradients are collected on the host, because the exact global norm is
known only when the last one has arrived; then every parameter is updated. A step whose gradients hold inf or nan, or
that has nothing to score, changes nothing: not the weights, not the moments, not the step count (cases C6, C8).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cupyllm.engine import Engine, LayerCallback, WeightSource
from cupyllm.errors import CupyllmError
from cupyllm.ops import grad_norm
from cupyllm.train.state import HostState


class TrainingStopped(CupyllmError):
    """Too many steps in a row had to be skipped."""


@dataclass(frozen=True)
class StepResult:
    """What one step saw. `skipped` says why nothing was updated, "" when it was."""

    loss: float  # before the update
    num_targets: int
    grad_norm: float  # before clipping
    clip_coef: float  # what gradients were multiplied by, 1.0 when the norm was within bounds
    skipped: str = ""


class Trainer:
    """AdamW (decoupled decay on matrices only) on every parameter, with exact global-norm clipping."""

    def __init__(
        self,
        make_engine: Callable[[WeightSource], Engine],
        source: WeightSource,
        *,
        dtype: str = "float32",
        lr: float,
        clip: float | None = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_skips: int = 3,
        available_bytes: int | None = None,
    ) -> None:
        self.state = HostState(source, dtype, available_bytes)
        self.engine = make_engine(self.state)
        self.lr, self.clip, self.betas, self.eps, self.weight_decay = lr, clip, betas, eps, weight_decay
        self.max_skips = max_skips
        self.skips_in_a_row = 0
        self.total_skips = 0

    def step(self, ids: np.ndarray, labels: np.ndarray, on_layer: LayerCallback | None = None) -> StepResult:
        """One update on ids, labels [B,T]. Raises TrainingStopped after `max_skips` bad steps in a row."""
        gradients: dict[str, np.ndarray] = {}

        def collect(name: str, gradient: np.ndarray) -> None:
            gradients[name] = np.asarray(gradient, np.float32)

        result = self.engine.loss_and_grads(ids, labels, collect, on_layer=on_layer)
        missing = set(self.state.names()) ^ set(gradients)
        assert not missing, f"gradients and parameters differ: {sorted(missing)}"
        if result.num_targets == 0:
            return StepResult(result.loss, 0, 0.0, 1.0, "no scored target in the batch")
        sums = self.engine.sum_of_squares(gradients)
        bad = [name for name, value in sums.items() if not math.isfinite(value)]
        if bad:
            return self._skip(result.loss, result.num_targets, bad)
        norm = grad_norm.global_norm(sums.values())
        coefficient = 1.0 if self.clip is None else grad_norm.clip_coefficient(norm, self.clip)
        self.skips_in_a_row = 0
        for name in self.state.names():
            self._update(name, gradients.pop(name), coefficient)
        self.state.step += 1
        return StepResult(result.loss, result.num_targets, norm, coefficient)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> float:
        """Mean loss over scored targets with the present weights."""
        loss = self.engine.forward(ids, labels=labels).loss
        assert loss is not None
        return loss

    def close(self) -> None:
        self.engine.close()

    def _update(self, name: str, gradient: np.ndarray, coefficient: float) -> None:
        state = self.state
        self.engine.adamw(
            state.master[name],
            gradient,
            state.m[name],
            state.v[name],
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay if gradient.ndim >= 2 else 0.0,
            step=state.step + 1,
            grad_scale=coefficient,
        )
        state.refresh(name)

    def _skip(self, loss: float, num_targets: int, bad: list[str]) -> StepResult:
        self.skips_in_a_row += 1
        self.total_skips += 1
        reason = f"non-finite gradient in {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
        if self.skips_in_a_row >= self.max_skips:
            raise TrainingStopped(
                f"training: {self.skips_in_a_row} steps in a row skipped ({reason}, loss {loss:g}), expected finite "
                "gradients; lower --lr or look for damaged weights with `cupyllm verify --model DIR`"
            )
        return StepResult(loss, num_targets, math.inf, 0.0, reason)
