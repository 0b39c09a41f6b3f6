"""What an op is: shape inference, a forward and a backward launcher, a table of variants, cases and cost.

An op is four same-named files: cu/X.cu, ops/X.py, reference/X.py, tests/ops/test_X.py. This module holds what ops/X.py
is made of. Launchers check and record; they never run (backend/base.py says why), and they import no CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupyllm.backend.base import Spec, Tensor
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError

Attrs = Mapping[str, Any]
ACTIVATION_DTYPES = ("float32", "bfloat16")
SIMULATED_CAPABILITY = 80  # what backend/sim.py is: variants that need more are not simulated
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")  # stored parameters; arithmetic is fp32 whichever it is


@dataclass(frozen=True)
class Variant:
    """One way to run an op. The first variant of a table that fits and is preferred is taken; the last is always so.

    `fits`: whether it can be forced here; `prefers`: whether it is taken unasked where it fits.
    """

    name: str  # "plain"
    source: str  # "linear.cu"
    min_capability: int = 80
    max_capability: int | None = None  # of code for one architecture only (sm_90a); None: every later one
    fits: Callable[[Sequence[Spec], Sequence[Spec], Attrs], bool] = lambda inputs, params, attrs: True
    prefers: Callable[[Recorder, Sequence[Spec], Sequence[Spec], Attrs], bool] = lambda rec, inputs, params, attrs: True
    tensor_cores: bool = False  # a device without them (the tests' emulator) takes another
    library: bool = False  # calls a library of NVIDIA (backend/cublas.py) instead of a kernel of ours: GPUs only
    batch_invariant: bool = True  # whether it can keep a row's bits from depending on the number of rows
    note: str = ""  # one line for `doctor --variants`

    def runs_on(self, capability: int, tensor_cores: bool = True) -> bool:
        """Whether devices of this compute capability can run it."""
        if self.tensor_cores and not tensor_cores:
            return False
        return self.min_capability <= capability <= (capability if self.max_capability is None else self.max_capability)

    @property
    def simulated(self) -> bool:
        """Whether `--backend sim` can run it."""
        return not self.why_not_simulated

    @property
    def why_not_simulated(self) -> str:
        """A phrase for a refusal; empty where it is simulated."""
        if self.library:
            return "it calls NVIDIA's library, which only GPUs run"
        return "" if self.runs_on(SIMULATED_CAPABILITY) else f"it needs sm_{self.min_capability} and is not simulated"


@dataclass(frozen=True)
class Cost:
    """Work of one call: floating-point operations, and the fewest bytes that must cross device memory."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Case:
    """A call worth checking or timing. Shapes by position; `kinds` names how an integer input is drawn.

    `kinds` values: "normal" (default for floats), "ids:N" (uniform in [0,N)), "labels:N" (ids with some -100),
    "positions" (0..n-1), "segments" (runs of equal ids with some -1 padding at a row's end), "cos"/"sin" (a rope table
    of `positions`), "none" (input absent), "values:1,2,3" (these), "slots:N" (distinct in [0,N), some -1), "pages:N"
    (distinct in [0,N)). `param_kinds`: how parameters are drawn: "normal" (default), "bytes" (uint8), "scales" (float32
    above 0), "int4_scales" (int32) and "nested" (float32) as cupyllm/quant/layout.py has them.
    """

    name: str
    inputs: tuple[tuple[int, ...], ...]
    params: tuple[tuple[int, ...], ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    size: str = "small"  # "small": every machine, finite differences too; "model": real Qwen3 shapes
    param_kinds: tuple[str, ...] = ()


class Op:
    """Base of all graph ops. Subclasses are stateless; `registry` in ops/__init__.py holds one instance each."""

    name: str
    variants: tuple[Variant, ...]
    differentiable: tuple[bool, ...]  # per input (optional ones included)
    inference_only: bool = False  # no backward: generation only
    frozen: bool = False  # its parameters have no gradients: backward writes d_inputs alone
    in_place: tuple[int, ...] = ()  # inputs that forward writes to; what tests compare behind the outputs

    def infer(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """Output specs. Raises InputError (operation, argument, got, expected, remedy) on what does not fit."""
        raise NotImplementedError

    def forward(
        self,
        rec: Recorder,
        inputs: Sequence[Tensor | None],
        params: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attrs: Attrs,
    ) -> tuple[Tensor | None, ...]:
        """Record the forward (every output is written with =) and return what backward needs."""
        raise NotImplementedError

    def backward(
        self,
        rec: Recorder,
        saved: tuple[Tensor | None, ...],
        d_outputs: Sequence[Tensor | None],
        d_inputs: Sequence[Tensor | None],
        d_params: Sequence[Tensor | None],
        attrs: Attrs,
        accumulate: bool,
    ) -> None:
        """Record the backward. d_inputs are written (=), in the inputs' dtypes; None means not wanted.

        d_params are float32; `accumulate` adds to them (+=), else they are written (=).
        """
        raise NotImplementedError

    def cost(self, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> tuple[Cost, Cost]:
        """Forward and backward cost (nothing, where there is no backward)."""
        raise NotImplementedError

    def cases(self) -> list[Case]:
        """Small cases (one, odd, tile-1, tile, tile+1) and model cases (the real Qwen3 shapes)."""
        raise NotImplementedError

    def select(self, rec: Recorder, inputs: Sequence[Spec | None], params: Sequence[Spec], attrs: Attrs) -> Variant:
        """The first preferred variant that this device and these shapes allow, or the forced one."""
        present = [spec for spec in inputs if spec is not None]
        forced = rec.forced.get(self.name)
        for variant in self.variants:
            if forced is not None and variant.name != forced:
                continue
            if not variant.runs_on(rec.capability, rec.tensor_cores) or not variant.fits(present, params, attrs):
                continue
            if forced is not None and rec.batch_invariant and not variant.batch_invariant:
                raise InputError(
                    f"{self.name}: variant {forced} sums a row in an order that depends on the number of rows, which "
                    f"--batch-invariant forbids; leave out --batch-invariant or --variant {self.name}={forced}"
                )
            if forced is not None or variant.prefers(rec, present, params, attrs):
                rec.chosen[rec.node or self.name] = variant.name
                return variant
        names = ", ".join(v.name for v in self.variants)
        raise InputError(
            f"{self.name}: no variant fits (forced: {forced or 'none'}, device sm_{rec.capability}); it has: {names}; "
            f"choose another with --variant {self.name}=NAME"
        )


class InferenceOp(Op):
    """An op of generation only. Nothing differentiates it, so `backward` is a bug of whoever walks the graph."""

    inference_only = True

    def backward(
        self,
        rec: Recorder,
        saved: tuple[Tensor | None, ...],
        d_outputs: Sequence[Tensor | None],
        d_inputs: Sequence[Tensor | None],
        d_params: Sequence[Tensor | None],
        attrs: Attrs,
        accumulate: bool,
    ) -> None:
        raise AssertionError(f"{self.name} is for inference only and has no backward")


def check(condition: bool, op: str, argument: str, got: object, expected: object, remedy: str = "") -> None:
    """Raise InputError in the house format unless `condition`."""
    if not condition:
        tail = f"; {remedy}" if remedy else ""
        raise InputError(f"{op}: {argument} is {got}, expected {expected}{tail}")
