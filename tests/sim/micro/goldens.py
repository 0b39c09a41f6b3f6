"""What a GPU gave for the micro-kernels, in one file.

goldens.npz holds `index`, JSON as bytes (where and when it was made, kernels that did not compile, and for each kernel
a hash of its source and inputs and the sizes of its outputs), and `data`: the outputs behind one another, LZMA over
byte planes (all first bytes of an array, then all second bytes), which halves what the neighbours share. Inputs are
made again from the tables; a kernel whose hash differs has to be run on a GPU again.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.sim.micro import Micro

Array = np.ndarray

PATH = Path(__file__).parents[1] / "goldens" / "micro.npz"


@dataclass(frozen=True)
class Goldens:
    about: dict[str, Any]  # device, driver, nvrtc, date, refused
    hashes: dict[str, str]
    outputs: dict[str, list[Array]]


def fingerprint(micro: Micro) -> str:
    """Changes with the kernel's text, launch or operands."""
    digest = hashlib.sha256(f"{micro.source} {micro.grid} {micro.block}".encode())
    for array in micro.draw():
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:12]


def write(path: Path, about: dict[str, Any], table: dict[str, Micro], outputs: dict[str, list[Array]]) -> None:
    kernels = {
        name: [fingerprint(table[name]), *([array.dtype.str[1:], array.size] for array in arrays)]
        for name, arrays in outputs.items()
    }
    planes = [
        array.view(np.uint8).reshape(array.size, -1).T.tobytes() for arrays in outputs.values() for array in arrays
    ]
    packed = lzma.compress(b"".join(planes), preset=9 | lzma.PRESET_EXTREME)
    index = lzma.compress(json.dumps({"about": about, "kernels": kernels}).encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, index=np.frombuffer(index, np.uint8), data=np.frombuffer(packed, np.uint8))


def read(path: Path) -> Goldens:
    with np.load(path) as file:
        index = json.loads(lzma.decompress(file["index"].tobytes()))
        data = np.frombuffer(lzma.decompress(file["data"].tobytes()), np.uint8)
    hashes: dict[str, str] = {}
    outputs: dict[str, list[Array]] = {}
    at = 0
    for name, (digest, *arrays) in index["kernels"].items():
        hashes[name] = digest
        outputs[name] = []
        for dtype, size in arrays:
            nbytes = size * np.dtype(dtype).itemsize
            planes = data[at : at + nbytes].reshape(-1, size)
            outputs[name].append(np.ascontiguousarray(planes.T).reshape(-1).view(dtype))
            at += nbytes
    return Goldens(index["about"], hashes, outputs)
