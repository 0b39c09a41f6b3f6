"""The device engine when something fails: the right error, nothing lost, and the next call exact to the bit.

Every comparison is with a fresh engine on a fresh emulator, which runs stream work as late as the events allow.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyllm.backend.base import Backend
from cupyllm.engine import ForwardResult
from cupyllm.errors import CheckpointError, OutOfMemory, StorageError
from cupyllm.model import engine as engine_module
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.engine import DeviceEngine
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.synth import synthesize
from tests.hostcuda.backend import HostBackend, HostBuffer
from tests.reference.sources import ArraySource, random_arrays, tiny_config

ROOT = Path(__file__).parents[2]
H1 = ROOT / "tests" / "fixtures" / "goldens" / "h1"
IDS = np.arange(24).reshape(2, 12) * 5 % 37
OTHER = (IDS * 3 + 1) % 37
LAYERS = 4
HEAD = "lm_head.weight"
Grads = dict[str, np.ndarray]


class Source(ArraySource):
    """Random float32 weights; reading a parameter whose name holds `broken` fails."""

    broken: str | None = None

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        if self.broken is not None and self.broken in name:
            raise CheckpointError(f"cannot read {name}")
        out[...] = np.ascontiguousarray(self.arrays[name]).reshape(-1).view(np.uint8)[start : start + out.size]


def source(**changes: Any) -> Source:
    config = tiny_config(**{"head_dim": 16, "num_hidden_layers": LAYERS, **changes})
    return Source(config, random_arrays(config))


class FailingBackend(HostBackend):
    """The emulator; allocation number `fail_at` (device and pinned counted together, from 0) is refused once."""

    fail_at: int | None = None
    num_allocations = 0

    def _count(self, nbytes: int) -> None:
        number, self.num_allocations = self.num_allocations, self.num_allocations + 1
        if number == self.fail_at:
            raise OutOfMemory(f"memory: {nbytes} bytes needed, 0 free")

    def allocate(self, nbytes: int, name: str = "") -> HostBuffer:
        self._count(nbytes)
        return super().allocate(nbytes, name)

    def allocate_host(self, nbytes: int) -> np.ndarray:
        self._count(nbytes)
        return super().allocate_host(nbytes)


def logits(engine: DeviceEngine, ids: np.ndarray = OTHER, mode: Any = "stream") -> ForwardResult:
    return engine.forward(ids, labels=ids, mode=mode, want_logits=True)


def grads(engine: DeviceEngine, ids: np.ndarray = OTHER) -> Grads:
    found: Grads = {}
    engine.loss_and_grads(ids, ids, lambda name, gradient: found.update({name: gradient.copy()}))
    return found


@lru_cache(maxsize=None)
def clean_logits(layers: int = LAYERS) -> ForwardResult:
    with DeviceEngine(source(num_hidden_layers=layers), HostBackend(deferred=True)) as engine:
        return logits(engine)


@lru_cache(maxsize=None)
def clean_grads(layers: int = LAYERS) -> Grads:
    with DeviceEngine(source(num_hidden_layers=layers), HostBackend(deferred=True)) as engine:
        return grads(engine)


def assert_same(got: ForwardResult, want: ForwardResult, streamed: bool = True) -> None:
    assert got.logits is not None and want.logits is not None
    assert got.logits.tobytes() == want.logits.tobytes()
    assert (got.loss, got.argmax.tolist()) == (want.loss, want.argmax.tolist())
    if streamed:
        bytes_moved = (got.streamed_bytes, want.streamed_bytes)
        assert bytes_moved[0] == bytes_moved[1]


def assert_same_grads(got: Grads, want: Grads) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if got[name].tobytes() != want[name].tobytes()] == []


def assert_nothing_left(backend: HostBackend) -> None:
    gc.collect()
    assert backend.live_bytes == 0 and len(backend._pinned) == 0


# ---- errors from the weights, the sink and the user ----

READS = [*(f"layers.{i}.mlp.down" for i in range(LAYERS)), "model.norm", HEAD]


@pytest.mark.parametrize("mode", ["stream", "resident"])
@pytest.mark.parametrize("broken", READS)
def test_forward_after_a_read_error(broken: str, mode: str) -> None:
    weights, backend = source(), HostBackend(deferred=True)
    with DeviceEngine(weights, backend) as engine:
        for before in (False, True):  # with and without a pass that made every buffer
            if before:
                logits(engine, IDS, mode)
            weights.broken = broken
            if not (before and mode == "resident"):  # which reads nothing any more
                with pytest.raises(CheckpointError, match=f"cannot read .*{broken}"):
                    logits(engine, IDS, mode)
            weights.broken = None
            assert_same(logits(engine, OTHER, mode), clean_logits(), streamed=mode == "stream")
    assert_nothing_left(backend)


@pytest.mark.parametrize("broken", READS)
def test_gradients_after_a_read_error(broken: str) -> None:
    weights, backend = source(), HostBackend(deferred=True)
    with DeviceEngine(weights, backend) as engine:
        weights.broken = broken
        with pytest.raises(CheckpointError, match=f"cannot read .*{broken}"):
            grads(engine, IDS)
        weights.broken = None
        assert_same_grads(grads(engine), clean_grads())
    assert_nothing_left(backend)


@pytest.mark.parametrize("layer", range(1, LAYERS + 1))
def test_an_interrupt_between_layers(layer: int) -> None:
    backend = HostBackend(deferred=True)
    with DeviceEngine(source(), backend) as engine:

        def interrupt(done: int, of: int) -> None:
            if done == layer:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.forward(IDS, on_layer=interrupt)
        assert_same(logits(engine), clean_logits())
        with pytest.raises(KeyboardInterrupt):
            engine.loss_and_grads(IDS, IDS, lambda name, gradient: None, on_layer=interrupt)
        assert_same(logits(engine), clean_logits())
        assert_same_grads(grads(engine), clean_grads())
    assert_nothing_left(backend)


@pytest.mark.parametrize("target", [HEAD, "model.norm", "layers.3.mlp.up", "layers.0.mlp.up", "embed_tokens"])
def test_a_sink_that_raises_and_weights_that_change(target: str) -> None:
    """The trainer changes the source's weights between passes: nothing that was read before may be used again."""
    weights, backend = source(), HostBackend(deferred=True)

    def full_disk(name: str, gradient: np.ndarray) -> None:
        if target in name:
            raise StorageError("the disk is full")

    with DeviceEngine(weights, backend) as engine:
        with pytest.raises(StorageError, match="the disk is full"):
            engine.loss_and_grads(IDS, IDS, full_disk)
        for array in weights.arrays.values():
            array *= 2
        changed = Source(weights.config, weights.arrays)
        with DeviceEngine(changed, HostBackend(deferred=True)) as fresh:
            assert_same(logits(engine), logits(fresh))
            assert_same_grads(grads(engine), grads(fresh))
    assert_nothing_left(backend)


def test_weights_that_change_after_a_resident_pass_reach_training() -> None:
    """A resident pass says what it keeps; a streamed one reads everything anew, the head included."""
    weights = source()
    with DeviceEngine(weights, HostBackend(deferred=True)) as engine:
        logits(engine, mode="resident")
        weights.arrays[HEAD] *= 2
        with DeviceEngine(weights, HostBackend(deferred=True)) as fresh:
            want = grads(fresh)
        assert_same_grads(grads(engine), want)


@pytest.mark.parametrize("call", ["forward", "loss_and_grads"])
def test_a_file_cut_short_before_a_pass_is_an_error_not_a_bus_error(call: str, tmp_path: Path) -> None:
    """The embedding's rows are read on the host too: by pread and after the check, as layers are (design.md, 6)."""
    shutil.copytree(H1, tmp_path / "model")
    options = "" if call == "forward" else ", ids, lambda name, gradient: None"
    code = (
        "import os, numpy as np\n"
        "from cupyllm.errors import CheckpointError\n"
        "from cupyllm.model.checkpoint import Checkpoint\n"
        "from cupyllm.model.engine import DeviceEngine\n"
        "from tests.hostcuda.backend import HostBackend\n"
        f"checkpoint = Checkpoint.open({str(tmp_path / 'model')!r})\n"
        "engine = DeviceEngine(checkpoint, HostBackend(deferred=True))\n"
        f"os.truncate({str(tmp_path / 'model' / 'model.safetensors')!r}, 1000)\n"
        "ids = np.array([[0, 255]])\n"
        "try:\n"
        f"    engine.{call}(ids{options})\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-300:])  # -7: SIGBUS
    assert "in use" in done.stdout


class Checked(Source):
    """Check number `changed_at`, counted from 0, finds that a file was changed."""

    changed_at: int | None = None
    num_checks = 0

    def check_unchanged(self) -> None:
        number, self.num_checks = self.num_checks, self.num_checks + 1
        if number == self.changed_at:
            raise CheckpointError("it was changed while in use")


PASSES: dict[str, Callable[[DeviceEngine], object]] = {
    "stream": logits,
    "resident": lambda engine: logits(engine, mode="resident"),
    "gradients": grads,
}


@pytest.mark.parametrize("again", [False, True], ids=["first pass", "second pass"])
@pytest.mark.parametrize("name", PASSES)
def test_every_check_counts_and_the_last_one_ends_the_pass(name: str, again: bool) -> None:
    """Whichever check finds the change, the pass fails and the next is exact; nothing is read after the last check."""
    weights = Checked(source().config, source().arrays)
    backend, log = HostBackend(deferred=True), list[str]()
    with DeviceEngine(weights, backend) as engine:
        if again:
            PASSES[name](engine)
        with pytest.MonkeyPatch.context() as patch:
            read, check = weights.read_into, weights.check_unchanged
            patch.setattr(weights, "read_into", lambda *given: (log.append("read"), read(*given)))
            patch.setattr(weights, "check_unchanged", lambda: (log.append("check"), check()))
            weights.num_checks = 0
            PASSES[name](engine)
        assert log[-1] == log[0] == "check"
        for number in range(weights.num_checks if again else 1):
            weights.num_checks, weights.changed_at = 0, number
            with pytest.raises(CheckpointError, match="changed while in use"):
                PASSES[name](engine)
        weights.changed_at = None
        assert_same(logits(engine), clean_logits())
        assert_same_grads(grads(engine), clean_grads())
    assert_nothing_left(backend)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("at", [1, LAYERS // 2, LAYERS])
def test_bytes_overwritten_in_the_middle_of_a_pass(name: str, at: int, tmp_path: Path) -> None:
    path = synthesize(tiny_config(head_dim=16, num_hidden_layers=LAYERS, dtype="bfloat16"), tmp_path / "model", 0)
    weights = path / "model.safetensors"
    os.utime(weights, (1e9, 1e9))  # a change within one tick of the kernel's clock could not be seen

    def overwrite(done: int, of: int) -> None:
        if done == of * at // LAYERS:
            with open(weights, "r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(bytes(100))

    with Checkpoint.open(path) as checkpoint, DeviceEngine(checkpoint, HostBackend(deferred=True)) as engine:
        PASSES[name](engine)
        with pytest.raises(CheckpointError, match=r"model\.safetensors was changed while in use"):
            if name == "gradients":
                engine.loss_and_grads(OTHER, OTHER, lambda name, gradient: None, on_layer=overwrite)
            else:
                engine.forward(OTHER, mode=name, on_layer=overwrite)  # type: ignore[arg-type]


# ---- memory ----


def resident(engine: DeviceEngine) -> None:
    assert_same(logits(engine, mode="resident"), clean_logits(engine.config.num_hidden_layers), streamed=False)


def stream(engine: DeviceEngine) -> None:
    assert_same(logits(engine), clean_logits(engine.config.num_hidden_layers), streamed=False)


def train(engine: DeviceEngine) -> None:
    assert_same_grads(grads(engine), clean_grads(engine.config.num_hidden_layers))


def update(engine: DeviceEngine) -> None:
    p, g, m, v = (np.full(500, value, np.float32) for value in (1.0, 2.0, 0.0, 0.0))
    assert engine.sum_of_squares({"g": g}) == {"g": 2000.0}
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    engine.adamw(p, g, m, v, step=1, grad_scale=1.0, **numbers)
    assert np.allclose(p, 0.9) and np.allclose(m, 0.2)


CALLS: dict[str, Callable[[DeviceEngine], None]] = {
    "stream": stream,
    "resident": resident,
    "train": train,
    "update": update,
}


@pytest.mark.parametrize("used", [False, True], ids=["new engine", "after another shape"])
@pytest.mark.parametrize("name", CALLS)
def test_any_allocation_may_fail(name: str, used: bool) -> None:
    """Allocation n fails, for every n: the error arrives, the same call then works, and close gives all back."""
    call, weights = CALLS[name], source(num_hidden_layers=2)
    failures: list[str] = []
    for number in range(100):
        backend = FailingBackend(deferred=True)
        engine = DeviceEngine(weights, backend)
        if used:
            logits(engine, IDS[:1, :5])
        backend.fail_at = backend.num_allocations + number
        try:
            call(engine)
            engine.close()
            break  # it made fewer allocations than that: all have been tried
        except OutOfMemory as error:
            error.__traceback__ = None
        try:
            call(engine)
            engine.close()
            assert_nothing_left(backend)
        except Exception as error:
            failures.append(f"allocation {number}: {type(error).__name__} {str(error).splitlines()[0][:100]}")
    assert 5 < number < 99 and failures == [], f"{len(failures)} of {number}"


@pytest.mark.parametrize("name", ["stream", "resident", "train"])
def test_the_error_says_what_did_not_fit(name: str) -> None:
    call, measured = CALLS[name], HostBackend(deferred=True)
    with DeviceEngine(source(), measured) as engine:
        call(engine)
    for share in (0.05, 0.3, 0.6, 0.9, 0.99):
        backend = HostBackend(deferred=True, memory_bytes=int(share * measured.peak_bytes()))
        with DeviceEngine(source(), backend) as engine:
            with pytest.raises(OutOfMemory, match=r"^GPU memory: .+ needs \d+ bytes, \d+ are free$"):
                call(engine)
            backend.memory_bytes = measured.peak_bytes() + 4096
            call(engine)
        assert_nothing_left(backend)


def test_a_shape_too_large_does_not_spoil_the_one_before() -> None:
    backend = HostBackend(deferred=True)
    with DeviceEngine(source(), backend) as engine:
        assert_same(logits(engine), clean_logits())
        backend.memory_bytes = backend.live_bytes + 50_000
        with pytest.raises(OutOfMemory):
            logits(engine, np.zeros((2, 400), np.int64))
        assert_same(logits(engine), clean_logits())
    assert_nothing_left(backend)


def test_close_twice_and_before_anything() -> None:
    backend = HostBackend(deferred=True)
    engine = DeviceEngine(source(), backend)
    engine.close()
    for call in (stream, resident, train, update):
        call(engine)
        engine.close()
        engine.close()
        assert_nothing_left(backend)


# ---- sequences and shapes ----


def test_resident_then_stream_then_gradients() -> None:
    with DeviceEngine(source(), HostBackend(deferred=True)) as engine:
        for mode in ("resident", "stream", "resident", "resident", "stream"):
            assert_same(logits(engine, mode=mode), clean_logits(), streamed=mode == "stream")
            assert_same_grads(grads(engine), clean_grads())


def test_shapes_in_turn(backend: Backend) -> None:
    """Rows, tokens and segments change from call to call; each result is that of an engine of its own."""
    segments = np.array([[0] * 5 + [1] * 4 + [-1] * 3, [-1] * 2 + [7] * 10], np.int32)
    batches = [(IDS, None), (IDS[:1, :1], None), (IDS, segments), (IDS.reshape(3, 8), None), (IDS.reshape(24, 1), None)]

    def compute(engine: DeviceEngine, ids: np.ndarray, parts: np.ndarray | None) -> tuple[ForwardResult, Grads]:
        found: Grads = {}
        engine.loss_and_grads(ids, ids, lambda name, g: found.update({name: g.copy()}), segments=parts)
        return engine.forward(ids, labels=ids, segments=parts, want_logits=True), found

    want = []
    for ids, parts in batches:
        with DeviceEngine(source(), backend) as engine:
            want.append(compute(engine, ids, parts))
    with DeviceEngine(source(), backend) as engine:
        for index in (0, 1, 2, 3, 4, 0, 2, 1, 3):
            result, found = compute(engine, *batches[index])
            assert_same(result, want[index][0])
            assert_same_grads(found, want[index][1])


def test_shapes_in_turn_take_no_more_memory() -> None:
    backend = HostBackend(deferred=True)
    with DeviceEngine(source(), backend) as engine:
        live = []
        for _ in range(3):
            grads(engine, IDS[:1])
            grads(engine, IDS)
            live.append(backend.live_bytes)
        assert live[0] == live[1] == live[2]


def against_reference(weights: Source, backend: Backend, ids: np.ndarray = IDS, **options: Any) -> None:
    """Loss, logits and gradients in float32 against the float64 reference: relative L2 error of each below 1e-5.

    Four layers of sums over at most 24 terms: some 40 roundings of 2^-24 in a row, amplified by norms of short rows.
    """
    reference = ReferenceEngine(weights, "float64")
    want: Grads = {}
    loss = reference.loss_and_grads(ids, ids, lambda n, g: want.update({n: g.copy()}), **options).loss
    expected = reference.forward(ids, want_logits=True, **options).logits
    found: Grads = {}
    with DeviceEngine(weights, backend) as engine:
        ours = engine.loss_and_grads(ids, ids, lambda n, g: found.update({n: g.copy()}), **options).loss
        got = engine.forward(ids, want_logits=True, **options)
        assert_same(engine.forward(ids, mode="resident", want_logits=True, **options), got, streamed=False)
    assert found.keys() == want.keys()
    assert expected is not None and got.logits is not None
    found.update({"the loss": np.array(ours), "the logits": got.logits})
    want.update({"the loss": np.array(loss), "the logits": expected})
    errors = {n: float(np.linalg.norm(found[n] - want[n]) / (np.linalg.norm(want[n]) or 1.0)) for n in want}
    worst = max(errors, key=lambda n: errors[n])
    print(f"worst: {worst} {errors[worst]:.1e}")
    assert errors[worst] < 1e-5


@pytest.mark.parametrize("windows", [(None, 3, None, 5), (2, 3, 4, None), (5, None, 2, 5)])
def test_windows_that_differ_by_layer(windows: tuple[int | None, ...], backend: Backend) -> None:
    against_reference(source(layer_windows=windows), backend)


def test_layers_of_different_dtypes(backend: Backend) -> None:
    weights = source()
    for name, array in weights.arrays.items():
        if "layers.1." in name or name == "model.norm.weight":
            weights.arrays[name] = array.astype(ml_dtypes.bfloat16)
        elif "layers.3.mlp" in name or name == HEAD:
            weights.arrays[name] = array.astype(np.float16)
    against_reference(weights, backend)


def test_a_tied_head_with_a_padding_token(backend: Backend) -> None:
    assert (IDS == 5).any()
    against_reference(source(tie_word_embeddings=True, pad_token_id=5), backend)


@pytest.mark.parametrize("rows, tokens", [(3, 43), (70, 1)])
def test_rows_that_fill_no_whole_chunk(
    rows: int, tokens: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LOGITS_BYTES", 0)
    ids = np.random.default_rng(0).integers(0, 37, (rows, tokens))
    against_reference(source(hidden_size=23), backend, ids)


def test_nothing_to_score_gives_zero_gradients_whatever_the_activations_hold(backend: Backend) -> None:
    """As the reference does: 0 times NaN must not reach a sink."""
    weights = source()
    weights.arrays["model.norm.weight"][:] = np.nan
    for engine in (ReferenceEngine(weights), DeviceEngine(weights, backend)):
        found: Grads = {}
        result = engine.loss_and_grads(IDS, np.full_like(IDS, -100), found.__setitem__)
        engine.close()
        assert result.loss == 0.0 and found.keys() == weights.arrays.keys()
        assert [name for name, gradient in found.items() if gradient.any()] == []
