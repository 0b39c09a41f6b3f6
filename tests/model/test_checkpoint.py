"""Opening checkpoints: cases A1 (shards), A5 (tied embeddings), A8 (links and odd paths), shapes, dtypes, layers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyllm.errors import CheckpointError, InputError
from cupyllm.model import checkpoint as subject
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.stream.safetensors import save_file
from tests.casekit_checkpoint import (
    expect_raises,
    load,
    mk_cache,
    n_buffers,
    tensor_file,
    tiny_config,
    tiny_tensors,
    write_index,
    write_model,
    write_sharded,
)

INDEX = "model.safetensors.index.json"
SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def same_weights(a: Checkpoint, b: Checkpoint) -> bool:
    return a.names() == b.names() and all(np.array_equal(a.tensor(n), b.tensor(n)) for n in a.names())


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    directory = tmp_path / "sharded"
    return directory, write_sharded(directory, tiny_config())


# --- A1: shards and their index


def test_A1a_missing_shard_is_named_with_the_index(sharded: tuple[Path, dict[str, str]]) -> None:
    directory, _ = sharded
    (directory / SHARD_2).unlink()
    message = expect_raises(CheckpointError, lambda: load(directory), contains="00002")
    assert SHARD_2 in message and INDEX in message


def test_A1b_odd_shard_names_load(sharded: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    write_sharded(odd, tiny_config(), ("model.safetensors-00001-of-00002.safetensors", "rest of it"))
    with load(sharded[0]) as good, load(odd) as renamed:
        assert same_weights(good, renamed) and good.config == renamed.config and renamed.notes == []


def test_A1c_tensor_missing_from_the_index_is_named(sharded: tuple[Path, dict[str, str]]) -> None:
    directory, weight_map = sharded
    del weight_map["model.norm.weight"]
    write_index(directory, weight_map)
    message = expect_raises(CheckpointError, lambda: load(directory), contains="model.norm.weight")
    assert SHARD_2 in message and INDEX in message


def test_A1d_tensor_mapped_to_the_wrong_shard_is_named(sharded: tuple[Path, dict[str, str]]) -> None:
    directory, weight_map = sharded
    weight_map["model.norm.weight"] = SHARD_1
    write_index(directory, weight_map)
    message = expect_raises(CheckpointError, lambda: load(directory), contains="model.norm.weight")
    assert f"is in {SHARD_1}" in message and f"it is in {SHARD_2}" in message


def test_nothing_stays_open_after_an_error(sharded: tuple[Path, dict[str, str]]) -> None:
    directory, weight_map = sharded
    weight_map["model.norm.weight"] = SHARD_1
    write_index(directory, weight_map)
    before = set(os.listdir("/proc/self/fd"))
    expect_raises(CheckpointError, lambda: load(directory))
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{}", "no weight_map"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "not empty"),
        ('{"weight_map": {"a": 3}}', "maps 'a' to 3"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "/etc/passwd"),
        ('{"weight_map": {"a": "../x"}}', "outside"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' appears twice"),
        ('{"weight_map": ', "not a safetensors index"),
    ],
)
def test_damaged_index(index: str, text: str, sharded: tuple[Path, dict[str, str]]) -> None:
    directory, _ = sharded
    (directory / INDEX).write_text(index)
    message = expect_raises(CheckpointError, lambda: load(directory), contains=text)
    assert str(directory / INDEX) in message


def test_no_weights_at_all(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", tiny_config())
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    message = expect_raises(CheckpointError, lambda: load(directory), contains="pytorch_model.bin")
    assert "model.safetensors" in message


def test_single_file_wins_over_an_index_and_says_so(sharded: tuple[Path, dict[str, str]]) -> None:
    directory, _ = sharded
    (directory / "model.safetensors").write_bytes(tensor_file(tiny_tensors(tiny_config(), seed=1)))
    with load(directory) as opened:
        assert len(opened.notes) == 1 and INDEX in opened.notes[0]
        assert np.array_equal(opened.tensor(EMBED), tiny_tensors(tiny_config(), seed=1)[EMBED])


# --- completeness, shapes, dtypes


def changed(tensors: dict[str, np.ndarray], name: str, array: np.ndarray | None) -> dict[str, np.ndarray]:
    return {n: a for n, a in (tensors | {name: array}).items() if a is not None}


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", EMBED, "model.layers.0.self_attn.q_norm.weight"])
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    config = tiny_config()
    write_model(tmp_path, config, changed(tiny_tensors(config), name, None))
    expect_raises(CheckpointError, lambda: load(tmp_path), contains=name)


def test_foreign_names_are_shown(tmp_path: Path) -> None:
    config = tiny_config()
    write_model(tmp_path, config, {n.removeprefix("model."): a for n, a in tiny_tensors(config).items()})
    message = expect_raises(CheckpointError, lambda: load(tmp_path), contains=EMBED)
    assert "'embed_tokens.weight'" in message and "more tensors of 25 expected" in message


def test_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    config = tiny_config()
    name = "model.layers.1.self_attn.k_proj.weight"
    write_model(tmp_path, config, changed(tiny_tensors(config), name, np.zeros((64, 32), np.float32)))
    message = expect_raises(CheckpointError, lambda: load(tmp_path), contains=name)
    assert "[64, 32]" in message and "[32, 64]" in message


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    name = "model.layers.1.self_attn.k_proj.weight"
    write_model(tmp_path, config, changed(tiny_tensors(config), name, np.zeros((32, 64), np.int64)))
    message = expect_raises(CheckpointError, lambda: load(tmp_path), contains=name)
    assert "int64" in message and "bfloat16" in message


def test_extra_tensors_are_noted_and_known_tables_are_not(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    with load(write_model(tmp_path / "harmless", config, tensors)) as opened:
        assert opened.notes == []
    tensors["model.layers.2.input_layernorm.weight"] = tensors["visual.x"] = np.zeros(8, np.float32)
    with load(write_model(tmp_path / "extra", config, tensors)) as opened:
        assert len(opened.notes) == 1
        assert "model.layers.2.input_layernorm.weight" in opened.notes[0] and "1 more" in opened.notes[0]


def test_dtypes_come_from_the_files(tmp_path: Path) -> None:
    config = tiny_config(dtype="float32")
    tensors: dict[str, Any] = {n: a.astype(ml_dtypes.bfloat16) for n, a in tiny_tensors(config).items()}
    norm = "model.norm.weight"
    tensors[norm] = tensors[norm].astype(np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    save_file(tmp_path / "model.safetensors", tensors)
    with load(tmp_path) as opened:
        assert opened.config.dtype == "bfloat16"
        assert opened.spec(norm) == ("float32", (64,)) and opened.spec(EMBED) == ("bfloat16", (320, 64))
        assert opened.tensor(EMBED).dtype == ml_dtypes.bfloat16
        out = np.empty(320 * 64 * 2, np.uint8)
        opened.read_into(EMBED, out)
        assert out.tobytes() == tensors[EMBED].tobytes()
        layer = 2 * (64 + 64 * 64 + 2 * 32 * 64 + 16 + 16 + 64 * 64 + 64 + 3 * 96 * 64)
        assert opened.layer_bytes(0) == opened.layer_bytes(1) == layer
        assert opened.stored_bytes(opened.names()) == 2 * layer + 2 * 2 * 320 * 64 + 4 * 64


# --- layers


def test_first_layers(tmp_path: Path) -> None:
    config = tiny_config(layer_windows=(None, 7))
    write_model(tmp_path, config)
    with load(tmp_path, 1) as one, load(tmp_path) as two:
        assert one.config.num_hidden_layers == 1 and one.config.layer_windows == (None,)
        assert two.config.layer_windows == (None, 7)
        assert one.names() == [n for n in two.names() if ".layers.1." not in n]
        assert one.notes == []


@pytest.mark.parametrize("number", [0, -1, 3, True])
def test_impossible_layers(number: int, tmp_path: Path) -> None:
    write_model(tmp_path, tiny_config())
    message = expect_raises(InputError, lambda: load(tmp_path, number), contains=repr(number))
    assert "1 to 2" in message


# --- A5: tied embeddings


def tie_model(directory: Path, tie: bool | None, head: np.ndarray | None) -> Path:
    config = tiny_config()
    raw = config.to_hf() | ({} if tie is None else {"tie_word_embeddings": tie})
    if tie is None:
        del raw["tie_word_embeddings"]
    return write_model(directory, config, changed(tiny_tensors(config), HEAD, head), raw)


def test_A5_tied_one_buffer_with_and_without_the_tensor(tmp_path: Path) -> None:
    embed = tiny_tensors(tiny_config())[EMBED]
    with load(tie_model(tmp_path / "1", True, None)) as one, load(tie_model(tmp_path / "2", True, embed)) as two:
        for opened in (one, two):
            assert opened.config.tie_word_embeddings and opened.notes == []
            assert n_buffers(opened, "vocab") == 1 and HEAD not in opened.names()
        assert same_weights(one, two)
        assert one.stored_bytes(one.names()) == two.stored_bytes(two.names())


@pytest.mark.parametrize("differs_at", ["everywhere", "the last byte"])
def test_A5_tied_with_another_head_uses_the_stored_one_and_says_so(differs_at: str, tmp_path: Path) -> None:
    embed = tiny_tensors(tiny_config())[EMBED]
    head = embed + np.float32(0.5)
    if differs_at == "the last byte":
        head = embed.copy()
        head.reshape(-1).view(np.uint8)[-1] ^= 1
    with load(tie_model(tmp_path, True, head)) as opened:
        assert not opened.config.tie_word_embeddings and n_buffers(opened, "vocab") == 2
        assert np.array_equal(opened.tensor(HEAD), head)
        assert len(opened.notes) == 1 and HEAD in opened.notes[0] and "stored head is used" in opened.notes[0]


@pytest.mark.parametrize("tie", [False, None])
def test_A5_untied_or_unsaid_without_the_tensor_is_an_error(tie: bool | None, tmp_path: Path) -> None:
    directory = tie_model(tmp_path, tie, None)
    message = expect_raises(CheckpointError, lambda: load(directory), contains=HEAD)
    assert "tie_word_embeddings" in message


def test_A5_heads_are_compared_in_pieces_that_cross_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_COMPARE_CHUNK_BYTES", 1000)  # 81920 bytes: 81 pieces and a rest
    embed = tiny_tensors(tiny_config())[EMBED]
    with load(tie_model(tmp_path / "same", True, embed)) as opened:
        assert opened.config.tie_word_embeddings
    head = embed.copy()
    head[-1, -1] += 1
    with load(tie_model(tmp_path / "other", True, head)) as opened:
        assert not opened.config.tie_word_embeddings


# --- A8: links and odd paths


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = write_model(tmp_path / "source", tiny_config())
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize("root", ["plain", "mo del 模型 ü #1%20", "quo'te\"$HOME;`x`\\n"])
def test_A8_snapshot_of_links_loads_from_its_own_path(root: str, source: Path, tmp_path: Path) -> None:
    snapshot = mk_cache(tmp_path / root, source)
    with load(snapshot) as linked, load(source) as plain:
        assert same_weights(linked, plain)
        assert linked.path == snapshot and linked.tokenizer_file == snapshot / "tokenizer.json"
        linked.check_unchanged()


def test_A8_relative_path(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = mk_cache(tmp_path / "模 型", source)
    monkeypatch.chdir(snapshot.parent)
    with load("abc") as opened, load("./abc") as dotted, load("abc/") as slashed:
        assert same_weights(opened, dotted) and same_weights(opened, slashed)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_A8_dangling_link_prints_link_and_target(name: str, source: Path, tmp_path: Path) -> None:
    snapshot = mk_cache(tmp_path / "hub", source)
    target = os.readlink(snapshot / name)
    (snapshot / target).unlink()
    message = expect_raises(CheckpointError, lambda: load(snapshot), contains=str(snapshot / name))
    assert target in message
    if name == "model.safetensors":
        assert "hf download x/y" in message


def test_A8_the_directory_itself_is_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    message = expect_raises(CheckpointError, lambda: load(tmp_path / "link"), contains=str(tmp_path / "link"))
    assert "nowhere" in message
    expect_raises(CheckpointError, lambda: load(tmp_path / "link" / "snapshots"), contains="nowhere")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_A8_repo_id_is_found_in_a_cache_behind_a_link(
    variable: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub", "HOME": ".cache/huggingface/hub"}.get(variable, "")
    (tmp_path / "real").mkdir()
    (tmp_path / "cache").symlink_to("real")
    snapshot = mk_cache(tmp_path / "cache" / below, source, "Qwen/Qwen3-0.6B")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with load("Qwen/Qwen3-0.6B") as opened:
        assert opened.path == snapshot


def test_missing_repo_says_how_to_get_it(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    message = expect_raises(CheckpointError, lambda: load("Qwen/Qwen3-0.6B"), contains="hf download Qwen/Qwen3-0.6B")
    assert str(tmp_path / "hub") in message
    snapshot = mk_cache(tmp_path / "hub", source)
    refs = snapshot.parent.parent / "refs" / "main"
    for revision in ("def", "../../../source", ""):
        refs.write_text(revision)
        expect_raises(CheckpointError, lambda: load("x/y"), contains="hf download x/y")
    refs.unlink()
    expect_raises(CheckpointError, lambda: load("x/y"), contains="hf download x/y")


def test_not_a_directory(source: Path, tmp_path: Path) -> None:
    expect_raises(CheckpointError, lambda: load(source / "model.safetensors"), contains="is a file")
    expect_raises(CheckpointError, lambda: load(tmp_path / "absent"), contains="absent does not exist")
    (tmp_path / "empty").mkdir()
    expect_raises(CheckpointError, lambda: load(tmp_path / "empty"), contains="config.json does not exist")


def test_messages_stay_on_one_line_whatever_the_path(tmp_path: Path) -> None:
    directory = tmp_path / "a\nb\x1b[31m"
    directory.mkdir()
    message = expect_raises(CheckpointError, lambda: load(directory))
    assert "a\\nb\\x1b" in message
    undecodable = tmp_path / os.fsdecode(b"\xff\xfe")
    undecodable.mkdir()
    expect_raises(CheckpointError, lambda: load(undecodable)).encode("utf-8")


def test_changes_under_an_open_checkpoint_are_errors(source: Path) -> None:
    with load(source) as opened:
        opened.check_unchanged()
        os.truncate(source / "model.safetensors", 100)
        expect_raises(CheckpointError, opened.check_unchanged, contains="size")
        expect_raises(CheckpointError, lambda: opened.tensor("model.nothing"), contains="model.nothing")


def test_open_reads_headers_only(tmp_path: Path) -> None:
    """A sparse file of 40 GB opens at once: no weight is read."""
    config = replace(tiny_config(), vocab_size=10**8)
    shapes = {n: list(a.shape) for n, a in tiny_tensors(tiny_config()).items()}
    shapes[EMBED] = shapes[HEAD] = [10**8, 64]
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    write_model(tmp_path, config, {})
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    with load(tmp_path) as opened:
        assert opened.stored_bytes([EMBED, HEAD]) == 2 * 4 * 10**8 * 64
