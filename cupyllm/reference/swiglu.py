"""SwiGLU (Shazeer 2020): y = silu(gate) up, silu(g) = g s, s = 1 / (1 + exp(-g)).

Backward: d silu / d g = s + g s (1 - s) = s (1 + g (1 - s)); d_up = d_y g s. Nothing but the two inputs is saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def forward(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, tuple[Any, ...]]:
    """gate and up [N,F] -> y [N,F] (a new array)."""
    return gate * _sigmoid(gate) * up, (gate, up)


def backward(saved: tuple[Any, ...], d_y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """d_y [N,F] -> (d_gate, d_up)."""
    gate, up = saved
    sigmoid = _sigmoid(gate)
    return d_y * up * sigmoid * (1 + gate * (1 - sigmoid)), d_y * gate * sigmoid


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp of a large -x is inf and 1 / inf is the right limit, 0
        return 1 / (1 + np.exp(-x))
