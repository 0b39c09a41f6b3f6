"""Attention over a paged KV cache, for decode and chunked prefill alike (cu/paged_attention.cu).

    out_i = sum_j softmax_j(scale q_i . k_j) v_j   over the keys j of its own sequence that query i sees

The rows of q are those of all sequences, one after another; sequence s owns rows q_starts[s] to q_starts[s+1] and has
kv_lengths[s] keys, the new tokens' included (kv_append runs first). Its query r of n stands at position
kv_lengths[s] - n + r and sees the keys up to itself, with a window of W the W latest of them. Key j lies in page
block_table[s, j // P]. Rows at or behind kv_lengths[s] are never read, whatever they hold; nor are table entries of
pages that lie wholly behind the window or behind the last key, which may be -1. Rows of q behind q_starts[S] give 0,
and so do sequences without keys: a step may be padded to a fixed number of rows and sequences.

Contract: the output equals, bit for bit, op attention's on the same keys in one run. Both kernels run the same code;
only a tile's address differs, and since P is a multiple of the 32-key tile no tile lies in two pages. So batch, chunks,
page size and placement change no bit either. Rejected for now: a split of long keys over several CTAs (flash decoding),
which needs a second variant of attention to stay equal to. Inference only.

    Node("attention", "paged_attention", ("q", "k_pages", "v_pages", "block_table", "q_starts", "kv_lengths"), ("out",),
         attrs={"num_heads": .., "num_kv_heads": .., "scale": None, "window": None})

Shapes: N rows, S sequences, M table entries, HQ HK query and KV heads, D head size, P tokens a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cupyllm.backend.base import Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.op import ACTIVATION_DTYPES, Attrs, Case, Cost, InferenceOp, Variant, check

ROWS = 32  # queries of one CTA; ROWS in attention.cuh
KEY_TILE = 32  # P is a multiple of it; FORWARD_KEYS in attention.cuh
THREADS = 128
NO_WINDOW = 1 << 40  # wider than any sequence


class PagedAttention(InferenceOp):
    """inputs (q [N,HQ*D], k_pages [num_pages,P,HK*D], v_pages like it, block_table int32 [S,M], q_starts int32 [S+1],
    kv_lengths int32 [S]) -> (out [N,HQ*D] in q's dtype).

    Attrs: num_heads, num_kv_heads, scale (None: 1/sqrt(D)), window (tokens or None). q_starts begins with 0 and never
    falls; kv_lengths[s] is at least the number of s's rows. Both are checked on the host by whoever makes them.
    """

    name = "paged_attention"
    variants = (Variant("plain", "paged_attention.cu", note="attention's own tiles, keys found by the block table"),)
    differentiable = (False,) * 6

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """[Spec of the output]. Raises InputError."""
        op = self.name
        assert len(inputs) == 6 and not params, (len(inputs), len(params))
        q, k_pages, v_pages, block_table, q_starts, kv_lengths = inputs
        assert q is not None and k_pages is not None and v_pages is not None
        assert block_table is not None and q_starts is not None and kv_lengths is not None
        heads, kv_heads = attrs["num_heads"], attrs["num_kv_heads"]
        check(len(q.shape) == 2, op, "q's shape", q.shape, "[N, HQ*D]")
        check(q.dtype in ACTIVATION_DTYPES, op, "q's dtype", q.dtype, " or ".join(ACTIVATION_DTYPES))
        whole = min(heads, kv_heads) > 0 and heads % kv_heads == 0
        check(whole, op, "num_heads and num_kv_heads", (heads, kv_heads), "a whole multiple")
        head_dim = q.shape[1] // heads
        check(q.shape[1] == heads * head_dim, op, "q's width", q.shape[1], f"a multiple of {heads} heads")
        fits = head_dim % 8 == 0 and 16 <= head_dim <= 128
        check(fits, op, "the head size", head_dim, "a multiple of 8 from 16 to 128")
        pages, width = k_pages.shape, kv_heads * head_dim
        check(len(pages) == 3 and pages[2] == width, op, "k_pages' shape", pages, f"[num_pages, P, {width}]")
        tiled = pages[1] > 0 and pages[1] % KEY_TILE == 0
        check(tiled, op, "the page size", pages[1], f"a multiple of {KEY_TILE} tokens")
        check(len(block_table.shape) == 2, op, "block_table's shape", block_table.shape, "[S, M]")
        sequences = block_table.shape[0]
        for name, got, want in (
            ("k_pages", k_pages, Spec(pages, q.dtype)),
            ("v_pages", v_pages, Spec(pages, q.dtype)),
            ("block_table", block_table, Spec(block_table.shape, "int32")),
            ("q_starts", q_starts, Spec((sequences + 1,), "int32")),
            ("kv_lengths", kv_lengths, Spec((sequences,), "int32")),
        ):
            same = (got.shape, got.dtype) == (want.shape, want.dtype)
            check(same, op, name, (got.dtype, got.shape), (want.dtype, want.shape))
        window, scale = attrs.get("window"), attrs.get("scale")
        check(window is None or window >= 1, op, "window", window, "at least 1, or None for no window")
        check(scale is None or math.isfinite(scale), op, "scale", scale, "a finite number or None")
        return [Spec(q.shape, q.dtype)]

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        """out is written (=) and must not overlap an input; saves nothing."""
        self.infer(inputs, params, attrs)
        variant = self.select(rec, inputs, params, attrs)
        q, k_pages, block_table = inputs[0], inputs[1], inputs[3]
        assert q is not None and k_pages is not None and block_table is not None
        heads, window = attrs["num_heads"], attrs.get("window")
        head_dim = q.shape[1] // heads
        scale = attrs.get("scale")
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        run = kernel(variant.source, "paged_attention_forward", dtypes={"X_T": q.dtype}, HEAD_DIM=head_dim)
        rec.launch(
            run,
            most_tiles(q.shape[0], block_table.shape[0]) * heads,
            THREADS,
            *inputs,
            outputs[0],
            *(q.shape[0], *block_table.shape, k_pages.shape[0], k_pages.shape[1], heads, attrs["num_kv_heads"]),
            *(np.float32(scale), NO_WINDOW if window is None else int(window)),
        )
        return ()

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        """As if the block table were full and every row stood at its sequence's end: only the device knows lengths."""
        q, k_pages, block_table = inputs[0], inputs[1], inputs[3]
        assert q is not None and k_pages is not None and block_table is not None
        sequences, entries = block_table.shape
        keys = min(entries * k_pages.shape[1], attrs.get("window") or NO_WINDOW)
        slot_bytes = k_pages.nbytes // max(1, k_pages.shape[0] * k_pages.shape[1])
        return (
            Cost(4.0 * q.size * keys, 2 * q.nbytes + 2 * sequences * keys * slot_bytes + block_table.nbytes),
            Cost(0.0, 0.0),
        )

    def cases(self) -> list[Case]:
        """Decode, prefill, chunks around the tiles, GQA, windows, padding; Qwen3-32B. Head sizes 16, 64 and 128: each
        is a compilation for every target, and attention's own cases have the others."""

        def case(
            name: str,
            queries: Sequence[int],
            lengths: Sequence[int],
            heads: tuple[int, int, int],  # HQ, HK, D
            page_tokens: int = 32,
            padding: int = 0,
            size: str = "small",
            **attrs: object,
        ) -> Case:
            num_heads, kv_heads, head_dim = heads
            starts = np.cumsum([0, *queries])
            entries = max(1, -(-max(lengths) // page_tokens))
            num_pages = len(lengths) * entries + 1
            pages = (num_pages, page_tokens, kv_heads * head_dim)
            table = (len(lengths), entries)
            rows = (int(starts[-1]) + padding, num_heads * head_dim)
            values = ("values:" + ",".join(str(value) for value in numbers) for numbers in (starts, lengths))
            kinds = ("normal", "normal", "normal", f"pages:{num_pages}", *values)
            inputs = (rows, pages, pages, table, (len(lengths) + 1,), (len(lengths),))
            return Case(name, inputs, (), {"num_heads": num_heads, "num_kv_heads": kv_heads, **attrs}, kinds, size)

        return [
            case("one key", [1], [1], (1, 1, 16)),
            case("decode", [1, 1, 1], [33, 5, 64], (2, 1, 16)),
            case("prefill and decode", [31, 1, 5], [31, 40, 37], (4, 1, 16)),
            case("tile-1, tile, tile+1", [31, 32, 33], [31, 32, 33], (2, 2, 16)),
            case("chunk of 64-token pages", [3, 40], [70, 129], (2, 1, 64), 64),
            case("window", [1, 34], [50, 67], (2, 1, 16), window=9),
            case("a sequence without rows", [0, 2], [9, 2], (8, 1, 16), scale=0.3),
            case("padded", [2, 0], [34, 0], (2, 1, 16), padding=3),
            case("head 128, 128-token pages", [2], [130], (2, 1, 128), 128),
            case("Qwen3-32B, decode of 8 at 2048", [1] * 8, [2048] * 8, (64, 8, 128), 64, size="model"),
            case("Qwen3-32B, chunk of 512 at 2048", [512], [2048], (64, 8, 128), 64, size="model"),
        ]


OP = PagedAttention()


def most_tiles(num_rows: int, num_sequences: int) -> int:
    """Upper bound of sum ceil(n_s / ROWS) over the sequences and the rows behind them, n_s adding up to num_rows."""
    return min(num_rows, (num_rows + (ROWS - 1) * (num_sequences + 1)) // ROWS)
