"""linear against the fp64 reference, and what its kernels promise beyond closeness."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops.cases import Drawn, draw
from cupyllm.ops.op import Case
from tests.hostcuda.backend import HostBackend
from tests.ops import opcheck

OP = ops.get("linear")
CASES = opcheck.small_cases("linear")


def limits(case: Case, dtype: str, tensor_cores: bool = False) -> dict[str, float]:
    """Per tensor: its sum's length; parameter gradients are float32 whatever the activations are.

    Tensor cores cut sums, by at most 2^-20 of sum |a||b| (test_linear_sm90.py judges each element by that). Of L normal
    terms that sum is 2/pi L where the result is sqrt(L): float32 results may be off by 2^-20 2/pi sqrt(L).
    """
    (num_rows, depth), num_cols = case.inputs[0], case.params[0][0]
    cut = 2.0**-20 * 2 / np.pi * num_rows**0.5 if tensor_cores else 0.0
    return {
        "output0": opcheck.tolerance(dtype, depth),
        "d_input0": opcheck.tolerance(dtype, num_cols),
        "d_param0": opcheck.tolerance("float32", num_rows) + cut,
        "d_param1": opcheck.tolerance("float32", num_rows),
    }


@pytest.mark.parametrize("dtypes", opcheck.DTYPE_PAIRS, ids="/".join)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(backend: Backend, case: Case, dtypes: tuple[str, str]) -> None:
    tensor_cores = backend.tensor_cores and dtypes == ("bfloat16", "bfloat16")
    opcheck.check(backend, "linear", case, *dtypes, limit=limits(case, dtypes[0], tensor_cores))


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_float32_output_of_bfloat16_activations(backend: Backend, weight_dtype: str) -> None:
    """The LM head: logits keep fp32's digits, d_x is rounded once."""
    case = Case("head", ((5, 33),), ((70, 33), (70,)), {"out_dtype": "float32"})
    limit = {**limits(case, "float32"), "d_input0": opcheck.tolerance("bfloat16", 70)}
    result = opcheck.check(backend, "linear", case, "bfloat16", weight_dtype, limit=limit)
    assert result.got["output0"].dtype == np.float32 and result.got["d_input0"].dtype.name == "bfloat16"


@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[-2]], ids=lambda case: case.name)
def test_accumulates(backend: Backend, case: Case) -> None:
    opcheck.check(backend, "linear", case, "float32", "bfloat16", limit=limits(case, "float32"), accumulate=True)


@pytest.mark.parametrize(
    "shape", [(2, 3, 25600), (2, 25600, 3), (25600, 2, 3)], ids=["forward K", "dgrad M", "wgrad N"]
)
def test_long_sums_have_two_levels(backend: Backend, shape: tuple[int, int, int]) -> None:
    """Positive terms, where the error of one sequence is largest: it grows with the length and not with its root."""
    num_rows, num_cols, depth = shape
    case = Case("long", ((num_rows, depth),), ((num_cols, depth), (num_cols,)))
    rng = np.random.default_rng(3)
    x, weight, bias, d_y = (
        rng.random(shape).astype(np.float32)
        for shape in ((num_rows, depth), (num_cols, depth), (num_cols,), (num_rows, num_cols))
    )
    drawn = Drawn([x], [weight, bias])
    done = opcheck.run(backend, "linear", case, drawn, [d_y], "float32")
    want = opcheck.reference("linear", case, drawn, [d_y])
    # The i-th addition errs by at most u S_i, S_i = i S/L: over a run of 128 and 200 partial sums of random rounding
    # u (sqrt(128/3) + sqrt(200/3)) = 15 u; one sequence makes u sqrt(25600/3) = 92 u at random, and more by drift.
    limit = 15 * opcheck.U32
    got = {"output0": done.outputs[0], "d_input0": done.d_inputs[0], "d_param0": done.d_params[0]}
    got["d_param1"] = done.d_params[1]
    for name, array in got.items():
        assert array is not None
        error = opcheck.relative_error(array, want[name])
        print(f"{name} {error:.2e}")
        assert error < limit, name
    terms = (
        (x[0] * weight[0]) if depth == 25600 else (d_y[0] * weight[:, 0] if num_cols == 25600 else d_y[:, 0] * x[:, 0])
    )
    sequential = abs(float(np.cumsum(terms)[-1]) / float(np.sum(terms, dtype=np.float64)) - 1)
    assert sequential > limit, "the limit would not notice a sum in one sequence"


def two_levels(terms: np.ndarray, run: int = 128) -> np.ndarray:
    """float32 sum over axis 0 in order: runs of `run` terms from 0, each added to a total. Every step rounds."""
    total = np.zeros(terms.shape[1:], np.float32)
    for first in range(0, len(terms), run):
        total = total + np.add.accumulate(terms[first : first + run], axis=0)[-1]
    return total


@pytest.mark.parametrize("length", [128, 129, 1000, 1024])
def test_partial_sums_are_promoted_every_128_terms(backend: Backend, length: int) -> None:
    """The plain kernel, bit for bit. One operand is 1, so that each product is exact and fmaf is an addition."""
    terms = np.random.default_rng(length).random((length, 70)).astype(np.float32)
    want = two_levels(terms)
    if length > 256:
        for run in (64, 127, 144, 256, 512, length):
            assert (two_levels(terms, run) != want).any(), f"the terms cannot tell 128 from {run}"
    ones, plain = np.ones((1, length), np.float32), {"linear": "plain"}
    forward = run_op(backend, OP, [ones], [np.ascontiguousarray(terms.T)], forced=plain)
    opcheck.assert_same_bits(forward.outputs[0], want[None])
    # d_x = d_y weight with weight = terms; d_weight = d_y^T x with x = terms and one column of ones as d_y.
    dgrad = run_op(backend, OP, [np.ones((1, 70), np.float32)], [terms], {}, [ones], forced=plain)
    assert dgrad.d_inputs[0] is not None
    opcheck.assert_same_bits(dgrad.d_inputs[0], want[None])
    wgrad = run_op(
        backend, OP, [terms], [np.ones((1, 70), np.float32)], {}, [np.ones((length, 1), np.float32)], forced=plain
    )
    opcheck.assert_same_bits(wgrad.d_params[0], want[None])


def test_bias_gradient_is_promoted_every_128_terms(backend: Backend) -> None:
    """Warp w adds the rows w, w + 8, .. in runs of 128; then the warps' totals are added in order."""
    d_y = np.random.default_rng(0).random((5003, 40)).astype(np.float32)

    def in_order(run: int) -> np.ndarray:
        return np.add.accumulate([two_levels(d_y[warp::8], run) for warp in range(8)])[-1]

    for run in (64, 127, 129, 256, 626):
        assert (in_order(run) != in_order(128)).any()
    x, weight = np.ones((5003, 1), np.float32), np.ones((40, 1), np.float32)
    done = run_op(backend, OP, [x], [weight, weight[:, 0]], {}, [d_y])
    opcheck.assert_same_bits(done.d_params[1], in_order(128))


def test_bias_gradient_has_two_levels(backend: Backend) -> None:
    """400000 rows over 8 warps: in runs of 128 u sqrt(128/3 + 390/3)/sqrt(8) = 5 u, in sequences of 50000 46 u."""
    d_y = np.random.default_rng(0).random((400_000, 1)).astype(np.float32)
    with Session(backend) as session:
        source, target = session.put(d_y), session.empty(Spec((1,), "float32"))
        x, weight = session.empty(Spec((400_000, 1), "float32")), session.empty(Spec((1, 1), "float32"))
        rec = Recorder.of(backend)
        OP.backward(rec, (x, weight), [source], [None], [None, target], {}, False)
        session.execute(rec)
        error = opcheck.relative_error(session.get(target), d_y.sum(axis=0, dtype=np.float64))
    print(f"{error:.2e}")
    assert error < 15 * opcheck.U32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_the_batch(backend: Backend, dtype: str) -> None:
    """Every row of forward and dgrad has the same bits alone, in chunks, and in the whole."""
    case = Case("rows", ((130, 257),), ((66, 257), (66,)))
    drawn = draw(case, dtype, "bfloat16")
    x, d_y = drawn.inputs[0], np.random.default_rng(1).standard_normal((130, 66)).astype(NUMPY_DTYPE[dtype])
    assert x is not None
    whole = run_op(backend, OP, [x], drawn.params, {}, [d_y], batch_invariant=True)
    for rows in (slice(0, 1), slice(77, 78), slice(129, 130), slice(0, 64), slice(64, 130), slice(5, 70)):
        part = run_op(backend, OP, [x[rows]], drawn.params, {}, [d_y[rows]], batch_invariant=True)
        opcheck.assert_same_bits(part.outputs[0], whole.outputs[0][rows], f"y {rows}")
        assert part.d_inputs[0] is not None and whole.d_inputs[0] is not None
        opcheck.assert_same_bits(part.d_inputs[0], whole.d_inputs[0][rows], f"d_x {rows}")


def test_a_variant_that_breaks_batch_invariance_is_refused_with_it() -> None:
    for name in ("rows", "cublas"):
        rec = Recorder(80, {"linear": name}, batch_invariant=True)
        with pytest.raises(InputError, match=f"variant {name} .* which --batch-invariant forbids; leave out"):
            OP.select(rec, [Spec((1, 64), "bfloat16")], [Spec((64, 64), "bfloat16")], {})


def test_repeats_with_the_same_bits(backend: Backend) -> None:
    case = Case("repeat", ((70, 130),), ((65, 130), (65,)))
    drawn = draw(case, "float32", "bfloat16")
    d_y = [np.random.default_rng(1).standard_normal((70, 65)).astype(np.float32)]
    first = opcheck.run(backend, "linear", case, drawn, d_y, "float32")
    for _ in range(3):
        opcheck.assert_same_run(first, opcheck.run(backend, "linear", case, drawn, d_y, "float32"))


def test_thread_order_does_not_matter() -> None:
    """A missing barrier, or a block that relies on another one, shows when threads and blocks run backwards."""
    case = CASES[4]
    drawn = draw(case, "float32")
    d_y = [np.random.default_rng(1).standard_normal((65, 65)).astype(np.float32)]
    ascending = opcheck.run(HostBackend(), "linear", case, drawn, d_y, "float32")
    descending = opcheck.run(HostBackend(descending=True), "linear", case, drawn, d_y, "float32")
    opcheck.assert_same_run(ascending, descending)


@pytest.mark.parametrize("exponent", [-50, 50])
def test_scales_exactly_by_powers_of_two(backend: Backend, exponent: int) -> None:
    """Tiny and large values: scaling by 2^k commutes with every rounding while nothing leaves fp32's normal range."""
    case = Case("scale", ((5, 40),), ((6, 40),))
    drawn = draw(case)
    x = drawn.inputs[0]
    assert x is not None
    plain = run_op(backend, OP, [x], drawn.params)
    scaled = run_op(backend, OP, [np.ldexp(x, exponent)], drawn.params)
    opcheck.assert_same_bits(np.ldexp(plain.outputs[0], exponent), scaled.outputs[0])


def test_nan_and_inf_reach_their_outputs_and_no_others(backend: Backend) -> None:
    """A tile's padding is zero, and zero times infinity must not leak into a neighbour."""
    case = Case("special", ((5, 19),), ((6, 19),))
    drawn = draw(case)
    x, weight = drawn.inputs[0], drawn.params[0]
    assert x is not None
    x[1, 3], x[4, 18], weight[5, 18] = np.nan, np.inf, np.inf
    d_y = np.random.default_rng(1).standard_normal((5, 6)).astype(np.float32)
    d_y[2, 2] = np.nan
    done = opcheck.run(backend, "linear", case, drawn, [d_y], "float32")
    with np.errstate(invalid="ignore"):
        want = opcheck.reference("linear", case, drawn, [d_y])
    for got, name in ((done.outputs[0], "output0"), (done.d_inputs[0], "d_input0"), (done.d_params[0], "d_param0")):
        assert got is not None
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want[name]), name)
        assert opcheck.relative_error(got, want[name]) < opcheck.tolerance("float32", 19)
    assert np.isfinite(done.outputs[0][[0, 2, 3], :5]).all()


def test_no_rows(backend: Backend) -> None:
    """N = 0: no outputs, and gradients of parameters are 0 when written, unchanged when added to."""
    weight, x, d_y = np.ones((3, 2), np.float32), np.empty((0, 2), np.float32), np.empty((0, 3), np.float32)
    bias = np.ones(3, np.float32)
    written = run_op(backend, OP, [x], [weight, bias], {}, [d_y])
    assert written.outputs[0].shape == (0, 3)
    assert (written.d_params[0] == 0).all() and (written.d_params[1] == 0).all()
    added = run_op(backend, OP, [x], [weight, bias], {}, [d_y], d_params=[weight, bias])
    assert (added.d_params[0] == 1).all() and (added.d_params[1] == 1).all()


def test_unwanted_gradients_cost_nothing() -> None:
    case = Case("frozen", ((4, 8),), ((3, 8), (3,)))
    names = opcheck.kernel_names
    assert names(opcheck.record("linear", case, want_params=False)) == ["linear_forward", "linear_dgrad"]
    only_params = ["linear_forward", "linear_wgrad", "linear_bgrad"]
    assert names(opcheck.record("linear", case, want_inputs=False)) == only_params


@pytest.mark.parametrize(
    ("inputs", "params", "message"),
    [
        ([Spec((2, 3), "float32")], [Spec((4, 5), "float32")], r"weight shape is \(4, 5\), expected \[M,3\]"),
        ([Spec((2, 3), "float16")], [Spec((4, 3), "float32")], "x dtype is float16, expected float32 or bfloat16"),
        ([Spec((2, 3), "float32")], [Spec((4, 3), "int32")], "weight dtype is int32"),
        ([Spec((1, 2, 3), "float32")], [Spec((4, 3), "float32")], r"x shape is \(1, 2, 3\), expected \[N,K\]"),
        ([Spec((2, 3), "float32")], [Spec((12,), "float32")], r"weight shape is \(12,\), expected \[M,K\]"),
        ([Spec((2, 3), "float32")], [Spec((4, 3), "float32"), Spec((3,), "float32")], r"bias shape is \(3,\)"),
        ([Spec((2, 3), "float32")], [Spec((4, 3), "float32"), Spec((4,), "bfloat16")], "bias dtype is bfloat16"),
        ([Spec((2, 3), "float32")], [], "number of params is 0"),
    ],
)
def test_infer_refuses(inputs: list[Spec | None], params: list[Spec], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        OP.infer(inputs, params, {})
    assert str(caught.value).startswith("linear: ") and "\n" not in str(caught.value)


def test_infer_refuses_an_output_dtype() -> None:
    with pytest.raises(InputError, match="linear: out_dtype is float16, expected float32 or bfloat16"):
        OP.infer([Spec((2, 3), "float32")], [Spec((4, 3), "float32")], {"out_dtype": "float16"})


def test_cost_counts_the_products() -> None:
    forward, backward = OP.cost([Spec((2, 3), "bfloat16")], [Spec((5, 3), "bfloat16"), Spec((5,), "bfloat16")], {})
    assert forward.flops == 2 * 2 * 3 * 5 and backward.flops == 2 * forward.flops
    assert forward.bytes == 2 * (2 * 3 + 5 * 3 + 5 + 2 * 5)
    assert backward.bytes == 2 * (2 * 5 + 2 * 2 * 3 + 5 * 3) + 4 * (5 * 3 + 5)
