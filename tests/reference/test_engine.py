"""The reference engine beyond its numbers: streaming, slices, batches, padding, refusals, memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyllm.errors import CheckpointError, InputError
from cupyllm.reference import attention, engine, qwen3
from cupyllm.reference.engine import ReferenceEngine
from tests.reference.sources import ArraySource, random_source

IDS = np.random.default_rng(0).integers(0, 37, (2, 9))
# Same values, another order of sums: a few roundings of values of order 10 through two layers.
FP32 = {"rtol": 0, "atol": 2e-5}


def gradients(model: ReferenceEngine, ids: np.ndarray, labels: np.ndarray, **layout: Any) -> dict[str, np.ndarray]:
    grads: dict[str, np.ndarray] = {}

    def sink(name: str, grad: np.ndarray) -> None:
        assert name not in grads
        grads[name] = grad.copy()

    model.loss_and_grads(ids, labels, sink, **layout)
    return grads


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_streamed_resident_and_the_page_agree(stored: str, tied: bool, dtype: Any) -> None:
    kind = ml_dtypes.bfloat16 if stored == "bfloat16" else np.dtype(stored)
    source = random_source(dtype=kind, tie_word_embeddings=tied, layer_windows=(None, 3))
    model = ReferenceEngine(source, dtype)
    streamed = model.forward(IDS, labels=IDS, want_logits=True, want_hidden=range(4))
    resident = model.forward(IDS, labels=IDS, mode="resident", want_logits=True)
    again = model.forward(IDS, labels=IDS, mode="resident", want_logits=True)
    assert streamed.loss == resident.loss == again.loss and streamed.num_targets == 16
    np.testing.assert_array_equal(streamed.logits, resident.logits)
    np.testing.assert_array_equal(streamed.logits, again.logits)
    assert streamed.logits.dtype == np.dtype(dtype)

    skipped = "" if tied else "model.embed_tokens.weight"
    stored_bytes = sum(a.nbytes for n, a in source.arrays.items() if n != skipped)
    assert streamed.streamed_bytes == resident.streamed_bytes == stored_bytes and again.streamed_bytes == 0

    exact = {name: array.astype(dtype) for name, array in source.arrays.items()}
    loss, logits, argmax, saved = qwen3.forward(exact, source.config, IDS, IDS)
    assert loss == streamed.loss
    np.testing.assert_array_equal(logits.reshape(2, 9, -1), streamed.logits)
    np.testing.assert_array_equal(argmax.reshape(2, 9), streamed.argmax)
    np.testing.assert_array_equal(streamed.hidden[0], exact["model.embed_tokens.weight"][IDS])
    grads = gradients(model, IDS, IDS)
    for name, grad in qwen3.backward(saved).items():
        np.testing.assert_array_equal(grads.pop(name), grad, err_msg=name)
    assert not grads


def test_one_flipped_bit_in_a_streamed_layer_shows() -> None:
    class Flipped(ReferenceEngine):
        def load_layer(self, index: int, mode: Any) -> dict[str, np.ndarray]:
            params = super().load_layer(index, mode)
            if index == 1 and mode == "stream":
                params["mlp.up_proj.weight"].view(np.uint32)[3, 2] ^= 1 << 16
            return params

    model = Flipped(random_source())
    streamed = model.forward(IDS, want_logits=True)
    resident = model.forward(IDS, mode="resident", want_logits=True)
    assert (streamed.logits != resident.logits).any()


@pytest.mark.parametrize("elements", [1, 24 * 5, 24 * 37])
def test_head_in_slices(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random_source()
    source.arrays["lm_head.weight"][30] = source.arrays["lm_head.weight"][4]  # equal logits, far apart
    source.arrays["lm_head.weight"][35] = 100  # an id that would often win
    whole = ReferenceEngine(source, "float64", valid_vocab=35)
    expected = whole.forward(IDS, labels=IDS, want_logits=True)
    expected_grads = gradients(whole, IDS, IDS)
    assert expected.argmax.max() < 35 and 30 not in expected.argmax
    np.testing.assert_array_equal(expected.argmax, expected.logits[..., :35].argmax(axis=-1))
    monkeypatch.setattr(engine, "SLICE_ELEMENTS", elements)
    sliced = ReferenceEngine(source, "float64", valid_vocab=35)
    result = sliced.forward(IDS, labels=IDS, want_logits=True)
    np.testing.assert_allclose(result.logits, expected.logits, rtol=1e-12)
    np.testing.assert_allclose(result.last_logits, expected.logits[:, -1], rtol=1e-12)
    np.testing.assert_array_equal(result.argmax, expected.argmax)
    assert result.loss == pytest.approx(expected.loss, rel=1e-13)
    for name, grad in gradients(sliced, IDS, IDS).items():
        np.testing.assert_allclose(grad, expected_grads[name], rtol=1e-9, atol=1e-13, err_msg=name)


def test_batched_padded_and_packed_equal_alone() -> None:
    model = ReferenceEngine(random_source(layer_windows=(None, 3)))
    texts = [IDS[0, :4], IDS[1, :5], IDS[1, 5:8]]
    alone = [model.forward(t[None], labels=t[None], want_logits=True) for t in texts]
    rows = np.zeros((3, 7), np.int64)
    segments = np.full((3, 7), -1, np.int32)
    rows[0, 3:], segments[0, 3:] = texts[0], 0  # left-padded
    rows[1, :5], segments[1, :5] = texts[1], 0  # right-padded
    rows[2, :4], segments[2, :4] = texts[0], 7  # packed
    rows[2, 4:], segments[2, 4:] = texts[2], 8
    batch = model.forward(rows, labels=rows, segments=segments, want_logits=True)
    np.testing.assert_allclose(batch.logits[0, 3:], alone[0].logits[0], **FP32)
    np.testing.assert_allclose(batch.logits[1, :5], alone[1].logits[0], **FP32)
    np.testing.assert_allclose(batch.logits[2, :4], alone[0].logits[0], **FP32)
    np.testing.assert_allclose(batch.logits[2, 4:], alone[2].logits[0], **FP32)
    np.testing.assert_array_equal(batch.last_logits, batch.logits[[0, 1, 2], [6, 4, 6]])
    assert batch.num_targets == 3 + 4 + 3 + 2
    expected = (2 * 3 * alone[0].loss + 4 * alone[1].loss + 2 * alone[2].loss) / 12
    assert batch.loss == pytest.approx(expected, abs=1e-6)

    # The gradient of the mean is the token-weighted mean of the gradients.
    together = gradients(model, rows, rows, segments=segments)
    parts = [gradients(model, t[None], t[None]) for t in texts]
    for name, grad in together.items():
        expected_grad = (6 * parts[0][name] + 4 * parts[1][name] + 2 * parts[2][name]) / 12
        np.testing.assert_allclose(grad, expected_grad, rtol=0, atol=2e-5 * np.abs(grad).max(), err_msg=name)


def test_what_padding_holds_does_not_matter() -> None:
    model = ReferenceEngine(random_source())
    segments = np.array([[-1, -1, 0, 0, 0, 0, 0, -1, -1]] * 2, np.int32)
    other = IDS.copy()
    other[segments < 0] = 5
    first, second = (model.forward(i, labels=i, segments=segments, want_logits=True) for i in (IDS, other))
    assert first.loss == second.loss
    np.testing.assert_array_equal(first.logits[:, 2:7], second.logits[:, 2:7])
    one, two = (gradients(model, i, i, segments=segments) for i in (IDS, other))
    for name, grad in one.items():
        np.testing.assert_array_equal(grad, two[name], err_msg=name)


def test_positions_may_be_given() -> None:
    """Rope sees differences only; segments that share no key may start anywhere."""
    model = ReferenceEngine(random_source(), "float64")
    plain = model.forward(IDS, want_logits=True)
    shifted = model.forward(IDS, positions=np.tile(np.arange(9, dtype=np.int32) + 3, (2, 1)), want_logits=True)
    stretched = model.forward(IDS, positions=np.tile(2 * np.arange(9, dtype=np.int32), (2, 1)), want_logits=True)
    np.testing.assert_allclose(shifted.logits, plain.logits, atol=1e-5)  # angles are rounded to float32
    assert np.abs(stretched.logits - plain.logits).max() > 1e-2


def test_pad_token_of_a_tied_model_learns_through_the_head_alone() -> None:
    plain = random_source(tie_word_embeddings=True)
    padded = random_source(tie_word_embeddings=True, pad_token_id=int(IDS[0, 0]))
    untied = ArraySource(random_source().config, {**plain.arrays})
    untied.arrays["lm_head.weight"] = plain.arrays["model.embed_tokens.weight"]
    grads = [gradients(ReferenceEngine(source, "float64"), IDS, IDS) for source in (plain, padded, untied)]
    embed = [g["model.embed_tokens.weight"] for g in grads]
    head, token = grads[2]["lm_head.weight"], int(IDS[0, 0])
    np.testing.assert_allclose(embed[0], embed[2] + head, atol=1e-15)
    np.testing.assert_allclose(embed[1][token], head[token], atol=1e-15)
    others = np.arange(37) != token
    np.testing.assert_array_equal(embed[0][others], embed[1][others])
    assert np.abs(embed[2][token]).max() > 1e-3


def test_progress_and_order_of_the_sink() -> None:
    model = ReferenceEngine(random_source())
    seen: list[tuple[int, int]] = []
    model.forward(IDS, on_layer=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)]
    seen.clear()
    names: list[str] = []
    result = model.loss_and_grads(
        IDS, IDS, lambda name, _: names.append(name), on_layer=lambda done, of: seen.append((done, of))
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert names[:2] == ["lm_head.weight", "model.norm.weight"] and names[-1] == "model.embed_tokens.weight"
    assert [n.split(".")[2] for n in names[2:-1]] == ["1"] * 11 + ["0"] * 11
    layers = sum(a.nbytes for n, a in model.source.arrays.items() if ".layers." in n)  # type: ignore[attr-defined]
    assert result.streamed_bytes > 2 * layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.array([[0, 37]])}, "token id 37"),
        ({"ids": np.array([[-1, 0]])}, "token id -1"),
        ({"ids": np.array([0, 1])}, r"shape \(2,\)"),
        ({"ids": np.zeros((0, 3), int)}, "at least one token"),
        ({"ids": np.array([[0.0, 1.0]])}, "integers"),
        ({"labels": np.array([[0, 37]])}, "got label 37"),
        ({"labels": np.array([[-1, 0]])}, "got label -1"),
        ({"labels": np.array([[1]])}, "labels of int64"),
        ({"segments": np.array([0, 0], np.int32)}, "segments"),
        ({"positions": np.array([[0.0, 1.0]])}, "positions of float64"),
        ({"want_hidden": [4]}, "want_hidden"),
    ],
)
def test_bad_input_is_refused_before_any_work(change: dict[str, Any], message: str) -> None:
    source = random_source()
    model = ReferenceEngine(source)
    source.changed = True  # any read of a layer would raise CheckpointError
    arguments = {"ids": np.array([[0, 1]]), **change}
    with pytest.raises(InputError, match=message) as caught:
        model.forward(**arguments)
    assert "\n" not in str(caught.value)
    if "want_hidden" not in change:
        arguments.setdefault("labels", np.array([[0, 1]]))
        with pytest.raises(InputError, match=message):
            model.loss_and_grads(sink=lambda name, grad: pytest.fail(name), **arguments)


def test_other_refusals() -> None:
    source = random_source()
    with pytest.raises(InputError, match="bfloat16"):
        ReferenceEngine(source, "bfloat16")  # type: ignore[arg-type]
    source.changed = True
    with pytest.raises(CheckpointError):
        ReferenceEngine(source).forward(IDS)
    del source.arrays["model.embed_tokens.weight"]
    missing = {n: a for n, a in source.arrays.items() if ".1." not in n}
    with pytest.raises(CheckpointError, match="layer 1 of 2"):
        ReferenceEngine(ArraySource(source.config, missing))


def test_attention_memory_does_not_grow_with_the_square() -> None:
    """T = 2048 and 4 heads: all scores at once are 64 MiB; a block has 4 MiB and lives in a few copies."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2048, h * 8), dtype=np.float32) for h in (4, 1, 1))
    tracemalloc.start()
    try:
        out, saved = attention.forward(q, k, v, num_heads=4, num_kv_heads=1)
        attention.backward(saved, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"peak {peak / 2**20:.1f} MiB")
    assert peak < 8 * attention.BLOCK_SCORES * 4


def test_head_memory_does_not_grow_with_the_vocabulary() -> None:
    """[T,V] and the head in float32 would each be 64 MiB beside slices of 16 MiB."""
    source = random_source(
        hidden_size=256, vocab_size=1 << 16, dtype=np.float16, tie_word_embeddings=True, num_hidden_layers=1
    )
    ids = np.zeros((1, 256), np.int64)
    tracemalloc.start()
    try:
        ReferenceEngine(source).forward(ids, labels=ids)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"peak {peak / 2**20:.1f} MiB")
    assert peak < 60 * 2**20


def test_anonymous_memory_grows_by_one_layer_in_bf16_and_one_in_fp32(tmp_path: Path) -> None:
    """A subprocess samples RssAnon every millisecond while 8 layers of 16 MiB stream from a mapped file."""
    program = textwrap.dedent(
        f"""
        import sys, threading, time
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        import ml_dtypes, numpy as np
        from cupyllm.model.checkpoint import Checkpoint
        from cupyllm.model.names import model_params
        from cupyllm.reference.engine import ReferenceEngine
        from tests.reference.sources import ArraySource, tiny_config

        config = tiny_config(hidden_size=512, intermediate_size=5120, num_attention_heads=8, head_dim=64,
                             num_hidden_layers=8, dtype="bfloat16")
        path, start, arrays = {str(tmp_path / "weights")!r}, 0, {{}}
        shapes = model_params(config)
        rng = np.random.default_rng(0)
        with open(path, "wb") as file:
            for name, shape in shapes.items():
                value = np.ones(shape) if "norm" in name else rng.standard_normal(shape, dtype=np.float32) / 30
                file.write(value.astype(ml_dtypes.bfloat16).tobytes())
        mapped = np.memmap(path, np.uint8, "r")
        for name, shape in shapes.items():
            stop = start + 2 * int(np.prod(shape))
            arrays[name] = mapped[start:stop].view(ml_dtypes.bfloat16).reshape(shape)
            start = stop
        del value
        layer_bytes = sum(a.nbytes for n, a in arrays.items() if n.startswith("model.layers.0."))

        def anonymous():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

        peak, done = 0, threading.Event()
        def sample():
            global peak
            while not done.is_set():
                peak = max(peak, anonymous())
                time.sleep(0.001)

        before = anonymous()
        thread = threading.Thread(target=sample)
        thread.start()
        result = ReferenceEngine(ArraySource(config, arrays)).forward(np.zeros((1, 16), np.int64))
        done.set()
        thread.join()
        assert np.isfinite(result.last_logits).all()
        print(layer_bytes, peak - before)
        """
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    layer_bytes, growth = map(int, run.stdout.split())
    print(f"layer {layer_bytes / 2**20:.1f} MiB in bf16, growth {growth / 2**20:.1f} MiB")
    assert layer_bytes > 16 * 2**20
    assert layer_bytes < growth <= 3 * layer_bytes
