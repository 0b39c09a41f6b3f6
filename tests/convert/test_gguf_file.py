"""The GGUF reader against damage: one line that names the file, never another exception."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cupyllm.convert.gguf_file import SUPPORTED_TYPES, GgufFile
from cupyllm.errors import CheckpointError
from tests.casekit import expect_raises
from tests.convert.ggufs import write

METADATA: dict[str, Any] = {
    "a.int": 7,
    "a.float": 0.5,
    "a.text": "é",
    "a.flag": True,
    "a.list": ["x", "yz"],
    "a.n": [1, 2],
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal((4, 64)).astype(np.float32) for name in ("first", "second")}
    write(path, "llama", METADATA, {**tensors, "vector": np.arange(5, dtype=np.float32)}, {"second": "Q8_0"})
    return path


def refused(path: Path, data: bytes, contains: str = "") -> None:
    path.write_bytes(data)
    error = expect_raises(CheckpointError, lambda: GgufFile(path), contains)
    assert path.name in str(error)


def test_a_whole_file(whole: Path) -> None:
    with GgufFile(whole) as file:
        assert {key: value for key, value in file.metadata.items() if key.startswith("a.")} == METADATA
        assert [(t.name, t.type_name, t.shape) for t in file.tensors.values()] == [
            ("first", "F32", (4, 64)),
            ("second", "Q8_0", (4, 64)),
            ("vector", "F32", (5,)),
        ]
        theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(whole).tensors}
        for name, tensor in file.tensors.items():
            want = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
            got = np.concatenate([rows for _, rows in file.chunks(name)])
            assert got.tobytes() == want.tobytes() and got.size == want.size
            assert tensor.num_bytes == theirs[name].n_bytes and tensor.begin == theirs[name].data_offset


def test_every_truncation_is_found(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    with GgufFile(whole) as file:
        last = max(tensor.begin + tensor.num_bytes for tensor in file.tensors.values())
    for length in [*range(0, 600), *range(600, last, 37), last - 1]:
        refused(tmp_path / "cut.gguf", data[:length])
    refused(
        tmp_path / "cut.gguf", data[: last - 1], f"has {last - 1} bytes, tensor 'vector' ends at {last}: it is trunc"
    )


def test_flipped_bytes_raise_nothing_else(whole: Path, tmp_path: Path) -> None:
    """Lengths and counts may be lies of up to 2^64: neither memory nor time may follow them."""
    data = bytearray(whole.read_bytes())
    with GgufFile(whole) as file:
        header = min(tensor.begin for tensor in file.tensors.values())
    path = tmp_path / "flipped.gguf"
    outcomes = set()
    for at in range(header):
        for value in (0x00, 0x7F, 0xFF):
            before, data[at] = data[at], value
            path.write_bytes(data)
            data[at] = before
            try:
                GgufFile(path).__exit__()
                outcomes.add("opened")
            except CheckpointError as error:
                assert "\n" not in str(error) and path.name in str(error)
                outcomes.add("refused")
    assert outcomes == {"opened", "refused"}


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    refused(path, b"", "truncated or damaged")
    refused(path, b"PK\x03\x04" + bytes(100), "begins with b'PK\\x03\\x04', expected b'GGUF'")
    refused(path, b"version https://git-lfs.github.com/spec/v1\n", "it is no GGUF file")
    refused(path, b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is a version 1 GGUF file, expected little-endian version 2")
    refused(path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file")
    expect_raises(CheckpointError, lambda: GgufFile(tmp_path / "none.gguf"), "none.gguf does not exist")
    expect_raises(CheckpointError, lambda: GgufFile(tmp_path), "Is a directory")


def one_tensor(kind: int, sizes: tuple[int, ...] = (256,), name: bytes = b"w", copies: int = 1, **keys: int) -> bytes:
    """A header with u32 metadata and `copies` of one tensor, and zeros for its data."""
    pairs = b"".join(struct.pack("<Q", len(k)) + k.encode() + struct.pack("<II", 4, v) for k, v in keys.items())
    entry = struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, copies, len(keys)) + pairs + entry * copies + bytes(4096)


def test_types_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    refused(path, one_tensor(20_000), "tensor 'w' has type number 20000, expected one of F32, F16")
    refused(path, one_tensor(gguf.GGMLQuantizationType.IQ2_XXS), "tensor 'w' has type IQ2_XXS, expected one of")
    refused(path, one_tensor(gguf.GGMLQuantizationType.I32), "tensor 'w' has type I32")
    for name in SUPPORTED_TYPES:
        path.write_bytes(one_tensor(gguf.GGMLQuantizationType[name]))
        with GgufFile(path) as file:
            assert next(file.chunks("w"))[1].shape == (1, 256)


def test_headers_that_make_no_sense(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    refused(path, one_tensor(2, (48, 2)), "of type Q4_0 has shape [2, 48], expected rows of a multiple of 32")
    refused(path, one_tensor(0, (0,)), "has shape [0]")
    refused(path, one_tensor(0, (1,) * 5), "has 5 dimensions, expected 1 to 4")
    refused(path, one_tensor(0, (2**62, 2**62)), "it is truncated")
    refused(path, one_tensor(0, copies=2), "tensor 'w' appears twice")
    refused(path, one_tensor(0, name=b"\xff"), "a tensor's name is not UTF-8")
    refused(path, one_tensor(0, **{"general.alignment": 24}), "general.alignment is 24, expected a power of two")


def test_arrays_of_arrays(tmp_path: Path) -> None:
    """Nobody writes them, and a file of nothing else would nest as deep as it is long."""
    nested = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    refused(tmp_path / "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested, "metadata 'k' is an array of type 9")


def test_without_the_package(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    expect_raises(CheckpointError, lambda: GgufFile(whole), "get it with: pip install gguf")


def test_a_file_that_shrinks_while_it_is_read(whole: Path) -> None:
    with GgufFile(whole) as file:
        with open(whole, "r+b") as again:
            again.truncate(file.tensors["second"].begin + 4)
        expect_raises(CheckpointError, lambda: list(file.chunks("second")), "was truncated while in use")
