"""RMSNorm over the hidden size, or over each head. Kernels, maths and numerics: cu/rmsnorm.cu.

Shapes: N rows of H chunks of D = weight size; R = N*H chunks. Saves x, weight and rstd float32 [R].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupyllm.backend.base import KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops.op import ACTIVATION_DTYPES, WEIGHT_DTYPES, Attrs, Case, Cost, Op, Variant, check

THREADS = 256
WARP_MAX = 256  # chunks up to this size get a warp each, larger ones a block
COLUMNS = 32  # columns of a block of the weight gradient
SLAB_CHUNKS = 128  # chunks of a slab of the weight gradient, at least
MAX_SLABS = 256  # so that the scratch stays small: 256 D floats


class RMSNorm(Op):
    """inputs (x [N,H*D]), params (weight [D]), attrs eps -> (y [N,H*D])."""

    name = "rmsnorm"
    variants = (Variant("plain", "rmsnorm.cu", 80, note="a warp a chunk up to D = 256, a block beyond"),)
    differentiable = (True,)

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        check(len(inputs) == 1, "rmsnorm", "number of inputs", len(inputs), "1 (x)")
        check(len(params) == 1, "rmsnorm", "number of params", len(params), "1 (weight)")
        x, weight = inputs[0], params[0]
        assert x is not None
        check(x.dtype in ACTIVATION_DTYPES, "rmsnorm", "x dtype", x.dtype, " or ".join(ACTIVATION_DTYPES))
        check(weight.dtype in WEIGHT_DTYPES, "rmsnorm", "weight dtype", weight.dtype, " or ".join(WEIGHT_DTYPES))
        check(len(x.shape) == 2, "rmsnorm", "x shape", x.shape, "[N,H*D]", "flatten the leading dimensions")
        check(len(weight.shape) == 1 and weight.size > 0, "rmsnorm", "weight shape", weight.shape, "[D] with D >= 1")
        whole = x.shape[1] % weight.size == 0
        check(whole, "rmsnorm", "x shape", x.shape, f"[N,H*{weight.size}] for a weight of {weight.size}")
        check("eps" in attrs and attrs["eps"] >= 0, "rmsnorm", "eps", attrs.get("eps"), "a number >= 0")
        return [Spec(x.shape, x.dtype)]

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        variant = self.select(rec, inputs, params, attrs)
        x, weight, y = inputs[0], params[0], outputs[0]
        assert x is not None
        num_chunks, dim = x.size // weight.size, weight.size
        rstd = rec.empty((num_chunks,), "float32", "rstd")
        form, grid = _form(num_chunks, dim)
        run = _kernel(f"rmsnorm_forward_{form}", variant.source, x, weight)
        rec.launch(run, grid, THREADS, x, weight, y, rstd, num_chunks, dim, np.float32(attrs["eps"]))
        return x, weight, rstd

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
        (x, weight, rstd), d_y, d_x, d_weight = saved, d_outputs[0], d_inputs[0], d_params[0]
        assert x is not None and weight is not None and d_y is not None
        source = self.select(rec, [x], [weight], attrs).source
        num_chunks, dim = x.size // weight.size, weight.size
        if d_x is not None:
            form, grid = _form(num_chunks, dim)
            run = _kernel(f"rmsnorm_backward_{form}", source, x, weight)
            rec.launch(run, grid, THREADS, d_y, x, weight, rstd, d_x, num_chunks, dim)
        if d_weight is not None:
            # The slabs depend on the shape alone, not on the device, so every GPU gives the same bits.
            slab_chunks = max(SLAB_CHUNKS, -(-num_chunks // MAX_SLABS))
            num_slabs = -(-num_chunks // slab_chunks)
            slabs = rec.empty((num_slabs, dim), "float32", "d_weight_slabs")
            run = _kernel("rmsnorm_backward_weight", source, x, weight)
            grid = -(-dim // COLUMNS) * num_slabs
            rec.launch(run, grid, THREADS, d_y, x, rstd, slabs, num_chunks, dim, slab_chunks)
            run = _kernel("rmsnorm_backward_weight_sum", source, x, weight)
            rec.launch(run, -(-dim // THREADS), THREADS, slabs, d_weight, num_slabs, dim, int(accumulate))

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        x, weight = inputs[0], params[0]
        assert x is not None
        rstd_bytes = 4 * (x.size // weight.size)
        return (
            Cost(4.0 * x.size, 2 * x.nbytes + weight.nbytes + rstd_bytes),
            Cost(10.0 * x.size, 3 * x.nbytes + weight.nbytes + rstd_bytes + 4 * weight.size),
        )

    def cases(self) -> list[Case]:
        # name: (rows, chunks a row, chunk size). With D = 1 and eps = 0 the gradient is 0 by cancellation, so the
        # smallest case has a large eps.
        small = {
            "odd": (3, 1, 5),
            "head 16": (5, 3, 16),
            "warp-1": (9, 2, 31),
            "warp": (8, 1, 32),
            "warp+1": (7, 3, 33),
            "head 128": (17, 8, 128),
            "warp form's last": (2, 1, 256),
            "block form's first": (3, 1, 257),
            "two slabs": (129, 1, 34),
            "rows of 520": (4, 1, 520),
        }
        model = {"hidden": (128, 1, 5120), "q_norm": (128, 64, 128), "k_norm": (128, 8, 128), "8192": (128, 1, 8192)}
        return [
            Case("one", ((1, 1),), ((1,),), {"eps": 0.5}),
            *(Case(name, ((n, h * d),), ((d,),), {"eps": 1e-6}) for name, (n, h, d) in small.items()),
            *(Case(name, ((n, h * d),), ((d,),), {"eps": 1e-6}, size="model") for name, (n, h, d) in model.items()),
        ]


def _kernel(name: str, source: str, x: Spec, weight: Spec) -> KernelSpec:
    return kernel(source, name, dtypes={"X_T": x.dtype, "W_T": weight.dtype})


def _form(num_chunks: int, dim: int) -> tuple[str, int]:
    """Which form of a chunk-wise kernel, and its grid."""
    return ("warp", -(-num_chunks // (THREADS // 32))) if dim <= WARP_MAX else ("block", num_chunks)


OP = RMSNorm()
