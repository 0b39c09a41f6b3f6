"""The user's cache: made once, by several processes at once, remade when damaged; one line when unwritable."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cupyllm import cache
from cupyllm.cache import cache_dir, cache_subdir, cached_synthetic, clean, synthetic_entry
from cupyllm.errors import StorageError
from cupyllm.files import staged_directory, tree_bytes
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.synth import plan_bytes
from tests.casekit_checkpoint import expect_raises, tiny_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "cupyllm"


def test_where_it_is(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == home
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_dir() == tmp_path / ".cache" / "cupyllm"
    assert not home.exists()


def test_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached_synthetic(tiny_config(), 0)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    with Checkpoint.open(path) as opened:
        assert opened.config == tiny_config()
    monkeypatch.setattr(cache, "write_checkpoint", None)  # would fail if called
    assert cached_synthetic(tiny_config(), 0) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    assert synthetic_entry(tiny_config(), 0) == path
    assert cached_synthetic(tiny_config(layer_windows=()), 0) == path  # the same model, said more briefly


def test_entries_differ_by_shape_seed_and_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {synthetic_entry(tiny_config(), 0), synthetic_entry(tiny_config(), 1)}
    entries.add(synthetic_entry(replace(tiny_config(), rms_norm_eps=1e-5), 0))
    monkeypatch.setattr(cache, "GENERATOR_VERSION", 999)
    entries.add(synthetic_entry(tiny_config(), 0))
    assert len(entries) == 4


@pytest.mark.parametrize("damage", ["truncated", "weights gone", "config gone", "config of another shape", "a file"])
def test_damaged_entries_are_remade(damage: str) -> None:
    path = cached_synthetic(tiny_config(), 0)
    good = (path / "model.safetensors").read_bytes()
    if damage == "truncated":
        os.truncate(path / "model.safetensors", 5000)
    elif damage == "weights gone":
        (path / "model.safetensors").unlink()
    elif damage == "config gone":
        (path / "config.json").unlink()
    elif damage == "config of another shape":
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'))
    else:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        path.write_text("")
    assert cached_synthetic(tiny_config(), 0) == path
    assert (path / "model.safetensors").read_bytes() == good
    assert os.listdir(path.parent) == [path.name]


RACE = """
from tests.casekit_checkpoint import tiny_config
from cupyllm.cache import cached_synthetic
print(cached_synthetic(tiny_config(hidden_size=256, intermediate_size=2048), 0, threads=1))
"""


def test_several_processes_at_once() -> None:
    children = [subprocess.Popen([sys.executable, "-c", RACE], stdout=subprocess.PIPE, cwd=ROOT) for _ in range(4)]
    lines = {child.communicate(timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0] * 4 and len(lines) == 1
    path = Path(lines.pop().decode().strip())
    assert os.listdir(path.parent) == [path.name]


def test_the_loser_of_a_race_uses_the_winners_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cache.write_checkpoint

    def overtaken(config, directory, seed, *rest):  # type: ignore[no-untyped-def]
        real(config, directory, seed, *rest)
        monkeypatch.setattr(cache, "write_checkpoint", real)
        cached_synthetic(config, seed)

    monkeypatch.setattr(cache, "write_checkpoint", overtaken)
    path = cached_synthetic(tiny_config(), 0)
    assert os.listdir(path.parent) == [path.name]


def test_leftovers_of_dead_makers_go(home: Path) -> None:
    dead = home / "synthetic" / ".entry.partial-0123"
    dead.mkdir(parents=True)
    (dead / ".maker-lock").touch()  # nobody holds it
    (dead / "model.safetensors").write_bytes(bytes(1000))
    with staged_directory(home / "synthetic" / "alive") as alive:
        path = cached_synthetic(tiny_config(), 0)
        assert not dead.exists() and alive.exists() and path.exists()


@pytest.mark.parametrize("at", ["xdg", "cupyllm", "synthetic"])
def test_unwritable_cache_is_one_line(at: str, home: Path) -> None:
    blocked = {"xdg": home.parent, "cupyllm": home, "synthetic": home / "synthetic"}[at]
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("")  # root passes every permission, so a file stands in the directory's place
    message = expect_raises(StorageError, lambda: cached_synthetic(tiny_config(), 0), contains=str(home))
    assert "XDG_CACHE_HOME" in message
    expect_raises(StorageError, lambda: cache_subdir("synthetic"), contains="XDG_CACHE_HOME")


def test_full_disk_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyllm.files.free_space", lambda directory: 1000)
    message = expect_raises(StorageError, lambda: cached_synthetic(tiny_config(), 0), contains="1000")
    assert "XDG_CACHE_HOME" in message and os.listdir(home / "synthetic") == []


def test_clean(home: Path) -> None:
    assert clean() == 0
    cached_synthetic(tiny_config(), 0)
    (cache_subdir("kernels") / "x.cubin").write_bytes(bytes(777))
    with staged_directory(home / "synthetic" / "alive") as alive:
        (alive / "half").write_bytes(bytes(50))
        held = tree_bytes(home)
        freed = clean()
        assert freed == held - 50 > plan_bytes(tiny_config()) and alive.exists()
    assert clean() == 50 and tree_bytes(home) == 0


def test_clean_does_not_follow_links(home: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    cache_subdir("synthetic")
    (home / "synthetic" / "link").symlink_to(tmp_path / "precious")
    (home / "link").symlink_to(tmp_path / "precious")
    clean()
    assert (tmp_path / "precious" / "file").exists() and not (home / "link").is_symlink()
