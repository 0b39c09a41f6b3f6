"""linear's cublas variant: taken only when named, refused by name where it cannot run; values and bits on a GPU."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend import cublas
from cupyllm.backend.base import NUMPY_DTYPE, Spec, Tensor, fixed
from cupyllm.backend.cublas import Cublas
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.null import NullBackend
from cupyllm.backend.record import Recorder
from cupyllm.errors import BackendError, InputError
from cupyllm.ops.linear_cublas import LAYOUTS, makes, product
from tests.hostcuda.backend import HostBackend
from tests.simulated import new_simulator

OP = ops.get("linear")
FORCED = {"linear": "cublas"}


def operands(form: str, rows: int, cols: int, depth: int, dtype: str) -> tuple[Spec, Spec, Spec]:
    a_mn, b_mn = LAYOUTS[form]
    a, b = (depth, rows) if a_mn else (rows, depth), (depth, cols) if b_mn else (cols, depth)
    return Spec(a, dtype), Spec(b, dtype), Spec((rows, cols), "float32" if form in ("head", "wgrad") else dtype)


def recorded(form: str = "forward", dtype: str = "bfloat16", accumulate: bool = False) -> Recorder:
    """C [3,5], K 7, at made-up addresses."""
    rec = Recorder(80)
    rec.node = "q_proj"
    specs = operands(form, 3, 5, 7, dtype)
    a, b, c = (fixed((i + 1) << 40, spec.shape, spec.dtype) for i, spec in enumerate(specs))
    product(rec, form, a, b, c, accumulate=accumulate)
    return rec


# ---- who takes it, who refuses it ----


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_never_unasked(capability: int, dtype: str) -> None:
    for rows in (1, 16, 4096):
        x, w = Spec((rows, 4096), dtype), Spec((1024, 4096), dtype)
        assert OP.select(Recorder(capability), [x], [w], {}).name != "cublas"
        assert OP.select(Recorder(capability, FORCED), [x], [w], {}).name == "cublas"


def test_forced_it_makes_forward_and_both_gradients() -> None:
    rec = Recorder(90, FORCED)
    x, w, y = (fixed(i << 40, shape, "bfloat16") for i, shape in enumerate(((3, 7), (5, 7), (3, 5)), 1))
    d_w = fixed(9 << 40, (5, 7), "float32")
    saved = OP.forward(rec, [x], [w], [y], {})
    OP.backward(rec, saved, [y], [x], [d_w], {}, accumulate=True)
    names = [launch.kernel.symbol for launch in rec.launches]
    assert names == [
        f"gemm_{form}" for form in ("forward_bfloat16_bfloat16", "dgrad_bfloat16_bfloat16", "wgrad_bfloat16_float32")
    ]
    assert {launch.kernel.source for launch in rec.launches} == {"cublas"}


@pytest.mark.parametrize(
    ("a", "b", "c", "form"),
    [
        (Spec((3, 7), "bfloat16"), Spec((5, 7), "float32"), Spec((3, 5), "bfloat16"), "forward"),
        (Spec((3, 7), "float16"), Spec((5, 7), "float16"), Spec((3, 5), "float16"), "forward"),
        (Spec((3, 7), "bfloat16"), Spec((5, 7), "bfloat16"), Spec((3, 5), "float32"), "forward"),
        (Spec((3, 7), "bfloat16"), Spec((5, 7), "bfloat16"), Spec((3, 5), "bfloat16"), "head"),
        (Spec((0, 7), "bfloat16"), Spec((5, 7), "bfloat16"), Spec((0, 5), "bfloat16"), "forward"),
        (Spec((3, 2**31), "bfloat16"), Spec((5, 2**31), "bfloat16"), Spec((3, 5), "bfloat16"), "forward"),
    ],
)
def test_what_it_cannot_make(a: Spec, b: Spec, c: Spec, form: str) -> None:
    assert not makes(form, a, b, c)


def test_a_bias_is_refused() -> None:
    x, w, bias = Spec((3, 8), "bfloat16"), Spec((5, 8), "bfloat16"), Spec((5,), "bfloat16")
    with pytest.raises(InputError, match=r"no variant fits \(forced: cublas"):
        OP.select(Recorder(90, FORCED), [x], [w, bias], {})


def test_simulator_and_emulator_refuse_it_by_name() -> None:
    asked = r"gemm_forward_.*\(node q_proj\) is cuBLAS's.*this is the {}; leave out --variant linear=cublas"
    with new_simulator() as simulator, pytest.raises(BackendError, match=asked.format("simulator")):
        simulator.load(recorded().launches)
    with pytest.raises(BackendError, match=asked.format("emulator")):
        HostBackend().load(recorded().launches)
    variant = next(variant for variant in OP.variants if variant.name == "cublas")
    assert not variant.simulated and "library" in variant.why_not_simulated


def test_the_null_device_counts_it() -> None:
    backend = NullBackend()
    backend.run(backend.load(recorded().launches))
    assert backend.num_launches == 1


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    def missing(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(f"no {name}")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(BackendError, match=r"cuBLAS does not load \(no cublas\); pip install 'cupyllm\[cublas\]'"):
        Cublas(NullBackend().allocate)


# ---- what the library is asked for ----


class Call:
    restype: Any = None

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name = library, name

    def __call__(self, *arguments: Any) -> None:
        values = [getattr(argument, "value", argument) for argument in arguments]
        self.library.asked.append((self.name, values))
        if self.name == "cublasGemmEx":
            self.library.gemm(*values)
        self.restype(self.library.status.get(self.name, 0))


class Library:
    """In place of libcublas: notes calls, and multiplies host matrices, column-major, as cublasGemmEx does."""

    def __init__(self, **status: int) -> None:
        self.status, self.asked = status, []  # type: ignore[var-annotated]
        for name in cublas._FUNCTIONS:
            setattr(self, name, Call(self, name))

    def gemm(self, handle: Any, *rest: Any) -> None:
        transposed_a, transposed_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, how, algo = (
            rest
        )
        assert (how, algo) == (68, -1)
        if a < 1 << 44:  # a made-up address
            return

        def matrix(address: int, kind: int, rows: int, cols: int, lead: int) -> np.ndarray:
            dtype = NUMPY_DTYPE[{0: "float32", 14: "bfloat16"}[kind]]
            raw = (ctypes.c_uint8 * (lead * cols * dtype.itemsize)).from_address(address)
            return np.frombuffer(raw, dtype).reshape(cols, lead).T[:rows]

        left = matrix(a, a_type, *((k, m) if transposed_a else (m, k)), lda).astype(np.float64)
        right = matrix(b, b_type, *((n, k) if transposed_b else (k, n)), ldb).astype(np.float64)
        target = matrix(c, c_type, m, n, ldc)
        scales = [ctypes.c_float.from_address(scale).value for scale in (alpha, beta)]
        made = (left.T if transposed_a else left) @ (right.T if transposed_b else right)
        target[...] = scales[0] * made + (scales[1] * target.astype(np.float64) if scales[1] else 0)


@pytest.mark.parametrize(("form", "dtype"), list(itertools.product(LAYOUTS, ("bfloat16", "float32"))))
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_product_in_column_major_terms(form: str, dtype: str, accumulate: bool) -> None:
    """Integers, so exact: the library's own definition of its arguments gives C = A B^T (+ C)."""
    if accumulate and form != "wgrad":
        return
    rng, specs = np.random.default_rng(0), operands(form, 3, 5, 7, dtype)
    arrays = [np.ascontiguousarray(rng.integers(-3, 4, spec.shape).astype(NUMPY_DTYPE[spec.dtype])) for spec in specs]
    a, b, c = arrays
    before = c.astype(np.float64)
    rec = Recorder(80)
    tensors = [fixed(array.ctypes.data, spec.shape, spec.dtype) for array, spec in zip(arrays, specs, strict=True)]
    product(rec, form, *tensors, accumulate=accumulate)
    function, arguments = Cublas(NullBackend().allocate, Library()).step(rec.launches[0], 0)
    function(*arguments)
    a_mn, b_mn = LAYOUTS[form]
    left, right = a.astype(np.float64), b.astype(np.float64)
    wanted = (left.T if a_mn else left) @ (right if b_mn else right.T) + (before if accumulate else 0)
    np.testing.assert_array_equal(c.astype(np.float64), wanted)


def test_a_stream_has_a_handle_and_a_workspace_of_its_own() -> None:
    library, backend = Library(), NullBackend()
    opened = Cublas(backend.allocate, library)
    assert opened.open(7) is opened.open(7) and opened.open(8) is not opened.open(7)
    assert backend.live_bytes == 2 * cublas.WORKSPACE_BYTES
    names = [name for name, _ in library.asked]
    one = ["cublasCreate_v2", "cublasSetStream_v2", "cublasSetMathMode", "cublasSetWorkspace_v2"]
    assert names == one * 2  # the workspace last: a stream takes it away
    opened.forget(7)
    opened.forget(7)
    assert backend.live_bytes == cublas.WORKSPACE_BYTES and library.asked[-1][0] == "cublasDestroy_v2"


def test_a_status_is_an_error() -> None:
    with pytest.raises(cublas.CublasError, match=r"status 15 \(not supported\)"):
        function, arguments = Cublas(NullBackend().allocate, Library(cublasGemmEx=15)).step(recorded().launches[0], 0)
        function(*arguments)


# ---- on a GPU ----


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    from cupyllm.backend.cuda import CudaBackend

    backend = CudaBackend()
    yield backend
    backend.close()


SHAPES = [(1, 1, 1), (3, 5, 7), (65, 72, 136), (64, 136, 513), (200, 320, 96), (1, 1000, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(gpu: Any, shape: tuple[int, int, int], dtype: str) -> None:
    """Forward, dgrad, wgrad = and +=, against float64. One rounding of the output (2^-9 in bfloat16, 2^-24 in float32),
    and sums of n terms: float32 FMAs err by n 2^-24 of the sum of magnitudes at most; tensor cores, whose products of
    bfloat16 are exact, align the terms of a step and cut them off, by 2^-20 of that sum at most (H200: half of it)."""
    n, m, k = shape
    rng, kind = np.random.default_rng(1), NUMPY_DTYPE[dtype]
    x, w, d_y = (rng.standard_normal(s).astype(kind) for s in ((n, k), (m, k), (n, m)))
    start = rng.standard_normal((m, k)).astype(np.float32)
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-23
    x64, w64, d64 = (array.astype(np.float64) for array in (x, w, d_y))
    for before in (None, start):
        run = run_op(gpu, OP, [x], [w], None, [d_y], d_params=None if before is None else [before], forced=FORCED)
        base = 0 if before is None else before.astype(np.float64)
        d_x = run.d_inputs[0]
        assert d_x is not None
        for name, got, wanted, size, terms, one in (
            ("y", run.outputs[0], x64 @ w64.T, abs(x64) @ abs(w64).T, k, unit),
            ("d_x", d_x, d64 @ w64, abs(d64) @ abs(w64), m, unit),
            ("d_w", run.d_params[0], d64.T @ x64 + base, abs(d64).T @ abs(x64) + abs(base), n, 2.0**-23),
        ):
            error = abs(got.astype(np.float64) - wanted)
            limit = (2.0**-20 if dtype == "bfloat16" else (terms + 2) * 2.0**-24) * size + one * abs(wanted)
            print(f"{name} {shape} {dtype}: {float((error / np.maximum(limit, 1e-30)).max()):.3f} of the limit")
            assert (error <= limit).all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_same_bits_again_and_in_a_graph(gpu: Any, dtype: str) -> None:
    """Few rows and a long sum, which the library splits: in turns on two streams, then from a graph on both."""
    rng, specs = np.random.default_rng(2), operands("forward", 16, 1024, 8192, dtype)
    with Session(gpu) as session:
        a, b = (session.put(rng.standard_normal(spec.shape).astype(NUMPY_DTYPE[dtype])) for spec in specs[:2])
        c = session.empty(specs[2])
        rec = Recorder.of(gpu)
        product(rec, "forward", a, b, c)
        program = gpu.load(rec.launches)
        streams = [gpu.stream(), gpu.stream()]
        graph = gpu.capture([program, program])
        found = set()
        for turn in range(12):
            gpu.fill(c.address, c.nbytes, 0xFF)
            if turn < 6:
                gpu.run(program, streams[turn % 2])
            else:
                graph.launch(streams[turn % 2])
            gpu.synchronize()
            found.add(_bytes(session, c))
        graph.free()
        assert len(found) == 1 and not np.isnan(session.get(c).astype(np.float32)).any()


def _bytes(session: Session, tensor: Tensor) -> bytes:
    return session.get(tensor).tobytes()
