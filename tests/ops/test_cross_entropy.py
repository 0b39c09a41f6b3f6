"""Cross-entropy: loss, argmax and gradient against the fp64 reference; ties, NaN, ignored and refused labels.

Tolerance. Logits of size 1: exp (2 u), a sum of V terms in two levels (opcheck.tolerance), log and two additions of the
size of log V <= 12 (so up to 4 u absolute where the loss is near 0: relative to a tensor of losses of size log V that
is within the stages). Gradients: exp(x - lse) adds the same again, and one rounding to the logits' dtype.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec
from cupyllm.backend.eager import OpRun, Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops.cases import draw
from cupyllm.ops.cross_entropy import OP, check_labels
from cupyllm.ops.op import Case
from tests.hostcuda.backend import HostBackend
from tests.ops.opcheck import U32, assert_same_bits, assert_same_run, check, tolerance

SMALL = [case for case in OP.cases() if case.size == "small"]


def cross_entropy(
    backend: Backend, logits: np.ndarray, labels: list[int], d_loss: float = 1.0, valid_vocab: int | None = None
) -> OpRun:
    d_losses = np.full(len(labels), d_loss, np.float32)
    attrs = {"valid_vocab": valid_vocab}
    return run_op(backend, OP, [logits, np.array(labels, np.int32)], (), attrs, [d_losses, None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_own_cases(backend: Backend, case: Case, dtype: str) -> None:
    vocab = case.inputs[0][1]
    limit = {
        "output0": tolerance("float32", vocab, stages=8),
        "d_input0": tolerance(dtype, vocab, stages=16),
    }
    check(backend, "cross_entropy", case, dtype, limit=limit)


@pytest.mark.parametrize("offset", [-1e4, 1e4, 3e38])
def test_large_logits(backend: Backend, offset: float) -> None:
    """A common offset changes nothing but the logits' own rounding; the largest floats do not overflow."""
    logits = (np.arange(300)[None] % 7 * 16 + np.float64(offset)).astype(np.float32)
    labels = [5]
    run = cross_entropy(backend, logits, labels)
    exact = logits.astype(np.float64)
    loss = np.log(np.exp(exact - exact.max()).sum()) + (exact.max() - exact[0, 5])
    np.testing.assert_allclose(run.outputs[0], [loss], rtol=8 * U32)
    assert run.outputs[1] == logits.argmax()


def test_ties_go_to_the_lowest_id_and_padded_ids_never_win(backend: Backend) -> None:
    logits = np.zeros((5, 3000), np.float32)
    logits[1, [2999, 700, 1213]] = 2
    logits[2, [2500, 2900]] = [1, 9]  # the 9 is padding
    logits[3] = -np.inf
    logits[3, 2999] = 0
    logits[4, [1, 257, 513]] = -0.0
    run = cross_entropy(backend, logits, [0] * 5, valid_vocab=2600)
    assert run.outputs[1].tolist() == [0, 700, 2500, 0, 0]
    assert run.outputs[0][2] == pytest.approx(np.log(2998 + np.e + np.exp(9)), rel=8 * U32)  # padding is in the softmax


def test_every_position_can_win_and_be_the_target(backend: Backend) -> None:
    """One row per id, around the edges of the 256 threads and the 2048 logits of a pass."""
    ids = [0, 1, 31, 32, 255, 256, 257, 1791, 2047, 2048, 2049, 2304, 2305]
    logits = np.zeros((len(ids), 2306), np.float32)
    logits[np.arange(len(ids)), ids] = 3
    run = cross_entropy(backend, logits, ids)
    assert run.outputs[1].tolist() == ids
    np.testing.assert_allclose(run.outputs[0], np.log(2305 + np.exp(3)) - 3, rtol=16 * U32)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 300, 2049])
def test_nan_and_inf_surface(backend: Backend, position: int, value: float) -> None:
    logits = np.zeros((3, 2050), np.float32)
    logits[1, position] = value
    logits[2, position] = -np.inf
    run = cross_entropy(backend, logits, [7, 7, 7])
    assert np.isfinite(run.outputs[0][[0, 2]]).all() and np.isnan(run.outputs[0][1])
    assert run.outputs[1][1] == position
    gradient = run.d_inputs[0]
    assert gradient is not None and np.isnan(gradient[1]).any() and np.isfinite(gradient[[0, 2]]).all()
    assert gradient[2, position] == 0


def test_all_logits_minus_infinite(backend: Backend) -> None:
    run = cross_entropy(backend, np.full((1, 300), -np.inf, np.float32), [0])
    assert np.isnan(run.outputs[0]).all() and run.outputs[1].tolist() == [0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ignored_rows_are_exactly_zero(backend: Backend, dtype: str) -> None:
    """Even where the row holds NaN; the other rows have the bits they have alone."""
    logits = np.random.default_rng(0).standard_normal((3, 700)).astype(NUMPY_DTYPE[dtype])
    logits[1, 3] = np.nan
    run = cross_entropy(backend, logits, [4, -100, 5], d_loss=0.5)
    alone = cross_entropy(backend, logits[2:], [5], d_loss=0.5)
    gradient, want = run.d_inputs[0], alone.d_inputs[0]
    assert gradient is not None and want is not None
    assert run.outputs[0][1] == 0 and (gradient[1] == 0).all()
    assert_same_bits(run.outputs[0][2:], alone.outputs[0])
    assert_same_bits(gradient[2:], want)


@pytest.mark.parametrize("label", [-1, -101, 700, 2**31 - 1])
def test_an_unchecked_bad_label_is_nan_and_reads_nothing_outside(backend: Backend, label: int) -> None:
    run = cross_entropy(backend, np.zeros((1, 700), np.float32), [label])
    assert np.isnan(run.outputs[0]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_in_place_of_the_logits(backend: Backend, dtype: str) -> None:
    case = Case("in place", ((3, 515), (3,)), (), {}, ("normal", "labels:515"))
    logits, labels = draw(case, dtype).inputs
    assert logits is not None and labels is not None
    want = run_op(backend, OP, [logits, labels], (), {}, [np.ones(3, np.float32), None]).d_inputs[0]
    with Session(backend) as session:
        x, loss, argmax = session.put(logits), session.empty(Spec((3,), "float32")), session.empty(Spec((3,), "int32"))
        rec = Recorder.of(backend)
        saved = OP.forward(rec, [x, session.put(labels)], (), [loss, argmax], {})
        OP.backward(rec, saved, [session.put(np.ones(3, np.float32)), None], [x, None], [], {}, False)
        assert len(rec.launches) == 2  # the forward, argmax included, is one
        session.execute(rec)
        assert want is not None
        assert_same_bits(session.get(x), want)


def test_same_bits_every_time_and_in_any_thread_order(backend: Backend) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 5000)).astype(np.float32)
    first = cross_entropy(backend, logits, [1, 2])
    others = [backend, HostBackend(descending=True)] if isinstance(backend, HostBackend) else [backend]
    for other in others:
        assert_same_run(cross_entropy(other, logits, [1, 2]), first)


def test_check_labels_names_the_position() -> None:
    check_labels(np.array([[0, 9], [-100, 3]]), 10)
    check_labels(np.zeros(0, np.int64), 10)
    with pytest.raises(InputError, match=r"position \(1, 0\) is 10, expected 0 to 9"):
        check_labels(np.array([[0, 9], [10, 11]]), 10)
    with pytest.raises(ValueError, match="position 2 is -4"):
        check_labels(np.array([0, -100, -4]), 10)


@pytest.mark.parametrize(
    "logits, labels, attrs, words",
    [
        (Spec((3, 4, 5), "float32"), Spec((3,), "int32"), {}, "logits' shape"),
        (Spec((3, 4), "float16"), Spec((3,), "int32"), {}, "float16"),
        (Spec((3, 4), "float32"), Spec((4,), "int32"), {}, "labels' shape"),
        (Spec((3, 4), "float32"), Spec((3,), "int64"), {}, "int64"),
        (Spec((3, 0), "float32"), Spec((3,), "int32"), {}, "vocabulary is 0"),
        (Spec((1, 2**31 - 1), "float32"), Spec((1,), "int32"), {}, "vocabulary"),
        (Spec((3, 4), "float32"), Spec((3,), "int32"), {"valid_vocab": 5}, "valid_vocab is 5"),
        (Spec((3, 4), "float32"), Spec((3,), "int32"), {"valid_vocab": 0}, "valid_vocab is 0"),
    ],
)
def test_refusals(logits: Spec, labels: Spec, attrs: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        OP.infer([logits, labels], (), attrs)
