"""Every kernel that any launcher can ask for, found by recording launchers on tensors that have no memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

from cupyllm import ops
from cupyllm.backend.base import KernelSpec, Launch, Spec, Tensor, fixed
from cupyllm.backend.record import Recorder
from cupyllm.ops import (
    adamw,
    grad_norm,
    linear_mma,
    linear_rows,
    linear_sm90,
    linear_tf32,
    quantized_mma,
    quantized_rows,
    quantized_sm90,
    rope,
)
from cupyllm.ops.cases import FLOAT_DTYPES, op_attrs, specs
from cupyllm.ops.op import Case, Op, Variant
from cupyllm.quant.layout import codes_shape, format_number
from tests.ops.opcheck import DTYPE_PAIRS

_ADDRESSES = itertools.count(1 << 40, 1 << 40)


@dataclass(frozen=True)
class Use:
    variant: str  # "plain"
    threads: int  # of its largest block


@lru_cache(maxsize=None)
def every_kernel(capability: int) -> dict[KernelSpec, Use]:
    """Each kernel that a device of this capability may be given, and how."""
    found: dict[KernelSpec, Use] = {}
    for name in ops.GRAPH_OPS:
        op = ops.get(name)
        for variant in op.variants:
            if variant.runs_on(capability) and not variant.library:
                _note(found, variant.name, _of_variant(op, variant, capability))
    _note(found, "plain", _outside_the_graph(capability))
    if any(variant.name == "wgmma" and variant.runs_on(capability) for variant in ops.get("linear").variants):
        _note(found, "wgmma", every_design(capability))
    _note(found, "mma", every_mma_design(capability))
    _note(found, "tf32x3", every_tf32_design(capability))
    _note(found, "rows", every_rows_design(capability))
    if capability == 90:
        _note(found, "wgmma", every_quantized_design(quantized_sm90, capability))
    _note(found, "mma", every_quantized_design(quantized_mma, capability))
    _note(found, "rows", every_quantized_rows_design(capability))
    return found


def tensor(spec: Spec) -> Tensor:
    """A tensor somewhere."""
    return fixed(next(_ADDRESSES), spec.shape, spec.dtype)


def record_case(rec: Recorder, op: Op, case: Case, dtype: str, weight_dtype: str, accumulate: bool = False) -> None:
    """Record forward and, where there is one, backward of a case."""
    x_specs, w_specs = specs(case, dtype, weight_dtype)
    x, w = [None if spec is None else tensor(spec) for spec in x_specs], [tensor(spec) for spec in w_specs]
    attrs = op_attrs(op.name, case, dtype)
    y = [tensor(spec) for spec in op.infer(x, w, attrs)]
    saved = op.forward(rec, x, w, y, attrs)
    if op.inference_only:
        return
    d_y = [tensor(t) if t.dtype in FLOAT_DTYPES else None for t in y]
    d_x = [tensor(t) if t is not None and op.differentiable[i] else None for i, t in enumerate(x)]
    op.backward(rec, saved, d_y, d_x, [tensor(Spec(t.shape, "float32")) for t in w], attrs, accumulate)


def every_design(capability: int = 90) -> list[Launch]:
    """A product by each of linear's wgmma designs, whichever the chooser would take."""
    rec = Recorder(capability)
    for form, (a_mn, b_mn, dtype) in linear_sm90.FORMS.items():
        for design in linear_sm90.designs(form):
            rows, cols, depth = 72, 136, 264
            a = tensor(Spec((depth, rows) if a_mn else (rows, depth), "bfloat16"))
            b = tensor(Spec((depth, cols) if b_mn else (cols, depth), "bfloat16"))
            choice = linear_sm90.Choice(design, *linear_sm90.DEFAULT_ORDER)
            linear_sm90.product(rec, form, a, b, tensor(Spec((rows, cols), dtype)), choice=choice)
    return rec.launches


def every_mma_design(capability: int = 80) -> list[Launch]:
    """The same of its mma designs."""
    rec = Recorder(capability)
    for form, (a_mn, b_mn, dtype) in linear_mma.FORMS.items():
        for tile, copy in linear_mma.designs(form):
            rows, cols, depth = (min(pair) for pair in zip((72, 136, 24), tile.most, strict=True))
            a = tensor(Spec((depth, rows) if a_mn else (rows, depth), "bfloat16"))
            b = tensor(Spec((depth, cols) if b_mn else (cols, depth), "bfloat16"))
            for slices in (1, 2) if tile.sliced else (1,):
                c = tensor(Spec((rows, cols), dtype))
                linear_mma.product(rec, form, a, b, c, choice=(tile, copy), slices=slices)
            linear_mma.add_up(rec, tensor(Spec((2, 5, 3), "float32")), None, tensor(Spec((5, 3), dtype)), False)
    return rec.launches


def every_rows_design(capability: int = 80) -> list[Launch]:
    """The same of its rows designs."""
    rec = Recorder(capability)
    for form in ("forward", "head"):
        for design in linear_rows.DESIGNS:
            a, b = tensor(Spec((8 * design.row_groups, 1032), "bfloat16")), tensor(Spec((50, 1032), "bfloat16"))
            for slices in (1, 2):
                c = tensor(Spec((a.shape[0], b.shape[0]), linear_mma.FORMS[form][2]))
                linear_rows.product(rec, form, a, b, c, choice=linear_rows.Choice(design, slices, 2))
    return rec.launches


QUANTIZED = {"int8": (("float32", 1),), "int4": (("int32", 1),), "nf4": (("float32", 1), ("uint8", 2))}


def every_quantized_design(maker: ModuleType, capability: int) -> list[Launch]:
    """One product by each design, form and format of quantized_sm90 or quantized_mma."""
    rec = Recorder(capability)
    (rows, num_out, num_in), forms = (72, 136, 256), {"forward": "bfloat16", "head": "float32", "dgrad": "bfloat16"}
    for (form, dtype), format in itertools.product(forms.items(), QUANTIZED):
        a_cols, cols = (num_out, num_in) if form == "dgrad" else (num_in, num_out)
        for scale_dtype, count in QUANTIZED[format]:
            groups = (-(-num_out // 16), num_in // (128 if format == "int4" else 64), 16)
            stored = [Spec(codes_shape(format, num_out, num_in), "uint8")]
            stored.append(Spec((num_out,) if format == "int8" else groups, scale_dtype))
            if count == 2:
                stored.append(Spec((257 + -(-num_out * groups[1] // 256),), "float32"))
            a, c = tensor(Spec((rows, a_cols), "bfloat16")), tensor(Spec((rows, cols), dtype))
            for design in maker.DESIGNS:
                maker.product(rec, form, format, a, [tensor(spec) for spec in stored], c, choice=design)
    return rec.launches


def every_quantized_rows_design(capability: int = 80) -> list[Launch]:
    """The same of quantized_rows: its designs differ by format, its kernels by the groups of 8 rows, too."""
    rec = Recorder(capability)
    cases = [case for case in ops.get("quantized_linear").cases() if "few rows" in case.name]
    for case, rows, form in itertools.product(cases, (1, 9), ("forward", "head")):
        (x, *_), params = specs(case, "bfloat16")
        assert x is not None
        c = Spec((rows, case.attrs["out_features"]), linear_mma.FORMS[form][2])
        format, stored = case.attrs["format"], [tensor(spec) for spec in params]
        for design in quantized_rows.designs(format_number(format, stored), rows, capability):
            a, choice = tensor(Spec((rows, x.shape[1]), x.dtype)), quantized_rows.Choice(design, 1, 2)
            quantized_rows.product(rec, form, format, a, stored, tensor(c), choice=choice)
            if capability in quantized_rows.CLUSTER_CAPABILITIES:
                for slices in quantized_rows.CLUSTERS:
                    deep = tensor(Spec((rows, slices * 128 * design.warps), x.dtype))
                    choice = quantized_rows.Choice(design, slices, 2, cluster=True)
                    quantized_rows.product(rec, form, format, deep, stored, tensor(c), choice=choice)
    return rec.launches


def every_tf32_design(capability: int = 80) -> list[Launch]:
    """The same of its tf32x3 designs, with every dtype of the weight."""
    rec = Recorder(capability)
    for form, (a_mn, b_mn, dtypes) in linear_tf32.FORMS.items():
        for dtype, design in itertools.product(dtypes, linear_tf32.designs(capability)):
            rows, cols, depth = 72, 136, 24
            a = tensor(Spec((depth, rows) if a_mn else (rows, depth), "float32"))
            b = tensor(Spec((depth, cols) if b_mn else (cols, depth), dtype))
            linear_tf32.product(rec, form, a, b, tensor(Spec((rows, cols), "float32")), choice=design)
    return rec.launches


def _note(found: dict[KernelSpec, Use], variant: str, launches: Iterable[Launch]) -> None:
    for launch in launches:
        before = found.get(launch.kernel, Use(variant, 0))
        found[launch.kernel] = Use(before.variant, max(before.threads, math.prod(launch.block)))


def _of_variant(op: Op, variant: Variant, capability: int) -> Iterator[Launch]:
    for case in op.cases():
        for dtype, weight_dtype in DTYPE_PAIRS:
            inputs, params = specs(case, dtype, weight_dtype)
            if not variant.fits([spec for spec in inputs if spec is not None], params, case.attrs):
                continue
            for accumulate in (False, True):
                rec = Recorder(capability, {op.name: variant.name})
                record_case(rec, op, case, dtype, weight_dtype, accumulate)
                yield from rec.launches


def _outside_the_graph(capability: int) -> list[Launch]:
    rec = Recorder(capability)
    p, g, m, v = (tensor(Spec((1000,), "float32")) for _ in range(4))
    for p16 in (None, "bfloat16", "float16"):
        adamw.adamw(rec, p, g, m, v, tensor(adamw.SCALARS), None if p16 is None else tensor(Spec((1000,), p16)))
    grad_norm.sum_of_squares(rec, g, tensor(Spec((2,), "float64")))
    grad_norm.scale(rec, g, tensor(grad_norm.FACTOR))
    table = Spec((100, 64), "float32")
    positions = tensor(Spec((100,), "int32"))
    rope.rope_table(rec, positions, tensor(Spec((64,), "float32")), 1.0, tensor(table), tensor(table))
    # The LM head: float32 logits from bfloat16 activations. (Those of tensor cores are among
    # the designs.)
    rec.forced = {"linear": "plain"}
    linear = ops.get("linear")
    for weight_dtype in ("float32", "bfloat16", "float16"):
        x, w = tensor(Spec((3, 64), "bfloat16")), tensor(Spec((320, 64), weight_dtype))
        y, attrs = tensor(Spec((3, 320), "float32")), {"out_dtype": "float32"}
        saved = linear.forward(rec, [x], [w], [y], attrs)
        linear.backward(rec, saved, [tensor(y)], [tensor(x)], [tensor(Spec(w.shape, "float32"))], attrs, False)
    return rec.launches
