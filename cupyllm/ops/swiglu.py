"""SwiGLU: y = silu(gate) up. Kernels, maths and numerics: cu/swiglu.cu."""

from __future__ import annotations

from collections.abc import Sequence

from cupyllm.backend.base import Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.op import ACTIVATION_DTYPES, Attrs, Case, Cost, Op, Variant, check

THREADS = 256


class SwiGLU(Op):
    """inputs (gate, up) of one shape -> (y). Saves the inputs; silu is recomputed."""

    name = "swiglu"
    variants = (Variant("plain", "swiglu.cu", 80, note="one thread an element, fp32 inside"),)
    differentiable = (True, True)

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        check(len(inputs) == 2, "swiglu", "number of inputs", len(inputs), "2 (gate, up)")
        check(len(params) == 0, "swiglu", "number of params", len(params), 0)
        gate, up = inputs
        assert gate is not None and up is not None
        check(gate.dtype in ACTIVATION_DTYPES, "swiglu", "gate dtype", gate.dtype, " or ".join(ACTIVATION_DTYPES))
        check(up.dtype == gate.dtype, "swiglu", "up dtype", up.dtype, f"{gate.dtype} as gate")
        check(up.shape == gate.shape, "swiglu", "up shape", up.shape, f"{gate.shape} as gate")
        return [Spec(gate.shape, gate.dtype)]

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        source = self.select(rec, inputs, params, attrs).source
        gate, up = inputs
        assert gate is not None
        run = kernel(source, "swiglu_forward", dtypes={"X_T": gate.dtype})
        rec.launch(run, -(-gate.size // THREADS), THREADS, gate, up, outputs[0], gate.size)
        return gate, up

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
        (gate, up), d_y = saved, d_outputs[0]
        assert gate is not None and d_y is not None
        if all(d is None for d in d_inputs):
            return
        source = self.select(rec, saved, [], attrs).source
        run = kernel(source, "swiglu_backward", dtypes={"X_T": gate.dtype})
        rec.launch(run, -(-gate.size // THREADS), THREADS, d_y, gate, up, *d_inputs, gate.size)

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        gate = inputs[0]
        assert gate is not None
        return Cost(6.0 * gate.size, 3 * gate.nbytes), Cost(12.0 * gate.size, 5 * gate.nbytes)

    def cases(self) -> list[Case]:
        small = {"one": (1, 1), "odd": (3, 7), "tile-1": (1, 255), "tile": (2, 128), "tile+1": (257, 1)}
        model = {"qwen3 32b": (128, 25600), "qwen3 0.6b": (128, 3072)}
        return [
            *(Case(name, (shape, shape)) for name, shape in small.items()),
            *(Case(name, (shape, shape), size="model") for name, shape in model.items()),
        ]


OP = SwiGLU()
