"""The reader refuses damaged files and reads what others write; our files are whole or not there (case A2)."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import cupyllm.stream.safetensors as subject
from cupyllm.errors import CheckpointError, StorageError
from cupyllm.stream.safetensors import DTYPES, SafetensorsFile, SafetensorsWriter, save_file
from tests.casekit_checkpoint import expect_raises, raw_safetensors, st_open

HEADER = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1503300328\n"


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD_SIZE = len(raw_safetensors(HEADER, bytes(16)))
A2 = {
    "short body": (raw_safetensors(HEADER, bytes(12)), [str(GOOD_SIZE - 4), str(GOOD_SIZE), "truncated"]),
    "long body": (raw_safetensors(HEADER, bytes(20)), [str(GOOD_SIZE + 4), str(GOOD_SIZE), "belong to no tensor"]),
    "length 10^6": (raw_safetensors(HEADER, bytes(16), 1_000_000), ["1000000", str(GOOD_SIZE)]),
    "length 2^63": (raw_safetensors(HEADER, bytes(16), 2**63), [str(2**63), str(GOOD_SIZE)]),
    "length 4": (raw_safetensors(HEADER, bytes(16), 4), ["4 bytes", str(GOOD_SIZE)]),
    "3 bytes": (b"abc", ["3 bytes", "8"]),
    "0 bytes": (b"", ["0 bytes", "8"]),
    "git-lfs pointer": (LFS, ["Git LFS pointer", "1503300328", str(len(LFS)), "git lfs pull"]),
}


@pytest.mark.parametrize("damage", A2)
def test_A2_damaged_files_are_rejected_with_path_and_sizes(damage: str, tmp_path: Path) -> None:
    data, expected = A2[damage]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    start = time.monotonic()
    message = expect_raises(CheckpointError, lambda: st_open(path), contains=str(path))
    assert time.monotonic() - start < 5
    for text in expected:
        assert text in message, message


def test_A2_a_claimed_header_is_not_read_before_its_length_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:  # sparse: the file really has the bytes that the header claims
        file.write((200_000_000).to_bytes(8, "little") + b"{")
        file.truncate(300_000_000)
    counts: list[int] = []
    pread = os.pread

    def counting(fd: int, count: int, at: int) -> bytes:
        counts.append(count)
        return pread(fd, count, at)

    monkeypatch.setattr(os, "pread", counting)
    expect_raises(CheckpointError, lambda: st_open(path), contains="over the limit of 100000000")
    assert sum(counts) < 1000


BAD_HEADERS: dict[str, tuple[Any, int, str]] = {
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "overlaps"),
    "hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, 20, "hole"),
    "late start": ({"a": entry(offsets=(4, 12))}, 12, "hole"),
    "size is not shape times dtype": ({"a": entry(shape=(3,))}, 8, "needs 12 bytes"),
    "product overflows 64 bits": ({"a": entry(shape=(2**40, 2**40))}, 8, "needs"),
    "negative size": ({"a": entry(shape=(-2, -1))}, 8, "shape [-2, -1]"),
    "fractional size": ({"a": entry(shape=(2.0,))}, 8, "shape [2.0]"),
    "boolean size": ({"a": entry(shape=(True, 2))}, 8, "shape [True, 2]"),
    "shape is no list": ({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, 8, "shape '2'"),
    "offsets backwards": ({"a": entry(offsets=(8, 0))}, 8, "data_offsets [8, 0]"),
    "three offsets": ({"a": entry(offsets=(0, 8, 8))}, 8, "data_offsets"),
    "unknown dtype": ({"a": entry(dtype="F8_E4M3", shape=(8,))}, 8, "dtype 'F8_E4M3'"),
    "dtype is no string": ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, 8, "dtype ['F32']"),
    "missing key": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "'a'"),
    "unknown key": ({"a": entry() | {"stride": [1]}}, 8, "'a'"),
    "entry is no object": ({"a": 3}, 0, "'a'"),
    "metadata is no map of strings": ({"__metadata__": {"n": 1}, "a": entry()}, 8, "__metadata__"),
    "duplicate tensor": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":0}', 8, "'a' appears twice"),
    "duplicate inner key": (b'{"a":{"dtype":"F32","dtype":"F16"}}', 8, "appears twice"),
    "not JSON": (b"{'a': 1}", 0, "not valid"),
    "not UTF-8": (b'{"\xff":1}', 0, "not valid"),
    "NaN": (b'{"a":NaN}', 0, "not valid"),
    "a list": (b"[1]", 0, "does not begin with"),
    "nested too deeply": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", 0, "not valid"),
    "a number of 5000 digits": (b'{"a":{"shape":[' + b"9" * 5000 + b"]}}", 8, "not valid"),
}


@pytest.mark.parametrize("damage", BAD_HEADERS)
def test_bad_headers_are_rejected(damage: str, tmp_path: Path) -> None:
    header, size, text = BAD_HEADERS[damage]
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_safetensors(header, bytes(size)))
    expect_raises(CheckpointError, lambda: st_open(path), contains=str(path))
    expect_raises(CheckpointError, lambda: st_open(path), contains=text)


def test_nothing_stays_open_after_a_rejection(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"abc")
    before = set(os.listdir("/proc/self/fd"))
    expect_raises(CheckpointError, lambda: st_open(path))
    assert set(os.listdir("/proc/self/fd")) == before


def test_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for ever
    expect_raises(CheckpointError, lambda: st_open(tmp_path / "fifo"), contains="not a regular file")
    expect_raises(CheckpointError, lambda: st_open(tmp_path), contains="not a regular file")
    expect_raises(CheckpointError, lambda: st_open(tmp_path / "absent"), contains="absent does not exist")


def test_dangling_link_names_link_and_target(tmp_path: Path) -> None:
    link = tmp_path / "model.safetensors"
    link.symlink_to("../blobs/0123abcd")
    message = expect_raises(CheckpointError, lambda: st_open(link), contains=str(link))
    assert "../blobs/0123abcd" in message


def sample_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "f64": rng.standard_normal((3, 5)),
        "f32": rng.standard_normal((7,)).astype(np.float32),
        "f16": rng.standard_normal((3,)).astype(np.float16),
        "i64": rng.integers(-9, 9, (2, 2)),
        "i32": rng.integers(-9, 9, (3,)).astype(np.int32),
        "i16": rng.integers(-9, 9, (3,)).astype(np.int16),
        "i8": rng.integers(-9, 9, (3,)).astype(np.int8),
        "u8": rng.integers(0, 9, (3,)).astype(np.uint8),
        "bool": np.array([True, False, True]),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "ключ 名": np.arange(3, dtype=np.float32),
    }


def test_reads_what_the_official_package_writes(tmp_path: Path) -> None:
    arrays = sample_arrays()
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays, path, {"format": "np"})
    with SafetensorsFile(path) as file:
        assert sorted(file.names()) == sorted(arrays)
        assert file.metadata == {"format": "np"}
        for name, array in arrays.items():
            view = file.tensor(name)
            assert view.dtype == array.dtype and view.shape == array.shape
            assert np.array_equal(view, array)
            assert not view.flags.writeable and not view.flags.owndata
            out = np.full(array.nbytes, 0xAB, np.uint8)
            file.read_into(name, out)
            assert out.tobytes() == array.tobytes()


def test_the_official_package_reads_what_the_writer_writes(tmp_path: Path) -> None:
    arrays = sample_arrays()
    path = tmp_path / "x.safetensors"
    save_file(path, arrays, {"format": "np"})
    loaded = safetensors.numpy.load_file(path)
    assert sorted(loaded) == sorted(arrays)
    assert all(np.array_equal(loaded[n], a) and loaded[n].dtype == a.dtype for n, a in arrays.items())
    with SafetensorsFile(path) as file:
        assert file.data_begin % 64 == 0
        assert all(file.info(n).begin % max(a.itemsize, 1) == 0 for n, a in arrays.items())
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_every_dtype_round_trips(tmp_path: Path) -> None:
    arrays = {code: np.arange(5).astype(dtype) for code, dtype in DTYPES.items()}
    assert arrays["BF16"].dtype == ml_dtypes.bfloat16
    save_file(tmp_path / "x", arrays)
    with SafetensorsFile(tmp_path / "x") as file:
        for code, array in arrays.items():
            assert file.info(code).dtype == array.dtype and file.tensor(code).tobytes() == array.tobytes()


def test_the_mapping_is_read_only_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "mapped.safetensors"
    save_file(path, {"a": np.zeros(1000, np.float32)})
    with SafetensorsFile(path):
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
        assert lines and {fields[1] for fields in lines} == {"r--s"}
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_views_outlive_close_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file(path, {"a": np.arange(4, dtype=np.float32)})
    file = SafetensorsFile(path)
    view = file.tensor("a")
    file.close()
    file.close()
    assert view.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="closed"):
        file.tensor("a")
    with pytest.raises(ValueError, match="closed"):
        file.read_into("a", np.empty(16, np.uint8))


def test_read_into_loops_over_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    save_file(tmp_path / "x", {"a": array})
    preadv, calls = os.preadv, []

    def short(fd: int, buffers: list[memoryview], at: int) -> int:
        calls.append(at)
        return preadv(fd, [buffers[0][:7]], at)

    with SafetensorsFile(tmp_path / "x") as file:
        monkeypatch.setattr(subject.os, "preadv", short)
        out = np.zeros(1000, np.uint8)
        file.read_into("a", out)
    assert np.array_equal(out, array) and len(calls) == 143


def test_read_into_refuses_a_wrong_buffer(tmp_path: Path) -> None:
    save_file(tmp_path / "x", {"a": np.zeros(4, np.float32)})
    with SafetensorsFile(tmp_path / "x") as file:
        byte = np.uint8
        for wrong in (np.empty(15, byte), np.empty(16, np.int8), np.empty((4, 4), byte), np.empty(32, byte)[::2]):
            with pytest.raises(ValueError, match="uint8"):
                file.read_into("a", wrong)


def test_truncation_under_a_reader_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file(path, {"a": np.zeros(1 << 16, np.float32)})
    with SafetensorsFile(path) as file:
        os.truncate(path, 4096)
        expect_raises(CheckpointError, lambda: file.read_into("a", np.empty(1 << 18, np.uint8)), contains="truncated")
        expect_raises(CheckpointError, file.check_unchanged, contains="size was")


def test_check_unchanged_sees_size_inode_and_mtime(tmp_path: Path) -> None:
    path = tmp_path / "x"
    array = {"a": np.zeros(4, np.float32)}
    save_file(path, array)
    with SafetensorsFile(path) as file:
        file.check_unchanged()
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        expect_raises(CheckpointError, file.check_unchanged, contains="mtime_ns")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        file.check_unchanged()
        save_file(path, array)  # a new inode of the same size
        expect_raises(CheckpointError, file.check_unchanged, contains="inode")
        path.unlink()
        expect_raises(CheckpointError, file.check_unchanged, contains="does not exist")


def test_writer_takes_tensors_in_any_order_and_in_parts(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(1000, dtype=np.int16)
    with SafetensorsWriter(tmp_path / "x", {"a": (np.float32, (2, 3)), "b": ("int16", [1000])}) as writer:
        parts = [(at, b.view(np.uint8)[at : at + 300]) for at in range(0, 2000, 300)]
        threads = [threading.Thread(target=writer.write_at, args=("b", at, part)) for at, part in reversed(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.write("a", np.asfortranarray(a))
        assert not (tmp_path / "x").exists()
    with SafetensorsFile(tmp_path / "x") as file:
        assert np.array_equal(file.tensor("a"), a) and np.array_equal(file.tensor("b"), b)


@pytest.mark.parametrize("parts", [[], [(0, 8)], [(8, 8)], [(0, 8), (0, 8)], [(0, 12), (8, 8)]])
def test_writer_refuses_to_close_with_missing_data(parts: list[tuple[int, int]], tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "x", {"a": (np.float32, (4,))})
    for at, count in parts:
        writer.write_at("a", at, np.zeros(count, np.uint8))
    with pytest.raises(ValueError, match="'a'"):
        writer.close()
    assert os.listdir(tmp_path) == []


def test_writer_refuses_wrong_arrays(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), SafetensorsWriter(tmp_path / "x", {"a": (np.float32, (4,))}) as writer:
        for wrong in (np.zeros(4), np.zeros((2, 2), np.float32)):
            with pytest.raises(ValueError, match="must be float32"):
                writer.write("a", wrong)
        with pytest.raises(ValueError, match="announced"):
            writer.write("b", np.zeros(4))
        with pytest.raises(ValueError, match="outside"):
            writer.write_at("a", 8, np.zeros(9, np.uint8))
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="complex64"):
        SafetensorsWriter(tmp_path / "x", {"a": (np.complex64, (4,))})


def test_an_error_leaves_the_previous_file_as_it_was(tmp_path: Path) -> None:
    save_file(tmp_path / "x", {"a": np.ones(4, np.float32)})
    before = (tmp_path / "x").read_bytes()
    with pytest.raises(ZeroDivisionError), SafetensorsWriter(tmp_path / "x", {"a": (np.float32, (4,))}) as writer:
        writer.write("a", np.zeros(4, np.float32))
        raise ZeroDivisionError
    assert (tmp_path / "x").read_bytes() == before and os.listdir(tmp_path) == ["x"]


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        message = expect_raises(
            StorageError, lambda: save_file(tmp_path / "x", {"a": np.zeros(4096, np.float32)}), contains="EFBIG"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "x") in message and os.listdir(tmp_path) == []


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x"  # as root no permission binds, a file in place of the directory does
    expect_raises(StorageError, lambda: save_file(path, {"a": np.zeros(1)}), contains=str(path))


def test_a_link_stays_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    link, long = tmp_path / "link", tmp_path / ("x" * 255)
    link.symlink_to("real")
    save_file(link, {"a": np.ones(4, np.float32)})
    save_file(long, {"a": np.ones(4, np.float32)})
    assert link.is_symlink() and (tmp_path / "real").read_bytes() == long.read_bytes()
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/null", tmp_path, f"{tmp_path}/new/"):
        expect_raises(StorageError, lambda path=path: save_file(path, {"a": np.zeros(1)}), contains="expected a")
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link", "real", long.name]


KILLED = """
import sys, time, numpy as np
from cupyllm.stream.safetensors import SafetensorsWriter
writer = SafetensorsWriter(sys.argv[1], {"a": (np.float32, (4,)), "b": (np.float32, (4,))})
writer.write("a", np.zeros(4, np.float32))
print("half", flush=True)
time.sleep(60)
"""


def test_killed_in_the_middle_the_old_file_stands(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file(path, {"old": np.ones(4, np.float32)})
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"half\n"
        child.send_signal(signal.SIGKILL)
    with SafetensorsFile(path) as file:
        assert file.names() == ["old"]


def test_the_header_is_deterministic_json(tmp_path: Path) -> None:
    save_file(tmp_path / "x", {"a": np.zeros(2, np.float32), "b": np.zeros(1)}, {"k": "v"})
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert json.loads(data[8 : 8 + length]) == {
        "__metadata__": {"k": "v"},
        "b": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    }
