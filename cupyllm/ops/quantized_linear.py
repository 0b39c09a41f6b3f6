"""Linear with a quantised, frozen weight: y = x weight^T, and d_x = d_y weight. Kernels, maths and numerics:
cu/quantized_linear.cu; of bfloat16 with few rows cu/quantized_rows.cu, on tensor cores cu/quantized_sm90.cu (Hopper)
and cu/quantized_mma.cu. Formats and layouts: cupyllm/quant/layout.py.

Shapes: N rows, K in, M out. Attrs: `format` "int8", "int4" or "nf4", and `out_features` M, which the parameters'
padded rows do not tell. Parameters: codes, scales and, of double-quantised nf4, `nested`. There is no bias (`add`
has it) and no weight gradient: adapters train beside a frozen weight (QLoRA, arXiv:2305.14314), which needs d_x
alone. Activations share a dtype unless attr "out_dtype" names another for y (float32 logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from cupyllm.backend.base import Spec, Tensor, kernel
from cupyllm.backend.record import Recorder
from cupyllm.ops import quantized_mma, quantized_rows, quantized_sm90
from cupyllm.ops.op import ACTIVATION_DTYPES, Attrs, Case, Cost, Op, Variant, check
from cupyllm.quant.layout import FORMATS, GROUP, MAP, ROWS, codes_shape, format_number
from cupyllm.quant.nf4 import OUTER_BLOCK

TILE = 64  # rows and columns of a block's tile, as in cu/quantized_linear.cu
THREADS = 256

# variant -> who makes its products: a module with SOURCE; makes(form, format, a, params, c), whether it can;
# prefers(rec, form, rows, cols, depth), whether it is taken unasked where it can; and product(rec, form, format, a,
# params, c), which records it. Forms, C [rows,cols] summed over depth: "forward" (a = x [N,K], c = y [N,M]), "head"
# (the same, y float32 of bfloat16 x) and "dgrad" (a = d_y [N,M], c = d_x [N,K]).
MAKERS: dict[str, ModuleType] = {"rows": quantized_rows, "wgmma": quantized_sm90, "mma": quantized_mma}


def _variant(name: str, min_capability: int, max_capability: int | None, note: str) -> Variant:
    maker = MAKERS[name]

    def fits(inputs: Sequence[Spec], params: Sequence[Spec], attrs: Attrs) -> bool:
        return bool(maker.makes(*_forward_product(inputs[0], params, attrs)))

    def prefers(rec: Recorder, inputs: Sequence[Spec], params: Sequence[Spec], attrs: Attrs) -> bool:
        form, _, x, _, y = _forward_product(inputs[0], params, attrs)
        return bool(maker.prefers(rec, form, *y.shape, x.shape[1]))

    able = (name, maker.SOURCE, min_capability, max_capability, fits, prefers)
    return Variant(*able, tensor_cores=True, batch_invariant=name != "rows", note=note)


def _forward_product(x: Spec, params: Sequence[Spec], attrs: Attrs) -> tuple[str, str, Spec, Sequence[Spec], Spec]:
    """(form, format, A, parameters, C) of y = x weight^T; form "head" has another dtype than x."""
    y = Spec((x.shape[0], attrs["out_features"]), attrs.get("out_dtype", x.dtype))
    return "forward" if y.dtype == x.dtype else "head", attrs["format"], x, params, y


class QuantizedLinear(Op):
    """inputs (x [N,K]), params (codes, scales[, nested]) -> (y [N,M])."""

    name = "quantized_linear"
    variants = (
        _variant("rows", 80, None, "tensor cores; bfloat16, at most 16 rows, K a multiple of 8"),
        _variant("wgmma", 90, 90, "tensor cores; bfloat16, M and K multiples of 8; bits independent of N"),
        _variant("mma", 80, None, "tensor cores; bfloat16, K (backward: M) a multiple of 8; bits independent of N"),
        Variant("plain", "quantized_linear.cu", 80, note="64x64 tiles, fp32 FMA, promoted sums; bits independent of N"),
    )
    differentiable = (True,)
    frozen = True

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        op = self.name
        check(len(inputs) == 1, op, "number of inputs", len(inputs), "1 (x)")
        check(len(params) in (2, 3), op, "number of params", len(params), "2 (codes, scales) or 3 (nested behind them)")
        x, codes, scales = inputs[0], params[0], params[1]
        assert x is not None
        format, num_rows = str(attrs.get("format")), int(attrs.get("out_features", 0))
        check(format in FORMATS, op, "format", format, " or ".join(FORMATS))
        check(x.dtype in ACTIVATION_DTYPES, op, "x dtype", x.dtype, " or ".join(ACTIVATION_DTYPES))
        check(len(x.shape) == 2, op, "x shape", x.shape, "[N,K]", "flatten the leading dimensions")
        depth, remedy = x.shape[1], "pack the weight with cupyllm.quant.layout.pack"
        group = GROUP.get(format, 1)
        check(depth % group == 0, op, "K of x", depth, f"a multiple of {group} ({format})", "scales lie inside rows")
        expected: tuple[int, ...] = codes_shape(format, num_rows, depth)
        check(codes.shape == expected, op, "codes shape", codes.shape, expected, remedy)
        check(codes.dtype == "uint8", op, "codes dtype", codes.dtype, "uint8", remedy)
        double = len(params) == 3
        check(format == "nf4" or not double, op, "number of params", 3, f"2 ({format} has no nested)")
        expected = (num_rows,) if format == "int8" else (-(-num_rows // ROWS), depth // group, ROWS)
        check(scales.shape == expected, op, "scales shape", scales.shape, expected, remedy)
        dtype = "int32" if format == "int4" else "uint8" if double else "float32"
        check(scales.dtype == dtype, op, "scales dtype", scales.dtype, dtype, remedy)
        if double:
            blocks = -(-num_rows * depth // group // OUTER_BLOCK)
            nested, expected = params[2], (MAP + 1 + blocks,)
            check(nested.shape == expected, op, "nested shape", nested.shape, expected, remedy)
            check(nested.dtype == "float32", op, "nested dtype", nested.dtype, "float32", remedy)
        out_dtype = attrs.get("out_dtype", x.dtype)
        check(out_dtype in ACTIVATION_DTYPES, op, "out_dtype", out_dtype, " or ".join(ACTIVATION_DTYPES))
        return [Spec((x.shape[0], num_rows), out_dtype)]

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        variant = self.select(rec, inputs, params, attrs)
        x, y = inputs[0], outputs[0]
        assert x is not None
        form, format = "forward" if y.dtype == x.dtype else "head", attrs["format"]
        maker = MAKERS.get(variant.name)
        if maker is not None:
            maker.product(rec, form, format, x, params, y)
        else:
            _product(rec, "forward", format, x, params, y)
        return tuple(params)

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
        """d_x alone; d_params are left as they are (Op.frozen)."""
        d_y, d_x = d_outputs[0], d_inputs[0]
        assert d_y is not None
        if d_x is None:
            return
        params, format = [tensor for tensor in saved if tensor is not None], attrs["format"]
        maker = self._maker(rec, "dgrad", format, d_y, params, d_x)
        if maker is not None:
            maker.product(rec, "dgrad", format, d_y, params, d_x)
        else:
            _product(rec, "dgrad", format, d_y, params, d_x)

    def _maker(
        self, rec: Recorder, form: str, format: str, a: Spec, params: Sequence[Spec], c: Spec
    ) -> ModuleType | None:
        """Who makes a product of the backward: the forced variant where it can, else the first that can and is
        preferred; None is quantized_linear.cu."""
        forced = rec.forced.get(self.name)
        if forced == "plain":
            return None
        able = [
            variant.name
            for variant in self.variants
            if variant.name in MAKERS
            and variant.runs_on(rec.capability, rec.tensor_cores)
            and MAKERS[variant.name].makes(form, format, a, params, c)
            and (variant.name == forced or MAKERS[variant.name].prefers(rec, form, *c.shape, a.shape[1]))
        ]
        able.sort(key=lambda name: name != forced)  # stable: the forced one first
        return MAKERS[able[0]] if able else None

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        assert inputs[0] is not None
        _, _, x, _, y = _forward_product(inputs[0], params, attrs)
        once = Cost(2.0 * x.size * y.shape[1], x.nbytes + sum(spec.nbytes for spec in params) + y.nbytes)
        return once, once

    def cases(self) -> list[Case]:
        small = {
            "int8": {
                "one": (1, 1, 1),
                "odd": (3, 5, 7),
                "tile-1": (63, 63, 127),
                "tile+1": (65, 65, 129),
                "eights": (3, 24, 40),
                "few rows": (9, 33, 264),
                "one row": (1, 17, 1032),
            },
            "int4": {"one": (1, 1, 128), "tile-1": (15, 63, 128), "tile+1": (17, 65, 256), "few rows": (9, 33, 640)},
            "nf4": {"one": (1, 1, 64), "tile-1": (15, 63, 64), "tile+1": (17, 65, 192), "few rows": (9, 33, 576)},
        }
        model = {"gate_up_proj": (1, 51200, 5120), "down_proj": (1, 5120, 25600), "o_proj": (128, 5120, 8192)}
        found = []
        for format in FORMATS:
            for double in (False, True) if format == "nf4" else (False,):
                label = f"{format} double" if double else format
                for name, shape in small[format].items():
                    found.append(_case(f"{label}, {name}", format, double, shape, "small"))
                for name, shape in model.items():
                    found.append(_case(f"{label}, {name}", format, double, shape, "model"))
        return found


def _case(name: str, format: str, double: bool, shape: tuple[int, int, int], size: str) -> Case:
    n, m, k = shape
    attrs = {"format": format, "out_features": m}
    if format == "int8":
        scales, kind = (m,), "scales"
    else:
        scales = (-(-m // ROWS), k // GROUP[format], ROWS)  # type: ignore[assignment]
        kind = "int4_scales" if format == "int4" else "bytes" if double else "scales"
    params, kinds = (codes_shape(format, m, k), scales), ("bytes", kind)
    if double:
        blocks = -(-m * k // GROUP[format] // OUTER_BLOCK)
        params, kinds = (*params, (MAP + 1 + blocks,)), (*kinds, "nested")  # type: ignore[assignment]
    return Case(name, ((n, k),), params, attrs, size=size, param_kinds=kinds)


def _product(rec: Recorder, form: str, format: str, a: Tensor, params: Sequence[Tensor], c: Tensor) -> None:
    """By cu/quantized_linear.cu, of any shape. Form "forward" (or head) and "dgrad"."""
    num_rows, cols = c.shape
    x, y = (c, a) if form == "dgrad" else (a, c)
    run = kernel(
        "quantized_linear.cu",
        f"quantized_linear_{form}",
        dtypes={"X_T": x.dtype, "Y_T": y.dtype},
        FORMAT=format_number(format, params),
    )
    codes, scales, nested = (*params, None)[:3]
    grid = -(-num_rows // TILE) * -(-cols // TILE)
    rec.launch(run, grid, THREADS, a, codes, scales, nested, c, num_rows, y.shape[1], x.shape[1])


OP = QuantizedLinear()
