"""Embedding: y[n] = weight[ids[n]]. Kernels and the deterministic backward: cu/embedding.cu.

Shapes: N positions, V vocabulary, C hidden. Ids are checked on the host by whoever uploads them; a kernel cannot raise.
"""

from __future__ import annotations

from collections.abc import Sequence

from cupyllm.backend.base import ITEMSIZE, KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.op import ACTIVATION_DTYPES, WEIGHT_DTYPES, Attrs, Case, Cost, Op, Variant, check

THREADS = 256


class Embedding(Op):
    """inputs (ids int32 [N]), params (weight [V,C]) -> (y [N,C]).

    attrs: "dtype", that of y (default: the weight's); "padding_idx", an id whose row gets no gradient (default: none).
    """

    name = "embedding"
    variants = (Variant("plain", "embedding.cu", 80, note="a gather; backward sums chains of equal ids in order"),)
    differentiable = (False,)

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        check(len(inputs) == 1, "embedding", "number of inputs", len(inputs), "1 (ids)")
        check(len(params) == 1, "embedding", "number of params", len(params), "1 (weight)")
        ids, weight = inputs[0], params[0]
        assert ids is not None
        check(ids.dtype == "int32", "embedding", "ids dtype", ids.dtype, "int32", "convert the ids")
        check(len(ids.shape) == 1, "embedding", "ids shape", ids.shape, "[N]", "flatten the ids")
        check(ids.size < 2**31, "embedding", "number of ids", ids.size, "< 2^31", "split the batch")
        check(weight.dtype in WEIGHT_DTYPES, "embedding", "weight dtype", weight.dtype, " or ".join(WEIGHT_DTYPES))
        check(len(weight.shape) == 2, "embedding", "weight shape", weight.shape, "[V,C]")
        dtype = attrs.get("dtype", weight.dtype)
        remedy = 'pass attrs["dtype"]'
        check(dtype in ACTIVATION_DTYPES, "embedding", "output dtype", dtype, " or ".join(ACTIVATION_DTYPES), remedy)
        padding_idx = attrs.get("padding_idx")
        inside = padding_idx is None or 0 <= padding_idx < weight.shape[0]
        check(inside, "embedding", "padding_idx", padding_idx, f"None or 0 <= padding_idx < {weight.shape[0]}")
        return [Spec((ids.size, weight.shape[1]), dtype)]

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        variant = self.select(rec, inputs, params, attrs)
        ids, weight, y = inputs[0], params[0], outputs[0]
        assert ids is not None
        run = _kernel("embedding_forward", variant.source, y, weight)
        rec.launch(run, ids.size, THREADS, ids, weight, y, weight.shape[1])
        return ids, weight

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
        (ids, weight), d_y, d_weight = saved, d_outputs[0], d_params[0]
        assert ids is not None and weight is not None and d_y is not None
        if d_weight is None:
            return
        source = self.select(rec, [ids], [weight], attrs).source
        if not accumulate:
            zero = _kernel("embedding_zero", source, d_y, weight)
            rec.launch(zero, -(-d_weight.size // THREADS), THREADS, d_weight, d_weight.size)
        following = rec.empty(ids.shape, "int32", "next")
        first = rec.empty(ids.shape, "int32", "first")
        chain = _kernel("embedding_chain", source, d_y, weight)
        rec.launch(chain, -(-ids.size // THREADS), THREADS, ids, following, first, ids.size)
        padding_idx = attrs.get("padding_idx")
        hidden = weight.shape[1]
        run = _kernel("embedding_backward", source, d_y, weight)
        grid = (ids.size, -(-hidden // THREADS))
        padding = -1 if padding_idx is None else padding_idx
        rec.launch(run, grid, THREADS, d_y, ids, following, first, d_weight, hidden, padding)

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        ids, weight = inputs[0], params[0]
        assert ids is not None
        size = ids.size * weight.shape[1]
        y_bytes = size * ITEMSIZE[attrs.get("dtype", weight.dtype)]
        return (
            Cost(0.0, ids.nbytes + size * ITEMSIZE[weight.dtype] + y_bytes),
            Cost(float(size), ids.nbytes + y_bytes + 4 * weight.size),
        )

    def cases(self) -> list[Case]:
        # name: (positions, vocabulary, hidden)
        small = {
            "one": (1, 1, 1),
            "odd": (7, 5, 3),
            "tile-1": (20, 9, 255),
            "tile": (256, 40, 8),
            "tile+1": (257, 300, 9),
            "one id 300 times": (300, 1, 4),
            "wide": (6, 3, 257),
        }
        padded = Case("padding", ((40,),), ((6, 5),), {"padding_idx": 2}, ("ids:6",))
        model = {"qwen3 0.6b": (128, 151936, 1024)}
        return [
            *(Case(name, ((n,),), ((v, c),), kinds=(f"ids:{v}",)) for name, (n, v, c) in small.items()),
            padded,
            *(Case(name, ((n,),), ((v, c),), kinds=(f"ids:{v}",), size="model") for name, (n, v, c) in model.items()),
        ]


def _kernel(name: str, source: str, y: Spec, weight: Spec) -> KernelSpec:
    return kernel(source, name, dtypes={"X_T": y.dtype, "W_T": weight.dtype})


OP = Embedding()
