"""`--backend sim`: each command gives what the reference gives, by the GPU's kernels; faults in them are said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cupyllm import check, doctor, verify
from cupyllm.backend.base import Launch
from cupyllm.runtime import Runtime
from cupyllm.sim.machine import Simulator
from cupyllm.sim.report import Reports, Site
from tests.cli.conftest import Cli, Ran
from tests.cli.test_generate import GREEDY, H1, IDS, make_talker
from tests.simulated import share_kernels

LIMIT = check.LAYER_LIMIT["float32"] * 4  # tiny's two layers, embedding and head
IDS_2X7 = np.arange(14).reshape(2, 7)


@pytest.fixture
def sim(cli: Cli, shared_cache: Path) -> Cli:
    """The command line with --backend sim; compiled kernels stay between test runs."""
    share_kernels(shared_cache / "cupyllm")
    return lambda *arguments, **options: cli(*arguments, "--backend", "sim", **options)


def in_json(ran: Ran, status: int = 0) -> dict[str, Any]:
    assert ran.status == status, ran.stderr
    return ran.json()


def test_forward(sim: Cli, cli: Cli, tiny: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", IDS_2X7)
    common = ("forward", "--model", tiny, "--ids", tmp_path / "ids.npy", "--json")
    ran = sim(*common, "--dtype", "float32", "--check-lossless", "--logits-out", tmp_path / "sim.npy")
    result, wanted = in_json(ran), cli(*common, "--logits-out", tmp_path / "reference.npy").json()
    assert ran.stderr.splitlines()[0] == "backend: sim, PTX simulator (NumPy), kernels as on sm_80, as asked"
    assert (result["backend"], result["device"], result["lossless"]) == ("sim", "PTX simulator (NumPy)", True)
    assert result["peak_allocator_bytes"] > 0 and result["peak_device_bytes"] is None
    assert result["loss"] == pytest.approx(wanted["loss"], rel=LIMIT)
    assert check.relative_error(np.load(tmp_path / "sim.npy"), np.load(tmp_path / "reference.npy")) < LIMIT
    assert in_json(sim(*common))["dtype"] == "bfloat16", "the default of a device with 16-bit weights"
    assert in_json(sim(*common, "--dtype", "float32", "--variant", "linear=plain"))["loss"] == result["loss"]


def test_grads(sim: Cli, cli: Cli, tiny: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", IDS_2X7)
    common = ("grads", "--model", tiny, "--ids", tmp_path / "ids.npy", "--json", "--dtype", "float32")
    assert in_json(sim(*common, "--out", tmp_path / "sim.safetensors"))["backend"] == "sim"
    assert cli(*common, "--out", tmp_path / "reference.safetensors").status == 0
    got, want = load_file(tmp_path / "sim.safetensors"), load_file(tmp_path / "reference.safetensors")
    assert got.keys() == want.keys() and got
    for name, gradient in want.items():
        assert check.relative_error(got[name], gradient.astype(np.float64)) < LIMIT, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grad_check(sim: Cli, dtype: str) -> None:
    result = in_json(sim("grad-check", "--op", "add", "--op", "swiglu", "--layer", "--dtype", dtype, "--json"))
    assert (result["backend"], result["parity"], result["failed"]) == ("sim", "checked", [])
    assert result["layer"]["passed"] == result["layer"]["tensors"] > 0


def test_train_smoke(sim: Cli, cli: Cli, tiny: Path) -> None:
    common = ("train-smoke", "--model", tiny, "--tokens", 16, "--steps", 2, "--dtype", "float32", "--json")
    result, wanted = in_json(sim(*common)), cli(*common).json()
    np.testing.assert_allclose(result["losses"], wanted["losses"], rtol=1e-5)


def test_generate(sim: Cli) -> None:
    """The ids that transformers continues with."""
    arguments = ("--model", H1, "--ids", IDS, "--greedy", "--ignore-eos", "--max-tokens", 4, "--json")
    ran = sim("generate", *arguments)
    assert in_json(ran)["ids"] == GREEDY[8:12] and "weights: resident" in ran.stderr


def test_chat(sim: Cli, cli: Cli, tmp_path: Path) -> None:
    common = ("chat", "--model", make_talker(tmp_path / "talker"), "--greedy", "--max-tokens", 3, "--dtype", "float32")
    ran, wanted = (run(*common, "--json", stdin="the thing\n") for run in (sim, cli))
    answer, expected = (json.loads(text.stdout) for text in (ran, wanted))
    assert ran.status == 0 and answer["ids"] == expected["ids"] and len(answer["ids"]) == 3


# ---- what is found, and what is refused


def found(kernel: str) -> None:
    """Two reports, as a launch ends with."""
    reports = Reports()
    for number in (1, 2):
        reports.add("race", Site(kernel, f"ld.shared.f32 %f{number}, [%r1]", ()), 0, number, f"tile[{number}]")
    reports.raise_if_any()


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_a_fault_in_a_kernel_is_a_line_a_finding_and_status_1(
    sim: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch, json_option: list[str]
) -> None:
    run = Simulator.launch

    def launch(self: Simulator, module: Any, launch: Launch) -> None:
        if "swiglu" in launch.kernel.symbol:
            found(launch.kernel.symbol)
        run(self, module, launch)

    monkeypatch.setattr(Simulator, "launch", launch)
    ran = sim("forward", "--model", tiny, "--prompt", "a", "--dtype", "float32", *json_option)
    lines = ran.stderr.splitlines()[-2:]
    assert ran.status == 1
    assert ran.stdout == "" if json_option else "loss" not in ran.stdout
    assert lines[0].startswith("cupyllm: error: node swiglu: race in shared memory: swiglu_forward_float32, CTA")
    assert "tile[1]" in lines[0]
    assert lines[1].startswith("  node swiglu: race in shared memory: swiglu_forward_float32") and "tile[2]" in lines[1]


def test_a_fault_is_a_proof_that_does_not_hold(sim: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "launch", lambda self, module, launch: found(launch.kernel.symbol))
    ran = sim("verify", "--out", tmp_path / "report", "--json")
    assert ran.status == 1
    errors = ran.json()["errors"]
    assert any(error.startswith("training (float32): node ") and "race in shared memory" in error for error in errors)


@pytest.mark.parametrize(("name", "amount"), [("sim", verify.SIMULATED), ("cuda", verify.FULL)])
def test_verify_does_less_there(name: str, amount: verify.Amount, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(source: Any, runtime: Any, dtype: str, batch: np.ndarray, *, steps: int) -> dict[str, Any]:
        assert (batch.shape, steps) == ((1, amount.smoke_tokens), amount.smoke_steps)
        return {"losses": [2.0, 1.0], "ok": True}

    monkeypatch.setattr(verify.train_smoke, "train", train)
    proof = verify._training(Runtime(name, "for a test"), "float32")
    assert proof.ok and f"in {amount.smoke_steps} steps" in proof.line


def test_a_variant_of_a_newer_gpu_is_refused_and_never_replaced(sim: Cli, tiny: Path) -> None:
    line = sim("forward", "--model", tiny, "--variant", "linear=wgmma").refused()
    assert "--variant linear=wgmma with --backend sim: it needs sm_90 and is not simulated" in line
    assert sim("train-smoke", "--model", tiny, "--variant", "linear=wgmma").refused()
    simulated = {entry["variant"]: entry["simulated"] for entry in doctor.variants() if entry["op"] == "linear"}
    assert simulated == {
        **dict.fromkeys(("rows", "mma", "tf32x3", "plain"), True),
        **dict.fromkeys(("skinny", "wgmma", "cublas"), False),
    }


def test_doctor_says_whether_it_can_run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("doctor", "--json").json()["simulator"] is True
    assert "simulator (--backend sim): can run" in cli("doctor").stdout
    assert cli("doctor", "--variants").stdout.splitlines()[0].split() == [
        *("op", "variant", "file", "from", "simulated", "note")
    ]
    monkeypatch.setattr("cupyllm.doctor._nvrtc", lambda: (None, "no libnvrtc"))
    assert cli("doctor", "--json").json()["simulator"] is False
    assert "simulator (--backend sim): cannot run: it needs CuPy and NVRTC" in cli("doctor").stdout


def test_without_nvrtc_the_choice_is_refused(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    line = cli("forward", "--model", tiny, "--backend", "sim").refused()
    assert "--backend sim" in line and "pip install 'cupyllm[cuda12]'" in line
