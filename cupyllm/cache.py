"""The user's cache: $XDG_CACHE_HOME/cupyllm, else ~/.cache/cupyllm.

Synthetic checkpoints live under synthetic/<label>-<digest of shape, seed and generator>, converted ones under
converted/<label>-<digest of the source and the converter>. An entry is made beside and
renamed into place. When several processes want the same missing entry, each makes it and the first rename wins; the
others remove theirs and use the winner's, which has the same bytes. Making one waits for nobody: locks held across a
long job were rejected, since a stopped process would then stop all.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cupyllm.config import ModelConfig
from cupyllm.errors import CheckpointError, StorageError
from cupyllm.files import (
    is_staging,
    make_directory,
    remove_leftovers,
    require_space,
    show_path,
    staged_directory,
    staging_in_use,
    storage_error,
    tree_bytes,
)
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.synth import GENERATOR_VERSION, Progress, plan_bytes, write_checkpoint


def cache_dir() -> Path:
    """Where the cache is; not created. A relative XDG_CACHE_HOME is ignored, as the XDG specification demands."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise StorageError("there is no home directory for the cache; set XDG_CACHE_HOME to a writable directory")
        base = os.path.join(home, ".cache")
    return Path(base) / "cupyllm"


def cache_subdir(name: str) -> Path:
    """A directory inside the cache, created and known to be writable. Raises StorageError."""
    with _naming_the_cache():
        path = make_directory(cache_dir() / name)
        probe = path / f".probe-{secrets.token_hex(6)}"
        try:
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise storage_error(path, error, "write into") from error
    return path


def cached_synthetic(
    config: ModelConfig, seed: int, threads: int | None = None, progress: Progress | None = None
) -> Path:
    """The synthetic checkpoint of this shape and seed, made when it is absent or damaged. Raises StorageError."""
    return cached_checkpoint(
        synthetic_entry(config, seed),
        plan_bytes(config),
        lambda staging: write_checkpoint(config, staging, seed, threads, progress),
        config,
    )


def cached_checkpoint(
    entry: Path, num_bytes: int, make: Callable[[Path], object], config: ModelConfig | None = None
) -> Path:
    """`entry` (cache_dir() / kind / name), made by `make(directory)` when it is absent, damaged or of another shape.

    `num_bytes` is the space that making takes; `config` None accepts any shape. Raises StorageError, and what `make`
    raises.
    """
    if _complete(entry, config):
        return entry
    parent = cache_subdir(entry.parent.name)
    remove_leftovers(parent)
    _discard(entry)
    with _naming_the_cache():
        require_space(parent, num_bytes)
        try:
            with staged_directory(entry) as staging:
                make(staging)
        except FileExistsError:
            pass  # another process was faster; its entry is checked below
    if not _complete(entry, config):
        raise StorageError(f"{show_path(entry)} was damaged while it was made; run again, or remove it")
    return entry


def synthetic_entry(config: ModelConfig, seed: int) -> Path:
    """Where `cached_synthetic` keeps it, made or not."""
    identity = json.dumps([GENERATOR_VERSION, seed, config.to_hf()], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    label = f"{config.family}-{config.num_hidden_layers}x{config.hidden_size}-{config.dtype}-seed{seed}"
    return cache_dir() / "synthetic" / f"{label}-{digest}"


def clean() -> int:
    """Remove everything in the cache but what is being made right now; bytes freed."""
    root = cache_dir()
    return _clean(root) if root.is_dir() else 0


def _clean(directory: Path) -> int:
    freed = 0
    for entry in list(directory.iterdir()):
        if is_staging(entry) and staging_in_use(entry):
            continue
        if entry.is_dir() and not entry.is_symlink() and directory == cache_dir():
            freed += _clean(entry)
            continue
        size = tree_bytes(entry)
        try:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        except OSError as error:
            raise storage_error(entry, error, "remove") from error
        freed += size
    return freed


def _complete(entry: Path, config: ModelConfig | None) -> bool:
    """Whether the entry opens (every file whole, every tensor there) and has the wanted shape, if there is one."""
    if not entry.is_dir():
        return False
    try:
        with Checkpoint.open(entry) as checkpoint:
            if config is None:
                return True
            windows = config.layer_windows or (None,) * config.num_hidden_layers
            return checkpoint.config == replace(config, layer_windows=windows)
    except CheckpointError:
        return False


def _discard(entry: Path) -> None:
    """Remove a damaged entry: renamed first, so that nobody opens it half removed."""
    if not os.path.lexists(entry):
        return
    doomed = entry.with_name(f".doomed-{secrets.token_hex(6)}")
    try:
        entry.rename(doomed)
        shutil.rmtree(doomed) if doomed.is_dir() and not doomed.is_symlink() else doomed.unlink()
    except FileNotFoundError:
        pass  # another process was faster
    except OSError as error:
        raise storage_error(entry, error, "remove") from error


@contextmanager
def _naming_the_cache() -> Iterator[None]:
    """Say that the path in a StorageError is the cache and how to move it."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{error} (the cache is {show_path(cache_dir())}; XDG_CACHE_HOME moves it)") from error
