"""rmsnorm against the fp64 reference, and what its kernels promise beyond closeness."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec, Tensor
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops.cases import draw
from cupyllm.ops.op import Case
from tests.hostcuda.backend import HostBackend
from tests.ops import opcheck
from tests.ops.test_linear import two_levels

OP = ops.get("rmsnorm")
CASES = opcheck.small_cases("rmsnorm")
EPS = {"eps": 1e-6}


def limits(case: Case, dtype: str) -> dict[str, float]:
    """y is rounded twice (Hugging Face's order). d_x subtracts n mean(g n) from g, two numbers of at most g's size
    each with the error of its own sum and rounded steps: twice the stages."""
    dim = case.params[0][0]
    num_chunks = case.inputs[0][0] * case.inputs[0][1] // dim
    return {
        "output0": opcheck.tolerance(dtype, dim, roundings=2),
        "d_input0": opcheck.tolerance(dtype, dim, stages=8),
        "d_param0": opcheck.tolerance("float32", num_chunks, stages=6),
    }


@pytest.mark.parametrize("dtypes", opcheck.DTYPE_PAIRS, ids="/".join)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(backend: Backend, case: Case, dtypes: tuple[str, str]) -> None:
    opcheck.check(backend, "rmsnorm", case, *dtypes, limit=limits(case, dtypes[0]))


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_accumulates(backend: Backend, case: Case) -> None:
    opcheck.check(backend, "rmsnorm", case, "float32", "bfloat16", limit=limits(case, "float32"), accumulate=True)


@pytest.mark.parametrize("shape", [(1, 25600, 25600), (40000, 1, 1), (700, 64, 2)], ids=["D", "N", "N with heads"])
def test_long_sums(backend: Backend, shape: tuple[int, int, int]) -> None:
    """Many columns, and so many chunks that slabs grow beyond 128 (40000 and 22400 chunks, 256 slabs at most)."""
    num_rows, width, dim = shape
    case = Case("long", ((num_rows, width),), ((dim,),), {"eps": 0.5})
    opcheck.check(backend, "rmsnorm", case, "float32", limit=limits(case, "float32"))


def test_the_weight_gradient_is_added_in_the_documented_order(backend: Backend) -> None:
    """Bit for bit: 256 slabs, in each eight warps that add every eighth chunk in runs of 128, the warps in order, then
    the slabs in runs of 128. With x = r = 1 each term is d_y itself. Four columns have terms in
    the first slab alone and four one term a slab, lest one level's rounding hide the other's."""
    num_chunks, num_slabs = 300_000, 256
    slab_chunks = -(-num_chunks // num_slabs)
    d_y, rng = np.zeros((num_chunks, 8), np.float32), np.random.default_rng(0)
    d_y[:slab_chunks, :4] = rng.random((slab_chunks, 4))
    d_y[::slab_chunks, 4:] = rng.random((num_slabs, 4))

    def in_order(run: int, slab_run: int) -> np.ndarray:
        warps = two_levels(terms.transpose(1, 0, 2, 3), run)  # [slab,warp,D]
        return two_levels(np.add.accumulate(warps, axis=1)[:, -1], slab_run)

    terms = np.zeros((num_slabs, -(-slab_chunks // 8) * 8, 8), np.float32)  # adding 0 changes no sum
    padded = np.zeros((num_slabs * slab_chunks, 8), np.float32)
    padded[:num_chunks] = d_y
    terms[:, :slab_chunks] = padded.reshape(num_slabs, slab_chunks, 8)
    terms = terms.reshape(num_slabs, -1, 8, 8)  # [slab,term,warp,D]
    want = in_order(128, 128)
    assert -(-slab_chunks // 8) > 128, "no warp of a slab has more than one run"
    for other in ((147, 128), (64, 128), (128, 256), (128, 64)):
        assert (in_order(*other) != want).any(), f"the terms cannot tell the runs from {other}"
    with Session(backend) as session:  # the weight's gradient alone
        x, weight, rstd = (session.put(np.ones(n, np.float32)) for n in ((num_chunks, 8), (8,), (num_chunks,)))
        target = session.empty(Spec((8,), "float32"))
        rec = Recorder.of(backend)
        OP.backward(rec, (x, weight, rstd), [session.put(d_y)], [None], [target], {"eps": 0.0}, False)
        session.execute(rec)
        opcheck.assert_same_bits(session.get(target), want)


@pytest.mark.parametrize("width", [200, 256, 257, 1000], ids=lambda width: f"D {width}")
def test_squares_are_added_in_the_documented_order(backend: Backend, width: int) -> None:
    """Bit for bit: thread t of 32 (256 beyond D = 256) adds x[t], x[t + 32], ..; then butterflies, then the warps.

    Values are eighths up to 8 and their squares exact, so a multiplication fused with the addition changes nothing; one
    value of 2^12 makes later additions round.
    """
    group = 32 if width <= 256 else 256
    x = np.random.default_rng(width).integers(1, 64, (6, width)).astype(np.float32) / 8
    x[:, 5] = 4096
    squares = np.zeros((6, -(-width // group) * group), np.float32)
    squares[:, :width] = x * x
    lanes = np.add.accumulate(squares.reshape(6, -1, group), axis=1)[:, -1]
    lanes = lanes.reshape(6, -1, 32)
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., np.arange(32) ^ distance]
    total = np.add.accumulate(lanes[..., 0], axis=1)[:, -1]
    assert (total != np.add.accumulate(x * x, axis=1)[:, -1]).any()
    rstd = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(0.5))
    done = run_op(backend, OP, [x], [np.ones(width, np.float32)], {"eps": 0.5})
    opcheck.assert_same_bits(done.outputs[0], x * rstd[:, None])


def test_rounds_in_hugging_faces_order(backend: Backend) -> None:
    """bf16: x r is rounded before it meets the weight. With a weight of 1 the second rounding is exact, with one of
    1 + 2^-7 the two orders differ."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(NUMPY_DTYPE["bfloat16"])
    weight = np.full(64, 1 + 2.0**-7, np.float32)
    done = run_op(backend, OP, [x], [weight.astype(NUMPY_DTYPE["bfloat16"])], EPS)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6)
    rounded = normed.astype(np.float32).astype(NUMPY_DTYPE["bfloat16"]).astype(np.float32)
    want = (rounded * weight).astype(NUMPY_DTYPE["bfloat16"])
    once = (normed * weight).astype(np.float32).astype(NUMPY_DTYPE["bfloat16"])
    assert (want != once).any(), "the case cannot tell the orders apart"
    opcheck.assert_same_bits(done.outputs[0], want)


@pytest.mark.parametrize("width", [96, 520], ids=["warp form", "block form"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_the_batch(backend: Backend, width: int, dtype: str) -> None:
    drawn = draw(Case("rows", ((19, width),), ((width,),), EPS), dtype, "bfloat16")
    x, d_y = drawn.inputs[0], np.random.default_rng(1).standard_normal((19, width)).astype(NUMPY_DTYPE[dtype])
    assert x is not None
    whole = run_op(backend, OP, [x], drawn.params, EPS, [d_y])
    for rows in (slice(0, 1), slice(18, 19), slice(3, 12)):
        part = run_op(backend, OP, [x[rows]], drawn.params, EPS, [d_y[rows]])
        opcheck.assert_same_bits(part.outputs[0], whole.outputs[0][rows])
        assert part.d_inputs[0] is not None and whole.d_inputs[0] is not None
        opcheck.assert_same_bits(part.d_inputs[0], whole.d_inputs[0][rows])


def test_heads_are_rows(backend: Backend) -> None:
    """Three heads of 16 in a row give the bits of three rows of 16, d_weight included."""
    drawn = draw(Case("heads", ((5, 48),), ((16,),), EPS))
    x, d_y = drawn.inputs[0], np.random.default_rng(1).standard_normal((5, 48)).astype(np.float32)
    assert x is not None
    heads = run_op(backend, OP, [x], drawn.params, EPS, [d_y])
    rows = run_op(backend, OP, [x.reshape(15, 16)], drawn.params, EPS, [d_y.reshape(15, 16)])
    opcheck.assert_same_bits(heads.outputs[0].reshape(15, 16), rows.outputs[0])
    opcheck.assert_same_bits(heads.d_params[0], rows.d_params[0])


@pytest.mark.parametrize("case", [CASES[-1], CASES[-2]], ids=lambda case: case.name)
def test_repeats_and_thread_order_does_not_matter(backend: Backend, case: Case) -> None:
    drawn = draw(case)
    d_y = [np.random.default_rng(1).standard_normal(case.inputs[0]).astype(np.float32)]
    first = opcheck.run(backend, "rmsnorm", case, drawn, d_y, "float32")
    opcheck.assert_same_run(first, opcheck.run(backend, "rmsnorm", case, drawn, d_y, "float32"))
    ascending = opcheck.run(HostBackend(), "rmsnorm", case, drawn, d_y, "float32")
    descending = opcheck.run(HostBackend(descending=True), "rmsnorm", case, drawn, d_y, "float32")
    opcheck.assert_same_run(ascending, descending)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_large_and_tiny_values(backend: Backend, scale: float) -> None:
    """Squares of 1e-15 and 1e15 stay normal in fp32; the result does not depend on the scale (eps = 0)."""
    case = Case("scaled", ((3, 40),), ((40,),), {"eps": 0.0})
    drawn = draw(case)
    assert drawn.inputs[0] is not None
    drawn.inputs[0] *= np.float32(scale)
    opcheck.check(backend, "rmsnorm", case, "float32", limit=limits(case, "float32"), drawn=drawn)


def test_zero_row_is_finite(backend: Backend) -> None:
    case = Case("zeros", ((2, 40),), ((40,),), EPS)
    drawn = draw(case)
    assert drawn.inputs[0] is not None
    drawn.inputs[0][:] = 0
    opcheck.check(backend, "rmsnorm", case, "float32", limit=limits(case, "float32"), drawn=drawn)


@pytest.mark.parametrize("width", [40, 300], ids=["warp form", "block form"])
def test_nan_stays_in_its_row(backend: Backend, width: int) -> None:
    drawn = draw(Case("nan", ((3, width),), ((width,),), EPS))
    x = drawn.inputs[0]
    assert x is not None
    x[1, 7] = np.nan
    done = run_op(backend, OP, [x], drawn.params, EPS, [np.ones((3, width), np.float32)])
    d_x = done.d_inputs[0]
    assert d_x is not None
    assert np.isnan(done.outputs[0][1]).all() and np.isfinite(done.outputs[0][[0, 2]]).all()
    assert np.isnan(d_x[1]).all() and np.isfinite(d_x[[0, 2]]).all()
    assert np.isnan(done.d_params[0]).all()  # a sum over rows that hold a NaN


def test_no_rows(backend: Backend) -> None:
    weight, empty = np.ones(4, np.float32), np.empty((0, 8), np.float32)
    written = run_op(backend, OP, [empty], [weight], EPS, [empty])
    assert written.outputs[0].shape == (0, 8) and (written.d_params[0] == 0).all()
    added = run_op(backend, OP, [empty], [weight], EPS, [empty], d_params=[weight])
    assert (added.d_params[0] == 1).all()


def test_forms_and_unwanted_gradients() -> None:
    small, large = (Case("form", ((2, d),), ((d,),), EPS) for d in (256, 257))
    names = opcheck.kernel_names
    assert names(opcheck.record("rmsnorm", small, want_params=False)) == [
        "rmsnorm_forward_warp",
        "rmsnorm_backward_warp",
    ]
    assert names(opcheck.record("rmsnorm", large, want_inputs=False)) == [
        "rmsnorm_forward_block",
        "rmsnorm_backward_weight",
        "rmsnorm_backward_weight_sum",
    ]


def test_weight_gradient_needs_little_scratch() -> None:
    """At most 256 slabs, however many tokens: 128 KiB for a head of 128."""
    rec = opcheck.record("rmsnorm", Case("long", ((65536, 64 * 128),), ((128,),), EPS))
    (partial,) = (launch for launch in rec.launches if "weight_sum" in launch.kernel.symbol)
    slabs = partial.args[0]
    assert isinstance(slabs, Tensor) and slabs.shape == (256, 128)


@pytest.mark.parametrize(
    ("x", "weight", "attrs", "message"),
    [
        (Spec((2, 10), "float32"), Spec((4,), "float32"), EPS, r"x shape is \(2, 10\), expected \[N,H\*4\]"),
        (Spec((2, 8), "float64"), Spec((4,), "float32"), EPS, "x dtype is float64"),
        (Spec((2, 8), "float32"), Spec((4,), "int64"), EPS, "weight dtype is int64"),
        (Spec((2, 8), "float32"), Spec((2, 4), "float32"), EPS, r"weight shape is \(2, 4\), expected \[D\]"),
        (Spec((16,), "float32"), Spec((4,), "float32"), EPS, r"x shape is \(16,\), expected \[N,H\*D\]"),
        (Spec((2, 8), "float32"), Spec((4,), "float32"), {}, "eps is None"),
        (Spec((2, 8), "float32"), Spec((4,), "float32"), {"eps": -1.0}, "eps is -1.0"),
    ],
)
def test_infer_refuses(x: Spec, weight: Spec, attrs: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        OP.infer([x], [weight], attrs)
    assert str(caught.value).startswith("rmsnorm: ") and "\n" not in str(caught.value)


def test_cost_is_one_pass() -> None:
    forward, backward = OP.cost([Spec((3, 8), "bfloat16")], [Spec((4,), "bfloat16")], EPS)
    assert forward.bytes == 2 * (2 * 24 + 4) + 4 * 6
    assert backward.bytes == 2 * (3 * 24 + 4) + 4 * 6 + 4 * 4
