"""Scaled dot-product attention, FlashAttention-2 style: cu/attention.cu on the device, reference/attention.py in NumPy.

    out_i = sum_j softmax_j(scale q_i . k_j) v_j   over the keys j that query i sees

The scores never reach device memory: a CTA keeps a tile of queries and passes over the keys with an online softmax; the
backward computes the probabilities again from the saved log-sum-exp (Dao 2023). d_k/d_v and d_q are two kernels, each
with one owner per output element. One kernel that adds d_q with atomics was rejected: its sum has no fixed order.

Visible means: same segment and not a negative one; causal: key <= query; window W: the W latest keys, self included.
The last query sits at the last key (offset Tk - Tq), so a chunk of queries is the tail of its sequence.
A query that sees nothing gives exactly 0 and passes no gradient, even where hidden keys or values hold NaN.

Shapes: B batch, Tq Tk queries and keys, HQ HK query and KV heads, D head size. Query head h reads KV head h // (HQ/HK).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cupyllm.backend.base import KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.op import ACTIVATION_DTYPES, Attrs, Case, Cost, Op, Variant, check

ROWS = 32  # queries (forward, d_q) or keys (d_k, d_v) of one CTA; ROWS in attention.cu
THREADS = 128
DELTA_ROWS = 4  # rows of one CTA of attention_delta
NO_WINDOW = 1 << 40  # wider than any sequence


class Attention(Op):
    """Inputs q [B,Tq,HQ*D], k and v [B,Tk,HK*D], q_segments int32 [B,Tq] and k_segments int32 [B,Tk] or both None.

    Attrs: num_heads, num_kv_heads, scale (None: 1/sqrt(D)), causal (default True), window (tokens or None).
    Output [B,Tq,HQ*D] in q's dtype. Saved: q, k, v, both segments, the output and its lse float32 [B,HQ,Tq].
    """

    name = "attention"
    variants = (Variant("plain", "attention.cu", note="fp32 FMA tiles of 32x32, any GPU, batch-invariant"),)
    differentiable = (True, True, True, False, False)

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """[Spec of the output]. Raises InputError."""
        assert len(inputs) == 5 and not params, (len(inputs), len(params))
        q, k, v, q_segments, k_segments = inputs
        assert q is not None and k is not None and v is not None
        heads, kv_heads = attrs["num_heads"], attrs["num_kv_heads"]
        check(len(q.shape) == 3, "attention", "q's shape", q.shape, "[B, Tq, HQ*D]")
        check(q.dtype in ACTIVATION_DTYPES, "attention", "q's dtype", q.dtype, " or ".join(ACTIVATION_DTYPES))
        check(
            min(heads, kv_heads) > 0 and heads % kv_heads == 0,
            "attention",
            "num_heads and num_kv_heads",
            (heads, kv_heads),
            "a whole multiple",
        )
        head_dim = q.shape[2] // heads
        check(q.shape[2] == heads * head_dim, "attention", "q's width", q.shape[2], f"a multiple of {heads} heads")
        check(
            head_dim % 8 == 0 and 16 <= head_dim <= 128,
            "attention",
            "the head size",
            head_dim,
            "a multiple of 8 from 16 to 128",
        )
        shape = (q.shape[0], k.shape[1] if len(k.shape) == 3 else -1, kv_heads * head_dim)
        check(k.shape == shape, "attention", "k's shape", k.shape, f"[{shape[0]}, Tk, {shape[2]}]")
        check(v.shape == k.shape, "attention", "v's shape", v.shape, f"k's, {k.shape}")
        check(k.dtype == v.dtype == q.dtype, "attention", "k's and v's dtype", (k.dtype, v.dtype), f"q's, {q.dtype}")
        check(
            (q_segments is None) == (k_segments is None),
            "attention",
            "the segments given",
            "q_segments alone" if k_segments is None else "k_segments alone",
            "both or neither",
        )
        for name, segments, x in (("q_segments", q_segments, q), ("k_segments", k_segments, k)):
            if segments is not None:
                want = Spec(x.shape[:2], "int32")
                got = Spec(segments.shape, segments.dtype)
                check(got == want, "attention", name, (got.dtype, got.shape), (want.dtype, want.shape))
        window, scale = attrs.get("window"), attrs.get("scale")
        check(window is None or window >= 1, "attention", "window", window, "at least 1, or None for no window")
        check(scale is None or math.isfinite(scale), "attention", "scale", scale, "a finite number or None")
        return [Spec(q.shape, q.dtype)]

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        """out is written (=) and must not overlap an input."""
        self.infer(inputs, params, attrs)
        self.select(rec, inputs, params, attrs)
        q, k, v, q_segments, k_segments = inputs
        (out,) = outputs
        assert q is not None and k is not None and v is not None
        heads = attrs["num_heads"]
        lse = rec.empty((q.shape[0], heads, q.shape[1]), "float32", "lse")
        rec.launch(
            _kernel("attention_forward", q, heads),
            _tiles(q.shape[1]) * q.shape[0] * heads,
            THREADS,
            *(q, k, v, q_segments, k_segments, out, lse),
            *_numbers(q, k, attrs),
        )
        return q, k, v, q_segments, k_segments, out, lse

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
        """d_q, d_k and d_v are written (=), each where wanted; none may overlap a saved tensor or d_out."""
        q, k, v, q_segments, k_segments, out, lse = saved
        d_out = d_outputs[0]
        d_q, d_k, d_v = d_inputs[:3]
        assert q is not None and k is not None and out is not None and d_out is not None
        heads, kv_heads = attrs["num_heads"], attrs["num_kv_heads"]
        (batch, num_queries, _), num_keys = q.shape, k.shape[1]
        delta = rec.empty((batch, heads, num_queries), "float32", "delta")
        rec.launch(
            _kernel("attention_delta", q, heads),
            -(-delta.size // DELTA_ROWS),
            32 * DELTA_ROWS,
            *(out, d_out, delta, batch, num_queries, heads),
        )
        common = (q, k, v, q_segments, k_segments, d_out, lse, delta)
        numbers = _numbers(q, k, attrs)
        if d_k is not None or d_v is not None:
            grid = _tiles(num_keys) * batch * kv_heads
            rec.launch(_kernel("attention_backward_kv", q, heads), grid, THREADS, *common, d_k, d_v, *numbers)
        if d_q is not None:
            grid = _tiles(num_queries) * batch * heads
            rec.launch(_kernel("attention_backward_q", q, heads), grid, THREADS, *common, d_q, *numbers)

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        """Products over visible pairs only (segments not counted): 2 in the forward, 5 in the backward."""
        q, k = inputs[0], inputs[1]
        assert q is not None and k is not None
        product = 2.0 * q.shape[0] * q.shape[2] * visible_pairs(q.shape[1], k.shape[1], attrs)
        lse_bytes = 4 * q.shape[0] * attrs["num_heads"] * q.shape[1]
        return (
            Cost(2 * product, 2 * q.nbytes + 2 * k.nbytes + lse_bytes),
            Cost(5 * product, 4 * q.nbytes + 4 * k.nbytes + 2 * lse_bytes),
        )

    def cases(self) -> list[Case]:
        """One query, odd, tile-1, tile, tile+1; GQA, window, segments, query tails; Qwen3 shapes.

        The one query has two keys: with a single key d_q is 0, and no error is small beside it.
        """

        def case(
            name: str,
            batch: int,
            num_queries: int,
            num_keys: int,
            heads: int,
            kv_heads: int,
            head_dim: int,
            segments: bool = False,
            size: str = "small",
            **attrs: object,
        ) -> Case:
            q, k = (batch, num_queries, heads * head_dim), (batch, num_keys, kv_heads * head_dim)
            inputs: tuple[tuple[int, ...], ...] = (q, k, k, q[:2], k[:2])
            kind = "segments" if segments else "none"
            attrs = {"num_heads": heads, "num_kv_heads": kv_heads, **attrs}
            return Case(name, inputs, (), attrs, ("normal", "normal", "normal", kind, kind), size)

        return [
            case("one query", 1, 1, 2, 1, 1, 16),
            case("odd", 2, 7, 7, 2, 1, 24),
            case("bidirectional", 1, 5, 9, 2, 2, 16, causal=False),
            case("bidirectional tiles", 1, 40, 70, 2, 1, 16, causal=False),
            case("tile-1", 1, 31, 31, 2, 1, 32),
            case("tile", 1, 32, 32, 2, 2, 64),
            case("tile+1", 1, 33, 33, 4, 2, 16),
            case("window", 1, 40, 40, 2, 1, 16, window=9),
            case("segments", 2, 37, 37, 2, 1, 16, segments=True),
            case("query tail", 1, 3, 36, 4, 1, 16, window=33),
            case("head 128", 1, 18, 18, 2, 1, 128),
            case("Qwen3-0.6B, 2048 tokens", 1, 2048, 2048, 16, 8, 128, size="model"),
            case("Qwen3-32B, 2048 tokens", 1, 2048, 2048, 64, 8, 128, size="model"),
            case("Qwen3-32B, 8192 tokens", 1, 8192, 8192, 64, 8, 128, size="model"),
        ]


OP = Attention()


def visible_pairs(num_queries: int, num_keys: int, attrs: Attrs) -> int:
    """(query, key) pairs that causality and window leave, for one row and head."""
    position = np.arange(num_queries, dtype=np.int64) + (num_keys - num_queries)
    high = position + 1 if attrs.get("causal", True) else np.full_like(position, num_keys)
    low = position + 1 - (attrs.get("window") or NO_WINDOW)
    return int(np.maximum(np.clip(high, 0, num_keys) - np.clip(low, 0, num_keys), 0).sum())


def _tiles(num_tokens: int) -> int:
    return -(-num_tokens // ROWS)


def _kernel(name: str, q: Spec, num_heads: int) -> KernelSpec:
    return kernel("attention.cu", name, dtypes={"X_T": q.dtype}, HEAD_DIM=q.shape[2] // num_heads)


def _numbers(q: Spec, k: Spec, attrs: Attrs) -> tuple[int | np.float32, ...]:
    """The kernels' last arguments, B to window."""
    heads, scale = attrs["num_heads"], attrs.get("scale")
    scale = 1 / math.sqrt(q.shape[2] // heads) if scale is None else scale
    window = attrs.get("window")
    return (
        *(q.shape[0], q.shape[1], k.shape[1], heads, attrs["num_kv_heads"]),
        *(np.float32(scale), int(attrs.get("causal", True)), NO_WINDOW if window is None else int(window)),
    )
