"""Cases of quantized_linear: linear's projections with a weight of 8 or 4 bits; nf4 is the double-quantised one.

Beside the parameters a set of operands has a weight of that shape in the activations' dtype, which peers multiply by
and ours does not read: there is no library to call for packed weights. Bytes are op.cost's: packed ones. Random bytes
are valid codes and scales in every format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyllm import ops
from cupyllm.backend.base import Spec, Tensor
from cupyllm.backend.record import Recorder
from cupyllm.bench import linear
from cupyllm.bench.cases import UNPACKED, Case, Wanted, Way
from cupyllm.errors import InputError
from cupyllm.quant.layout import FORMATS, GROUP, MAP, ROWS, codes_shape
from cupyllm.quant.nf4 import OUTER_BLOCK

OP = ops.get("quantized_linear")
FORMS = ("forward", "dgrad")
FEW_ROWS = 16


def cases(wanted: Wanted) -> list[Case]:
    """Every format, projection, form and number of rows that is wanted, in that order."""
    for form in wanted.forms:
        if form not in FORMS:
            raise InputError(
                f"--form {form}: a quantised weight is frozen and has no gradient, expected {' or '.join(FORMS)}"
            )
    found = []
    for format in wanted.formats or FORMATS:
        for projection in wanted.projections:
            out, depth = linear.shapes(wanted.size)[projection]
            for form in wanted.forms:
                found += [case(projection, format, form, rows, out, depth, wanted.dtype) for rows in wanted.rows]
    return found


def parameters(format: str, out: int, depth: int) -> tuple[Spec, ...]:
    """Codes, scales and, for nf4, what its scales are quantised with."""
    codes = Spec(codes_shape(format, out, depth), "uint8")
    if format == "int8":
        return codes, Spec((out,), "float32")
    blocks = (-(-out // ROWS), depth // GROUP[format], ROWS)
    if format == "int4":
        return codes, Spec(blocks, "int32")
    outer = -(-out * depth // GROUP[format] // OUTER_BLOCK)
    return codes, Spec(blocks, "uint8"), Spec((MAP + 1 + outer,), "float32")


def case(label: str, format: str, form: str, rows: int, out: int, depth: int, dtype: str = "bfloat16") -> Case:
    """`rows` rows through a packed weight [out, depth]."""
    x, y, weight = Spec((rows, depth), dtype), Spec((rows, out), dtype), Spec((out, depth), dtype)
    params, attrs = parameters(format, out, depth), {"format": format, "out_features": out}
    a, c = (x, y) if form == "forward" else (y, x)
    plain = linear.case(label, form, rows, out, depth, dtype)

    def record(rec: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        packed = list(inputs[1:-1])
        if form == "forward":
            OP.forward(rec, [inputs[0]], packed, outputs, attrs)
        else:
            OP.backward(rec, tuple(packed), [inputs[0]], list(outputs), [None] * len(packed), attrs, accumulate=False)

    def unpacked(rec: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        plain.record(rec, (inputs[0], inputs[-1]), outputs)

    def torch(module: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Way]:
        assert plain.torch is not None
        return [(UNPACKED, call) for _, call in plain.torch(module, (inputs[0], inputs[-1]), outputs)]

    return Case(
        "quantized_linear",
        {"format": format, **plain.labels},
        (a, *params, weight),
        (c,),
        OP.cost([x], params, attrs)[0],
        few_rows=rows <= FEW_ROWS,
        record=record,
        torch=torch,
        unpacked=unpacked,
        tolerance=plain.tolerance,
        read_bytes=a.nbytes + sum(spec.nbytes for spec in params),
    )
