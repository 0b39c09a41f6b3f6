"""Synthetic checkpoints: the same bits everywhere, in any pieces and threads; whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupyllm import synth
from cupyllm.config import ModelConfig, default_proportions, published
from cupyllm.errors import InputError, StorageError
from cupyllm.files import staged_directory, staging_in_use
from cupyllm.model import names
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.synth import parameter_values, plan_bytes, synthesize
from tests.casekit_checkpoint import expect_raises, parameter_count, tiny_config

MASK = 2**64 - 1
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
PINNED = {  # SHA-256 of model.safetensors for the tiny model, seed 7; any change of them is a new GENERATOR_VERSION
    "bfloat16": "8a11284b51af59c89b514f5ae4d52ff352b9f7359ad8d5f399e14d7c5d1541be",
    "float16": "91dfd96322b31ec4ef803fd7e0710219a599a02d322c77874d8ac566d8a7b984",
    "float32": "cc7507e2653ac74c73c3ff8a24ea138bc045fa13c40e476437d8da409b23486e",
}


def splitmix64(state: int) -> int:
    """The published algorithm on Python integers."""
    z = state & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def indices(key: int, count: int) -> list[int]:
    words = [splitmix64(key + (j + 1) * 0x9E3779B97F4A7C15) for j in range((count + 3) // 4)]
    return [word >> 16 * part & 0xFFFF for word in words for part in range(4)][:count]


def key_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little")


def normal_entry(k: int) -> float:
    """Table entry k, the definition: a sum of twelve uniforms; the upper half mirrors the lower."""
    if k >= 1 << 15:
        return -normal_entry(65535 - k)
    words = [splitmix64(key_of(0, "table") + ((part << 15) + k + 1) * 0x9E3779B97F4A7C15) for part in range(3)]
    total = sum(word >> 16 * part & 0xFFFF for word in words for part in range(4))
    return (2 * total - 12 * 65535) / 2**17


@pytest.mark.parametrize("dtype", PINNED)
def test_the_bits_are_pinned(dtype: str, tmp_path: Path) -> None:
    path = synthesize(tiny_config(), tmp_path / "out", seed=7, dtype=dtype)
    assert hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest() == PINNED[dtype]


def test_values_follow_the_definition() -> None:
    config = tiny_config(dtype="float32")
    values = parameter_values(config, Q_PROJ, seed=7).reshape(-1)
    scale = 1 / 8  # 1/sqrt(hidden 64)
    for i, index in enumerate(indices(key_of(7, Q_PROJ), 50)):
        assert values[i] == np.float32(normal_entry(index) * scale)


def test_narrow_dtypes_are_the_wide_one_rounded_to_nearest_even() -> None:
    wide = parameter_values(tiny_config(dtype="float32"), Q_PROJ, seed=1)
    half = parameter_values(tiny_config(dtype="float16"), Q_PROJ, seed=1)
    brain = parameter_values(tiny_config(dtype="bfloat16"), Q_PROJ, seed=1)
    assert np.array_equal(half, wide.astype(np.float16))
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert brain.dtype == ml_dtypes.bfloat16 and np.array_equal(brain.view(np.uint16), rounded)


def test_any_piece_equals_the_whole() -> None:
    config = tiny_config(hidden_size=1024)  # q_proj has 65536 values, more than one block with a lead
    whole = parameter_values(config, Q_PROJ, seed=3)
    rng = np.random.default_rng(0)
    for begin in [0, 1, 2, 3, 4, 5, 65535, *rng.integers(0, 60000, 5).tolist()]:
        count = min(int(rng.integers(1, 9000)), len(whole) - begin)
        assert np.array_equal(parameter_values(config, Q_PROJ, 3, begin, count), whole[begin : begin + count])


def test_threads_and_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(dtype="bfloat16")
    one = synthesize(config, tmp_path / "one", seed=5, threads=1)
    monkeypatch.setattr(synth, "_TASK_VALUES", 1003)
    many = synthesize(config, tmp_path / "many", seed=5, threads=7, max_shard_bytes=50_000)
    assert len(list(many.glob("model-*-of-*.safetensors"))) > 2 and not (many / "model.safetensors").exists()
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan_bytes(config)
    with Checkpoint.open(one) as a, Checkpoint.open(many) as b:
        assert a.config == b.config == config and a.notes == b.notes == []
        for name in a.names():
            assert a.tensor(name).tobytes() == b.tensor(name).tobytes()
            assert a.tensor(name).tobytes() == parameter_values(config, name, 5).tobytes()


def test_no_two_parameters_are_equal_and_seeds_differ() -> None:
    config = replace(tiny_config(dtype="bfloat16"), num_hidden_layers=64, layer_windows=())
    every = names.model_params(config)
    digests = {hashlib.sha256(parameter_values(config, n, seed=0).tobytes()).digest() for n in every}
    assert len(digests) == len(every)
    assert parameter_values(config, Q_PROJ, 0).tobytes() != parameter_values(config, Q_PROJ, 1).tobytes()


def test_statistics() -> None:
    """65536 draws of a table with mean 0: the mean is within 5/sqrt(65536) = 0.02 standard deviations, the deviation
    within 5/sqrt(2 * 65536) = 0.014 of the table's, which is within 0.01 of 1."""
    config = replace(default_proportions(8), dtype="float32", num_hidden_layers=8)
    expected = {
        names.EMBED: 1.0,
        names.HEAD: 160**-0.5 / 4,
        "model.layers.3.self_attn.k_proj.weight": 160**-0.5,
        "model.layers.3.self_attn.o_proj.weight": (256 * 16) ** -0.5,
        "model.layers.3.mlp.down_proj.weight": (800 * 16) ** -0.5,
    }
    for name, deviation in expected.items():
        large = replace(config, vocab_size=512)
        values = parameter_values(large, name, seed=0)
        if len(values) < 65536:
            values = np.concatenate([parameter_values(large, name, seed=s) for s in range(65536 // len(values) + 1)])
        assert abs(values.mean()) < 0.02 * deviation, name
        assert abs(values.std() / deviation - 1) < 0.025, name
    norm = parameter_values(config, "model.layers.0.input_layernorm.weight", 0)
    assert 0.5 < norm.min() < 1 < norm.max() < 1.5


def test_tied_models_have_no_head(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True, dtype="bfloat16")
    with Checkpoint.open(synthesize(config, tmp_path / "out", 0)) as opened:
        assert opened.config == config and names.HEAD not in opened.names()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_other_families(family: str, tmp_path: Path) -> None:
    bias = family == "qwen2"
    config = tiny_config(family=family, qk_norm=False, qkv_bias=bias, mlp_bias=not bias)
    with Checkpoint.open(synthesize(config, tmp_path / "out", 0)) as opened:
        assert opened.config == config and opened.notes == []


@pytest.mark.parametrize("size", ["0.6b", "32b"])
def test_plan_bytes(size: str) -> None:
    assert plan_bytes(published(size)) == 2 * parameter_count(published(size))
    assert plan_bytes(published(size), "float32") == 4 * parameter_count(published(size))


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    synthesize(tiny_config(), tmp_path / "out", 0, threads=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (plan_bytes(tiny_config()),) * 2


def test_bad_arguments(tmp_path: Path) -> None:
    expect_raises(InputError, lambda: synthesize(tiny_config(), tmp_path / "o", -1), contains="seed is -1")
    expect_raises(InputError, lambda: synthesize(tiny_config(), tmp_path / "o", 0, dtype="int8"), contains="'int8'")
    assert os.listdir(tmp_path) == []


# --- whole or not there


def test_existing_directories(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    synthesize(tiny_config(), tmp_path / "empty", 0)
    before = {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()}
    message = expect_raises(StorageError, lambda: synthesize(tiny_config(), tmp_path / "empty", 1))
    assert str(tmp_path / "empty") in message and "not an empty directory" in message
    assert {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()} == before
    (tmp_path / "file").write_text("")
    expect_raises(StorageError, lambda: synthesize(tiny_config(), tmp_path / "file", 0), contains="file")
    expect_raises(StorageError, lambda: synthesize(tiny_config(), tmp_path / "file" / "x", 0), contains="file")


@pytest.mark.parametrize("limit", [10, 4096, 100_000])
def test_full_disk_leaves_nothing(limit: int, tmp_path: Path) -> None:
    """At 10 bytes config.json fails, at 4096 the header of the weights, at 100000 their data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        message = expect_raises(StorageError, lambda: synthesize(tiny_config(), tmp_path / "out", 0, threads=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "EFBIG" in message and str(tmp_path) in message
    assert os.listdir(tmp_path) == []


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyllm.files.free_space", lambda directory: 1000)
    message = expect_raises(StorageError, lambda: synthesize(tiny_config(), tmp_path / "out", 0), contains="1000")
    assert str(plan_bytes(tiny_config())) in message and os.listdir(tmp_path) == []


SLOW = """
import sys, time
from tests.casekit_checkpoint import tiny_config
from cupyllm.synth import synthesize
def slowly(done, total):
    print("writing", flush=True)
    time.sleep(60)
synthesize(tiny_config(), sys.argv[1], 0, threads=1, progress=slowly)
"""


def test_killed_in_the_middle(tmp_path: Path) -> None:
    out = tmp_path / "out"
    root = Path(__file__).parent.parent
    with subprocess.Popen([sys.executable, "-c", SLOW, str(out)], stdout=subprocess.PIPE, cwd=root) as child:
        assert child.stdout is not None and child.stdout.readline() == b"writing\n"
        (leftover,) = tmp_path.iterdir()
        assert staging_in_use(leftover) and not out.exists()
        other = synthesize(tiny_config(), tmp_path / "other", 0)  # does not touch a living maker's work
        assert leftover.exists() and other.exists()
        child.send_signal(signal.SIGKILL)
    assert not out.exists() and not staging_in_use(leftover)
    synthesize(tiny_config(), out, 0)
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


INTERRUPTED = """
import signal, sys, time
from cupyllm import synth
from tests.casekit_checkpoint import tiny_config
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored
def slowly(done, total):
    print("writing", flush=True)
    time.sleep(0.1)
synth._TASK_VALUES = 64  # hundreds of tasks, so that going on would take a minute
synth.synthesize(tiny_config(), sys.argv[1], 0, threads=2, progress=slowly)
"""


def test_an_interrupt_stops_the_workers(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root) as child:
        assert child.stdout is not None and child.stdout.readline() == b"writing\n"
        child.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert b"KeyboardInterrupt" in child.communicate(timeout=60)[1]
    assert time.monotonic() - sent < 3 and os.listdir(tmp_path) == []  # two tasks and the interpreter's end


def test_a_directory_without_its_lock_is_left_alone_while_young(tmp_path: Path) -> None:
    young, old = tmp_path / ".out.partial-1", tmp_path / ".out.partial-2"
    young.mkdir()
    old.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    with staged_directory(tmp_path / "out"):
        assert young.exists() and not old.exists()


def test_generator_speed() -> None:
    """One thread makes at least 50 MB/s (measured: 1200 on one core of a shared machine), so 16 outrun 1 GB/s."""
    config: ModelConfig = default_proportions(64)
    parameter_values(config, names.EMBED, 0)
    start = time.process_time()
    total = 0
    for layer in range(4):
        for name in names.layer_names(config, layer):
            total += parameter_values(config, name, 0).nbytes
    assert total / (time.process_time() - start) > 50e6
