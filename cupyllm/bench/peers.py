"""Who else does the work: torch, whose products are cuBLAS's as it calls it, and cuBLAS as we call it (a variant)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyllm.backend.base import KernelSpec, Tensor
from cupyllm.bench.cases import Case, Way
from cupyllm.bench.device import Bench, Contender, Operands, Ours, Ready
from cupyllm.bench.measure import Batch
from cupyllm.errors import InputError

PEERS = ("torch", "cublas")
_TYPESTR = {"bfloat16": "<i2", "float32": "<f4", "int32": "<i4", "uint8": "|u1"}


def peer(name: str) -> Contender:
    """The peer called `name`. Raises InputError where it is not installed or sees no GPU."""
    return Torch() if name == "torch" else Ours("cublas", {"linear": "cublas"}, unpacked=True)


class Torch:
    """torch on the bench's stream, its calls captured into graphs as ours are."""

    name = "torch"

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            why = " ".join(str(error).split())
            raise InputError(
                f"--peer torch: torch does not import ({why}); pip install torch, or take --peer cublas"
            ) from error
        if not torch.cuda.is_available():
            raise InputError(
                f"--peer torch: torch {torch.__version__} sees no GPU; install one for CUDA, or take --peer cublas"
            )
        self.torch = torch
        self.version = str(torch.__version__)
        torch.backends.cuda.matmul.allow_tf32 = False

    def kernels(self, backend: Any, case: Case) -> list[KernelSpec]:
        return []

    def prepare(self, bench: Bench, case: Case, sets: Sequence[Operands]) -> Ready:
        torch = self.torch
        torch.cuda.set_stream(torch.cuda.ExternalStream(bench.stream.ptr))
        assert case.torch is not None, case.name
        ways = [case.torch(torch, *self._tensors(operands)) for operands in sets]
        which = self._first_that_runs(ways[0])
        graphs: list[Any] = []

        def batches(order: Sequence[Sequence[int]]) -> list[Batch]:
            found = []
            for turn in order:
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="relaxed")
                for index in turn:
                    ways[index][which][1]()
                graph.capture_end()
                graphs.append(graph)
                found.append(Batch(graph.replay, len(turn)))
            return found

        note, once = ways[0][which]
        return Ready("torch", note, once, batches, graphs.clear)

    def _tensors(self, operands: Operands) -> tuple[list[Any], list[Any]]:
        return [self._tensor(t) for t in operands.inputs], [self._tensor(t) for t in operands.outputs]

    def _tensor(self, tensor: Tensor) -> Any:
        """torch's view of our bytes."""
        found = self.torch.as_tensor(_Exported(tensor), device="cuda")
        return found.view(self.torch.bfloat16) if tensor.dtype == "bfloat16" else found

    def _first_that_runs(self, ways: Sequence[Way]) -> int:
        for index, (_, call) in enumerate(ways):
            try:
                call()
                self.torch.cuda.synchronize()
                return index
            except (TypeError, RuntimeError):
                if index == len(ways) - 1:
                    raise
        raise AssertionError("there is no way")


class _Exported:
    """__cuda_array_interface__ of a tensor; it has no bfloat16, so those go as 16-bit integers."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tensor.shape,
            "typestr": _TYPESTR[tensor.dtype],
            "data": (tensor.address, False),
            "version": 3,
        }
