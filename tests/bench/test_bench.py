"""Cases on a fake GPU: operands and their rotation, who is timed, what rows and tables say. On a GPU: real ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm import cli, ops
from cupyllm.backend.base import Spec
from cupyllm.backend.record import Recorder
from cupyllm.bench import OPS, device, linear, quantized_linear, report
from cupyllm.bench.cases import Wanted
from cupyllm.bench.device import Bench, Ours
from cupyllm.bench.peers import PEERS, Torch, peer
from cupyllm.bench.quantized_linear import OP
from cupyllm.errors import InputError, OutOfMemory
from cupyllm.quant.layout import FORMATS
from tests.bench.fake import FakeGpu
from tests.cli.conftest import Cli

FAST, MMA, CUBLAS = "linear_sm90.cu", "linear_mma.cu", "cublas"
WANTED = Wanted("0.6b", (16, 512), ("forward", "wgrad"), ("kv",), "bfloat16")


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu({FAST: 10.0, MMA: 20.0, CUBLAS: 8.0, "linear_sum.cu": 0.0})


# ---- cases ----


def test_shapes_are_those_of_the_model() -> None:
    assert linear.shapes("32b") == {
        "qkv": (10240, 5120),
        "q": (8192, 5120),
        "kv": (1024, 5120),
        "o": (5120, 8192),
        "gate-up": (51200, 5120),
        "down": (5120, 25600),
    }
    assert tuple(linear.shapes("0.6b")) == linear.PROJECTIONS == cli.BENCH_PROJECTIONS
    assert FORMATS == cli.BENCH_FORMATS and linear.FORMS == cli.BENCH_FORMS
    assert PEERS == cli.BENCH_PEERS and set(OPS) <= set(ops.GRAPH_OPS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_form_is_the_same_work_on_other_operands(dtype: str) -> None:
    size = 2 if dtype == "bfloat16" else 4
    made = {form: linear.case("q", form, 24, 40, 56, dtype) for form in linear.FORMS}
    assert {case.cost.flops for case in made.values()} == {2 * 24 * 40 * 56}
    x, w, y = 24 * 56, 40 * 56, 24 * 40
    assert made["forward"].cost.bytes == made["dgrad"].cost.bytes == size * (x + w + y)
    assert made["wgrad"].cost.bytes == size * (x + y) + 4 * w
    forward = linear.OP.cost(made["forward"].inputs[:1], made["forward"].inputs[1:], {})[0]
    assert (forward.flops, forward.bytes) == (made["forward"].cost.flops, made["forward"].cost.bytes)
    for form, case in made.items():
        rec = Recorder(90)
        case.record(rec, [device._somewhere(s) for s in case.inputs], [device._somewhere(s) for s in case.outputs])
        assert len(rec.launches) >= 1, form


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", quantized_linear.FORMS)
def test_packed_weights_and_what_they_stand_for(format: str, form: str) -> None:
    case = quantized_linear.case("q", format, form, 8, 256, 512)
    params = quantized_linear.parameters(format, 256, 512)
    x, y = 2 * 8 * 512, 2 * 8 * 256
    assert case.cost.bytes == x + y + sum(spec.nbytes for spec in params) and case.cost.flops == 2 * 8 * 256 * 512
    assert case.rotated_bytes < case.input_bytes  # the unpacked weight does not count
    OP.infer([Spec((8, 512), "bfloat16")], params, {"format": format, "out_features": 256})  # are its parameters
    tensors = [device._somewhere(s) for s in case.inputs], [device._somewhere(s) for s in case.outputs]
    packed, plain = Recorder(90), Recorder(90)
    case.record(packed, *tensors)
    assert case.unpacked is not None
    case.unpacked(plain, *tensors)
    sources = {launch.kernel.source for launch in packed.launches}
    assert sources and not sources & {launch.kernel.source for launch in plain.launches}


# ---- on the fake ----


def test_rows_of_ours_and_a_peer(gpu: FakeGpu) -> None:
    cases = linear.cases(WANTED)
    with Bench(gpu, cases, [Ours("ours", {"linear": "wgmma"}), peer("cublas")]) as bench:
        rows = list(bench.run(cases))
        assert bench.read_gb_per_s == pytest.approx(device.READ_BYTES / 5.0 / 1e3)
    assert gpu.live_bytes == 0 and all(graph.freed for graph in gpu.graphs)
    assert [(row.case.labels["form"], row.case.labels["M"]) for row in rows] == [
        *(("forward", 16), ("forward", 512), ("wgrad", 16), ("wgrad", 512))
    ]
    for row in rows:
        assert row.variants == {"ours": "wgmma", "cublas": "cublas"}
        assert (row.times["ours"].median, row.times["cublas"].median) == pytest.approx((10.0, 8.0))
        assert row.sets * row.case.input_bytes >= 200_000_000 or row.sets == 256
        assert row.calls in (50, 51) and row.agrees  # 400 us of the faster one
    found = report.values(rows[1], 4000.0, "cublas")
    assert found["ratio"] == pytest.approx(0.8) and found["read_share"] is None
    assert found["tflops"] == pytest.approx(2 * 512 * 1024 * 1024 / 10 / 1e6)
    few = report.values(rows[0], 4000.0, "cublas")
    assert few["read_share"] == pytest.approx(few["bytes"] / 10 / 1e3 / 4000)


def test_inputs_rotate_and_outputs_lie_elsewhere(gpu: FakeGpu) -> None:
    (case,) = linear.cases(Wanted("0.6b", (512,), ("forward",), ("kv",), "bfloat16"))
    with Bench(gpu, [case], [Ours()]) as bench:
        sets = bench.operands(case)
        spans = sorted(
            (t.address, t.address + t.nbytes) for operands in sets for t in (*operands.inputs, *operands.outputs)
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "operands overlap"
        pool = (bench._inputs.address, bench._inputs.address + bench._inputs.nbytes)
        for operands in sets:
            assert all(pool[0] <= t.address and t.address + t.nbytes <= pool[1] for t in operands.inputs)
            assert not any(pool[0] <= t.address < pool[1] for t in operands.outputs)
        row = bench.row(case)
    used = {
        arg.tensor.address
        for graph in gpu.graphs
        for program in graph.programs
        for launch in program.launches
        for arg in launch.args[1:2]
        if hasattr(arg, "tensor")
    }
    assert row.sets == len(sets) and len(used) in (0, row.sets)  # every weight has had its turn


def test_what_a_variant_cannot_make_is_refused_before_measuring(gpu: FakeGpu) -> None:
    cases = linear.cases(Wanted("0.6b", (16,), ("forward",), ("kv",), "float32"))
    with pytest.raises(InputError, match=r"no variant fits \(forced: wgmma"):
        Bench(gpu, cases, [Ours("ours", {"linear": "wgmma"})])
    assert gpu.now == 0


def test_everything_is_compiled_at_once(gpu: FakeGpu) -> None:
    cases = linear.cases(WANTED)
    with Bench(gpu, cases, [Ours("ours", {"linear": "mma"})]):
        sources = {kernel.source for kernel in gpu.compiled}
    assert MMA in sources and str(device.READ) in sources and CUBLAS not in sources
    assert Path(device.READ).is_file()


def test_what_has_no_room_is_skipped_and_said() -> None:
    gpu = FakeGpu({}, memory_bytes=(2 << 30) + (700 << 20))
    cases = linear.cases(Wanted("32b", (8192,), ("forward",), ("kv", "gate-up"), "bfloat16"))
    with Bench(gpu, cases, [Ours()]) as bench:
        rows = list(bench.run(cases))
    assert not rows[0].skipped and "are not free" in rows[1].skipped
    table = report.lines([report.values(row, 4000.0, None) for row in rows], None)
    assert "not measured: two sets of operands take" in table[-1]
    with pytest.raises(OutOfMemory, match=r"expected 2\.1 GB or more"):
        Bench(FakeGpu({}, memory_bytes=1 << 30), cases, [Ours()])


def test_a_result_unlike_the_peers_is_seen(gpu: FakeGpu) -> None:
    (case,) = linear.cases(Wanted("0.6b", (16,), ("forward",), ("kv",), "bfloat16"))
    count = 0

    def other(target: np.ndarray) -> None:
        nonlocal count
        count += 1
        target.fill(1 if count <= 2 else 1.05)  # ours reads two ends, then the peer's

    gpu.output = other
    with Bench(gpu, [case], [Ours(), peer("cublas")]) as bench:
        row = bench.row(case)
    assert row.differences["cublas"] == pytest.approx(0.05, rel=0.1) and not row.agrees
    gpu.output = lambda target: target.fill(np.nan)
    with Bench(gpu, [case], [Ours(), peer("cublas")]) as bench:
        assert not bench.row(case).agrees


def test_a_table_is_aligned_and_names_the_variant(gpu: FakeGpu) -> None:
    cases = linear.cases(WANTED)
    with Bench(gpu, cases, [Ours("ours", {"linear": "mma"}), peer("cublas")]) as bench:
        values = [report.values(row, 4000.0, "cublas") for row in bench.run(cases)]
    head, *lines = report.lines(values, "cublas")
    assert head.split() == [
        *("projection", "form", "M", "out", "in", "variant", "us", "+-%", "TFLOP/s", "GB/s", "%", "read"),
        *("cublas", "+-%", "ratio"),
    ]
    assert len(lines) == 4 and all("mma" in line and line.endswith("0.40") for line in lines)
    assert len({line.index("mma") for line in lines}) == 1 and len({len(line) for line in lines}) == 1
    assert report.summary(values)["geometric_mean"] == pytest.approx(0.4)


# ---- the command ----


@pytest.fixture
def on_fake(cli: Cli, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    from cupyllm.commands import bench as command

    monkeypatch.setattr(command, "open_gpu", lambda: gpu)
    yield cli


SMALL = ("--size", "0.6b", "--m", "1,512", "--projection", "kv,down")


def test_help_has_examples(cli: Cli) -> None:
    ran = cli("bench", "op", "--help")
    assert ran.status == 0 and "cupyllm bench op linear --peer torch" in ran.stdout and "--json" in ran.stdout
    assert "op" in cli("bench", "--help").stdout


def test_a_table(on_fake: Cli, gpu: FakeGpu) -> None:
    ran = on_fake("bench", "op", "linear", *SMALL, "--peer", "cublas", "--variant", "wgmma")
    assert ran.status == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("GPU: a fake (sm_90)") and len([line for line in lines if " wgmma " in line]) == 4
    assert "geometric mean 0.800, worst 0.800" in ran.stdout and gpu.closed


def test_json_and_a_file(on_fake: Cli, tmp_path: Path) -> None:
    out = tmp_path / "linear.json"
    ran = on_fake("bench", "op", "linear", *SMALL, "--form", "dgrad,forward", "--json", "--out", out)
    values = ran.json()
    assert ran.status == 0 and values["rows"] and values["peer"] is None and values["summary"]["rows"] == 0
    assert [row["form"] for row in values["rows"][:4]] == ["dgrad", "dgrad", "forward", "forward"]
    assert values.keys() >= {"op", "size", "dtype", "device", "read_gb_per_s", "samples", "seconds", "agrees"}
    import json

    assert json.loads(out.read_text()) == values and list(tmp_path.iterdir()) == [out]


def test_a_difference_is_status_1(on_fake: Cli, gpu: FakeGpu) -> None:
    gpu.output = lambda target: target.fill(np.nan)
    ran = on_fake("bench", "op", "linear", *SMALL, "--peer", "cublas")
    assert ran.status == 1 and "FAILED: 4 results differ from cublas's" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bench"], "expected `bench op NAME`"),
        (["bench", "op"], "NAME"),
        (["bench", "op", "convolution"], "expected one of linear, quantized_linear"),
        (["bench", "op", "linear", "--size", "7b"], "7b"),
        (["bench", "op", "linear", "--m", "0"], "'0' is no number from 1"),
        (["bench", "op", "linear", "--m", "1,,2"], "'' is no number from 1"),
        (["bench", "op", "linear", "--m", "-1"], "'-1' is no number"),
        (["bench", "op", "linear", "--m", "1e3"], "'1e3' is no number"),
        (["bench", "op", "linear", "--m", "9" * 30], "is no number from 1 to 1048576"),
        (["bench", "op", "linear", "--m", "1,16,1"], "1 is given twice"),
        (["bench", "op", "linear", "--form", "backward"], "'backward' is not one of forward"),
        (["bench", "op", "linear", "--form", "dgrad,dgrad"], "dgrad is given twice"),
        (["bench", "op", "linear", "--projection", "v"], "'v' is not one of qkv"),
        (["bench", "op", "linear", "--peer", "jax"], "jax"),
        (["bench", "op", "linear", "--dtype", "float16"], "float16"),
        (["bench", "op", "linear", "--variant", "magic"], "has no such variant, expected one of"),
        (["bench", "op", "linear", "--format", "int8"], "take bench op quantized_linear"),
        (["bench", "op", "quantized_linear", "--format", "fp8"], "'fp8' is not one of int8"),
        (["bench", "op", "quantized_linear", "--form", "wgrad"], "is frozen and has no gradient"),
        (["bench", "op", "linear", "--out", "/nonexistent/x.json"], "/nonexistent/x.json"),
        (["bench", "op", "linear", "--out", "/tmp"], "--out: /tmp is a directory"),
        (["bench", "op", "linear"], "bench measures a GPU, and there is no NVIDIA driver"),
        (["bench", "op", "linear", "--peer", "torch"], "there is no NVIDIA driver"),
    ],
    ids=lambda value: " ".join(str(word)[:20] for word in value[2:]) if isinstance(value, list) else "",
)
def test_refusals(cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str) -> None:
    from cupyllm import runtime

    monkeypatch.setattr(runtime, "ask_driver", lambda: (None, []))
    assert named in cli(*arguments).refused()
    if len(arguments) > 1:
        assert named in cli(*arguments, "--json").refused()


def test_no_torch_and_no_gpu_for_torch(on_fake: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, "torch", None)
    line = on_fake("bench", "op", "linear", "--peer", "torch").refused()
    assert "torch does not import" in line and "pip install torch, or take --peer cublas" in line
    without = SimpleNamespace(__version__="2.0+cpu", cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", without)
    assert "torch 2.0+cpu sees no GPU" in on_fake("bench", "op", "linear", "--peer", "torch").refused()


# ---- on a GPU ----


@pytest.fixture(scope="module")
def real() -> Iterator[Any]:
    from cupyllm.backend.cuda import CudaBackend

    backend = CudaBackend()
    yield backend
    backend.close()


@pytest.mark.gpu
def test_quantised_beside_unpacked(real: Any) -> None:
    cases = quantized_linear.cases(Wanted("0.6b", (1, 300), ("forward",), ("down",), "bfloat16"))
    with Bench(real, cases, [Ours(), peer("cublas")]) as bench:
        for row in bench.run(cases):
            print(row.case.name, row.variants, {n: round(t.median, 2) for n, t in row.times.items()})
            assert not row.differences and row.notes["cublas"] and not row.notes["ours"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ours_and_a_peer_agree_and_take_plausible_times(real: Any, name: str, dtype: str) -> None:
    if name == "torch":
        pytest.importorskip("torch")
    before = real._live_bytes
    cases = linear.cases(Wanted("0.6b", (1, 300), linear.FORMS, ("kv",), dtype))
    with Bench(real, cases, [Ours(), peer(name)]) as bench:
        assert bench.read_gb_per_s > 50
        for row in bench.run(cases):
            print(row.case.name, row.variants, {n: round(t.median, 2) for n, t in row.times.items()}, row.differences)
            assert row.agrees, row.differences
            assert all(len(times.us) == bench.samples and 0.5 < times.median < 1e5 for times in row.times.values())
            assert row.case.cost.bytes / row.times["ours"].median / 1e3 < 1.5 * bench.read_gb_per_s, "from a cache"
    assert real._live_bytes <= before + 64 * (1 << 20)


def test_torch_is_not_imported_for_nothing() -> None:
    import subprocess
    import sys

    code = "import sys, cupyllm.bench.peers, cupyllm.commands.bench; assert not {'torch', 'cupy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert Torch.name == "torch"
