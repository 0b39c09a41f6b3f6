"""No kernel's result depends on the order in which threads and blocks run: a race that the hardware would decide.

Each op's small cases run in ascending and in descending order, bit for bit alike. A missing barrier between threads, or
a value passed from one block to another, changes one of the two (test_hostcuda.py shows that it does).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.base import Spec
from cupyllm.backend.eager import OpRun, run_op
from cupyllm.ops.cases import draw, draw_cotangents, op_attrs
from tests.hostcuda.backend import HostBackend
from tests.ops.opcheck import small_cases


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ops.GRAPH_OPS)
def test_results_do_not_depend_on_the_order_of_threads(name: str, dtype: str) -> None:
    op, compared = ops.get(name), 0
    for case in small_cases(name):
        drawn, attrs, runs = draw(case, dtype), op_attrs(name, case, dtype), []
        for descending in (False, True):
            backend = HostBackend(descending=descending)
            specs = op.infer(_specs(drawn.inputs), _specs(drawn.params), attrs)
            runs.append(run_op(backend, op, drawn.inputs, drawn.params, attrs, draw_cotangents(specs)))
        for one, other in zip(_arrays(runs[0]), _arrays(runs[1]), strict=True):
            compared += one.size
            assert one.tobytes() == other.tobytes(), f"{name}, {case.name}, {dtype}"
    assert compared > 0


def _specs(arrays: list[np.ndarray] | list[np.ndarray | None]) -> list[Any]:
    return [None if array is None else Spec(array.shape, array.dtype.name) for array in arrays]


def _arrays(run: OpRun) -> list[np.ndarray]:
    return [array for array in (*run.outputs, *run.d_inputs, *run.d_params) if array is not None]
