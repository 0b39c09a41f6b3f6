"""A strict safetensors reader and an atomic writer.

The format (huggingface/safetensors, README "Format"): a little-endian u64 N, N bytes of JSON
{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}, then the data; offsets count
from the first data byte. Sizes are checked before anything is read or allocated, and the tensors must tile the data
exactly: a file that is too short, too long, overlapping or holed is an error at open and not a wrong number later.

Two ways to the bytes: `read_range` and `read_into` use pread, so that a file truncated under a running job is an error
and not a SIGBUS; whatever computes reads that way. `tensor` is a zero-copy view of a read-only shared mapping, to look
into a file that nobody changes.

Why not the `safetensors` package: it copies when it makes NumPy arrays, knows no bfloat16 there, has no pread path,
gives neither file offsets nor a mapping to register with the device, and must hold all tensors in memory to write.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from cupyllm.errors import CheckpointError
from cupyllm.files import (
    load_json,
    output_file,
    show_path,
    storage_error,
    sync_directory,
    temporary_beside,
    why_missing,
)

MAX_HEADER_BYTES = 100_000_000  # as the reference implementation
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
CODES: dict[np.dtype[Any], str] = {dtype: code for code, dtype in DTYPES.items()}

_LFS_MAGIC = b"version https://git-lfs"
_DATA_ALIGNMENT = 64  # where our own files' data begins; the format promises nothing, readers like at least 16
_READ_CHUNK_BYTES = 1 << 30  # Linux moves at most 2^31 - 4096 bytes a call


@dataclass(frozen=True)
class TensorInfo:
    """One header entry. `begin` and `end` are absolute file offsets in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class SafetensorsFile:
    """An open file. Readers from several threads may share it; close it (or leave the `with`) when done.

    Views returned by `tensor` keep the mapping alive after close; nothing else works then.
    Raises CheckpointError at open for every kind of damage, with the path and the sizes that disagree.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd, self._stat = _open_regular(self.path)
        try:
            self.size = self._stat.st_size
            header_bytes = _read_header(self._fd, self.path, self.size)
            self.data_begin = 8 + len(header_bytes)
            self.metadata, self._infos = _parse_header(header_bytes, self.path, self.size)
            self._mapping: mmap.mmap | None = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. The mapping goes with its last view."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        os.close(self._fd)
        try:
            mapping.close()
        except BufferError:
            pass  # views of it live on; the mapping is unmapped when the last of them is freed

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def names(self) -> list[str]:
        """Tensor names in file order."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError when there is no such tensor."""
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"{show_path(self.path)} has no tensor {name!r}") from None

    def tensor(self, name: str) -> np.ndarray:
        """Read-only view of the mapping, in the stored dtype and shape. It may be unaligned: the format allows it."""
        info = self.info(name)
        count = math.prod(info.shape)
        return np.frombuffer(self._mapped(), dtype=info.dtype, count=count, offset=info.begin).reshape(info.shape)

    def mapped_bytes(self) -> np.ndarray:
        """Read-only uint8 view [size] of the whole file, header included (for registration with a device)."""
        return np.frombuffer(self._mapped(), dtype=np.uint8)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Fill `out` (uint8, 1-D, C-contiguous, exactly the tensor's bytes) by pread."""
        info = self.info(name)
        if out.shape != (info.num_bytes,):
            raise ValueError(f"read_into: out must be uint8 [{info.num_bytes}] for {name!r}, got shape {out.shape}")
        self.read_range(info.begin, out)

    def read_range(self, begin: int, out: np.ndarray) -> None:
        """Fill `out` (uint8, 1-D, C-contiguous) with the file's bytes from absolute offset `begin`, by pread."""
        if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"read_range: out must be a writable contiguous uint8 vector, got {out.dtype} {out.shape}")
        if self._mapping is None:
            raise ValueError(f"read_range: {show_path(self.path)} is closed")
        view = out.data
        done = 0
        while done < len(view):
            got = _pread(self._fd, view[done : done + _READ_CHUNK_BYTES], begin + done, self.path)
            if got == 0:
                raise CheckpointError(
                    f"{show_path(self.path)} ended at byte {begin + done} while {begin + len(view)} were expected: "
                    "it was truncated while in use"
                )
            done += got

    def check_unchanged(self) -> None:
        """Raise CheckpointError when size, inode or mtime of the file at the path differ from those at open."""
        try:
            now = os.stat(self.path)
        except OSError:
            raise CheckpointError(
                f"{why_missing(self.path)} although it was opened: it was removed while in use"
            ) from None
        for what, before, after in (
            ("size", self._stat.st_size, now.st_size),
            ("inode", (self._stat.st_dev, self._stat.st_ino), (now.st_dev, now.st_ino)),
            ("mtime_ns", self._stat.st_mtime_ns, now.st_mtime_ns),
        ):
            if before != after:
                raise CheckpointError(
                    f"{show_path(self.path)} was changed while in use: {what} was {before}, is {after}; run again"
                )

    def _mapped(self) -> mmap.mmap:
        if self._mapping is None:
            raise ValueError(f"tensor: {show_path(self.path)} is closed")
        return self._mapping


class SafetensorsWriter:
    """Writes one file progressively: shapes first, data in any order and from any thread, renamed into place by close.

    `tensors` maps name to (dtype, shape); tensors lie in that order, stably sorted by item size so that each is
    aligned to it. Leaving the `with` block normally closes, leaving it by an exception aborts; after an abort or a
    failed write nothing is left. A symbolic link at `path` stays, the file it leads to is replaced.
    Raises StorageError when the system refuses or no regular file is there, ValueError for a wrong call.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[Any, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        header, self._infos = _build_header(tensors, metadata)
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in self._infos}
        self._guard = threading.Lock()
        self._target = output_file(path)
        self._temp = temporary_beside(self._target)
        self._fd: int | None = None
        try:
            self._fd = os.open(self._temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _pwrite_all(self._fd, memoryview(header), 0)
        except OSError as error:
            self.abort()
            raise storage_error(self.path, error) from error

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def info(self, name: str) -> TensorInfo:
        """Where the tensor goes; raises ValueError when it was not announced."""
        try:
            return self._infos[name]
        except KeyError:
            raise ValueError(f"write: {name!r} was not announced for {show_path(self.path)}") from None

    def write(self, name: str, array: np.ndarray) -> None:
        """Write a whole tensor; dtype and shape must be as announced. Copies only when it is not contiguous."""
        info = self.info(name)
        if array.dtype != info.dtype or array.shape != info.shape:
            raise ValueError(f"write: {name!r} must be {info.dtype} {info.shape}, got {array.dtype} {array.shape}")
        self.write_at(name, 0, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def write_at(self, name: str, begin: int, data: np.ndarray) -> None:
        """Write part of a tensor: `data` (uint8, 1-D) from byte `begin` of it. Parts must not overlap."""
        info = self.info(name)
        end = begin + data.nbytes
        if data.dtype != np.uint8 or data.ndim != 1 or begin < 0 or end > info.num_bytes:
            raise ValueError(f"write_at: bytes {begin}..{end} of {name!r} are outside its {info.num_bytes} bytes")
        if self._fd is None:
            raise ValueError(f"write_at: {show_path(self.path)} is closed")
        try:
            _pwrite_all(self._fd, data.data, info.begin + begin)
        except OSError as error:
            raise storage_error(self.path, error) from error
        with self._guard:
            self._written[name].append((begin, end))

    def close(self) -> None:
        """fsync, rename into place, fsync the directory. Refuses (and aborts) while a tensor is not fully written."""
        if self._fd is None:
            return
        unwritten = [name for name in self._infos if not self._covered(name)]
        if unwritten:
            self.abort()
            raise ValueError(f"close: {show_path(self.path)} lacks the data of {len(unwritten)}: {unwritten[0]!r}, …")
        try:
            os.fsync(self._fd)
            os.rename(self._temp, self._target)
            sync_directory(self._target.parent)
        except OSError as error:
            self.abort()
            raise storage_error(self.path, error) from error
        os.close(self._fd)
        self._fd = None

    def abort(self) -> None:
        """Give up: remove what was written. The file that was at the path before stays as it was."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
            self._temp.unlink(missing_ok=True)

    def _covered(self, name: str) -> bool:
        at = 0
        for begin, end in sorted(self._written[name]):
            if begin != at:
                return False
            at = end
        return at == self._infos[name].num_bytes


def save_file(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write all `tensors` to `path` atomically."""
    with SafetensorsWriter(path, {name: (a.dtype, a.shape) for name, a in tensors.items()}, metadata) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


def _open_regular(path: Path) -> tuple[int, os.stat_result]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before open: opening a FIFO would wait for a writer
            raise CheckpointError(f"{show_path(path)} is not a regular file")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{why_missing(path)}; a safetensors file was expected") from None
    except OSError as error:
        raise CheckpointError(f"cannot open {show_path(path)}: {os.strerror(error.errno or 0)}") from error
    return fd, os.fstat(fd)


def _pread(fd: int, out: memoryview, offset: int, path: Path) -> int:
    try:
        if hasattr(os, "preadv"):
            return os.preadv(fd, [out], offset)
        data = os.pread(fd, len(out), offset)  # macOS: one copy more
    except OSError as error:
        raise CheckpointError(f"cannot read {show_path(path)}: {os.strerror(error.errno or 0)}") from error
    out[: len(data)] = data
    return len(data)


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _READ_CHUNK_BYTES], offset + done)


def _read_header(fd: int, path: Path, size: int) -> bytes:
    """The JSON bytes, once the file is known to hold as many as it claims."""
    start = os.pread(fd, 256, 0)
    where = show_path(path)
    if start.startswith(_LFS_MAGIC):
        real = next((line[5:].decode("ascii", "replace") for line in start.splitlines() if line[:5] == b"size "), "?")
        raise CheckpointError(
            f"{where} is a Git LFS pointer of {size} bytes, not the file of {real} bytes that it stands for; "
            "fetch it with `git lfs pull` or `hf download`"
        )
    if size < 8:
        raise CheckpointError(f"{where} has {size} bytes, a safetensors file has at least 8; download it again")
    (length,) = struct.unpack("<Q", start[:8])
    if length > size - 8:
        raise CheckpointError(
            f"{where} claims a header of {length} bytes, but the file has {size}; cut short, or not a safetensors file"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{where} claims a header of {length} bytes, over the limit of {MAX_HEADER_BYTES}")
    header = os.pread(fd, length, 8)
    if len(header) != length:
        raise CheckpointError(
            f"{where} gave {len(header)} header bytes, expected {length}; it changed while being read"
        )
    if not header.startswith(b"{"):
        raise CheckpointError(
            f"{where} has a header of {length} bytes that does not begin with '{{' (file: {size} bytes)"
        )
    return header


def _parse_header(header: bytes, path: Path, size: int) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    where = show_path(path)
    try:
        entries = load_json(header)
    except ValueError as error:
        raise CheckpointError(
            f"{where} ({size} bytes) has a header of {len(header)} bytes that is not valid: {error}"
        ) from None
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map strings to strings")
    data_begin = 8 + len(header)
    infos = [(name, _parse_entry(name, entry, where, data_begin)) for name, entry in entries.items()]
    infos.sort(key=lambda item: (item[1].begin, item[1].end))
    at = data_begin
    for name, info in infos:
        if info.begin != at:
            kind = "overlaps the tensor before it" if info.begin < at else "leaves a hole before it"
            raise CheckpointError(
                f"{where}: tensor {name!r} begins at data byte {info.begin - data_begin}, expected "
                f"{at - data_begin}: it {kind}"
            )
        at = info.end
    if at != size:
        kind = "truncated: download it again" if at > size else "followed by bytes that belong to no tensor"
        raise CheckpointError(f"{where} has {size} bytes, its header describes {at}; it is {kind}")
    return metadata, dict(infos)


def _parse_entry(name: str, entry: Any, where: str, data_begin: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: the header entry of tensor {name!r} must have dtype, shape and data_offsets only"
        )
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{where}: tensor {name!r} has dtype {code!r}, expected one of {', '.join(DTYPES)}")
    if not _naturals(shape):
        raise CheckpointError(f"{where}: tensor {name!r} has shape {shape!r}, expected a list of integers >= 0")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: tensor {name!r} has data_offsets {offsets!r}, expected [begin, end]")
    expected = math.prod(shape) * DTYPES[code].itemsize
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{where}: tensor {name!r} ({code} {shape}) needs {expected} bytes, its data_offsets span "
            f"{offsets[1] - offsets[0]}"
        )
    return TensorInfo(DTYPES[code], tuple(shape), data_begin + offsets[0], data_begin + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _build_header(
    tensors: Mapping[str, tuple[Any, Sequence[int]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Header bytes (length word included) and where each tensor goes. The padding is spaces, as the format asks."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    specs = [(name, np.dtype(dtype), tuple(int(n) for n in shape)) for name, (dtype, shape) in tensors.items()]
    at = 0
    relative: dict[str, TensorInfo] = {}
    for name, dtype, shape in sorted(specs, key=lambda spec: -spec[1].itemsize):
        if dtype not in CODES or name == "__metadata__":
            raise ValueError(f"write: tensor {name!r} of dtype {dtype} cannot be stored, expected {', '.join(DTYPES)}")
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        relative[name] = TensorInfo(dtype, shape, at, end)
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"write: a header of {len(text)} bytes is over the format's limit of {MAX_HEADER_BYTES}")
    shift = 8 + len(text)
    infos = {n: TensorInfo(i.dtype, i.shape, shift + i.begin, shift + i.end) for n, i in relative.items()}
    return struct.pack("<Q", len(text)) + text, infos
