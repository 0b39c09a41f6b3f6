"""Rotary position embedding (Su et al. 2021), half-split pairing: element i of a head turns with element i + D/2.

    q'_i = q_i cos a_i - q_{i+D/2} sin a_i      q'_{i+D/2} = q_{i+D/2} cos a_i + q_i sin a_i      a_i = pos * inv_freq_i

A rotation is orthogonal, so its backward is the rotation by the opposite angle (times the same YaRN factor).

The inverse frequencies are float32 numbers and the angle is their float32 product with the position: that rounding
is part of the model's definition (what it was trained with), so the float64 reference keeps it and only evaluates
cos, sin and the rotation more precisely. Tables in bf16 were rejected: position 257 does not exist there.
The frequency rules are those of transformers' modeling_rope_utils: default, linear (Chen et al. 2023), llama3
(Llama 3.1) and YaRN (Peng et al. 2023, eq. 20-25).

Shapes: N rows, HQ and HK query and KV heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyllm.config import RopeConfig
from cupyllm.errors import ConfigError


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """(float32 [D/2] inverse frequencies, the factor that multiplies cos and sin). Raises ConfigError."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # theta^exponent in float64, rounded once: the same bits on every libm, within an ulp of torch's float32 pow.
    wave = np.power(rope.theta, exponent.astype(np.float64)).astype(np.float32)
    inv_freq = np.float32(1) / wave
    if rope.rope_type == "default":
        return inv_freq, 1.0
    if rope.rope_type == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, wave, head_dim), _yarn_attention_factor(rope)
    raise ConfigError(f"rope: got rope_type {rope.rope_type!r}, expected default, linear, llama3 or yarn")


def table(
    positions: np.ndarray, inv_freq: np.ndarray, attention_factor: float, dtype: np.dtype | type
) -> tuple[np.ndarray, np.ndarray]:
    """positions int [N] -> (cos, sin), each [N,D/2] in `dtype`, times attention_factor."""
    angle = positions.astype(np.float32)[:, None] * inv_freq[None, :]
    angle = angle.astype(dtype)
    factor = angle.dtype.type(attention_factor)
    return np.cos(angle) * factor, np.sin(angle) * factor


def forward(
    q: np.ndarray, k: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, head_dim: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[Any, ...]]:
    """q [N,HQ*D], k [N,HK*D], cos and sin [N,D/2] -> (q', k') of the same shapes (new arrays)."""
    return (_rotate(q, cos, sin, head_dim), _rotate(k, cos, sin, head_dim)), (cos, sin, head_dim)


def backward(saved: tuple[Any, ...], d_q: np.ndarray, d_k: np.ndarray) -> tuple[np.ndarray, np.ndarray, None, None]:
    """Gradients of q' and k' -> (d_q, d_k, None, None)."""
    cos, sin, head_dim = saved
    return _rotate(d_q, cos, -sin, head_dim), _rotate(d_k, cos, -sin, head_dim), None, None


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, head_dim: int) -> np.ndarray:
    halves = x.reshape(x.shape[0], -1, 2, head_dim // 2)
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = np.empty_like(halves)
    out[:, :, 0] = halves[:, :, 0] * cos - halves[:, :, 1] * sin
    out[:, :, 1] = halves[:, :, 1] * cos + halves[:, :, 0] * sin
    return out.reshape(x.shape)


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise ConfigError(f"rope: rope_type {rope.rope_type} needs original_max_position_embeddings in config.json")
    return rope.original_max_position_embeddings


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Long waves are slowed by `factor`, short ones kept, those between blended by how often they fit the context."""
    original = _original_length(rope)
    f32 = np.float32
    wavelength = f32(2 * math.pi) / inv_freq
    slowed = np.where(wavelength > f32(original / rope.low_freq_factor), inv_freq / f32(rope.factor), inv_freq)
    smooth = (f32(original) / wavelength - f32(rope.low_freq_factor)) / f32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (f32(1) - smooth) * slowed / f32(rope.factor) + smooth * slowed
    between = (wavelength >= f32(original / rope.high_freq_factor)) & (
        wavelength <= f32(original / rope.low_freq_factor)
    )
    return np.where(between, blended, slowed)


def _yarn(rope: RopeConfig, wave: np.ndarray, head_dim: int) -> np.ndarray:
    """A ramp over the dimensions from kept (turns more than beta_fast times) to slowed (less than beta_slow)."""
    original = _original_length(rope)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    f32 = np.float32
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - f32(low)) / f32(high - low), f32(0), f32(1))
    kept = f32(1) - ramp
    return f32(1) / (f32(rope.factor) * wave) * (f32(1) - kept) + f32(1) / wave * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
