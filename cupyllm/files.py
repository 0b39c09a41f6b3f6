"""Paths and directories: how messages show them, and how a directory comes into being whole or not at all.

A directory is written under a staging name beside its target, every file synced, and renamed into place at the end.
The staging directory holds a lock file that its maker keeps locked (flock); the kernel releases the lock when the
maker dies, however it dies, so the next maker can tell a leftover from work in progress. Process ids in the name were
rejected: they are reused, and mean nothing on a shared file system.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cupyllm.errors import StorageError

_STAGING = ".partial-"
_LOCK = ".maker-lock"
_LOCKLESS_GRACE_SECONDS = 3600.0  # between mkdir and the lock file (and between its removal and the rename)


def show_path(path: str | os.PathLike[str]) -> str:
    """The path for a one-line message: undecodable bytes and control characters escaped, the rest untouched."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def why_missing(path: str | os.PathLike[str]) -> str:
    """One phrase that says why `path` does not exist, naming link and target where a symbolic link dangles.

    Links are read, never resolved: what a path is called is decided by the name the user gave.
    """
    for candidate in (Path(path), *Path(path).parents):
        if candidate.is_symlink() and not candidate.exists():
            target = os.readlink(candidate)
            return f"{show_path(candidate)} is a symbolic link to {show_path(target)}, which does not exist"
    return f"{show_path(path)} does not exist"


def output_file(path: str | os.PathLike[str]) -> Path:
    """Where a file called `path` is to be written: behind symbolic links, so that a link stays one.

    Raises StorageError for what is there and no regular file: renaming a new file over it would destroy it.
    """
    name = os.fspath(path)
    shown = show_path(name) or "''"
    try:
        mode = os.stat(name).st_mode if name else stat.S_IFDIR
    except FileNotFoundError:
        mode = stat.S_IFDIR if name.endswith(os.sep) else stat.S_IFREG
    except OSError as error:
        raise storage_error(name, error) from error
    if stat.S_ISDIR(mode):
        raise StorageError(f"{shown} is a directory, expected a file name; add one")
    if not stat.S_ISREG(mode):
        raise StorageError(f"{shown} is a device, FIFO or socket, expected a regular file or a new name; give one")
    return Path(os.path.realpath(name))


def temporary_beside(target: Path) -> Path:
    """A new name in the directory of `target`, short whatever its name is (a name has at most 255 bytes)."""
    return target.with_name(f".{secrets.token_hex(8)}.tmp")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """A file's bytes. Raises OSError, also for what is no regular file: a FIFO may wait forever, a device never end."""
    if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):  # before open: it would wait
        raise OSError(errno.EINVAL, "it is a device, FIFO or socket, expected a regular file", os.fspath(path))
    with open(path, "rb") as file:
        return file.read()


def load_json(data: bytes) -> Any:
    """JSON without duplicate keys, NaN or Infinity. Raises ValueError that says what is wrong."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"key {key!r} appears twice")
            result[key] = value
        return result

    def no_constant(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON and sync it. Raises StorageError."""
    data = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: str | os.PathLike[str], error: OSError, doing: str = "write") -> StorageError:
    """The StorageError for a failed system call on `path`, with what usually mends it."""
    remedy = {
        errno.ENOSPC: "free some space or choose another directory",
        errno.EDQUOT: "the quota is used up: free some space or choose another directory",
        errno.EFBIG: "the file is over the size limit (ulimit -f or the file system's)",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.EROFS: "the file system is read-only: choose another directory",
    }.get(error.errno or 0, "choose a directory that can be written")
    name = errno.errorcode.get(error.errno or 0, "I/O error")
    return StorageError(f"cannot {doing} {show_path(path)}: {os.strerror(error.errno or 0)} ({name}); {remedy}")


def require_space(directory: str | os.PathLike[str], num_bytes: int) -> None:
    """Raise StorageError unless the file system of `directory`, or of its nearest existing parent, has the room."""
    free = free_space(directory)
    if free < num_bytes:
        raise StorageError(
            f"{show_path(directory)} needs {num_bytes} bytes ({num_bytes / 1e9:.2f} GB) but only {free} "
            f"({free / 1e9:.2f} GB) are free; free some space or choose another directory"
        )


def free_space(directory: str | os.PathLike[str]) -> int:
    """Free bytes for this user on the file system of `directory` or its nearest existing parent."""
    path = Path(os.path.abspath(directory))
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError as error:
        raise storage_error(path, error, "read the free space of") from error


def make_directory(path: Path) -> Path:
    """Create `path` and its parents; StorageError when that is impossible or something else is in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(path, error, "create the directory") from error
    return path


def sync_directory(path: str | os.PathLike[str]) -> None:
    """fsync a directory, so that a rename inside it survives a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside `target`; renamed to `target` when the block ends, removed when it raises.

    `target` may be an existing empty directory. The caller syncs the files it writes. Leftovers of dead makers of the
    same target are removed first.
    Raises StorageError when the rename fails, FileExistsError when `target` has become a non-empty directory.
    """
    target = Path(os.path.realpath(target))
    try:
        if target.exists() and (target.samefile(os.curdir) or target.is_mount()):
            raise StorageError(
                f"{show_path(target)} is the working directory or a mount point, expected another; give a new name"
            )
    except OSError as error:  # a name too long, say
        raise storage_error(target, error, "create the directory") from error
    parent = make_directory(target.parent)
    remove_leftovers(parent, target.name)
    staging = parent / f"{_staging_prefix(target.name)}{secrets.token_hex(6)}"
    try:
        staging.mkdir()
        lock = _lock(staging)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise storage_error(staging, error, "create the directory") from error
    try:
        yield staging
        _publish(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def remove_leftovers(parent: Path, name: str | None = None) -> int:
    """Remove the staging directories (of target `name`, or all) in `parent` whose maker is dead; bytes freed."""
    freed = 0
    prefix = "." if name is None else _staging_prefix(name)
    for entry in list(parent.iterdir()):
        if entry.name.startswith(prefix) and _STAGING in entry.name and not staging_in_use(entry):
            freed += tree_bytes(entry)
            shutil.rmtree(entry, ignore_errors=True)
    return freed


def _staging_prefix(name: str) -> str:
    """Cut to leave room: a name has at most 255 bytes."""
    return f".{name.encode('utf-8', 'surrogateescape')[:200].decode('utf-8', 'ignore')}{_STAGING}"


def is_staging(path: Path) -> bool:
    """Whether `path` is named as a staging directory is."""
    return path.name.startswith(".") and _STAGING in path.name


def staging_in_use(staging: Path) -> bool:
    """Whether the maker of a staging directory is alive (its lock is held) or may just be starting or finishing."""
    try:
        fd = os.open(staging / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        try:
            return time.time() - staging.stat().st_mtime < _LOCKLESS_GRACE_SECONDS
        except FileNotFoundError:  # renamed into place or removed meanwhile
            return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def tree_bytes(path: Path) -> int:
    """Bytes of the regular files under `path`; links are not followed."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size if os.path.lexists(path) else 0
    return sum(tree_bytes(child) for child in path.iterdir())


def _lock(staging: Path) -> int:
    fd = os.open(staging / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _publish(staging: Path, target: Path) -> None:
    try:
        os.unlink(staging / _LOCK)
        sync_directory(staging)
        os.rename(staging, target)
        sync_directory(target.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(errno.EEXIST, "exists and is not empty", str(target)) from error
        raise storage_error(target, error, "create the directory") from error
