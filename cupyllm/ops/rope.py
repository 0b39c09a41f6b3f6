"""Rotary position embedding, half-split pairing: cu/rope.cu on the device, reference/rope.py in NumPy.

    y_i = x_i cos a_i - x_{i+D/2} sin a_i      y_{i+D/2} = x_{i+D/2} cos a_i + x_i sin a_i
    a_i = position * inv_freq_i

q and k turn in one launch; cos and sin come from a float32 table that is built once per batch by `rope_table` and
shared by all layers. Turning inside every layer from the positions was rejected: it repeats the same slow cosines L
times. The backward is the transpose, the rotation by -a with the same factor.

The inverse frequencies are computed on the host in the order and precision of transformers' modeling_rope_utils
(float32; powers in float64 and rounded once): an ulp of a frequency is 0.002 radians at position 40959, so they are
part of the model's definition. Rules: default, linear (Chen et al. 2023), llama3 (Llama 3.1), YaRN (Peng et al. 2023).

Shapes: N rows, HQ HK query and KV heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cupyllm.backend.base import Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.config import RopeConfig
from cupyllm.errors import ConfigError
from cupyllm.ops.op import ACTIVATION_DTYPES, Attrs, Case, Cost, Op, Variant, check

THREADS = 256


class Rope(Op):
    """Inputs q [N,HQ*D], k [N,HK*D], cos and sin float32 [N,D/2]. Attr: head_dim. Outputs: turned q and k."""

    name = "rope"
    variants = (Variant("plain", "rope.cu", note="one CTA a row, one thread a pair"),)
    differentiable = (True, True, False, False)

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """Specs of both outputs. Raises InputError."""
        assert len(inputs) == 4 and not params, (len(inputs), len(params))
        q, k, cos, sin = inputs
        assert q is not None and k is not None and cos is not None and sin is not None
        head_dim = attrs["head_dim"]
        check(head_dim > 0 and head_dim % 2 == 0, "rope", "head_dim", head_dim, "a positive even number")
        check(q.dtype in ACTIVATION_DTYPES, "rope", "q's dtype", q.dtype, " or ".join(ACTIVATION_DTYPES))
        check(k.dtype == q.dtype, "rope", "k's dtype", k.dtype, f"q's, {q.dtype}")
        for name, x in (("q", q), ("k", k)):
            fits = len(x.shape) == 2 and x.shape[0] == q.shape[0] and x.shape[1] % head_dim == 0
            check(fits, "rope", f"{name}'s shape", x.shape, f"[{q.shape[0]}, heads * {head_dim}]")
        for name, x in (("cos", cos), ("sin", sin)):
            shape = (q.shape[0], head_dim // 2)
            check(x.shape == shape, "rope", f"{name}'s shape", x.shape, shape)
            check(x.dtype == "float32", "rope", f"{name}'s dtype", x.dtype, "float32")
        return [Spec(q.shape, q.dtype), Spec(k.shape, k.dtype)]

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        """Outputs are written (=); each may be its own input (in place)."""
        self.infer(inputs, params, attrs)
        self.select(rec, inputs, params, attrs)
        q, k, cos, sin = inputs
        assert cos is not None and sin is not None
        _turn(rec, q, k, cos, sin, outputs[0], outputs[1], attrs["head_dim"], 1.0)
        return cos, sin

    def backward(
        self,
        rec: Recorder,
        saved: tuple[Tensor | None, ...],
        d_outputs: Sequence[Tensor | None],
        d_inputs: Sequence[Tensor | None],
        d_params: Sequence[Tensor | None],
        attrs: Attrs,
        accumulate: bool,
    ) -> None:
        """d_q and d_k are written (=), each where wanted; each may be its own output gradient (in place)."""
        cos, sin = saved
        assert cos is not None and sin is not None
        _turn(rec, d_outputs[0], d_outputs[1], cos, sin, d_inputs[0], d_inputs[1], attrs["head_dim"], -1.0)

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        """Three operations an element; every tensor crosses memory once each way."""
        q, k, cos, sin = inputs
        assert q is not None and k is not None and cos is not None and sin is not None
        one = Cost(3.0 * (q.size + k.size), 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes)
        return one, one

    def cases(self) -> list[Case]:
        """One, odd, more pairs than threads (tile-1, tile, tile+1 of 256), and Qwen3 shapes."""

        def case(name: str, rows: int, heads: int, kv_heads: int, head_dim: int, size: str = "small") -> Case:
            table = (rows, head_dim // 2)
            inputs: tuple[tuple[int, ...], ...] = ((rows, heads * head_dim), (rows, kv_heads * head_dim), table, table)
            return Case(name, inputs, (), {"head_dim": head_dim}, ("normal", "normal", "cos", "sin"), size)

        return [
            case("one", 1, 1, 1, 2),
            case("odd", 3, 3, 1, 6),
            case("tile-1", 2, 4, 1, 102),  # 5 heads of 51 pairs
            case("tile", 2, 6, 2, 64),
            case("tile+1", 2, 256, 1, 2),
            case("Qwen3-0.6B, 2048 tokens", 2048, 16, 8, 128, "model"),
            case("Qwen3-32B, 2048 tokens", 2048, 64, 8, 128, "model"),
        ]


OP = Rope()


def rope_table(
    rec: Recorder, positions: Tensor, inv_freq: Tensor, attention_factor: float, cos: Tensor, sin: Tensor
) -> None:
    """Record cos, sin float32 [N,D/2] (=) of positions int32 [N] times inv_freq float32 [D/2], both times the factor.

    The angle is the float32 product; its cosine and sine are exact to the rounding at any angle.
    """
    shape = (*positions.shape, *inv_freq.shape)
    check(positions.dtype == "int32", "rope_table", "positions' dtype", positions.dtype, "int32")
    for name, x in (("inv_freq", inv_freq), ("cos", cos), ("sin", sin)):
        check(x.dtype == "float32", "rope_table", f"{name}'s dtype", x.dtype, "float32")
    check(cos.shape == sin.shape == shape, "rope_table", "cos' and sin's shape", (cos.shape, sin.shape), shape)
    num_rows, half = positions.size, inv_freq.size
    rec.launch(
        kernel("rope.cu", "rope_table", dtypes={}),
        -(-num_rows * half // THREADS),
        THREADS,
        *(positions, inv_freq, cos, sin, num_rows, half, np.float32(attention_factor)),
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """(float32 [D/2] inverse frequencies, the factor that multiplies cos and sin). Raises ConfigError."""
    # numpy's float32 pow differs between machines; float64 rounded once does not, and is within an ulp of torch's.
    powers = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    period = (np.float64(rope.theta) ** powers.astype(np.float64)).astype(np.float32)  # radians^-1, per pair
    base = np.float32(1) / period
    if rope.rope_type == "default":
        return base, 1.0
    if rope.rope_type == "linear":
        return base / np.float32(rope.factor), 1.0
    if rope.rope_type not in ("llama3", "yarn"):
        raise ConfigError(f"rope: rope_type is {rope.rope_type!r}, expected default, linear, llama3 or yarn")
    if rope.original_max_position_embeddings is None:
        raise ConfigError(
            f"rope: original_max_position_embeddings is missing, rope_type {rope.rope_type} needs it; add it to "
            "config.json"
        )
    if rope.rope_type == "llama3":
        return _llama3(rope, base, rope.original_max_position_embeddings), 1.0
    return _yarn(rope, period, rope.original_max_position_embeddings), _yarn_factor(rope)


def _llama3(rope: RopeConfig, base: np.ndarray, original: int) -> np.ndarray:
    """Keep waves shorter than original/high_freq_factor, divide those over original/low_freq_factor, blend between.

    The blend weighs the divided and the kept frequency by how many times the wave fits into the original context.
    """
    low, high, factor = rope.low_freq_factor, rope.high_freq_factor, np.float32(rope.factor)
    wavelength = np.float32(2 * math.pi) / base
    weight = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - weight) * base / factor + weight * base
    result = np.where(wavelength > np.float32(original / low), base / factor, blended)
    return np.where(wavelength < np.float32(original / high), base, result)


def _yarn(rope: RopeConfig, period: np.ndarray, original: int) -> np.ndarray:
    """Per pair a blend of the kept and the divided frequency, by a linear ramp between two pair indices.

    The ramp runs from the pair that turns beta_fast times within the original context to the one that turns beta_slow
    times (Peng et al. 2023, section 3.2); transformers floors and ceils both ends unless truncate is false.
    """
    pairs = period.size

    def pair_turning(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, 2.0 * pairs - 1)
    if low == high:
        high += 0.001  # transformers' guard against 0/0
    one = np.float32(1)
    ramp = np.clip((np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept_share = one - ramp
    divided, kept = one / (np.float32(rope.factor) * period), one / period
    return (divided * (one - kept_share) + kept * kept_share).astype(np.float32)


def _yarn_factor(rope: RopeConfig) -> float:
    """What multiplies cos and sin: given, or 0.1 mscale ln(factor) + 1 (over the same of mscale_all_dim)."""
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _turn(
    rec: Recorder,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor | None,
    k_out: Tensor | None,
    head_dim: int,
    direction: float,
) -> None:
    """Turn whichever of q and k has an output; direction 1 is the rotation, -1 its transpose."""
    heads = []
    for x, y in ((q, q_out), (k, k_out)):
        assert y is None or (x is not None and x.shape == y.shape)
        heads.append(0 if y is None else y.shape[1] // head_dim)
    wanted = q_out if q_out is not None else k_out
    if wanted is None:
        return
    rec.launch(
        kernel("rope.cu", "rope", dtypes={"X_T": wanted.dtype}),
        cos.shape[0],
        THREADS,
        *(q if heads[0] else None, k if heads[1] else None, cos, sin, q_out, k_out),
        *(*heads, head_dim // 2, np.float32(direction)),
    )
