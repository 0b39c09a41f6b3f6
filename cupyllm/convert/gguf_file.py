"""A strict reader of GGUF files: the header whole, tensors in pieces.

The format (ggml's docs/gguf.md): magic "GGUF", u32 version, u64 counts of tensors and of metadata; the metadata as
(string key, u32 type, value); a (string name, u32 dimensions, u64 sizes fastest first, u32 type, u64 offset) for each
tensor; then, aligned, the data. A quantised row is a sequence of blocks of 32 or 256 values; blocks never cross rows.

Everything is checked before a tensor is read: a count or length that the file cannot hold, a tensor past its end, a
type that cannot be dequantised. Data is read by pread, a few rows at a time, so memory does not grow with the model.

Why not `gguf.GGUFReader`: on a truncated file it slices silently and fails somewhere else, an unknown type is an
enumeration error that names no tensor, and for Qwen's 300,000 strings it builds a million NumPy arrays. The blocks are
decoded by `gguf.quants`, which is maintained beside ggml.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from cupyllm.errors import CheckpointError
from cupyllm.files import show_path, why_missing

SUPPORTED_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_CHUNK_VALUES = 1 << 22  # of float32 at a time


@dataclass(frozen=True)
class GgufTensor:
    """`shape` is row-major (the file's sizes reversed); a row of the last size takes `row_bytes` from `begin` on."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int
    row_bytes: int


class GgufFile:
    """An open file: `metadata` by key, `tensors` by name. Close it, or use `with`.

    Raises CheckpointError for damage, with the path and what was expected, and when the gguf package is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._gguf = require_gguf()
        try:
            self._file: BinaryIO = open(self.path, "rb", buffering=1 << 20)
        except FileNotFoundError:
            raise CheckpointError(f"{why_missing(self.path)}; a GGUF file was expected") from None
        except OSError as error:
            raise CheckpointError(f"cannot open {show_path(self.path)}: {os.strerror(error.errno or 0)}") from None
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.metadata, self.tensors = _Parser(self._file, self.path, self.size, self._gguf).parse()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def chunks(self, name: str, multiple: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        """(index of the first row, float32 [rows, last size]) in order, `rows` a multiple of `multiple` until the end.

        A vector is one row.
        """
        tensor = self.tensors[name]
        width = tensor.shape[-1]
        count = math.prod(tensor.shape[:-1])
        step = max(1, _CHUNK_VALUES // (width * multiple)) * multiple
        kind = self._gguf.GGMLQuantizationType[tensor.type_name]
        for first in range(0, count, step):
            rows = min(step, count - first)
            data = self._read(tensor.begin + first * tensor.row_bytes, rows * tensor.row_bytes)
            values = self._gguf.quants.dequantize(data.reshape(rows, tensor.row_bytes), kind)
            yield first, np.asarray(values, dtype=np.float32).reshape(rows, width)

    def _read(self, begin: int, count: int) -> np.ndarray:
        out = np.empty(count, np.uint8)
        done = 0
        while done < count:
            data = os.pread(self._file.fileno(), count - done, begin + done)
            if not data:
                raise CheckpointError(f"{show_path(self.path)} was truncated while in use; run again")
            out[done : done + len(data)] = np.frombuffer(data, np.uint8)
            done += len(data)
        return out


def require_gguf() -> ModuleType:
    """The gguf package. Raises CheckpointError with the command that gets it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise CheckpointError(f"reading GGUF needs the gguf package ({error}); get it with: pip install gguf") from None
    return gguf


class _Parser:
    """Reads the header in order. Every length is compared with what is left of the file before it is believed."""

    def __init__(self, file: BinaryIO, path: Path, size: int, gguf: ModuleType) -> None:
        self._file = file
        self._where = show_path(path)
        self._size = size
        self._gguf = gguf
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        self._check_magic()
        num_tensors, num_keys = self._unpack("<QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key")
            (kind,) = self._unpack("<I")
            metadata[key] = self._value(kind, key)
        split = metadata.get("split.count", 1)
        if split != 1:
            raise CheckpointError(
                f"{self._where} is one of {split} parts; join them first with: llama-gguf-split --merge FIRST OUT"
            )
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self._where}: general.alignment is {alignment!r}, expected a power of two")
        data_begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise CheckpointError(f"{self._where}: tensor {name!r} appears twice, expected once")
            tensors[name] = self._tensor(name, shape, kind, data_begin + offset)
        return metadata, tensors

    def _check_magic(self) -> None:
        start = self._take(4, "the magic")
        if start != _MAGIC:
            raise CheckpointError(f"{self._where} begins with {start!r}, expected b'GGUF': it is no GGUF file")
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            kind = "big-endian" if version.to_bytes(4, "big") in (b"\2\0\0\0", b"\3\0\0\0") else f"version {version}"
            raise CheckpointError(f"{self._where} is a {kind} GGUF file, expected little-endian version 2 or 3")

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= 4:
            raise CheckpointError(f"{self._where}: tensor {name!r} has {dimensions} dimensions, expected 1 to 4")
        sizes = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(sizes)), kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        try:
            quantization = self._gguf.GGMLQuantizationType(kind)
            type_name = quantization.name
        except ValueError:
            type_name = f"number {kind}"
        if type_name not in SUPPORTED_TYPES:
            raise CheckpointError(
                f"{self._where}: tensor {name!r} has type {type_name}, expected one of {', '.join(SUPPORTED_TYPES)}; "
                "use another quantisation of the model"
            )
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[quantization]
        if min(shape) < 1 or shape[-1] % block:
            raise CheckpointError(
                f"{self._where}: tensor {name!r} of type {type_name} has shape {list(shape)}, expected rows of a "
                f"multiple of {block}"
            )
        row_bytes = shape[-1] // block * block_bytes
        num_bytes = math.prod(shape[:-1]) * row_bytes
        if begin + num_bytes > self._size:
            raise CheckpointError(
                f"{self._where} has {self._size} bytes, tensor {name!r} ends at {begin + num_bytes}: it is truncated; "
                "download it again"
            )
        return GgufTensor(name, type_name, shape, begin, num_bytes, row_bytes)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind in _SCALARS:
            return self._unpack("<" + _SCALARS[kind])[0]
        if kind != _ARRAY:
            raise CheckpointError(f"{self._where}: metadata {key!r} has type {kind}, expected 0 to 12")
        inner, count = self._unpack("<IQ")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            size = struct.calcsize("<" + code)
            return list(struct.unpack(f"<{count}{code}", self._take(count * size, key)))
        if inner != _STRING:
            raise CheckpointError(
                f"{self._where}: metadata {key!r} is an array of type {inner}, expected 0 to 8 or 10 to 12"
            )
        self._require(count * 8, key)  # a string has at least its length
        return [self._string(key) for _ in range(count)]

    def _string(self, what: str) -> str:
        (length,) = self._unpack("<Q")
        data = self._take(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._where}: {what} is not UTF-8: the file is damaged") from None

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form), "the header"))

    def _take(self, count: int, what: str) -> bytes:
        self._require(count, what)
        data = self._file.read(count)
        assert len(data) == count, "the file shrank while its header was read"
        self._at += count
        return data

    def _require(self, count: int, what: str) -> None:
        if self._at + count > self._size:
            raise CheckpointError(
                f"{self._where} has {self._size} bytes, {show_path(what)} needs {count} from {self._at} on: it is "
                "truncated or damaged; download it again"
            )
