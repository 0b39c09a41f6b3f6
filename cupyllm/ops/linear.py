"""Linear: y = x weight^T + bias. Kernels, maths and numerics: cu/linear.cu, of bfloat16 on tensor cores
cu/linear_sm90.cu (Hopper), cu/linear_mma.cu and cu/linear_rows.cu (few rows), of float32 on them cu/linear_tf32.cu,
of Hopper cu/linear_tf32_sm90.cu.

Shapes: N rows, K in, M out; weight [M,K] as Hugging Face stores it. x and its gradient are in the activation dtype, y
and its gradient too unless attr "out_dtype" names another (the LM head's float32 logits), weight and bias in any weight
dtype, their gradients in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from cupyllm.backend.base import ITEMSIZE, KernelSpec, Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops import linear_cublas, linear_mma, linear_rows, linear_skinny, linear_sm90, linear_tf32
from cupyllm.ops.op import ACTIVATION_DTYPES, WEIGHT_DTYPES, Attrs, Case, Cost, Op, Variant, check

TILE = 64  # rows and columns of a block's tile, as in cu/linear.cu
THREADS = 256
COLUMNS = 32  # columns of a block of the bias gradient


# variant -> who makes its products
MAKERS: dict[str, ModuleType] = {
    "rows": linear_rows,
    "skinny": linear_skinny,
    "wgmma": linear_sm90,
    "mma": linear_mma,
    "tf32x3": linear_tf32,
    "cublas": linear_cublas,
}


def _variant(name: str, min_capability: int, max_capability: int | None, note: str) -> Variant:
    """Of tensor cores. A maker is a module with SOURCE, makes(form, a, b, c), prefers(rec, form, rows, cols, depth) and
    product(rec, form, a, b, c, bias, accumulate=)."""
    maker = MAKERS[name]
    library = maker is linear_cublas

    def fits(inputs: Sequence[Spec], params: Sequence[Spec], attrs: Attrs) -> bool:
        if library and len(params) > 1:  # a bias
            return False
        return bool(maker.makes(*_forward_product(inputs[0], params[0], attrs)))

    def prefers(rec: Recorder, inputs: Sequence[Spec], params: Sequence[Spec], attrs: Attrs) -> bool:
        (rows, depth), cols = inputs[0].shape, params[0].shape[0]
        return bool(maker.prefers(rec, _forward_product(inputs[0], params[0], attrs)[0], rows, cols, depth))

    able = (name, maker.SOURCE, min_capability, max_capability, fits, prefers)
    invariant = name not in ("rows", "cublas")
    return Variant(*able, tensor_cores=True, library=library, batch_invariant=invariant, note=note)


def _forward_product(x: Spec, weight: Spec, attrs: Attrs) -> tuple[str, Spec, Spec, Spec]:
    """(form, A, B, C) of y = x weight^T; form "head" has another dtype than x."""
    y = Spec((x.shape[0], weight.shape[0]), attrs.get("out_dtype", x.dtype))
    return "forward" if y.dtype == x.dtype else "head", x, weight, y


class Linear(Op):
    """inputs (x [N,K]), params (weight [M,K], optionally bias [M]) -> (y [N,M])."""

    name = "linear"
    variants = (
        _variant("rows", 80, None, "tensor cores; bfloat16, N up to 64, K a multiple of 8: reads weight at full speed"),
        _variant("skinny", 90, 90, "mma's products with an extent up to 64, before wgmma; bfloat16"),
        _variant("wgmma", 90, 90, "tensor cores; bfloat16, M and K multiples of 8"),
        _variant("mma", 80, None, "tensor cores; bfloat16, any shape"),
        _variant("tf32x3", 80, None, "float32 x on tensor cores, as exact as plain; on Hopper by linear_tf32_sm90.cu"),
        _variant("cublas", 80, None, "NVIDIA's library, when named; no bias"),
        Variant("plain", "linear.cu", 80, note="64x64 tiles, fp32 FMA, promoted sums; bits independent of N"),
    )
    differentiable = (True,)

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        check(len(inputs) == 1, "linear", "number of inputs", len(inputs), "1 (x)")
        check(len(params) in (1, 2), "linear", "number of params", len(params), "1 (weight) or 2 (weight, bias)")
        x, weight = inputs[0], params[0]
        assert x is not None
        check(x.dtype in ACTIVATION_DTYPES, "linear", "x dtype", x.dtype, " or ".join(ACTIVATION_DTYPES))
        check(weight.dtype in WEIGHT_DTYPES, "linear", "weight dtype", weight.dtype, " or ".join(WEIGHT_DTYPES))
        check(len(x.shape) == 2, "linear", "x shape", x.shape, "[N,K]", "flatten the leading dimensions")
        check(len(weight.shape) == 2, "linear", "weight shape", weight.shape, "[M,K]")
        remedy = "weight is stored [out, in]"
        check(x.shape[1] == weight.shape[1], "linear", "weight shape", weight.shape, f"[M,{x.shape[1]}]", remedy)
        for bias in params[1:]:
            check(bias.shape == weight.shape[:1], "linear", "bias shape", bias.shape, weight.shape[:1])
            check(bias.dtype == weight.dtype, "linear", "bias dtype", bias.dtype, weight.dtype, "convert the bias")
        out_dtype = attrs.get("out_dtype", x.dtype)
        check(out_dtype in ACTIVATION_DTYPES, "linear", "out_dtype", out_dtype, " or ".join(ACTIVATION_DTYPES))
        return [Spec((x.shape[0], weight.shape[0]), out_dtype)]

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
        bias = params[1] if len(params) == 2 else None
        if variant.name in MAKERS:
            form = "forward" if y.dtype == x.dtype else "head"
            MAKERS[variant.name].product(rec, form, x, weight, y, bias)
            return x, weight
        (num_rows, depth), num_cols = x.shape, weight.shape[0]
        run = _kernel("linear_forward", x, weight, y)
        grid = _tiles(num_rows) * _tiles(num_cols)
        rec.launch(run, grid, THREADS, x, weight, bias, y, num_rows, num_cols, depth)
        return x, weight

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
        (x, weight), d_y, d_x = saved, d_outputs[0], d_inputs[0]
        assert x is not None and weight is not None and d_y is not None
        (num_rows, depth), num_cols = x.shape, weight.shape[0]
        shape = (num_rows, num_cols, depth)
        if d_x is not None:
            maker = self._maker(rec, "dgrad", d_y, weight, d_x)
            if maker is not None:
                maker.product(rec, "dgrad", d_y, weight, d_x)
            else:
                run = _kernel("linear_dgrad", x, weight, d_y)
                rec.launch(run, _tiles(num_rows) * _tiles(depth), THREADS, d_y, weight, d_x, *shape)
        if d_params[0] is not None:
            maker = self._maker(rec, "wgrad", d_y, x, d_params[0])
            if maker is not None:
                maker.product(rec, "wgrad", d_y, x, d_params[0], accumulate=accumulate)
            else:
                run = _kernel("linear_wgrad", x, weight, d_y)
                grid = _tiles(num_cols) * _tiles(depth)
                rec.launch(run, grid, THREADS, d_y, x, d_params[0], *shape, int(accumulate))
        if len(d_params) == 2 and d_params[1] is not None:
            run = _kernel("linear_bgrad", x, weight, d_y)
            grid = -(-num_cols // COLUMNS)
            rec.launch(run, grid, THREADS, d_y, d_params[1], num_rows, num_cols, int(accumulate))

    def _maker(self, rec: Recorder, form: str, a: Spec, b: Spec, c: Spec) -> ModuleType | None:
        """Who makes a product of the backward: the forced variant where it can, else the first that can and is
        preferred; None is linear.cu."""
        forced, (rows, cols) = rec.forced.get(self.name), c.shape
        depth = a.shape[0 if form == "wgrad" else 1]
        if forced == "plain":
            return None
        able = [
            v.name
            for v in self.variants
            if v.name in MAKERS
            and v.runs_on(rec.capability, rec.tensor_cores)
            and MAKERS[v.name].makes(form, a, b, c)
            and (v.name == forced or MAKERS[v.name].prefers(rec, form, rows, cols, depth))
        ]
        able.sort(key=lambda name: name != forced)  # stable: the forced one first
        return MAKERS[able[0]] if able else None

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        x, weight = inputs[0], params[0]
        assert x is not None
        (num_rows, depth), num_cols = x.shape, weight.shape[0]
        y_bytes = num_rows * num_cols * ITEMSIZE[attrs.get("out_dtype", x.dtype)]
        stored = sum(p.nbytes for p in params)
        gradients = 4 * sum(p.size for p in params)
        flops = 2.0 * num_rows * num_cols * depth
        return (
            Cost(flops, x.nbytes + stored + y_bytes),
            Cost(2 * flops, y_bytes + 2 * x.nbytes + weight.nbytes + gradients),
        )

    def cases(self) -> list[Case]:
        small = {
            "one": (1, 1, 1),
            "odd": (3, 5, 7),
            "tile-1": (63, 63, 127),
            "tile": (64, 64, 128),
            "tile+1": (65, 65, 129),
            "row": (1, 130, 40),
            "rows": (130, 1, 17),
            "eights": (3, 24, 40),
            "eights, one row": (1, 136, 8),
            "eights, tile+8": (65, 72, 136),
            "eights, rows": (9, 40, 264),
        }
        biased = {"bias": (5, 33, 18), "bias one": (1, 1, 1), "bias rows": (9, 33, 4)}
        model = {
            "q_proj": (128, 8192, 5120),
            "kv_proj": (128, 1024, 5120),
            "o_proj": (128, 5120, 8192),
            "gate_up_proj": (128, 25600, 5120),
            "down_proj": (128, 5120, 25600),
        }
        return [
            *(Case(name, ((n, k),), ((m, k),)) for name, (n, m, k) in small.items()),
            *(Case(name, ((n, k),), ((m, k), (m,))) for name, (n, m, k) in biased.items()),
            *(Case(name, ((n, k),), ((m, k),), size="model") for name, (n, m, k) in model.items()),
        ]


def _kernel(name: str, x: Spec, weight: Spec, y: Spec) -> KernelSpec:
    return kernel("linear.cu", name, dtypes={"X_T": x.dtype, "W_T": weight.dtype, "Y_T": y.dtype})


def _tiles(extent: int) -> int:
    return -(-extent // TILE)


OP = Linear()
