"""Append to a paged KV cache: k_pages[slots[n]] = k[n] and v_pages[slots[n]] = v[n], in place (cu/kv_append.cu).

Slots are flat: slot = page * P + offset (kvcache/blocks.py, Sequence.slots). A slot of -1 writes nothing, so a step may
be padded to a fixed number of rows. In place, because the cache is far larger than what a step writes to it; a graph
node of this op therefore has no outputs, and whoever reads the pages comes later in the list. Inference only.

    Node("kv_append", "kv_append", ("k", "v", "k_pages", "v_pages", "slots"), ())

Shapes: N rows, HK KV heads, D head size, P tokens a page.
"""

from __future__ import annotations

from collections.abc import Sequence

from cupyllm.backend.base import Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.op import ACTIVATION_DTYPES, Attrs, Case, Cost, InferenceOp, Variant, check

THREADS = 256


class KvAppend(InferenceOp):
    """inputs (k [N,HK*D], v [N,HK*D], k_pages [num_pages,P,HK*D], v_pages like it, slots int32 [N]) -> no outputs.

    The pages are written (=) in the named slots and nowhere else. No two rows of a call may name one slot. No attrs.
    """

    name = "kv_append"
    variants = (Variant("plain", "kv_append.cu", note="a scatter of rows into pages, in place"),)
    differentiable = (False,) * 5
    in_place = (2, 3)

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """No output specs. Raises InputError."""
        assert len(inputs) == 5 and not params, (len(inputs), len(params))
        k, v, k_pages, v_pages, slots = inputs
        assert k is not None and v is not None and k_pages is not None and v_pages is not None and slots is not None
        check(len(k.shape) == 2, "kv_append", "k's shape", k.shape, "[N, HK*D]")
        check(k.dtype in ACTIVATION_DTYPES, "kv_append", "k's dtype", k.dtype, " or ".join(ACTIVATION_DTYPES))
        rows, width = k.shape
        pages = k_pages.shape
        check(len(pages) == 3 and pages[2] == width, "kv_append", "k_pages' shape", pages, f"[num_pages, P, {width}]")
        check(k_pages.size // max(width, 1) < 2**31, "kv_append", "slots in k_pages", pages, "fewer than 2^31")
        for name, got, want in (
            ("v", v, Spec(k.shape, k.dtype)),
            ("k_pages", k_pages, Spec(pages, k.dtype)),
            ("v_pages", v_pages, Spec(pages, k.dtype)),
            ("slots", slots, Spec((rows,), "int32")),
        ):
            same = (got.shape, got.dtype) == (want.shape, want.dtype)
            check(same, "kv_append", name, (got.dtype, got.shape), (want.dtype, want.shape))
        return []

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        """Records the write; saves nothing."""
        self.infer(inputs, params, attrs)
        variant = self.select(rec, inputs, params, attrs)
        k, k_pages = inputs[0], inputs[2]
        assert k is not None and k_pages is not None
        rows, width = k.shape
        run = kernel(variant.source, "kv_append_forward", dtypes={"X_T": k.dtype})
        rec.launch(run, rows, THREADS, *inputs, width, k_pages.shape[0] * k_pages.shape[1])
        return ()

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        """Every row is read and written once."""
        k, slots = inputs[0], inputs[4]
        assert k is not None and slots is not None
        return Cost(0.0, 4 * k.nbytes + slots.nbytes), Cost(0.0, 0.0)

    def cases(self) -> list[Case]:
        def case(name: str, rows: int, pages: tuple[int, int, int], kind: str = "", size: str = "small") -> Case:
            row = (rows, pages[2])
            kinds = ("normal", "normal", "normal", "normal", kind or f"slots:{pages[0] * pages[1]}")
            return Case(name, (row, row, pages, pages, (rows,)), kinds=kinds, size=size)

        return [
            case("one", 1, (1, 1, 1)),
            case("odd", 5, (3, 7, 3)),
            case("tile-1", 40, (2, 32, 255)),
            case("tile", 64, (2, 32, 256)),
            case("tile+1", 33, (3, 64, 257)),
            case("nothing written", 3, (2, 4, 8), "values:-1,-1,-1"),
            case("first and last slot", 2, (2, 32, 16), "values:63,0"),
            case("Qwen3-32B, 256 rows", 256, (64, 64, 1024), size="model"),
        ]


OP = KvAppend()
