"""Cases of linear: the projections of a published Qwen3, forward and both gradients.

form     reads                       writes         product
forward  x [M,in], weight [out,in]   y [M,out]      M x out, a sum over in
dgrad    d_y [M,out], weight         d_x [M,in]     M x in, over out
wgrad    d_y [M,out], x [M,in]       d_w [out,in]   out x in, over M; float32

The bytes of a form are those of its operands, each once, which for forward is what op.cost counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupyllm import ops
from cupyllm.backend.base import Spec, Tensor
from cupyllm.backend.record import Recorder
from cupyllm.bench.cases import Case, Wanted, Way
from cupyllm.config import published
from cupyllm.errors import InputError
from cupyllm.ops.op import Cost

OP = ops.get("linear")
FORMS = ("forward", "dgrad", "wgrad")
PROJECTIONS = ("qkv", "q", "kv", "o", "gate-up", "down")
FEW_ROWS = 64


def shapes(size: str) -> dict[str, tuple[int, int]]:
    """Projection -> (out, in). kv is one of the two, gate-up and qkv are fused ones."""
    c = published(size)
    hidden, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {
        "qkv": (q + 2 * kv, hidden),
        "q": (q, hidden),
        "kv": (kv, hidden),
        "o": (hidden, q),
        "gate-up": (2 * c.intermediate_size, hidden),
        "down": (hidden, c.intermediate_size),
    }


def cases(wanted: Wanted) -> list[Case]:
    """Every projection, form and number of rows that is wanted, in that order."""
    if wanted.formats:
        raise InputError("--format with bench op linear: its weights are not quantised; take bench op quantized_linear")
    found = []
    for projection in wanted.projections:
        out, depth = shapes(wanted.size)[projection]
        for form in wanted.forms:
            found += [case(projection, form, rows, out, depth, wanted.dtype) for rows in wanted.rows]
    return found


def case(label: str, form: str, rows: int, out: int, depth: int, dtype: str = "bfloat16") -> Case:
    """`rows` rows through a weight [out, depth]."""
    x, weight, y = Spec((rows, depth), dtype), Spec((out, depth), dtype), Spec((rows, out), dtype)
    d_weight = Spec(weight.shape, "float32")
    inputs, output = {"forward": ((x, weight), y), "dgrad": ((y, weight), x), "wgrad": ((y, x), d_weight)}[form]
    cost = Cost(2.0 * rows * out * depth, sum(spec.nbytes for spec in (*inputs, output)))
    return Case(
        "linear",
        {"projection": label, "form": form, "M": rows, "out": out, "in": depth},
        inputs,
        (output,),
        cost,
        few_rows=rows <= FEW_ROWS and form != "wgrad",
        record=_RECORD[form],
        torch=_TORCH[form],
        tolerance=2.0**-7 if dtype == "bfloat16" else 2.0**-14,
    )


# ---- ours ----


def _forward(rec: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    x, weight = inputs
    OP.forward(rec, [x], [weight], outputs, {})


def _dgrad(rec: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    d_y, weight = inputs
    OP.backward(rec, (_unread(d_y.shape[0], weight), weight), [d_y], list(outputs), [None], {}, accumulate=False)


def _wgrad(rec: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    d_y, x = inputs
    weight = Tensor((d_y.shape[1], x.shape[1]), x.dtype, x.storage)  # its shape and dtype are asked for, not its values
    OP.backward(rec, (x, weight), [d_y], [None], list(outputs), {}, accumulate=False)


def _unread(rows: int, weight: Tensor) -> Tensor:
    """x in a backward that does not need its values."""
    return Tensor((rows, weight.shape[1]), weight.dtype, weight.storage)


_RECORD: dict[str, Callable[[Recorder, Sequence[Tensor], Sequence[Tensor]], None]] = {
    "forward": _forward,
    "dgrad": _dgrad,
    "wgrad": _wgrad,
}

# ---- torch ----


def _torch_forward(torch: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Way]:
    return [("", lambda: torch.mm(inputs[0], inputs[1].t(), out=outputs[0]))]


def _torch_dgrad(torch: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Way]:
    return [("", lambda: torch.mm(inputs[0], inputs[1], out=outputs[0]))]


def _torch_wgrad(torch: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Way]:
    """float32 out of bfloat16 where torch can, as ours; else bfloat16, for which it writes half as much."""
    a, b, (out,) = inputs[0].t(), inputs[1], outputs
    if a.dtype == out.dtype:
        return [("", lambda: torch.mm(a, b, out=out))]
    narrow = out.view(-1).view(a.dtype)[: out.numel()].view(out.shape)
    return [
        ("", lambda: torch.mm(a, b, out_dtype=out.dtype, out=out)),
        ("writes bfloat16", lambda: torch.mm(a, b, out=narrow)),
    ]


_TORCH = {"forward": _torch_forward, "dgrad": _torch_dgrad, "wgrad": _torch_wgrad}
