"""The pages' memory: keys and values of every layer, on the device or in pinned host memory.

A layer's part is one run of bytes, K pages [num_pages,P,HK*D] and behind them V pages of the same shape, in the
activations' dtype. All layers share one block table: page p of a sequence is page p of every layer.
- DevicePool holds every layer's part on the device.
- HostPool holds them in pinned host memory, for caches beyond the device's: a layer's pages travel to a slot on the
  device before the layer runs (KV streaming), and the pages that it wrote travel back. A slot has the layout of a whole
  part, so page numbers, and with them the kernels' arguments, are the same; only pages in use are copied.
What lies in a page before it is written is undefined: paged_attention reads written slots only.

Rejected: K and V interleaved by page (half as many copies, but kv_append and paged_attention would carry a stride).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyllm.backend.base import ITEMSIZE, Backend, Buffer, Tensor, fixed
from cupyllm.config import ModelConfig
from cupyllm.errors import CupyllmError
from cupyllm.kvcache.blocks import PAGE_TOKENS, Copy

POISON = 0xFF  # every byte: NaN in all float formats


@dataclass(frozen=True)
class Geometry:
    """Sizes that both pools and their slots share."""

    num_layers: int
    num_pages: int
    page_tokens: int
    width: int  # HK*D
    dtype: str

    @classmethod
    def of(cls, config: ModelConfig, num_pages: int, dtype: str, page_tokens: int = PAGE_TOKENS) -> Geometry:
        """The cache of a whole model."""
        width = config.num_key_value_heads * config.head_dim
        return cls(config.num_hidden_layers, num_pages, page_tokens, width, dtype)

    @property
    def page_bytes(self) -> int:
        """Of one page's keys, or of its values, in one layer."""
        return self.page_tokens * self.width * ITEMSIZE[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Of one layer's part: keys and values of all pages."""
        return 2 * self.num_pages * self.page_bytes

    def place(self, address: int) -> tuple[Tensor, Tensor]:
        """K and V pages [num_pages,P,HK*D] of a layer whose part lies at `address`."""
        shape = (self.num_pages, self.page_tokens, self.width)
        k, v = (address + half * self.layer_bytes // 2 for half in (0, 1))
        return fixed(k, shape, self.dtype, "k_pages"), fixed(v, shape, self.dtype, "v_pages")

    def offsets(self, page: int) -> tuple[int, int]:
        """Bytes from the start of a layer's part to the keys of a page, and to its values."""
        assert 0 <= page < self.num_pages, page
        return page * self.page_bytes, self.layer_bytes // 2 + page * self.page_bytes


def bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """What one cached token costs over all layers."""
    width = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * width * ITEMSIZE[dtype]


class DevicePool:
    """Every layer's pages in device memory, owned until `close`."""

    def __init__(self, backend: Backend, geometry: Geometry) -> None:
        """Raises OutOfMemory, and holds nothing then."""
        self.backend, self.geometry = backend, geometry
        self._parts: list[Buffer] = []
        try:
            for index in range(geometry.num_layers):
                self._parts.append(backend.allocate(geometry.layer_bytes, f"the KV cache of layer {index}"))
        except CupyllmError:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return self.geometry.num_layers * self.geometry.layer_bytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V pages [num_pages,P,HK*D] of a layer."""
        return self.geometry.place(self._parts[index].address)

    def copy(self, copies: Iterable[Copy], stream: Any = None) -> None:
        """Run a reservation's copies, in order, in every layer."""
        for each in copies:
            pairs = tuple(zip(self.geometry.offsets(each.source), self.geometry.offsets(each.target), strict=True))
            for part in self._parts:
                for source, target in pairs:
                    self.backend.copy(part.address + target, part.address + source, self.geometry.page_bytes, stream)

    def poison(self, page: int, stream: Any = None) -> None:
        """Fill a page with NaN in every layer, to show that nobody reads it."""
        for part in self._parts:
            for offset in self.geometry.offsets(page):
                self.backend.fill(part.address + offset, self.geometry.page_bytes, POISON, stream)

    def close(self) -> None:
        for part in self._parts:
            part.free()
        self._parts.clear()

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class HostPool:
    """Every layer's pages in pinned host memory; `geometry.place` lays out a slot of layer_bytes on the device.

    Copies between host and device are asynchronous on a stream. Order against the host's own `copy` and `poison` is the
    caller's: wait for the transfers of the pages first.
    """

    def __init__(self, backend: Backend, geometry: Geometry) -> None:
        """Raises OutOfMemory."""
        self.backend, self.geometry = backend, geometry
        self._parts = [backend.allocate_host(geometry.layer_bytes) for _ in range(geometry.num_layers)]

    @property
    def nbytes(self) -> int:
        return self.geometry.num_layers * self.geometry.layer_bytes

    def upload(self, layer: int, address: int, pages: Iterable[int], stream: Any = None) -> None:
        """Copy pages of a layer to the slot at `address`."""
        for start, stop in self._runs(pages):
            self.backend.upload(address + start, self._parts[layer][start:stop], stream)

    def download(self, layer: int, address: int, pages: Iterable[int], stream: Any = None) -> None:
        """Copy pages of a layer back from the slot at `address`."""
        for start, stop in self._runs(pages):
            self.backend.download(self._parts[layer][start:stop], address + start, stream)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Run a reservation's copies, in order, in every layer."""
        for each in copies:
            for part in self._parts:
                for target, source in zip(self._bytes(part, each.target), self._bytes(part, each.source), strict=True):
                    target[:] = source

    def poison(self, page: int) -> None:
        """Fill a page with NaN in every layer, to show that nobody reads it."""
        for part in self._parts:
            for run in self._bytes(part, page):
                run[:] = POISON

    def close(self) -> None:
        """Let the memory go once nobody holds a view of it."""
        self._parts.clear()

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bytes(self, part: np.ndarray, page: int) -> list[np.ndarray]:
        return [part[offset : offset + self.geometry.page_bytes] for offset in self.geometry.offsets(page)]

    def _runs(self, pages: Iterable[int]) -> Iterator[tuple[int, int]]:
        """(start, stop) bytes of keys and of values for every run of neighbouring pages, each page once."""
        runs: list[list[int]] = []
        for page in sorted(set(pages)):
            if runs and runs[-1][1] == page:
                runs[-1][1] = page + 1
            else:
                runs.append([page, page + 1])
        for half in (0, 1):
            for first, last in runs:
                start = self.geometry.offsets(first)[half]
                yield start, start + (last - first) * self.geometry.page_bytes
