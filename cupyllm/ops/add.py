"""Residual add: y = a + b. Kernels and numerics: cu/add.cu."""

from __future__ import annotations

from collections.abc import Sequence

from cupyllm.backend.base import Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.op import ACTIVATION_DTYPES, Attrs, Case, Cost, Op, Variant, check

THREADS = 256


class Add(Op):
    """inputs (a, b) of one shape -> (y). Saves nothing."""

    name = "add"
    variants = (Variant("plain", "add.cu", 80, note="one thread an element"),)
    differentiable = (True, True)

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        check(len(inputs) == 2, "add", "number of inputs", len(inputs), "2 (a, b)")
        check(len(params) == 0, "add", "number of params", len(params), 0)
        a, b = inputs
        assert a is not None and b is not None
        check(a.dtype in ACTIVATION_DTYPES, "add", "a dtype", a.dtype, " or ".join(ACTIVATION_DTYPES))
        check(b.dtype == a.dtype, "add", "b dtype", b.dtype, f"{a.dtype} as a")
        check(b.shape == a.shape, "add", "b shape", b.shape, f"{a.shape} as a")
        return [Spec(a.shape, a.dtype)]

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        source = self.select(rec, inputs, params, attrs).source
        a, b = inputs
        assert a is not None
        run = kernel(source, "add_forward", dtypes={"X_T": a.dtype})
        rec.launch(run, -(-a.size // THREADS), THREADS, a, b, outputs[0], a.size)
        return ()

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
        d_y = d_outputs[0]
        assert d_y is not None
        if all(d is None for d in d_inputs):
            return
        source = self.select(rec, [d_y, d_y], [], attrs).source
        run = kernel(source, "add_backward", dtypes={"X_T": d_y.dtype})
        rec.launch(run, -(-d_y.size // THREADS), THREADS, d_y, *d_inputs, d_y.size)

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        a = inputs[0]
        assert a is not None
        return Cost(float(a.size), 3 * a.nbytes), Cost(0.0, 3 * a.nbytes)

    def cases(self) -> list[Case]:
        small = {"one": (1, 1), "odd": (3, 7), "tile-1": (1, 255), "tile": (2, 128), "tile+1": (257, 1)}
        model = {"qwen3 32b": (128, 5120)}
        return [
            *(Case(name, (shape, shape)) for name, shape in small.items()),
            *(Case(name, (shape, shape), size="model") for name, shape in model.items()),
        ]


OP = Add()
