"""The trainer: skipped steps change nothing (cases C6 and C8), clipping acts, state that does not fit is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from cupyllm.backend.base import Backend
from cupyllm.engine import Engine, GradientSink, LossResult, WeightSource
from cupyllm.errors import CheckpointError, OutOfMemory
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.engine import DeviceEngine
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.train.state import HostState, state_bytes
from cupyllm.train.trainer import Trainer, TrainingStopped
from tests.reference.sources import ArraySource

H1 = Path(__file__).parents[1] / "fixtures" / "goldens" / "h1"
IDS = np.arange(24).reshape(2, 12) * 7 % 256


@pytest.fixture
def checkpoint() -> Iterator[Checkpoint]:
    with Checkpoint.open(H1) as opened:
        yield opened


def snapshot(state: HostState) -> list[bytes]:
    arrays = [*state.master.values(), *state.m.values(), *state.v.values(), *state.compute.values()]
    return [a.tobytes() for a in arrays] + [bytes([state.step])]


class Poisoned(ReferenceEngine):
    """Gradients of one parameter hold `poison` while it is set."""

    poison: float | None = None
    target = "model.layers.1.mlp.up_proj.weight"

    def loss_and_grads(self, ids: np.ndarray, labels: np.ndarray, sink: GradientSink, **options: object) -> LossResult:
        def poisoned(name: str, gradient: np.ndarray) -> None:
            gradient = gradient.copy()
            if self.poison is not None and name == self.target:
                gradient.flat[5] = self.poison
            sink(name, gradient)

        return super().loss_and_grads(ids, labels, poisoned, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_C8_a_bad_gradient_leaves_every_bit(poison: float, checkpoint: Checkpoint) -> None:
    trainer = Trainer(Poisoned, checkpoint, lr=1e-2, max_skips=3)
    good = trainer.step(IDS, IDS)
    assert good.skipped == "" and trainer.state.step == 1
    before = snapshot(trainer.state)
    assert isinstance(trainer.engine, Poisoned)
    trainer.engine.poison = poison
    bad = trainer.step(IDS, IDS)
    assert Poisoned.target in bad.skipped and snapshot(trainer.state) == before and trainer.total_skips == 1
    trainer.step(IDS, IDS)
    with pytest.raises(TrainingStopped, match=r"3 steps in a row.*mlp\.up_proj"):
        trainer.step(IDS, IDS)
    assert snapshot(trainer.state) == before
    trainer.engine.poison = None
    assert trainer.step(IDS, IDS).skipped == "" and trainer.skips_in_a_row == 0


def test_C6_nothing_to_score_leaves_every_bit(checkpoint: Checkpoint) -> None:
    trainer = Trainer(ReferenceEngine, checkpoint, lr=1e-2)
    before = snapshot(trainer.state)
    ignored = np.full(IDS.shape, -100)
    for ids, labels in ((IDS, ignored), (IDS[:, :1], IDS[:, :1])):
        result = trainer.step(ids, labels)
        assert result.loss == 0.0 and result.num_targets == 0 and result.skipped
    assert snapshot(trainer.state) == before


def test_clipping_scales_to_the_bound(checkpoint: Checkpoint) -> None:
    trainer = Trainer(ReferenceEngine, checkpoint, lr=1e-3, clip=0.5)
    result = trainer.step(IDS, IDS)
    assert result.grad_norm > 0.5
    assert result.clip_coef == pytest.approx(0.5 / (result.grad_norm + 1e-6))
    unclipped = Trainer(ReferenceEngine, checkpoint, lr=1e-3, clip=None).step(IDS, IDS)
    assert unclipped.clip_coef == 1.0 and unclipped.grad_norm == result.grad_norm


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (0.5 - 2e-6, 1.0),
        (0.5 - 5e-7, 0.5 / (0.5 - 5e-7 + 1e-6)),  # below the bound, and still multiplied by 1 - 1e-6
        (0.5, 0.5 / (0.5 + 1e-6)),
        (0.5 + 5e-7, 0.5 / (0.5 + 5e-7 + 1e-6)),
        (1e-3, 1.0),
        (7.0, 0.5 / (7.0 + 1e-6)),
    ],
)
def test_the_coefficient_near_the_bound(norm: float, expected: float, checkpoint: Checkpoint) -> None:
    """torch.nn.utils.clip_grad_norm_'s rule, to the bit: min(1, bound / (norm + 1e-6))."""

    class Normed(ReferenceEngine):
        def sum_of_squares(self, gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
            return {name: norm * norm if name == Poisoned.target else 0.0 for name in gradients}

    result = Trainer(Normed, checkpoint, lr=1e-3, clip=0.5).step(IDS, IDS)
    norm = math.sqrt(norm * norm)  # may differ from the parameter in the last bit
    assert result.grad_norm == norm
    assert result.clip_coef == min(1.0, 0.5 / (norm + 1e-6)) == pytest.approx(expected, rel=1e-14)
    assert (result.clip_coef < 1.0) == (expected < 1.0)


def test_a_change_while_the_masters_are_copied_is_an_error(checkpoint: Checkpoint) -> None:
    """Checked before the first tensor and after the last."""

    class Changing(ArraySource):
        checks, changed_at = 0, -1

        def check_unchanged(self) -> None:
            self.checks += 1
            if self.checks - 1 == self.changed_at:
                raise CheckpointError("it was changed while in use")

    source = Changing(checkpoint.config, {name: checkpoint.tensor(name) for name in checkpoint.names()})
    state = HostState(source, "float32")
    assert source.checks == 2
    assert all((state.master[name] == source.arrays[name].astype(np.float32)).all() for name in source.names())
    for number in range(2):
        source.checks, source.changed_at = 0, number
        with pytest.raises(CheckpointError, match="changed while in use"):
            HostState(source, "float32")


def test_state_that_does_not_fit_is_refused_beforehand(checkpoint: Checkpoint) -> None:
    needed = state_bytes(checkpoint, "float32")
    with pytest.raises(OutOfMemory, match="training state: needs"):
        HostState(checkpoint, "float32", available_bytes=needed - 1)
    HostState(checkpoint, "float32", available_bytes=needed)


def test_the_checkpoint_is_never_written(checkpoint: Checkpoint) -> None:
    before = {p.name: p.read_bytes() for p in H1.iterdir()}
    trainer = Trainer(ReferenceEngine, checkpoint, lr=1e-2)
    trainer.step(IDS, IDS)
    assert before == {p.name: p.read_bytes() for p in H1.iterdir()}


def test_device_and_reference_take_the_same_steps(checkpoint: Checkpoint, backend: Backend) -> None:
    """Five steps each in float32: losses agree to 2e-5, the tolerance that the goldens derive for one loss, doubled."""

    def on_device(source: WeightSource) -> Engine:
        return DeviceEngine(source, backend)

    losses = []
    for make in (ReferenceEngine, on_device):
        trainer = Trainer(make, checkpoint, lr=3e-3)
        losses.append([trainer.step(IDS, IDS).loss for _ in range(5)])
        trainer.close()
    assert np.abs(np.subtract(*losses)).max() < 4e-5
    assert losses[0] == sorted(losses[0], reverse=True)


def test_bfloat16_streams_rounded_masters(checkpoint: Checkpoint, backend: Backend) -> None:
    trainer = Trainer(lambda s: DeviceEngine(s, backend, "bfloat16"), checkpoint, dtype="bfloat16", lr=3e-3)
    losses = [trainer.step(IDS, IDS).loss for _ in range(5)]
    for name, master in trainer.state.master.items():
        rounded = trainer.state.compute[name]
        assert rounded.dtype.name == "bfloat16" and (rounded == master.astype(rounded.dtype)).all()
        assert (master != rounded.astype(np.float32)).any()  # the master keeps what rounding drops
    trainer.close()
    assert losses == sorted(losses, reverse=True)
