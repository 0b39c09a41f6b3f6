"""Tensor maps: what the driver is asked for, where they lie among a program's arguments, and the arena behind them."""

from __future__ import annotations

import ctypes
import itertools
import struct
from typing import Any

import pytest

from cupyllm.backend import tensor_map
from cupyllm.backend.base import KernelSpec, Spec, Tensor, TensorMap, fixed
from cupyllm.backend.null import NullBackend
from cupyllm.backend.program import Program
from cupyllm.backend.record import Recorder, arena_layout, place
from cupyllm.backend.sim import check_arguments
from cupyllm.errors import BackendError

RUN = KernelSpec("x.cu", "x")


class Driver:
    """In place of libcuda: notes what it is asked for and writes a pattern where the descriptor belongs."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.asked = status, []  # type: ignore[var-annotated]

    def cuTensorMapEncodeTiled(self, target: Any, dtype: int, rank: int, address: Any, *rest: Any) -> int:
        dims, strides, box, step, interleave, swizzle, promotion, outside = rest
        assert target.value % 64 == 0
        ctypes.memmove(target.value, bytes(range(128)), 128)
        arrays = (tuple(dims), tuple(strides), tuple(box), tuple(step))
        self.asked.append((dtype, rank, address.value, *arrays, interleave, swizzle, promotion, outside))
        return self.status


def test_what_the_driver_is_asked_for() -> None:
    """Contiguous axis first, strides in bytes, the swizzle as wide as a box's row of 64 or 128."""
    driver = Driver()
    for tensor, box in (
        (fixed(1 << 40, (300, 72), "bfloat16"), (128, 64)),
        (fixed(2 << 40, (300, 72), "float32"), (64, 32)),
        (fixed(3 << 40, (8, 40), "bfloat16").rows(2, 7), (64, 32)),
        (fixed(4 << 40, (8, 40), "bfloat16"), (64, 200)),
    ):
        assert tensor_map.encode(driver, TensorMap(tensor, box)) == bytes(range(128))
    assert driver.asked == [
        (9, 2, 1 << 40, (72, 300), (144,), (64, 128), (1, 1), 0, 3, 3, 0),
        (7, 2, 2 << 40, (72, 300), (288,), (32, 64), (1, 1), 0, 3, 3, 0),
        (9, 2, (3 << 40) + 160, (40, 5), (80,), (32, 64), (1, 1), 0, 2, 3, 0),
        (9, 2, 4 << 40, (40, 8), (80,), (200, 64), (1, 1), 0, 0, 3, 0),
    ]


def test_a_refusal_names_the_tensor() -> None:
    with pytest.raises(BackendError, match=r"status 1 for bfloat16 300 x 72 at 0x100, boxes of 64 x 64"):
        tensor_map.encode(Driver(1), TensorMap(fixed(256, (300, 72), "bfloat16"), (64, 64)))


def test_a_missing_driver_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(BackendError, match=r"libcuda.so.1: cannot open.*--variant linear=plain"):
        tensor_map.driver()


@pytest.mark.parametrize(
    ("shape", "dtype", "box"),
    [
        ((8, 12), "bfloat16", (64, 64)),  # a pitch of 24 bytes
        ((8,), "bfloat16", (64, 64)),
        ((8, 16), "bfloat16", (257, 64)),
        ((8, 16), "bfloat16", (64, 12)),  # a box's row of 24 bytes
        ((8, 16), "bfloat16", (64, 264)),
        ((8, 16), "bfloat16", (0, 64)),
        ((2**31, 8), "bfloat16", (64, 64)),
    ],
)
def test_impossible_maps_are_our_bugs(shape: tuple[int, ...], dtype: str, box: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        TensorMap(fixed(1 << 40, shape, dtype), box)


def test_a_view_off_16_bytes_has_no_map() -> None:
    with pytest.raises(AssertionError):
        TensorMap(Tensor((8, 16), "bfloat16", fixed(1 << 40, (999,), "bfloat16").storage, 8), (64, 64))


def test_maps_lie_among_the_other_arguments() -> None:
    """By value: 128 bytes at a multiple of 64, whatever is packed before."""
    x = fixed(1 << 40, (16, 16), "bfloat16")
    first, second = TensorMap(x, (64, 64)), TensorMap(x, (32, 64))
    content = {first.box: bytes([1]) * 128, second.box: bytes([2]) * 128}
    rec = Recorder(90)
    rec.launch(RUN, 1, 32, 5)
    rec.launch(RUN, 1, 32, first, 6, x, second, second, None, 7)
    rec.launch(RUN, 1, 32, 8, first)
    program = Program(rec.launches, {RUN: 99}, lambda wanted: content[wanted.box])
    a, b, c = (call[9] for call in program.calls(0))
    addresses = struct.unpack("7Q", ctypes.string_at(b, 56))
    for index, fill in ((0, 1), (3, 2), (4, 2)):
        assert addresses[index] % 64 == 0 and ctypes.string_at(addresses[index], 128) == bytes([fill]) * 128
    values = [struct.unpack("q", ctypes.string_at(addresses[i], 8))[0] for i in (1, 2, 5, 6)]
    assert values == [6, 1 << 40, 0, 7]
    assert struct.unpack("q", ctypes.string_at(struct.unpack("Q", ctypes.string_at(a, 8))[0], 8))[0] == 5
    last = struct.unpack("2Q", ctypes.string_at(c, 16))
    assert ctypes.string_at(last[0], 8) == struct.pack("q", 8) and ctypes.string_at(last[1], 128) == bytes([1]) * 128
    spans = sorted((addr, addr + (128 if i in (0, 3, 4) else 8)) for i, addr in enumerate(addresses))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


def test_the_null_device_takes_them() -> None:
    rec = Recorder.of(NullBackend(90))
    rec.launch(RUN, 1, 32, TensorMap(fixed(1 << 40, (16, 16), "bfloat16"), (64, 64)))
    backend = NullBackend(90)
    backend.run(backend.load(rec.launches))
    assert backend.num_launches == 1


def test_the_arena_places_what_maps_name() -> None:
    """A tensor that only maps name lives from the first to the last of them, and is rebased with the rest."""
    rec = Recorder(90)
    x, y, z = (rec.empty((64, 64), "bfloat16", name) for name in "xyz")
    rec.launch(RUN, 1, 32, TensorMap(x, (64, 64)))
    rec.launch(RUN, 1, 32, y)
    rec.launch(RUN, 1, 32, TensorMap(x.rows(8, 16), (8, 64)), z)
    rec.launch(RUN, 1, 32, z)
    offsets, total = arena_layout(rec.launches)
    size = x.nbytes
    assert set(offsets) == {x.storage, y.storage, z.storage} and total == 2 * size
    assert offsets[x.storage] not in (offsets[y.storage], offsets[z.storage])
    for base in (1 << 20, 1 << 30):
        placed = place(rec.launches, offsets, base)
        whole, part = placed[0].args[0], placed[2].args[0]
        assert isinstance(whole, TensorMap) and isinstance(part, TensorMap)
        assert whole.tensor.address == base + offsets[x.storage] and whole.box == (64, 64)
        assert part.tensor.address == whole.tensor.address + 8 * 128 and part.tensor.shape == (8, 64)
        asked = Driver()
        Program(placed, {RUN: 0}, lambda wanted, asked=asked: tensor_map.encode(asked, wanted))  # type: ignore[misc]
        assert [row[2] for row in asked.asked] == [whole.tensor.address, part.tensor.address]
    assert x.storage.address is None


def test_maps_of_fixed_tensors_stay() -> None:
    rec = Recorder(90)
    wanted = TensorMap(fixed(1 << 40, (16, 16), "bfloat16"), (64, 64))
    rec.launch(RUN, 1, 32, wanted, rec.empty((4,), "float32"))
    offsets, total = arena_layout(rec.launches)
    assert total == 256 and place(rec.launches, offsets, 1 << 20)[0].args[0] == wanted


def test_the_simulator_refuses_them() -> None:
    class Parameter:
        nbytes, type = 128, "b8"

    class Kernel:
        class kernel:
            parameters = (Parameter(),)

    rec = Recorder(90)
    rec.launch(RUN, 1, 32, TensorMap(fixed(1 << 40, (16, 16), "bfloat16"), (64, 64)))
    with pytest.raises(BackendError, match="argument 0 is a tensor map, which sm_80 does not have"):
        check_arguments(rec.launches[0], Kernel())  # type: ignore[arg-type]


def test_a_map_says_what_it_is_of() -> None:
    spec = Spec((16, 16), "bfloat16")
    wanted = TensorMap(fixed(1 << 40, spec.shape, spec.dtype), (64, 64))
    assert wanted == TensorMap(wanted.tensor, (64, 64)) and hash(wanted) == hash(TensorMap(wanted.tensor, (64, 64)))
