"""The device engine (graph, programs, streaming, head) on the goldens, by the kernels themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cupyllm.backend.base import Backend
from cupyllm.model import engine as engine_module
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.engine import DeviceEngine
from cupyllm.model.names import streamed_names
from cupyllm.stream.safetensors import SafetensorsFile
from cupyllm.train.trainer import Trainer

GOLDENS = Path(__file__).parents[1] / "fixtures" / "goldens"
ALL = ("h1", "h2", "h3", "h4", "h5", "h6")


class Golden:
    """One golden's arrays and tolerances."""

    def __init__(self, name: str) -> None:
        self.path = GOLDENS / name
        meta = json.loads((self.path / "meta.json").read_text())
        self.tolerance = meta["recommended_tolerance"]
        with SafetensorsFile(self.path / "expected.safetensors") as file:
            self.arrays = {key: np.array(file.tensor(key)) for key in file.names()}
        mask = self.arrays.get("attention_mask")
        self.segments = None if mask is None else np.where(mask > 0, 0, -1).astype(np.int32)
        self.valid = np.ones(self.arrays["input_ids"].shape, bool) if mask is None else mask > 0


@pytest.mark.parametrize("name", ALL)
def test_golden_forward_and_gradients(name: str, backend: Backend) -> None:
    golden = Golden(name)
    want, tolerance = golden.arrays, golden.tolerance
    grads: dict[str, np.ndarray] = {}
    with Checkpoint.open(golden.path) as checkpoint, DeviceEngine(checkpoint, backend) as engine:
        hidden = [int(key.split(".")[1]) for key in want if key.startswith("hidden.")]
        result = engine.forward(
            want["input_ids"], labels=want["labels"], segments=golden.segments, want_logits=True, want_hidden=hidden
        )
        loss = engine.loss_and_grads(want["input_ids"], want["labels"], grads.__setitem__, segments=golden.segments)
        assert result.streamed_bytes == checkpoint.stored_bytes(streamed_names(checkpoint.config))
    assert result.logits is not None and result.loss is not None
    error = np.abs(result.logits - want["logits"])[golden.valid].max()
    print(f"{name}: logits {error:.2e} of {tolerance['logits_max_abs']:.0e}")
    assert error <= tolerance["logits_max_abs"]
    assert abs(result.loss - float(want["loss"][0])) <= tolerance["loss_abs"]
    assert loss.loss == result.loss
    assert (result.argmax[golden.valid] == want["logits"].argmax(-1)[golden.valid]).all()
    for i in hidden:
        expected = want[f"hidden.{i}"]
        rms = np.sqrt((expected[golden.valid] ** 2).mean())
        assert np.abs(result.hidden[i] - expected)[golden.valid].max() / rms <= tolerance["hidden_max_abs_over_rms"], i
    gradient_names = {key[len("grad.") :] for key in want if key.startswith("grad.")}
    assert gradient_names == set(grads)
    for key, got in grads.items():
        expected = want["grad." + key]
        assert np.abs(got - expected).max() / np.abs(expected).max() <= tolerance["grad_max_abs_over_tensor_max"], key


@pytest.mark.parametrize("name", ["h1", "h2", "h4"])
def test_greedy_ids(name: str, backend: Backend) -> None:
    golden = Golden(name)
    want = golden.arrays["greedy_ids"]
    ids = want[:, :8]
    with Checkpoint.open(golden.path) as checkpoint, DeviceEngine(checkpoint, backend) as engine:
        while ids.shape[1] < want.shape[1]:
            ids = np.concatenate([ids, engine.forward(ids, mode="resident").argmax[:, -1:]], axis=1)
    assert (ids == want).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_is_resident_and_repeats_bit_for_bit(dtype: str, backend: Backend) -> None:
    golden = Golden("h1")
    ids, labels = golden.arrays["input_ids"], golden.arrays["labels"]
    with Checkpoint.open(golden.path) as checkpoint, DeviceEngine(checkpoint, backend, dtype) as engine:
        first = engine.forward(ids, labels=labels, want_logits=True)
        assert first.logits is not None
        for mode in ("stream", "resident", "resident", "stream"):
            again = engine.forward(ids, labels=labels, mode=mode, want_logits=True)  # type: ignore[arg-type]
            assert again.logits is not None
            assert again.logits.tobytes() == first.logits.tobytes() and again.loss == first.loss
        runs: list[dict[str, np.ndarray]] = []
        for _ in range(3):
            grads: dict[str, np.ndarray] = {}
            engine.loss_and_grads(ids, labels, grads.__setitem__)
            runs.append(grads)
        for other in runs[1:]:
            assert all(other[key].tobytes() == runs[0][key].tobytes() for key in runs[0])


def test_a_flipped_byte_in_a_slot_shows(backend: Backend) -> None:
    golden = Golden("h1")
    ids = golden.arrays["input_ids"]
    with Checkpoint.open(golden.path) as checkpoint, DeviceEngine(checkpoint, backend) as engine:
        clean = engine.forward(ids, want_logits=True).logits

        def flip(index: int, host: np.ndarray) -> None:
            if index == 1:
                host[engine.layouts[1].offsets[1][1] + 3] ^= 0x80  # the sign of q_proj's first element

        engine.stream.filled = flip  # type: ignore[method-assign]
        damaged = engine.forward(ids, want_logits=True).logits
    assert clean is not None and damaged is not None
    assert clean.tobytes() != damaged.tobytes()


def test_batched_equals_alone_bit_for_bit(backend: Backend) -> None:
    golden = Golden("h1")
    ids = golden.arrays["input_ids"]
    with Checkpoint.open(golden.path) as checkpoint, DeviceEngine(checkpoint, backend) as engine:
        both = engine.forward(ids, want_logits=True).logits
        assert both is not None
        for row in range(ids.shape[0]):
            alone = engine.forward(ids[row : row + 1], want_logits=True).logits
            assert alone is not None and alone[0].tobytes() == both[row].tobytes()


def test_head_in_row_chunks(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks give the same logits and losses bit for bit; gradients within the golden's tolerance."""
    golden = Golden("h2")
    ids = np.random.default_rng(3).integers(0, 256, (3, 45))
    results = []
    for limit in (256 << 20, 0):  # all 135 rows at once, and three chunks of at most 64
        monkeypatch.setattr(engine_module, "LOGITS_BYTES", limit)
        grads: dict[str, np.ndarray] = {}
        with Checkpoint.open(golden.path) as checkpoint, DeviceEngine(checkpoint, backend) as engine:
            forward = engine.forward(ids, labels=ids, want_logits=True)
            loss = engine.loss_and_grads(ids, ids, grads.__setitem__)
        results.append((forward, loss, grads))
    (one, loss_one, grads_one), (many, loss_many, grads_many) = results
    assert one.logits is not None and many.logits is not None
    assert one.logits.tobytes() == many.logits.tobytes() and loss_one.loss == loss_many.loss
    for key, want in grads_one.items():
        # Sums over 135 rows in another order: sqrt(135) roundings of 2^-24 of a partial sum, itself up to a few times
        # the total where terms cancel.
        assert np.abs(grads_many[key] - want).max() <= 4 * 135**0.5 * 2.0**-24 * np.abs(want).max(), key


def test_training_golden(backend: Backend) -> None:
    meta = json.loads((GOLDENS / "train" / "meta.json").read_text())
    tolerance = meta["recommended_tolerance"]
    base = Golden("h1")
    with SafetensorsFile(GOLDENS / "train" / "expected.safetensors") as file:
        want = {key: np.array(file.tensor(key)) for key in file.names()}
    with Checkpoint.open(base.path) as checkpoint:
        trainer = Trainer(lambda source: DeviceEngine(source, backend), checkpoint, lr=1e-2, clip=1.0)
        ids, labels = base.arrays["input_ids"], base.arrays["labels"]
        steps = [trainer.step(ids, labels) for _ in range(12)]
        final = trainer.evaluate(ids, labels)
        weights = trainer.state.master
        trainer.close()
    losses = np.array([s.loss for s in steps])
    norms = np.array([s.grad_norm for s in steps])
    assert np.abs(losses - want["losses"]).max() <= tolerance["losses_abs"]
    assert np.abs(losses - want["losses"])[:3].max() <= tolerance["losses_abs_first3"]
    limit = np.maximum(tolerance["grad_norms_abs"], tolerance["grad_norms_rel"] * want["grad_norms"])
    assert (np.abs(norms - want["grad_norms"]) <= limit).all()
    assert abs(final - float(want["final_loss"][0])) <= tolerance["losses_abs"]
    difference = np.concatenate([np.abs(w - want["final." + key]).ravel() for key, w in weights.items()])
    assert np.quantile(difference, 0.99) <= tolerance["final_weights_abs_q99"]
    assert difference.max() <= tolerance["final_weights_max_abs"]
