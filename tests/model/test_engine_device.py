"""The device engine (graph, programs, streaming, head) on the goldens, by the kernels themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupyllm.backend.base import Backend
from cupyllm.model import engine as engine_module
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.engine import DeviceEngine
from cupyllm.model.names import streamed_names
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.train.trainer import Trainer
from tests.goldens import FIXTURES, GOLDENS, HF, HF_BF16, compute, load, worst_errors

H1 = FIXTURES / "goldens" / "h1"


@pytest.mark.parametrize("folder", [*GOLDENS, *HF], ids=lambda path: path.name)
def test_logits_loss_hidden_states_and_every_gradient(folder: Path, backend: Backend) -> None:
    expected, meta = load(folder)
    with Checkpoint.open(folder) as checkpoint, DeviceEngine(checkpoint, backend) as engine:
        ours, valid, counts = compute(engine, expected)
        assert {name for name in expected if name.startswith("grad.")} == {f"grad.{n}" for n in checkpoint.names()}
    assert counts == [meta["n_targets"]] * 2
    tolerance, worst = meta["recommended_tolerance"], worst_errors(ours, expected, valid)
    print({name: f"{value:.1e} of {tolerance[name]:.0e}" for name, value in worst.items()})
    for name, value in worst.items():
        assert value <= tolerance[name], name


@pytest.mark.parametrize("folder", HF_BF16, ids=lambda path: path.name)
def test_bfloat16_errs_no_more_than_hugging_face(folder: Path, backend: Backend) -> None:
    """Relative L2 error against the float64 reference: at most 1.1 times transformers' bfloat16.

    Logits and hidden states hold thousands of rounding errors, and so does the whole of the gradients. A norm's
    gradient has as few as 16 elements: the L2 norm of n independent errors scatters by 1/sqrt(2n), the ratio of two by
    1/sqrt(n), so a single tensor may exceed the bound by three of those.
    """
    expected, meta = load(folder)
    recorded = meta["hf_bfloat16_relative_l2_error_vs_float64_reference"]
    with Checkpoint.open(folder) as checkpoint:
        want, _, _ = compute(ReferenceEngine(checkpoint, "float64"), expected)
        with DeviceEngine(checkpoint, backend, "bfloat16") as engine:
            ours, _, _ = compute(engine, expected)
    errors = {name: np.linalg.norm(ours[name] - want[name]) / np.linalg.norm(want[name]) for name in recorded}
    ratios = {name: errors[name] / recorded[name] for name in recorded if name != "loss" and recorded[name]}
    gradients = [ratio for name, ratio in ratios.items() if name.startswith("grad.")]
    worst = max(ratios, key=lambda name: ratios[name])
    print(f"{folder.name}: logits {ratios['logits']:.3f}, worst {worst} {ratios[worst]:.3f}")
    assert ratios["logits"] <= 1.1
    if gradients:
        mean = float(np.exp(np.mean(np.log(gradients))))
        print(f"gradients: geometric mean {mean:.3f}")
        assert mean <= 1.0
    for name, ratio in ratios.items():
        scatter = 3 / np.sqrt(want[name].size) if name.startswith("grad.") else 0.0
        assert ratio <= 1.1 * (1 + scatter), name


def golden(name: str) -> dict[str, np.ndarray]:
    return load(FIXTURES / "goldens" / name)[0]


@pytest.mark.parametrize("name", ["h1", "h2", "h4"])
def test_greedy_ids(name: str, backend: Backend) -> None:
    want = golden(name)["greedy_ids"]
    ids = want[:, :8]
    with Checkpoint.open(FIXTURES / "goldens" / name) as checkpoint, DeviceEngine(checkpoint, backend) as engine:
        while ids.shape[1] < want.shape[1]:
            ids = np.concatenate([ids, engine.forward(ids, mode="resident").argmax[:, -1:]], axis=1)
    assert (ids == want).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_is_resident_and_repeats_bit_for_bit(dtype: str, backend: Backend) -> None:
    ids, labels = golden("h1")["input_ids"], golden("h1")["labels"]
    with Checkpoint.open(H1) as checkpoint, DeviceEngine(checkpoint, backend, dtype) as engine:
        first = engine.forward(ids, labels=labels, want_logits=True)
        assert first.logits is not None
        assert first.streamed_bytes == checkpoint.stored_bytes(streamed_names(checkpoint.config))
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
    ids = golden("h1")["input_ids"]
    with Checkpoint.open(H1) as checkpoint, DeviceEngine(checkpoint, backend) as engine:
        clean = engine.forward(ids, want_logits=True).logits

        def flip(index: int, host: np.ndarray) -> None:
            if index == 1:
                host[engine.layouts[1].offsets[1][1] + 3] ^= 0x80  # the sign of q_proj's first element

        engine.stream.filled = flip  # type: ignore[method-assign]
        damaged = engine.forward(ids, want_logits=True).logits
    assert clean is not None and damaged is not None
    assert clean.tobytes() != damaged.tobytes()


def test_batched_equals_alone_bit_for_bit(backend: Backend) -> None:
    ids = golden("h1")["input_ids"]
    with Checkpoint.open(H1) as checkpoint, DeviceEngine(checkpoint, backend) as engine:
        both = engine.forward(ids, want_logits=True).logits
        assert both is not None
        for row in range(ids.shape[0]):
            alone = engine.forward(ids[row : row + 1], want_logits=True).logits
            assert alone is not None and alone[0].tobytes() == both[row].tobytes()


def test_head_in_row_chunks(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks give the same logits and losses bit for bit; gradients within the golden's tolerance."""
    ids = np.random.default_rng(3).integers(0, 256, (3, 45))
    results = []
    for limit in (256 << 20, 0):  # all 135 rows at once, and three chunks of at most 64
        monkeypatch.setattr(engine_module, "LOGITS_BYTES", limit)
        grads: dict[str, np.ndarray] = {}
        with Checkpoint.open(FIXTURES / "goldens" / "h2") as checkpoint, DeviceEngine(checkpoint, backend) as engine:
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
    want, meta = load(FIXTURES / "goldens" / "train")
    tolerance = meta["recommended_tolerance"]
    with Checkpoint.open(H1) as checkpoint:
        trainer = Trainer(lambda source: DeviceEngine(source, backend), checkpoint, lr=1e-2, clip=1.0)
        ids, labels = golden("h1")["input_ids"], golden("h1")["labels"]
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
