"""What commands promise: keys, files, exit statuses, one JSON object on stdout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from cupyllm import check, ops
from cupyllm.backend.base import Backend
from cupyllm.engine import IGNORE_INDEX
from cupyllm.errors import CheckpointError
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.names import streamed_names
from cupyllm.reference import qwen3
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.stream.safetensors import SafetensorsFile, save_file
from cupyllm.synth import synthesize
from cupyllm.text import BUILTIN_TEXT, open_codec
from tests.cli.conftest import Cli, tiny_config

FORWARD_KEYS = {
    "backend",
    "device",
    "dtype",
    "layers",
    "tokens",
    "loss",
    "top_tokens",
    "seconds",
    "tokens_per_s",
    "streamed_bytes",
    "stream_gb_per_s",
    "peak_device_bytes",
    "peak_allocator_bytes",
    "peak_host_bytes",
    "peak_host_file_bytes",
    "lossless",
}


def save_ids(path: Path, ids: Any) -> Path:
    np.save(path, np.asarray(ids))
    return path


# ---- forward


@pytest.mark.parametrize("value", [math.nan, 3e38])
def test_weights_that_are_no_numbers_are_told(
    cli: Cli, tiny: Path, tmp_path: Path, value: float, recwarn: pytest.WarningsRecorder
) -> None:
    """NaN is there from the start; 3e38 is a number whose products are none."""
    with SafetensorsFile(tiny / "model.safetensors") as file:
        tensors = {name: np.array(file.tensor(name)) for name in file.names()}
    assert cli("forward", "--model", tiny, "--json").json()["nonfinite"] is False
    tensors["model.layers.0.mlp.down_proj.weight"][:] = value
    save_file(tiny / "model.safetensors", tensors)
    ids = save_ids(tmp_path / "ids.npy", np.arange(20))
    out = tmp_path / "g.safetensors"
    for arguments in (["forward"], ["grads", "--ids", ids, "--out", out]):
        ran = cli(*arguments, "--model", tiny, "--json")
        assert ran.status == 0 and ran.json()["nonfinite"] is True and ran.json()["loss"] is None
        assert [line for line in ran.stderr.splitlines() if line.startswith("note: NaN or infinity")]
    assert cli("generate", "--model", tiny, "--prompt", "a", "--max-tokens", 2).status == 1
    assert [str(warning.message) for warning in recwarn] == []


def test_forward_by_default(cli: Cli) -> None:
    ran = cli("forward", "--layers", 2, "--json")
    assert ran.status == 0
    result = ran.json()
    assert result.keys() >= FORWARD_KEYS
    assert (result["backend"], result["dtype"], result["layers"], result["tokens"]) == ("reference", "float32", 2, 256)
    assert result["lossless"] is None and result["peak_device_bytes"] is None
    assert abs(result["loss"] - math.log(320)) < 0.2  # random weights know nothing
    assert result["peak_host_bytes"] > 1 << 20
    assert len(result["top_tokens"]) == 5
    assert result["top_tokens"][0].keys() == {"id", "text", "probability", "logit"}
    probabilities = [token["probability"] for token in result["top_tokens"]]
    assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) < 1
    assert "RANDOM" in ran.stderr and f"{math.log(320):.4f}" in ran.stderr
    assert "UTF-8 bytes" in ran.stderr


def test_the_first_line_says_which_backend_and_why(cli: Cli) -> None:
    ran = cli("forward", "--layers", 1)
    assert ran.status == 0
    assert ran.stdout.splitlines()[0].startswith(
        "backend: reference, NumPy on the CPU, because there is no NVIDIA driver"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_streamed_bytes_are_the_headers_sum(cli: Cli, tmp_path: Path, tied: bool) -> None:
    """Layers, final norm and LM head (tied: the embedding); the embedding's rows are not counted."""
    directory = synthesize(tiny_config(tie_word_embeddings=tied), tmp_path / "m", 0)
    result = cli("forward", "--model", directory, "--json").json()
    with Checkpoint.open(directory) as checkpoint, SafetensorsFile(directory / "model.safetensors") as file:
        wanted = sum(file.info(name).num_bytes for name in streamed_names(checkpoint.config))
    assert result["streamed_bytes"] == wanted


def test_layers_takes_the_first_ones(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "logits"
    result = cli("forward", "--model", tiny, "--layers", 1, "--logits-out", out, "--json").json()
    assert result["layers"] == 1
    with Checkpoint.open(tiny, 1) as checkpoint:
        ids = open_codec(None, 300).encode(BUILTIN_TEXT)[None, :256]
        wanted = ReferenceEngine(checkpoint).forward(ids, want_logits=True).logits
    logits = np.load(out)  # under exactly that name
    assert logits.dtype == np.float32 and logits.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("ids", [[5, 7, 11, 299], [[1, 2, 3], [4, 5, 6]]])
def test_ids_and_logits(cli: Cli, tiny: Path, tmp_path: Path, ids: list[Any]) -> None:
    """The loss that is printed follows from the logits that are written."""
    path, out = save_ids(tmp_path / "ids.npy", np.array(ids, np.int32)), tmp_path / "logits.npy"
    result = cli("forward", "--model", tiny, "--ids", path, "--logits-out", out, "--json").json()
    rows = np.atleast_2d(ids)
    logits = np.load(out).astype(np.float64)
    assert logits.shape == (*rows.shape, 300)
    scores = logits[:, :-1] - np.log(np.exp(logits[:, :-1]).sum(axis=-1, keepdims=True))
    wanted = -np.take_along_axis(scores, rows[:, 1:, None], axis=-1).mean()
    # Each row's log-sum-exp and difference are rounded a few times to float32 at magnitudes below 8.
    assert abs(result["loss"] - wanted) < 8 * 4 * 2**-24
    assert result["tokens"] == rows.size and result["num_targets"] == rows.shape[0] * (rows.shape[1] - 1)
    assert result["top_tokens"][0]["id"] == int(logits[0, -1].argmax())
    assert list(tmp_path.glob(".*.tmp")) == []


def test_one_token_has_no_target(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    ids = save_ids(tmp_path / "ids.npy", [3])
    result = cli("forward", "--model", tiny, "--ids", ids, "--json").json()
    assert (result["loss"], result["num_targets"]) == (0.0, 0)


@pytest.mark.parametrize("mode", ["--stream", "--resident"])
def test_both_modes_give_the_same_bits(cli: Cli, tiny: Path, tmp_path: Path, mode: str) -> None:
    outs = [tmp_path / "a.npy", tmp_path / "b.npy"]
    assert cli("forward", "--model", tiny, "--logits-out", outs[0], mode).status == 0
    assert cli("forward", "--model", tiny, "--logits-out", outs[1]).status == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_prompt_and_prompt_file_agree(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("naïve", encoding="utf-8")
    by_text = cli("forward", "--model", tiny, "--prompt", "naïve", "--json").json()
    by_file = cli("forward", "--model", tiny, "--prompt-file", tmp_path / "p.txt", "--json").json()
    assert by_text["tokens"] == 6  # UTF-8 bytes
    assert by_text["loss"] == by_file["loss"]


def test_the_checkpoints_tokenizer_is_used_and_padding_never_wins(cli: Cli, tiny: Path) -> None:
    words = {"[UNK]": 0, "the": 1, "layer": 2, "falls": 3}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tiny / "tokenizer.json"))
    ran = cli("forward", "--model", tiny, "--prompt", "the layer falls", "--json")
    result = ran.json()
    assert result["tokens"] == 3
    assert {token["id"] for token in result["top_tokens"]} <= {0, 1, 2, 3}  # of a vocabulary of 300
    assert {token["text"] for token in result["top_tokens"]} <= set(words)
    assert "tokenizer.json" in ran.stderr and "UTF-8 bytes" not in ran.stderr


def test_check_lossless(cli: Cli, tiny: Path) -> None:
    ran = cli("forward", "--model", tiny, "--check-lossless", "--json")
    assert (ran.status, ran.json()["lossless"]) == (0, True)


def test_one_flipped_bit_in_a_slot_is_seen(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ReferenceEngine.load_layer

    def flip(self: ReferenceEngine, index: int, mode: Any) -> dict[str, np.ndarray]:
        params = load(self, index, mode)
        if mode == "stream" and index == 1:
            params["mlp.up_proj.weight"].view(np.uint8)[3, 6] ^= 1 << 5
        return params

    monkeypatch.setattr(ReferenceEngine, "load_layer", flip)
    ran = cli("forward", "--model", tiny, "--check-lossless", "--json")
    assert (ran.status, ran.json()["lossless"]) == (1, False)
    assert "NO" in cli("forward", "--model", tiny, "--check-lossless").stdout


def test_a_seed_gives_other_weights(cli: Cli) -> None:
    losses = [cli("forward", "--layers", 1, "--seed", seed, "--json").json()["loss"] for seed in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


def test_not_a_number_is_null(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ReferenceEngine.forward

    def broken(self: ReferenceEngine, *args: Any, **options: Any) -> Any:
        result = forward(self, *args, **options)
        result.loss = math.nan
        return result

    monkeypatch.setattr(ReferenceEngine, "forward", broken)
    assert cli("forward", "--model", tiny, "--json").json()["loss"] is None


# ---- grads


def test_grads_writes_every_parameter(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    ids = np.arange(24).reshape(2, 12)
    labels = ids.copy()
    labels[0, :5] = IGNORE_INDEX
    paths = [save_ids(tmp_path / "ids.npy", ids), save_ids(tmp_path / "labels.npy", labels)]
    out = tmp_path / "g.safetensors"
    ran = cli("grads", "--model", tiny, "--ids", paths[0], "--labels", paths[1], "--out", out, "--json")
    assert ran.status == 0
    wanted: dict[str, np.ndarray] = {}
    with Checkpoint.open(tiny) as checkpoint:
        engine = ReferenceEngine(checkpoint)
        loss = engine.loss_and_grads(ids, labels, lambda n, g: wanted.update({n: g.copy()})).loss
        names = checkpoint.names()
    got = load_file(out)
    assert set(got) == set(names)
    assert all(got[name].dtype == np.float32 and got[name].tobytes() == wanted[name].tobytes() for name in names)
    assert ran.json()["loss"] == loss
    assert ran.json()["num_targets"] == 18


# ---- grad-check


def test_grad_check_of_the_layer(cli: Cli) -> None:
    ran = cli("grad-check", "--layer", "--json")
    result = ran.json()
    assert (ran.status, result["ok"], result["ops"]) == (0, True, {})
    assert (result["layer"]["passed"], result["layer"]["tensors"]) == (12, 12)
    assert len(result["layer"]["errors"]) == 12 and max(result["layer"]["errors"].values()) < 1e-6
    assert "not applicable" in result["parity"]
    assert "12 of 12 tensors" in cli("grad-check", "--layer", "--op", "add").stdout


DIFFERENTIABLE = [op for op in ops.GRAPH_OPS if not ops.get(op).inference_only]


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_gradient_that_is_one_in_a_thousand_off_is_named(cli: Cli, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaling one op's backward by 1.001 fails that op, and only that one."""
    module = __import__(f"cupyllm.reference.{op}", fromlist=["backward"])
    backward = module.backward

    def scaled(*arguments: Any) -> Any:
        return tuple(None if g is None else g * g.dtype.type(1.001) for g in backward(*arguments))

    neighbour = DIFFERENTIABLE[(DIFFERENTIABLE.index(op) + 1) % len(DIFFERENTIABLE)]
    assert cli("grad-check", "--op", op, "--json").status == 0
    monkeypatch.setattr(module, "backward", scaled)
    ran = cli("grad-check", "--op", op, "--op", neighbour, "--json")
    assert (ran.status, ran.json()["failed"]) == (1, [op])
    assert f"FAILED: {op}" in cli("grad-check", "--op", op).stdout


def test_grad_check_of_an_op_without_a_gradient(cli: Cli) -> None:
    """The reference alone has nothing to compare."""
    ran = cli("grad-check", "--op", "kv_append")
    assert ran.status == 2 and "no op with a gradient" in ran.stderr
    ran = cli("grad-check", "--op", "add", "--op", "paged_attention", "--json")
    assert (ran.status, ran.json()["inference_only"]) == (0, ["paged_attention"])
    assert set(ran.json()["ops"]) == {"add"}


def test_parity_of_an_op_without_a_gradient(on_device: Cli) -> None:
    """Its outputs are compared, and the report says that only they are."""
    ran = on_device("grad-check", "--op", "kv_append", "--op", "paged_attention", "--json")
    assert (ran.status, set(ran.json()["ops"])) == (0, {"kv_append", "paged_attention"}), ran.stdout
    assert ran.json()["ops"]["paged_attention"]["worst"]["tensor"] == "output0"
    lines = on_device("grad-check", "--op", "kv_append").stdout
    assert "no gradient, for inference only: kv_append; only their outputs were compared" in lines


def test_parity_sees_a_wrong_device_gradient(on_device: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = on_device("grad-check", "--op", "add", "--op", "swiglu", "--json")
    assert (ran.status, ran.json()["parity"]) == (0, "checked"), ran.stdout
    run_op = check.run_op

    def scaled(backend: Any, op: Any, *arguments: Any, **options: Any) -> Any:
        run = run_op(backend, op, *arguments, **options)
        if op.name == "swiglu":
            run.d_inputs = [None if d is None else d * np.float32(1.001) for d in run.d_inputs]
        return run

    monkeypatch.setattr(check, "run_op", scaled)
    ran = on_device("grad-check", "--op", "add", "--op", "swiglu", "--json")
    assert (ran.status, ran.json()["failed"]) == (1, ["swiglu"])
    assert ran.json()["ops"]["swiglu"]["worst"]["check"] == "parity"


# ---- train-smoke


def test_train_smoke(cli: Cli) -> None:
    ran = cli("train-smoke", "--layers", 2, "--json")
    result = ran.json()
    assert (ran.status, result["ok"]) == (0, True)
    assert len(result["losses"]) == 11 and len(result["grad_norms"]) == len(result["clip_coefs"]) == 10
    assert all(after < before for before, after in zip(result["losses"], result["losses"][1:], strict=False))
    assert min(result["clip_coefs"]) < 1  # the clip acts by default
    assert "ok: every loss" in cli("train-smoke", "--layers", 1, "--steps", 1, "--tokens", 16).stdout


def test_a_learning_rate_of_100_fails(cli: Cli) -> None:
    ran = cli("train-smoke", "--layers", 1, "--tokens", 32, "--lr", 100, "--json")
    assert (ran.status, ran.json()["ok"]) == (1, False)
    assert ran.stderr.count("Warning") == 0


def test_a_sign_flipped_gradient_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = qwen3.layer_backward

    def flipped(*arguments: Any) -> Any:
        d_x, grads = backward(*arguments)
        return d_x, {name: -grad for name, grad in grads.items()}

    monkeypatch.setattr(qwen3, "layer_backward", flipped)
    ran = cli("train-smoke", "--layers", 2, "--tokens", 64, "--json")
    assert (ran.status, ran.json()["ok"]) == (1, False)


def test_gradients_that_are_not_finite_fail(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer gives up after three bad steps: a failed check, not an error."""
    monkeypatch.setattr(ReferenceEngine, "sum_of_squares", lambda self, grads: {name: math.inf for name in grads})
    ran = cli("train-smoke", "--layers", 1, "--tokens", 16, "--json")
    assert ran.status == 1
    assert any("non-finite gradient" in line for line in ran.json()["skipped"])
    assert ran.json()["grad_norms"] == [None, None]


def test_train_smoke_never_writes_the_checkpoint(cli: Cli, tiny: Path) -> None:
    before = (tiny / "model.safetensors").read_bytes()
    assert cli("train-smoke", "--model", tiny, "--tokens", 32, "--steps", 2).status == 0
    assert (tiny / "model.safetensors").read_bytes() == before


# ---- on a device


def test_commands_on_a_device(on_device: Cli, backend: Backend, tiny: Path, tmp_path: Path) -> None:
    """The same checkpoint, ids and command give the reference's logits and loss; bfloat16 is the default there."""
    ids, out = save_ids(tmp_path / "ids.npy", np.arange(14).reshape(2, 7)), tmp_path / "logits.npy"
    common = ("forward", "--model", tiny, "--ids", ids, "--json")
    ran = on_device(*common, "--dtype", "float32", "--check-lossless", "--logits-out", out)
    result = ran.json()
    assert (ran.status, result["lossless"], result["backend"]) == (0, True, backend.name), ran.stderr
    assert result["peak_allocator_bytes"] > 0
    with Checkpoint.open(tiny) as checkpoint:
        wanted = ReferenceEngine(checkpoint, "float64").forward(np.load(ids), labels=np.load(ids), want_logits=True)
    limit = check.LAYER_LIMIT["float32"] * 4  # two layers, embedding and head
    assert check.relative_error(np.load(out), wanted.logits) < limit
    assert result["loss"] == pytest.approx(wanted.loss, rel=limit)
    assert on_device(*common).json()["dtype"] == "bfloat16"
    trained = on_device("train-smoke", "--model", tiny, "--tokens", 16, "--steps", 2, "--dtype", "float32", "--json")
    assert (trained.status, len(trained.json()["losses"])) == (0, 3)
    plain = on_device(*common, "--dtype", "float32", "--variant", "linear=plain").json()
    assert plain["loss"] == result["loss"]


def test_one_flipped_bit_in_an_upload_is_seen(on_device: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, name, calls = Checkpoint.read_into, "model.layers.1.mlp.up_proj.weight", []

    def flip(self: Checkpoint, tensor: str, out: np.ndarray, *rest: Any) -> None:
        read(self, tensor, out, *rest)
        if tensor == name and not calls:  # the streamed pass comes first
            out[6] ^= 1 << 5
            calls.append(tensor)

    monkeypatch.setattr(Checkpoint, "read_into", flip)
    ran = on_device("forward", "--model", tiny, "--prompt", "bits", "--check-lossless", "--json")
    assert ran.status == 1, ran.stderr
    assert (ran.json()["lossless"], len(calls)) == (False, 1)


def test_an_error_in_the_middle_of_a_pass_is_the_error_shown(
    on_device: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches are queued when it is raised; cleaning up must not hide it behind an error of its own."""

    def truncated(self: Checkpoint, tensor: str, *rest: Any) -> None:
        raise CheckpointError("the file was truncated while in use")

    read = Checkpoint.read_into
    late = "lm_head.weight"
    monkeypatch.setattr(Checkpoint, "read_into", lambda s, t, *r: truncated(s, t) if t == late else read(s, t, *r))
    ran = on_device("forward", "--model", tiny, "--prompt", "bits", "--json")
    assert (ran.status, ran.stdout) == (2, "")
    assert ran.stderr.splitlines()[-1] == "cupyllm: error: the file was truncated while in use"


# ---- synth, doctor, verify


def test_synth(cli: Cli, tmp_path: Path) -> None:
    shape = ("--hidden", 32, "--layers", 2, "--heads", 4, "--kv-heads", 2, "--ffn", 48, "--vocab", 300, "--tied")
    ran = cli("synth", *shape, "--dtype", "float16", "--out", tmp_path / "m", "--json")
    assert ran.status == 0 and ran.json()["parameter_bytes"] > 0
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        config = checkpoint.config
    assert (config.head_dim, config.num_key_value_heads, config.tie_word_embeddings) == (8, 2, True)
    assert config.dtype == "float16"
    (tmp_path / "empty").mkdir()
    assert cli("synth", *shape, "--out", tmp_path / "empty").status == 0


def test_doctor(cli: Cli) -> None:
    report = cli("doctor", "--json").json()
    assert report.keys() >= {"cupyllm", "python", "packages", "driver", "gpus", "nvrtc", "cache", "problems"}
    assert report["packages"]["numpy"] == np.__version__
    table = cli("doctor", "--variants", "--json").json()["variants"]
    assert {entry["op"] for entry in table} == set(ops.GRAPH_OPS)
    assert all(entry["note"] for entry in table)
    assert "linear" in cli("doctor", "--variants").stdout


def test_doctor_clean(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli("forward", "--layers", 1).status == 0
    entry = next((tmp_path / "cupyllm" / "synthetic").iterdir())
    size = sum(path.stat().st_size for path in entry.iterdir())
    assert cli("doctor", "--clean", "--json").json()["freed_bytes"] == size
    assert not entry.exists()


def test_verify(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    ran = cli("verify", "--model", tiny, "--out", out, "--json")
    result = ran.json()
    failed = [proof for proof in result["proofs"] if not proof["ok"] and proof["name"] != "installation"]
    assert failed == []
    saved = json.loads((out / "verify.json").read_text())
    assert saved["proofs"] == result["proofs"]
    weights = next(proof for proof in saved["proofs"] if proof["name"] == "weights")["details"]["tensors"]
    with Checkpoint.open(tiny) as checkpoint:
        name = "model.layers.1.mlp.down_proj.weight"
        values = checkpoint.tensor(name).astype(np.float64)
    assert weights[name]["std"] == pytest.approx(values.std(), rel=1e-6)
    assert (weights[name]["min"], weights[name]["max"], weights[name]["nonfinite"]) == (values.min(), values.max(), 0)
    page = (out / "verify.md").read_text()
    assert name in page and "streamed = resident" in page


def test_verify_finds_a_weight_that_is_not_finite(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    path = tiny / "model.safetensors"
    with SafetensorsFile(path) as file:
        at = file.info("model.layers.1.mlp.up_proj.weight").begin
    data = bytearray(path.read_bytes())
    data[at : at + 2] = b"\xc0\x7f"  # a bfloat16 NaN
    path.write_bytes(data)
    ran = cli("verify", "--model", tiny, "--out", tmp_path / "report", "--json")
    assert ran.status == 1
    assert any("model.layers.1.mlp.up_proj.weight" in error for error in ran.json()["errors"])
