"""What a benchmark is made of: cases, each one kind of work at one shape, that ours and peers can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cupyllm.backend.base import Spec, Tensor
from cupyllm.backend.record import Recorder
from cupyllm.ops.op import Cost


@dataclass(frozen=True)
class Wanted:
    """What a user asked a benchmark for."""

    size: str  # "32b"
    rows: tuple[int, ...]
    forms: tuple[str, ...]
    projections: tuple[str, ...]
    dtype: str
    formats: tuple[str, ...] = ()  # of quantised weights; none: all


Record = Callable[[Recorder, Sequence[Tensor], Sequence[Tensor]], None]
UNPACKED = "multiplies by an unpacked weight"  # the note of who does not read a packed one
Way = tuple[str, Callable[[], Any]]  # what a peer does differently ("" for nothing), and the call that does it


@dataclass(frozen=True)
class Case:
    """One row of a table.

    `inputs` are random and read, `outputs` are written; together they are a set of operands. `record` records the work
    on such tensors, in that order; `torch` has ways to do the same with torch's, the one to take first. `labels` go
    into tables.
    """

    op: str
    labels: Mapping[str, Any]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    cost: Cost
    few_rows: bool  # bound by the reading of its inputs: compared with the read bandwidth
    record: Record
    torch: Callable[[Any, Sequence[Any], Sequence[Any]], list[Way]] | None = None
    tolerance: float = 2.0**-7  # of the relative L2 difference of ours and a peer's output
    unpacked: Record | None = None  # `record` with the weight that a packed one stands for
    read_bytes: int | None = None  # of a set, that are read; None: all of its inputs

    @property
    def rotated_bytes(self) -> int:
        """What a set brings into the caches."""
        return self.input_bytes if self.read_bytes is None else self.read_bytes

    @property
    def name(self) -> str:
        """For messages."""
        return " ".join([self.op, *(str(value) for value in self.labels.values())])

    @property
    def input_bytes(self) -> int:
        return sum(aligned(spec) for spec in self.inputs)

    @property
    def set_bytes(self) -> int:
        return self.input_bytes + sum(aligned(spec) for spec in self.outputs)


def aligned(spec: Spec) -> int:
    """Bytes that a tensor takes in a pool."""
    return -(-spec.nbytes // 256) * 256
