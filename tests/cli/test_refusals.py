"""Bad input: exit status 2, one line on stderr that names what was wrong, nothing on stdout, nothing left behind."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.commands import session, train_smoke
from cupyllm.commands.inputs import load_ids
from cupyllm.config import ModelConfig
from cupyllm.errors import OutOfMemory
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.synth import synthesize
from tests.cli.conftest import Cli, tiny_config

SHAPE = ("--hidden", 32, "--layers", 2, "--heads", 4, "--ffn", 48, "--vocab", 300)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when a refusal comes after work has begun."""

    def refuse(*arguments: Any, **options: Any) -> None:
        pytest.fail("the engine ran before the input was refused")

    monkeypatch.setattr(ReferenceEngine, "forward", refuse)
    monkeypatch.setattr(ReferenceEngine, "loss_and_grads", refuse)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "expected one of forward, generate, chat, grads"),
        (["frobnicate"], "frobnicate"),
        (["forward", "--frobnicate"], "--frobnicate"),
        (["forward", "--layers", 0], "--layers"),
        (["forward", "--layers", "many"], "many"),
        (["forward", "--size", "7b"], "7b"),
        (["forward", "--size", "0.6b", "--layers", 29], "1 to 28"),
        (["forward", "--backend", "tpu"], "tpu"),
        (["forward", "--backend", "cuda"], "libcuda.so.1"),
        (["grad-check", "--backend", "cuda"], "libcuda.so.1"),
        (["train-smoke", "--backend", "cuda"], "libcuda.so.1"),
        (["verify", "--backend", "cuda", "--out", "/nonexistent/x"], "libcuda.so.1"),
        (["forward", "--backend", "reference", "--dtype", "bfloat16"], "bfloat16"),
        (["grad-check", "--backend", "reference", "--dtype", "bfloat16"], "bfloat16"),
        (["forward", "--backend", "reference", "--variant", "linear=plain"], "no kernels"),
        (["forward", "--backend", "reference", "--batch-invariant"], "use --backend cuda or sim"),
        (["forward", "--variant", "linear"], "OP=NAME"),
        (["forward", "--variant", "convolution=plain"], "swiglu"),
        (["forward", "--variant", "linear=magic"], "expected one of rows, skinny, wgmma, mma, tf32x3, cublas, plain"),
        (["forward", "--prompt", ""], "--prompt is empty"),
        (["forward", "--prompt", "a", "--ids", "x.npy"], "--prompt and --ids"),
        (["forward", "--prompt", "a", "--prompt-file", "x.txt"], "--prompt and --prompt-file"),
        (["forward", "--model", "x", "--size", "0.6b"], "--model and --size"),
        (["train-smoke", "--model", "x", "--size", "0.6b"], "--model and --size"),
        (["forward", "--resident", "--check-lossless"], "--resident and --check-lossless"),
        (["forward", "--prompt", "a\udcff"], "not valid UTF-8"),
        (["forward", "--model", "/nonexistent/dir"], "/nonexistent/dir"),
        (["forward", "--model", "Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B"),
        (["forward", "--layers", 1, "--prompt", "x" * 40961], "40961 tokens"),
        (["forward", "--layers", 1, "--prompt-file", "/nonexistent"], "/nonexistent does not exist"),
        (["forward", "--layers", 1, "--ids", "/nonexistent.npy"], "/nonexistent.npy does not exist"),
        (["forward", "--logits-out", "/nonexistent/l.npy"], "/nonexistent/l.npy"),
        (["forward", "--logits-out", "/tmp"], "is a directory"),
        (["forward", "--logits-out", "/tmp/no-such-directory/"], "is a directory"),
        (["forward", "--logits-out", ""], "is a directory"),
        (["forward", "--logits-out", "/dev/null"], "/dev/null is a device"),
        (["grads", "--model", "x", "--ids", "y", "--out", "/dev/null"], "/dev/null is a device"),
        (["forward", "--logits-out", "x" * 300], "ENAMETOOLONG"),
        (["forward", "--ids", "/dev/zero"], "is a device"),
        (["forward", "--prompt-file", ""], "--prompt-file: got an empty name"),
        (["forward", "--model", ""], "name is empty"),
        (["forward", "--model", "x" * 300], "File name too long"),
        (["forward", "--model", "x", "--seed", 0], "--seed with random weights only"),
        (["train-smoke", "--model", "x", "--yes"], "--yes with random weights only"),
        (["forward", "--layers", 10_001], "10000"),
        (["forward", "--layers", 10**20], "10000"),
        (["synth", *SHAPE[:2], "--layers", 10**8, *SHAPE[4:], "--out", "x"], "10000"),
        (["synth", "--hidden", 2**31, *SHAPE[2:], "--out", "x"], "hidden_size is 2147483648"),
        (["synth", *SHAPE, "--out", "x" * 300], "ENAMETOOLONG"),
        (["train-smoke", "--lr", "nan"], "nan is not a number"),
        (["train-smoke", "--lr", "1e400"], "inf is not in the range"),
        (["train-smoke", "--lr", "1e39"], "is not in the range"),
        (["train-smoke", "--clip", "nan"], "nan is not a number"),
        (["train-smoke", "--clip", "inf"], "inf is not in the range"),
        (["train-smoke", "--steps", 10**20], "1000000"),
        (["grads", "--model", "x", "--ids", "y", "--out", "/nonexistent/g"], "/nonexistent/g"),
        (["grads", "--model", "x"], "--ids"),
        (["verify", "--model", "Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B"),
        (["grad-check", "--op", "convolution"], "swiglu"),
        (["grad-check", "--op", "add", "--size", "0.6b"], "--layer"),
        (["train-smoke", "--lr", -1], "--lr"),
        (["train-smoke", "--tokens", 1], "--tokens"),
        (["train-smoke", "--layers", 1, "--tokens", 50000], "40960"),
        (["synth", "--out", "x"], "--hidden"),
        (["synth", "--size", "0.6b", "--hidden", 64, "--out", "x"], "--hidden"),
        (["synth", "--size", "0.6b", "--untied", "--out", "x"], "--tied/--untied"),
        (["synth", *SHAPE, "--kv-heads", 3, "--out", "x"], "num_key_value_heads"),
        (["synth", *SHAPE, "--head-dim", 7, "--out", "x"], "head_dim"),
        (["synth", "--hidden", 30, *SHAPE[2:], "--out", "x"], "--head-dim"),
        (["synth", "--size", "14b", "--out", "/nonexistent/x"], "--yes"),
        (["forward", "--size", "32b"], "--yes"),
        (["doctor", "--variants", "--clean"], "--variants and --clean"),
    ],
    ids=lambda value: " ".join(str(word)[:20] for word in value) if isinstance(value, list) else "",
)
def test_options(cli: Cli, no_work: None, arguments: list[object], named: str) -> None:
    line = cli(*arguments).refused()
    assert named in line
    if not arguments:
        return
    ran = cli(*arguments, "--json")  # the same with --json
    assert ran.status == 2 and ran.stdout == "" and len(ran.stderr.splitlines()) == 1


def test_a_large_synthetic_model_says_how_large_and_how_much_is_free(cli: Cli) -> None:
    line = cli("forward", "--size", "32b").refused()
    assert "65.52 GB" in line and " free" in line


def test_more_layers_than_there_are(cli: Cli, tiny: Path) -> None:
    assert "1 to 2" in cli("forward", "--model", tiny, "--layers", 3).refused()


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([1.5, 2.0], "float64"),
        ([True, False], "bool"),
        (np.array([], np.int64), "shape [0]"),
        (7, "shape []"),
        ([[[1]]], "shape [1, 1, 1]"),
        ([[1, 2], [3, 300]], "id 300 at row 1, position 1"),
        ([1, -100], "id -100 at row 0, position 1"),
        (np.array([2**63], np.uint64), "9223372036854775808"),
        (list(range(200)) * 3, "600 tokens"),
    ],
)
def test_ids(cli: Cli, no_work: None, tiny: Path, tmp_path: Path, ids: Any, named: str) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.asarray(ids))
    line = cli("forward", "--model", tiny, "--ids", path).refused()
    assert named in line
    if "position" in named:
        assert "0 <= id < 300" in line


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00garbage", "npz"])
def test_ids_that_are_no_npy_file(cli: Cli, no_work: None, tiny: Path, tmp_path: Path, content: Any) -> None:
    path = tmp_path / "ids.npy"
    if content == "npz":
        with open(path, "wb") as file:
            np.savez(file, ids=[1, 2])
    else:
        path.write_bytes(content)
    assert "ids.npy" in cli("forward", "--model", tiny, "--ids", path).refused()
    assert "is a directory" in cli("forward", "--model", tiny, "--ids", tmp_path).refused()


@pytest.mark.parametrize(
    ("labels", "named"),
    [([1, 2, 3], "[1, 3]"), ([1, 2, 3, -4], "id -4"), ([1, 2, 3, 300], "0 <= id < 300 or -100"), ([0.5] * 4, "float")],
)
def test_labels(cli: Cli, no_work: None, tiny: Path, tmp_path: Path, labels: Any, named: str) -> None:
    np.save(tmp_path / "ids.npy", [1, 2, 3, 4])
    np.save(tmp_path / "labels.npy", labels)
    out = tmp_path / "g.safetensors"
    files = ("--ids", tmp_path / "ids.npy", "--labels", tmp_path / "labels.npy", "--out", out)
    assert named in cli("grads", "--model", tiny, *files).refused()
    assert not out.exists()


def test_prompt_files(cli: Cli, no_work: None, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"ab\xff")
    assert "byte 2" in cli("forward", "--model", tiny, "--prompt-file", path).refused()
    path.write_bytes(b"")
    assert "--prompt-file is empty" in cli("forward", "--model", tiny, "--prompt-file", path).refused()
    assert "cannot read" in cli("forward", "--model", tiny, "--prompt-file", tmp_path).refused()


def test_a_vocabulary_too_small_for_bytes(cli: Cli, no_work: None, tmp_path: Path) -> None:
    model = synthesize(tiny_config(vocab_size=255), tmp_path / "m", 0)
    line = cli("forward", "--model", model).refused()
    assert "255" in line and "--ids" in line
    assert "255" in cli("train-smoke", "--model", model).refused()


def test_a_damaged_tokenizer(cli: Cli, no_work: None, tiny: Path) -> None:
    (tiny / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in cli("forward", "--model", tiny).refused()


def test_arrays_that_their_header_belies(cli: Cli, no_work: None, tiny: Path, tmp_path: Path) -> None:
    """A shape is not believed (and allocated) before the file is known to hold it; objects are not unpickled."""
    path = tmp_path / "ids.npy"
    with open(path, "wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (10**15,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(80))
    line = cli("forward", "--model", tiny, "--ids", path).refused()
    assert "8000000000000000 bytes, but 80 follow" in line
    np.save(path, np.array([{}], object), allow_pickle=True)
    line = cli("forward", "--model", tiny, "--ids", path).refused()
    assert "holds object values" in line and "allow_pickle" not in line
    for array in (np.arange(6, dtype=">i4"), np.asfortranarray(np.arange(6).reshape(2, 3))):
        np.save(path, array)
        assert np.array_equal(load_ids(str(path), "--ids", 10), np.atleast_2d(array))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "ids.npy"])
def test_fifos_are_not_waited_for(cli: Cli, no_work: None, tiny: Path, name: str) -> None:
    (tiny / name).unlink(missing_ok=True)
    os.mkfifo(tiny / name)
    ids = ["--ids", tiny / name] if name == "ids.npy" else []
    assert "regular file" in cli("forward", "--model", tiny, *ids).refused()


def test_outputs_are_never_what_is_read(cli: Cli, no_work: None, tiny: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(4))
    link = tmp_path / "link"
    link.symlink_to(tiny / "model.safetensors")
    before = (tiny / "model.safetensors").read_bytes(), ids.read_bytes()
    for out in (tiny / "model.safetensors", tiny / "config.json", link, ids):
        assert "which this command reads" in cli("grads", "--model", tiny, "--ids", ids, "--out", out).refused()
        assert (
            "which this command reads" in cli("forward", "--model", tiny, "--ids", ids, "--logits-out", out).refused()
        )
    assert before == ((tiny / "model.safetensors").read_bytes(), ids.read_bytes())


def test_outputs_go_through_links_and_may_have_long_names(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    np.save(tmp_path / "ids.npy", np.arange(4))
    for name, options in (("l.npy", ["forward", "--logits-out"]), ("g", ["grads", "--out"])):
        link, real, command = tmp_path / name, tmp_path / "real" / name, options[0]
        real.write_text("old")
        link.symlink_to(Path("real") / name)
        assert cli(command, "--model", tiny, "--ids", tmp_path / "ids.npy", options[1], link).status == 0
        assert link.is_symlink() and real.stat().st_size > 100
        long = tmp_path / ("x" * 250)
        assert cli(command, "--model", tiny, "--ids", tmp_path / "ids.npy", options[1], long).status == 0
        assert long.stat().st_size == real.stat().st_size
    assert cli("synth", *SHAPE, "--out", tmp_path / ("d" * 250)).status == 0


def test_tokenizers_that_give_no_usable_ids(cli: Cli, no_work: None, tiny: Path) -> None:
    special = {"id": 0, "content": "<x>", "special": True}
    special.update(dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
    for model, added, named in (
        ({"type": "BPE", "vocab": {}, "merges": []}, [special], "gives no token"),
        ({"type": "BPE", "vocab": {"e": 5000}, "merges": []}, [], "id 5000 is out of range"),
        ({"type": "WordLevel", "vocab": {"e": 0}, "unk_token": "<unk>"}, [], "cannot encode the text"),
    ):
        (tiny / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": added}))
        for command in ("forward", "train-smoke"):
            assert named in cli(command, "--model", tiny).refused()


# ---- checkpoints (each kind of damage has its own tests beside the reader; here: one line, exit status 2)


def shards(directory: Path, config: ModelConfig) -> Path:
    return synthesize(config, directory, 0, max_shard_bytes=40_000)


def test_a_missing_shard(cli: Cli, no_work: None, tmp_path: Path) -> None:
    model = shards(tmp_path / "m", tiny_config())
    names = sorted(path.name for path in model.glob("*.safetensors"))
    assert len(names) > 1
    (model / names[1]).unlink()
    line = cli("forward", "--model", model).refused()
    assert names[1] in line and "model.safetensors.index.json" in line


def test_a_truncated_file_and_a_pointer(cli: Cli, no_work: None, tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert str(path) in cli("forward", "--model", tiny).refused()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1503300328\n")
    assert "Git LFS" in cli("forward", "--model", tiny).refused()


def test_a_head_that_is_missing(cli: Cli, no_work: None, tmp_path: Path) -> None:
    model = synthesize(tiny_config(tie_word_embeddings=True), tmp_path / "m", 0)
    raw = json.loads((model / "config.json").read_text())
    raw["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(raw))
    assert "lm_head.weight" in cli("forward", "--model", model).refused()


def test_a_dangling_link(cli: Cli, no_work: None, tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.unlink()
    path.symlink_to("../blobs/0123")
    line = cli("forward", "--model", tiny).refused()
    assert "../blobs/0123" in line and str(path) in line


def test_no_config(cli: Cli, no_work: None, tiny: Path) -> None:
    (tiny / "config.json").unlink()
    assert "config.json" in cli("forward", "--model", tiny).refused()


# ---- the machine


def test_an_unwritable_cache(cli: Cli, no_work: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    line = cli("forward", "--layers", 1).refused()
    assert "/dev/null/cache" in line and "XDG_CACHE_HOME" in line


def test_training_state_that_cannot_fit(cli: Cli, no_work: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_smoke, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(session, "cached_synthetic", lambda *arguments, **options: pytest.fail("weights were made"))
    assert "available" in cli("train-smoke", "--size", "0.6b", "--layers", 1, "--seed", 77).refused()
    assert "40960" in cli("train-smoke", "--size", "0.6b", "--layers", 1, "--tokens", 50000).refused()


def test_an_output_directory_that_is_not_empty(cli: Cli, tiny: Path) -> None:
    assert "not an empty directory" in cli("synth", *SHAPE, "--out", tiny).refused()
    assert (tiny / "config.json").exists()


def test_the_working_directory_is_not_replaced(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "working directory" in cli("synth", *SHAPE, "--out", ".").refused()


def test_a_failure_on_the_way_is_one_line_with_json(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OutOfMemory("no room")

    monkeypatch.setattr(ReferenceEngine, "forward", fail)
    assert "no room" in cli("forward", "--model", tiny, "--json").refused()


def test_a_report_that_cannot_be_written(cli: Cli) -> None:
    assert "/dev/null/report" in cli("verify", "--out", "/dev/null/report").refused()


def limited(arguments: list[str], cache: Path, file_bytes: int) -> subprocess.CompletedProcess[str]:
    """The command in a process whose files cannot grow past a limit: what a full disk does."""
    return subprocess.run(
        [sys.executable, "-m", "cupyllm", *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, tiny: Path) -> None:
    """The weights of each command's output are over the limit, headers and config.json are not."""
    work = tmp_path / "work"
    work.mkdir()
    np.save(tmp_path / "ids.npy", np.arange(40))
    commands = [
        ["synth", *map(str, SHAPE), "--out", str(work / "m")],
        ["forward", "--layers", "1", "--json"],
        ["grads", "--model", str(tiny), "--ids", str(tmp_path / "ids.npy"), "--out", str(work / "g.safetensors")],
        ["forward", "--model", str(tiny), "--ids", str(tmp_path / "ids.npy"), "--logits-out", str(work / "l.npy")],
    ]
    for command in commands:
        ran = limited(command, work, 20_000)
        assert ran.returncode == 2, (command, ran.stderr)
        assert len(ran.stderr.splitlines()) == 1 and "EFBIG" in ran.stderr, ran.stderr
        left = [path for path in work.rglob("*") if path.is_file() or path.name in ("m", "l.npy", "g.safetensors")]
        assert left == [], command
