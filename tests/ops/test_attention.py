"""Attention: the kernels against the fp64 reference, and the contracts that no tolerance covers.

Tolerance. Inputs are standard normal and scale is 1/sqrt(D), so scores are of size 1 and what a product sums is of size
sqrt(terms). u = 2^-24; a rounding error is uniform, so u / sqrt(3) on average.
- A score sums D products: u / sqrt(3) sqrt(D / 2), see opcheck; that absolute error of a score is the relative error of
  its probability. Scaling, the log-sum-exp (of size log T) and exp add at most 6 u.
- The output sums up to Tk of them in two levels (opcheck.tolerance), and is rounded to the dtype once.
- Gradients: d_p is such a product too, d_p - delta cancels (a factor of 2 over the tensor), the sum runs over the
  group's queries or over the keys; in bf16 delta is made of the rounded output, a second rounding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec, Tensor
from cupyllm.backend.eager import OpRun, Session, run_op
from cupyllm.backend.record import Recorder, arena_layout
from cupyllm.errors import InputError
from cupyllm.ops.attention import OP, visible_pairs
from cupyllm.ops.op import Case
from cupyllm.reference import attention as reference
from tests.hostcuda.backend import HostBackend
from tests.ops.opcheck import U32, assert_same_bits, check, relative_error, tolerance

SMALL = [case for case in OP.cases() if case.size == "small"]
# (Tq, Tk, HQ, HK, D): token counts around both tile sizes (16 and 32), every head size class, groups of 1, 2, 4 and 8
SHAPES = [
    (2, 2, 1, 1, 128),
    (31, 31, 8, 1, 16),
    (32, 32, 4, 1, 80),
    (33, 33, 2, 2, 96),
    (63, 63, 2, 1, 128),
    (64, 64, 4, 1, 64),
    (65, 65, 8, 1, 32),
    (127, 127, 1, 1, 64),
    (128, 128, 2, 1, 16),
    (129, 129, 2, 1, 32),
    (1, 65, 2, 1, 80),
    (17, 129, 4, 2, 16),
    (33, 63, 1, 1, 96),
    (40, 9, 2, 1, 16),
]


def limits(dtype: str, case: Case) -> dict[str, float]:
    """Largest errors of output and gradients; derivation above."""
    (_, num_queries, width), (_, num_keys, _) = case.inputs[:2]
    heads, kv_heads = case.attrs["num_heads"], case.attrs["num_kv_heads"]
    probability = U32 * (math.sqrt(width / heads / 2) / math.sqrt(3) + 6)
    terms = max(num_keys, num_queries * heads // kv_heads)
    return {
        "output0": probability + tolerance(dtype, num_keys),
        "": 2 * 2 * probability + tolerance(dtype, terms, roundings=2),
    }


def make_case(shape: tuple[int, int, int, int, int], batch: int = 1, segments: bool = False, **attrs: Any) -> Case:
    num_queries, num_keys, heads, kv_heads, head_dim = shape
    q, k = (batch, num_queries, heads * head_dim), (batch, num_keys, kv_heads * head_dim)
    kind = "segments" if segments else "none"
    attrs = {"num_heads": heads, "num_kv_heads": kv_heads, **attrs}
    return Case(str((*shape, attrs)), (q, k, k, q[:2], k[:2]), (), attrs, ("normal", "normal", "normal", kind, kind))


def arrays(shape: tuple[int, int, int, int, int], batch: int = 1, seed: int = 0) -> list[np.ndarray]:
    """q, k, v and d_out, float32."""
    num_queries, num_keys, heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(seed)
    q, k = (batch, num_queries, heads * head_dim), (batch, num_keys, kv_heads * head_dim)
    return [rng.standard_normal(s).astype(np.float32) for s in (q, k, k, q)]


def attend(
    backend: Backend,
    q: Any,
    k: Any,
    v: Any,
    d_out: Any,
    segments: Any = (None, None),
    heads: Any = (2, 1),
    **attrs: Any,
) -> OpRun:
    """Forward and backward on host arrays."""
    attrs = {"num_heads": heads[0], "num_kv_heads": heads[1], **attrs}
    return run_op(backend, OP, [q, k, v, *segments], (), attrs, [d_out])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_own_cases(backend: Backend, case: Case, dtype: str) -> None:
    check(backend, "attention", case, dtype, limit=limits(dtype, case))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend: Backend, shape: tuple[int, int, int, int, int]) -> None:
    dtype = "bfloat16" if shape[0] % 4 == 1 else "float32"
    case = make_case(shape)
    check(backend, "attention", case, dtype, limit=limits(dtype, case))


@pytest.mark.parametrize("window", [2, 31, 32, 33, 64, 500])
def test_windows(backend: Backend, window: int) -> None:
    for case in (
        make_case((67, 67, 2, 1, 16), window=window),
        make_case((35, 67, 2, 1, 16), window=window),
        make_case((35, 67, 2, 1, 16), window=window, causal=False, batch=2, segments=True, scale=0.3),
    ):
        check(backend, "attention", case, "float32", limit=limits("float32", case))


def test_windows_and_causality_count_pairs() -> None:
    assert visible_pairs(4, 4, {}) == 10
    assert visible_pairs(4, 4, {"causal": False}) == 16
    assert visible_pairs(8, 8, {"window": 4}) == 1 + 2 + 3 + 4 * 5
    assert visible_pairs(2, 5, {}) == 4 + 5
    assert visible_pairs(5, 2, {}) == 1 + 2


@pytest.mark.parametrize("tokens, window", [(1, None), (40, 1)])
def test_a_single_visible_key(backend: Backend, tokens: int, window: int | None) -> None:
    """The output is that key's value, bit for bit; gradients of q and k are 0 up to the rounding of d_p - delta."""
    q, k, v, d_out = arrays((tokens, tokens, 2, 1, 64))
    run = attend(backend, q, k, v, d_out, window=window)
    np.testing.assert_array_equal(
        run.outputs[0].reshape(tokens, 2, 64), np.broadcast_to(v[0, :, None], (tokens, 2, 64))
    )
    bound = 2 * 64 * U32 * np.abs(d_out).max() * np.abs(v).max() * max(np.abs(q).max(), np.abs(k).max())
    for gradient in run.d_inputs[:2]:
        assert gradient is not None and np.abs(gradient).max() <= bound


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(backend: Backend, side: str) -> None:
    """Padded rows are exactly 0 with 0 gradient; the others equal the row run without padding (bits, at the right)."""
    tokens, valid = 45, 34
    q, k, v, d_out = arrays((tokens, tokens, 2, 1, 16), batch=2)
    keep = slice(tokens - valid, tokens) if side == "left" else slice(0, valid)
    segments = np.full((2, tokens), -1, np.int32)
    segments[0, keep], segments[1] = 3, 0
    run = attend(backend, q, k, v, d_out, (segments, segments))
    alone = attend(backend, q[:1, keep], k[:1, keep], v[:1, keep], d_out[:1, keep])
    hidden = np.ones(tokens, bool)
    hidden[keep] = False
    for got, want in zip((*run.outputs, *run.d_inputs[:3]), (*alone.outputs, *alone.d_inputs[:3]), strict=True):
        assert got is not None and want is not None
        assert (got[0, hidden] == 0).all()
        assert relative_error(got[:1, keep], want) < 30 * U32
        if side == "right":
            assert_same_bits(got[:1, keep], want, "padded and alone")


def test_packed_rows_equal_separate_ones(backend: Backend) -> None:
    q, k, v, d_out = arrays((50, 50, 2, 1, 16))
    segments = np.repeat(np.array([[4, 0]], np.int32), [20, 30], axis=1)
    packed = attend(backend, q, k, v, d_out, (segments, segments), window=18)
    for part in (slice(0, 20), slice(20, 50)):
        alone = attend(backend, q[:, part], k[:, part], v[:, part], d_out[:, part], window=18)
        for got, want in zip(
            (*packed.outputs, *packed.d_inputs[:3]), (*alone.outputs, *alone.d_inputs[:3]), strict=True
        ):
            assert got is not None and want is not None
            assert relative_error(got[:, part], want) < 30 * U32


@pytest.mark.parametrize("head_dim", [16, 128])
def test_batched_is_alone_bit_for_bit(backend: Backend, head_dim: int) -> None:
    q, k, v, d_out = arrays((37, 37, 2, 1, head_dim), batch=3)
    batched = attend(backend, q, k, v, d_out)
    for row in range(3):
        alone = attend(backend, *(a[row : row + 1] for a in (q, k, v, d_out)))
        for got, want in zip(
            (*batched.outputs, *batched.d_inputs[:3]), (*alone.outputs, *alone.d_inputs[:3]), strict=True
        ):
            assert got is not None and want is not None
            assert_same_bits(got[row : row + 1], want, f"row {row}")


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_query_chunks_are_the_whole_bit_for_bit(backend: Backend, dtype: str, window: int | None) -> None:
    """A chunk of queries with the keys up to its end: output and d_q have the whole run's bits."""
    q, k, v, d_out = (a.astype(NUMPY_DTYPE[dtype]) for a in arrays((71, 71, 2, 1, 16)))
    whole = attend(backend, q, k, v, d_out, window=window)
    for start, stop in ((0, 1), (1, 33), (33, 71), (70, 71), (5, 40)):
        part = attend(
            backend, q[:, start:stop], k[:, :stop], v[:, :stop], d_out[:, start:stop], window=window
        )  # fmt: skip
        for got, want in ((part.outputs[0], whole.outputs[0]), (part.d_inputs[0], whole.d_inputs[0])):
            assert got is not None and want is not None
            assert_same_bits(got, np.ascontiguousarray(want[:, start:stop]), f"queries {start} to {stop}")


def test_underflow_does_not_break_chunking(backend: Backend) -> None:
    """A row whose sum underflows to -0 before a tile that it cannot see has the bits it has without that tile.

    The first tile's sum is -4e-44; the second tile's larger scores scale it by exp(-9), to -0, and add +0. Queries 57
    to 63 share their tile with queries that see the third tile, whose +0 would make +0 of it.
    """
    q, k, v = (np.zeros((1, 77, 16), np.float32) for _ in range(3))
    q[..., 0], k[:, 32:, 0], v[:, :32] = 1.0, 9.0, -1e-45
    for keys in (77, 62):
        run = attend(backend, q[:, 57:keys], k[:, :keys], v[:, :keys], q[:, 57:keys], heads=(1, 1), scale=1.0)
        assert_same_bits(run.outputs[0][:, :5], np.zeros((1, 5, 16), np.float32), f"{keys} keys")


def test_same_bits_every_time_and_in_any_thread_order(backend: Backend) -> None:
    q, k, v, d_out = arrays((70, 70, 4, 2, 64))
    first = attend(backend, q, k, v, d_out, heads=(4, 2))
    again = [attend(backend, q, k, v, d_out, heads=(4, 2)) for _ in range(3)]
    if isinstance(backend, HostBackend):
        again.append(attend(HostBackend(descending=True), q, k, v, d_out, heads=(4, 2)))
    for run in again:
        for got, want in zip((*run.outputs, *run.d_inputs[:3]), (*first.outputs, *first.d_inputs[:3]), strict=True):
            assert got is not None and want is not None
            assert_same_bits(got, want)


def _hidden(kind: str, tokens: int) -> tuple[np.ndarray | None, dict[str, Any], slice, slice]:
    """(segments, attrs, poisoned tokens, tokens whose queries see none of those)."""
    if kind == "padding":
        segments = np.zeros((1, tokens), np.int32)
        segments[0, :9] = -1
        return segments, {}, slice(0, 9), slice(9, tokens)
    if kind == "packed":
        segments = np.zeros((1, tokens), np.int32)
        segments[0, 30:] = 1
        return segments, {}, slice(0, 30), slice(30, tokens)
    if kind == "future":
        return None, {}, slice(30, tokens), slice(0, 30)
    return None, {"window": 7}, slice(0, 10), slice(16, tokens)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["padding", "packed", "future", "window"])
def test_hidden_nan_does_not_leak(backend: Backend, kind: str, poison: float) -> None:
    """NaN and inf in keys, values, queries and d_out of tokens that others cannot see change no bit of the others."""
    tokens = 50
    q, k, v, d_out = arrays((tokens, tokens, 2, 1, 16))
    segments, attrs, poisoned, clean = _hidden(kind, tokens)
    pair = (segments, segments)
    want = attend(backend, q, k, v, d_out, pair, **attrs)
    k_bad, v_bad = k.copy(), v.copy()
    k_bad[:, poisoned], v_bad[:, poisoned] = poison, poison
    got = attend(backend, q, k_bad, v_bad, d_out, pair, **attrs)
    for a, b in ((got.outputs[0], want.outputs[0]), (got.d_inputs[0], want.d_inputs[0])):
        assert a is not None and b is not None
        assert_same_bits(np.ascontiguousarray(a[:, clean]), np.ascontiguousarray(b[:, clean]), kind)
    # The other way round: queries that see none of the clean keys, so no NaN of theirs reaches those keys' gradients.
    if kind in ("padding", "packed"):
        q_bad, d_bad = q.copy(), d_out.copy()
        q_bad[:, poisoned], d_bad[:, poisoned] = poison, poison
        got = attend(backend, q_bad, k_bad, v_bad, d_bad, pair, **attrs)
        for a, b in zip(got.d_inputs[:3], want.d_inputs[:3], strict=True):
            assert a is not None and b is not None
            assert_same_bits(np.ascontiguousarray(a[:, clean]), np.ascontiguousarray(b[:, clean]), kind)
    if kind == "padding":
        for a in (*got.outputs, *got.d_inputs[:3]):
            assert a is not None and (a[:, poisoned] == 0).all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_visible_nan_and_inf_surface(backend: Backend, where: str, value: float) -> None:
    q, k, v, d_out = arrays((40, 40, 2, 1, 16))
    q[0, 20, 0] = k[0, 20, 0] = 1.0  # so that an inf gives a score of +inf
    {"q": q, "k": k, "v": v}[where][0, 20, 0] = value
    out = attend(backend, q, k, v, d_out).outputs[0]
    assert np.isfinite(out[0, :20]).all()
    assert not np.isfinite(out[0, 20]).all()


def test_minus_infinite_scores(backend: Backend) -> None:
    """A first tile whose visible scores are all -inf weighs nothing; a row with nothing else is NaN, not 0."""
    q, k, v, d_out = arrays((40, 40, 1, 1, 16))
    q[:] = np.abs(q)
    k[0, :34, 3] = -np.inf
    out = attend(backend, q, k, v, d_out, heads=(1, 1)).outputs[0]
    assert np.isnan(out[0, :34]).all()
    want, _ = reference.forward(q[:, 34:].astype(float), k[:, 34:].astype(float), v[:, 34:].astype(float),
                                num_heads=1, num_kv_heads=1)  # fmt: skip
    assert relative_error(out[:, 34:], want) < 20 * U32


@pytest.mark.parametrize("magnitude", [1e-20, 1e3, 1e18])
def test_large_and_tiny_values(backend: Backend, magnitude: float) -> None:
    """Scores of +-1e30 and of 1e-40 neither overflow nor lose the maximum."""
    q, k, v, d_out = arrays((33, 33, 2, 1, 16))
    q, k = (q * magnitude).astype(np.float32), (k * magnitude ** (2 / 3)).astype(np.float32)
    got = attend(backend, q, k, v, d_out).outputs[0]
    want, _ = reference.forward(*(a.astype(np.float64) for a in (q, k, v)), num_heads=2, num_kv_heads=1)
    # A score's error is relative to the products it sums (of size |s|), and is the probability's relative error.
    score = magnitude ** (5 / 3) * 16 if magnitude == 1e3 else 1.0
    assert relative_error(got, want) < min(U32 * (score + 30), 1e-2)


def test_lse_and_memory(backend: Backend) -> None:
    """lse is the log-sum-exp, -inf where nothing is visible; temporaries are two floats a row: no scores are kept."""
    q, k, v, d_out = arrays((40, 40, 2, 1, 16))
    segments = np.zeros((1, 40), np.int32)
    segments[0, :3] = -1
    attrs = {"num_heads": 2, "num_kv_heads": 1}
    with Session(backend) as session:
        x: list[Tensor | None] = [session.put(a) for a in (q, k, v, segments, segments)]
        out = session.empty(Spec(q.shape, "float32"))
        rec = Recorder.of(backend)
        saved = OP.forward(rec, x, (), [out], attrs)
        lse = session.empty(Spec((1, 2, 40), "float32"))
        rec.launches = [
            type(launch)(
                launch.kernel, launch.grid, launch.block, tuple(lse if a is saved[6] else a for a in launch.args)
            )
            for launch in rec.launches
        ]
        session.execute(rec)
        got = session.get(lse)
        gradients: list[Tensor | None] = [session.empty(Spec(a.shape, "float32")) for a in (q, k, v)]
        OP.backward(rec, saved, [session.put(d_out)], [*gradients, None, None], [], attrs, False)
        assert arena_layout(rec.launches)[1] <= 2 * 512  # [1,2,40] floats each, rounded up to the arena's alignment
    _, want = reference.forward(*(a.astype(np.float64) for a in (q, k, v)), segments, segments, **attrs)
    assert (got[0, :, :3] == -np.inf).all()
    # The log of a sum of up to 40 terms of size 1: an absolute error of the score's (see above) and 2 u of the log.
    np.testing.assert_allclose(got[0, :, 3:], want[6][0, :, 3:], rtol=0, atol=U32 * 20)


def test_unwanted_gradients_are_left_out(backend: Backend) -> None:
    q, k, v, d_out = arrays((20, 20, 2, 1, 16))
    full = attend(backend, q, k, v, d_out).d_inputs
    attrs = {"num_heads": 2, "num_kv_heads": 1}
    for wanted in range(3):
        with Session(backend) as session:
            x: list[Tensor | None] = [*(session.put(a) for a in (q, k, v)), None, None]
            out, target = (
                session.empty(Spec(q.shape, "float32")),
                session.empty(Spec((q, k, v)[wanted].shape, "float32")),
            )
            rec = Recorder.of(backend)
            saved = OP.forward(rec, x, (), [out], attrs)
            d_inputs: list[Tensor | None] = [target if i == wanted else None for i in range(5)]
            OP.backward(rec, saved, [session.put(d_out)], d_inputs, [], attrs, False)
            session.execute(rec)
            want = full[wanted]
            assert want is not None
            assert_same_bits(session.get(target), want)


GOOD: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize(
    "q, k, v, segments, attrs, words",
    [
        ((1, 3, 64), (1, 3, 32), (1, 3, 32), 2, {"num_kv_heads": 3}, "num_kv_heads"),
        ((1, 3, 64), (1, 3, 32), (1, 3, 32), 2, {"num_kv_heads": 0}, "num_kv_heads"),
        ((3, 64), (1, 3, 32), (1, 3, 32), 2, {}, "q's shape"),
        ((1, 3, 66), (1, 3, 32), (1, 3, 32), 2, {}, "q's width"),
        ((1, 3, 48), (1, 3, 24), (1, 3, 24), 2, {}, "head size is 12"),
        ((1, 3, 544), (1, 3, 272), (1, 3, 272), 2, {}, "head size is 136"),
        ((1, 3, 64), (1, 3, 64), (1, 3, 64), 2, {}, "k's shape"),
        ((1, 3, 64), (2, 3, 32), (2, 3, 32), 2, {}, "k's shape"),
        ((1, 3, 64), (1, 3, 32), (1, 4, 32), 2, {}, "v's shape"),
        ((1, 3, 64), (1, 3, 32), (1, 3, 32), 1, {}, "both or neither"),
        ((1, 3, 64), (1, 3, 32), (1, 3, 32), 3, {}, "k_segments"),
        ((1, 3, 64), (1, 3, 32), (1, 3, 32), 2, {"window": 0}, "window is 0"),
        ((1, 3, 64), (1, 3, 32), (1, 3, 32), 2, {"scale": math.nan}, "scale is nan"),
    ],
)
def test_refusals(q: Any, k: Any, v: Any, segments: int, attrs: dict[str, Any], words: str) -> None:
    specs: list[Spec | None] = [Spec(q, "float32"), Spec(k, "float32"), Spec(v, "float32")]
    specs += [Spec((1, 3), "int32"), None if segments == 1 else Spec((1, 2 + segments - 1), "int32")]
    with pytest.raises(InputError, match=words) as caught:
        OP.infer(specs, (), GOOD | attrs)
    assert "\n" not in str(caught.value)


def test_refuses_other_dtypes() -> None:
    good = [Spec((1, 3, 64), "float32"), Spec((1, 3, 32), "float32"), Spec((1, 3, 32), "float32"), None, None]
    assert OP.infer(good, (), GOOD) == [good[0]]
    with pytest.raises(InputError, match="float16"):
        OP.infer([Spec(s.shape, "float16") if s else None for s in good], (), GOOD)
    with pytest.raises(InputError, match="k's and v's dtype"):
        OP.infer([good[0], good[1], Spec((1, 3, 32), "bfloat16"), None, None], (), GOOD)
    with pytest.raises(InputError, match="int64"):
        OP.infer([*good[:3], Spec((1, 3), "int64"), Spec((1, 3), "int64")], (), GOOD)


def test_cost_counts_visible_pairs() -> None:
    case = make_case((128, 128, 8, 2, 64))
    forward, backward = OP.cost([*(Spec(s, "bfloat16") for s in case.inputs[:3]), None, None], (), case.attrs)
    assert forward.flops == 4 * 8 * 64 * 128 * 129 / 2
    assert backward.flops == 2.5 * forward.flops
    assert forward.bytes == 2 * 2 * 128 * 64 * (8 + 2) + 4 * 8 * 128
