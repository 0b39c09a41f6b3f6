"""`cupyllm generate`: what it answers, how it says it, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.commands.generation import parse_size
from cupyllm.errors import InputError
from cupyllm.model.tokenizer import Tokenizer
from cupyllm.reference.runner import ReferenceRunner
from cupyllm.serve.runner import StepBatch
from tests.cli.conftest import Cli, Ran
from tests.goldens import FIXTURES, load

H1 = FIXTURES / "goldens" / "h1"
KEYS = {"prompt_ids", "ids", "text", "finish_reason", "logprobs", "seconds", "ttft_seconds", "tokens_per_s"}
TOKENIZER_SIZE, VOCAB = 296, 320
GREEDY = load(H1)[0]["greedy_ids"][0].tolist()  # 8 ids and their continuation by transformers
IDS = ",".join(map(str, GREEDY[:8]))


def make_talker(directory: Path) -> Path:
    """A checkpoint with weights, tokenizer and chat template."""
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(H1 / name, directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / "tokenizer" / name, directory)
    return directory


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    return make_talker(tmp_path / "talker")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def objects(ran: Ran, status: int = 0) -> list[dict[str, Any]]:
    """stdout as one JSON object a line."""
    assert ran.status == status, ran.stderr
    lines = ran.stdout.splitlines()
    return [json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON")) for line in lines]


def one(ran: Ran) -> dict[str, Any]:
    [value] = objects(ran)
    return value


def record_steps(monkeypatch: pytest.MonkeyPatch, change: Any = None) -> list[StepBatch]:
    """The reference's steps as they are taken; `change(number, logits)` gives what they return."""
    steps: list[StepBatch] = []
    step = ReferenceRunner.step

    def recorded(self: ReferenceRunner, batch: StepBatch) -> np.ndarray:
        steps.append(batch)
        logits = step(self, batch)
        return logits if change is None else change(len(steps), logits)

    monkeypatch.setattr(ReferenceRunner, "step", recorded)
    return steps


# ---- what is generated


@pytest.mark.parametrize("mode", ["--stream", "--resident"])
def test_greedy_ids_are_those_of_transformers(cli: Cli, mode: str) -> None:
    ran = cli("generate", "--model", H1, "--ids", IDS, "--greedy", "--ignore-eos", "--max-tokens", 24, mode, "--json")
    result = one(ran)
    assert result.keys() >= KEYS
    assert (result["prompt_ids"], result["ids"]) == (GREEDY[:8], GREEDY[8:])
    assert (result["finish_reason"], result["logprobs"]) == ("length", None)
    assert 0 < result["ttft_seconds"] < result["seconds"] and result["tokens_per_s"] > 0
    assert "UTF-8 bytes as ids" in ran.stderr and f"weights: {mode[2:]}" in ran.stderr and "greedy" in ran.stderr


@pytest.mark.parametrize("kv_memory", [None, "0", "200kiB"])
def test_on_a_device(on_device: Cli, kv_memory: str | None) -> None:
    """The same ids, wherever the pages lie. A page of the three layers has 96 KiB, and one page is enough."""
    option = [] if kv_memory is None else ["--kv-memory", kv_memory]
    arguments = ("--model", H1, "--ids", IDS, "--greedy", "--ignore-eos", "--max-tokens", 24, "--json")
    ran = on_device("generate", *arguments, *option)
    assert one(ran)["ids"] == GREEDY[8:]
    assert ("travels" in ran.stderr) == (kv_memory == "0") and "weights: resident" in ran.stderr


def test_text_comes_with_its_tokens(cli: Cli, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two steps, all text that was certain has been written and flushed."""
    seen: list[str] = []
    step = ReferenceRunner.step

    def watched(self: ReferenceRunner, batch: StepBatch) -> np.ndarray:
        seen.append(sys.stdout.buffer.getvalue().decode())  # type: ignore[attr-defined]
        return step(self, batch)

    monkeypatch.setattr(ReferenceRunner, "step", watched)
    arguments = ("generate", "--model", talker, "--prompt", "the thing", "--greedy", "--max-tokens", 12, "--ignore-eos")
    ran = cli(*arguments)
    result = one(cli(*arguments, "--json"))
    assert ran.status == 0
    head, _, tail = ran.stdout.partition(result["text"])
    assert head.splitlines()[0].startswith("backend: reference") and tail.startswith("\n-- length after 12 tokens")
    tokenizer = Tokenizer.open(talker)
    for number, written in enumerate(seen[:12]):
        stream = tokenizer.detokenizer()
        assert written == head + stream.extend(result["ids"][:number])
    assert len(set(seen[:12])) > 6


def test_prompts_of_a_file(cli: Cli, talker: Path, tmp_path: Path) -> None:
    """One a line, shown in order whoever ends first; a line ends with LF or CRLF and nothing else."""
    (tmp_path / "p.txt").write_bytes("the one\r\na\u2028b\nthing".encode())
    arguments = ("generate", "--model", talker, "--prompt-file", tmp_path / "p.txt", "--greedy", "--max-tokens", 20)
    results = objects(cli(*arguments, "--json"))
    tokenizer = Tokenizer.open(talker)
    texts = ["the one", "a\u2028b", "thing"]
    assert [r["prompt_ids"] for r in results] == [tokenizer.encode(text) for text in texts]
    assert [(r["prompt"], r["index"]) for r in results] == [(0, 0), (1, 0), (2, 0)]
    for text, result in zip(texts, results, strict=True):  # each as if it were alone
        alone = one(cli("generate", "--model", talker, "--prompt", text, "--greedy", "--max-tokens", 20, "--json"))
        assert (alone["ids"], alone["text"]) == (result["ids"], result["text"])
    lines = cli(*arguments).stdout.splitlines()
    headers = [line for line in lines if line.startswith("== ")]
    assert headers == [f"== prompt {i}, choice 1" for i in (1, 2, 3)]


def test_ids_of_a_file(cli: Cli, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([GREEDY[:8], GREEDY[4:12]]))
    arguments = ("--model", H1, "--ids", tmp_path / "ids.npy", "--greedy", "--ignore-eos", "--max-tokens", 6, "--json")
    results = objects(cli("generate", *arguments))
    assert [r["prompt_ids"] for r in results] == [GREEDY[:8], GREEDY[4:12]]
    assert results[0]["ids"] == GREEDY[8:14]


# ---- chat templates


def test_chat(cli: Cli, talker: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(talker)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(messages))
    for option, think in (((), None), (("--think",), True), (("--no-think",), False)):
        for given, wanted in (("hi", messages[1:]), (path, messages)):
            result = one(cli("generate", "--model", talker, "--chat", given, *option, "--max-tokens", 1, "--json"))
            assert result["prompt_ids"] == tokenizer.encode_chat(wanted, enable_thinking=think)
    tools = [{"type": "function", "function": {"name": "f", "description": "<>", "parameters": {}}}]
    path.write_text(json.dumps({"messages": messages, "tools": tools}))
    result = one(cli("generate", "--model", talker, "--chat", path, "--max-tokens", 1, "--json"))
    assert result["prompt_ids"] == tokenizer.encode_chat(messages, tools=tools)


# ---- how an answer ends


def test_stop_ids_end_it_and_are_no_part_of_it(cli: Cli, talker: Path) -> None:
    """generation_config.json names one more than the tokenizer does."""
    base = ("generate", "--model", talker, "--prompt", "the", "--greedy", "--max-tokens", 8, "--json")
    free = one(cli(*base, "--ignore-eos"))["ids"]
    change(talker / "generation_config.json", eos_token_id=[free[3]])
    result = one(cli(*base))
    assert (result["ids"], result["finish_reason"]) == (free[: free.index(free[3])], "stop")
    assert one(cli(*base, "--ignore-eos"))["ids"] == free
    change(talker / "generation_config.json", eos_token_id=[free[0]])  # at once
    result = one(cli(*base))
    assert (result["ids"], result["text"], result["tokens_per_s"]) == ([], "", None)
    assert result["ttft_seconds"] > 0


def test_stop_strings(cli: Cli, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is made to say "abXYcd"; the stop string lies across tokens."""

    def say(number: int, logits: np.ndarray) -> np.ndarray:
        logits[:] = 0
        logits[:, ord("abXYcd"[(number - 1) % 6])] = 9
        return logits

    steps = record_steps(monkeypatch, say)
    base = ("generate", "--model", talker, "--prompt", "the", "--greedy", "--max-tokens", 6)
    result = one(cli(*base, "--stop", "XY", "--stop", "never", "--json"))
    assert (result["text"], result["finish_reason"], len(result["ids"])) == ("ab", "stop", 4)
    steps.clear()
    assert "\nab\n-- stop after 4 tokens" in cli(*base, "--stop", "XY").stdout


def test_the_models_end(cli: Cli, talker: Path) -> None:
    """max_position_embeddings cuts what --max-tokens would allow."""
    change(talker / "config.json", max_position_embeddings=12)
    result = one(cli("generate", "--model", talker, "--ids", IDS, "--ignore-eos", "--max-tokens", 50, "--json"))
    assert (len(result["ids"]), result["finish_reason"]) == (4, "length")


def test_logits_that_are_no_numbers(cli: Cli, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence ends with an error and the exit status is 1; the other goes on."""

    def spoil(number: int, logits: np.ndarray) -> np.ndarray:
        if number == 3:
            logits[0] = np.nan
        return logits

    record_steps(monkeypatch, spoil)
    base = ("generate", "--model", talker, "--prompt", "the", "--n", 2, "--max-tokens", 6, "--ignore-eos", "--json")
    results = objects(cli(*base), status=1)
    assert [r["finish_reason"] for r in results] == ["error", "length"]
    assert "NaN" in results[0]["error"] and "error" not in results[1]
    assert [len(r["ids"]) for r in results] == [2, 6]


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_shows_what_there_is(cli: Cli, talker: Path, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(number: int, logits: np.ndarray) -> np.ndarray:
        if number == 5:
            signal.raise_signal(signal.SIGINT)
        return logits

    before = signal.getsignal(signal.SIGINT)
    record_steps(monkeypatch, interrupt)
    base = ("generate", "--model", talker, "--prompt", "the", "--ignore-eos")
    ran = cli(*base, "--json") if as_json else cli(*base)
    assert ran.status == 130 and ran.stderr.splitlines()[-1] == "cupyllm: error: interrupted"
    if as_json:
        [result] = objects(ran, status=130)
        assert (result["finish_reason"], len(result["ids"])) == ("cancelled", 5)
    else:
        assert "\n-- cancelled after 5 tokens" in ran.stdout
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reader_that_goes_away(talker: Path) -> None:
    """Exit status 141 and no traceback, in the middle of an answer too."""
    code = "import sys; from cupyllm.cli import cli; cli.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "generate", "--model", str(talker), "--prompt", "the", "--ignore-eos"]
    options = ["--backend", "reference", "--max-tokens", "400"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


# ---- sampling


def test_generation_config_decides_and_options_replace(cli: Cli, talker: Path) -> None:
    """The golden's has do_sample true, temperature 0.6, top-k 20 and top-p 0.95."""
    base = ("generate", "--model", talker, "--prompt", "the", "--max-tokens", 12, "--ignore-eos", "--json")
    ran = cli(*base, "--seed", 5)
    assert "sampling: temperature 0.6, top-k 20, top-p 0.95, seed 5, as generation_config.json says" in ran.stderr
    assert one(cli(*base, "--seed", 5))["ids"] == one(ran)["ids"]
    stated = ("--temperature", 0.6, "--top-k", 20, "--top-p", 0.95)
    assert one(cli(*base, "--seed", 5, *stated))["ids"] == one(ran)["ids"]
    hot = cli(*base, "--seed", 5, "--temperature", 3, "--top-k", 0)
    assert "temperature 3, top-p 0.95, seed 5, as asked" in hot.stderr and one(hot)["ids"] != one(ran)["ids"]
    greedy = one(cli(*base, "--greedy"))
    assert greedy["seed"] is None
    for option in (("--temperature", 0), ("--top-k", 1), ("--top-p", 0)):
        assert one(cli(*base, *option))["ids"] == greedy["ids"]
    change(talker / "generation_config.json", do_sample=False)
    ran = cli(*base)
    assert one(ran)["ids"] == greedy["ids"] and "greedy, generation_config.json asks for no sampling" in ran.stderr
    assert one(cli(*base, "--min-p", 0.1))["seed"] is not None  # asks for sampling
    (talker / "generation_config.json").unlink()
    assert one(cli(*base))["ids"] == greedy["ids"]
    punished = one(cli(*base, "--repetition-penalty", 5))["ids"]  # and is greedy all the same
    assert punished == one(cli(*base, "--repetition-penalty", 5))["ids"] and len(set(punished)) == 12


def test_without_a_seed_another_one_is_drawn_and_told(cli: Cli, talker: Path) -> None:
    base = ("generate", "--model", talker, "--prompt", "the", "--max-tokens", 8, "--ignore-eos", "--json")
    first, second = one(cli(*base)), one(cli(*base))
    assert first["seed"] != second["seed"]
    assert one(cli(*base, "--seed", first["seed"]))["ids"] == first["ids"]


def test_n_choices(cli: Cli, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case G5: distinct and repeatable, equal when greedy, the prompt computed once; one stop ends one choice."""
    steps = record_steps(monkeypatch, lambda number, logits: np.zeros_like(logits))
    base = ("generate", "--model", talker, "--prompt", "the thing", "--max-tokens", 16, "--ignore-eos", "--json")
    sampled = ("--n", 4, "--seed", 7, "--temperature", 1, "--top-k", 0, "--top-p", 1)
    results = objects(cli(*base, *sampled))
    assert [r["index"] for r in results] == [0, 1, 2, 3] and [r["seed"] for r in results] == [7, 8, 9, 10]
    assert len({tuple(r["ids"]) for r in results}) == 4
    prompt = len(results[0]["prompt_ids"])
    assert sum(len(step.ids) for step in steps) == prompt + 4 * 15
    assert [r["ids"] for r in objects(cli(*base, *sampled))] == [r["ids"] for r in results]
    equal = objects(cli(*base, "--n", 4, "--temperature", 0))
    assert [r["ids"] for r in equal] == [[0] * 16] * 4  # ties go to the lowest id
    text = results[2]["text"]
    stop = next(
        text[i : i + 2] for i in range(2, 12) if all(text[i : i + 2] not in results[k]["text"] for k in (0, 1, 3))
    )
    stopped = objects(cli(*base, *sampled, "--stop", stop))
    assert stopped[2]["finish_reason"] == "stop" and stopped[2]["text"] == text[: text.index(stop)]
    assert stopped[2]["ids"] == results[2]["ids"][: len(stopped[2]["ids"])] and len(stopped[2]["ids"]) < 16
    assert [stopped[i]["ids"] for i in (0, 1, 3)] == [results[i]["ids"] for i in (0, 1, 3)]


def test_more_sequences_than_a_step_takes(cli: Cli, talker: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    base = ("generate", "--model", talker, "--prompt-file", tmp_path / "p.txt", "--max-tokens", 2, "--json")
    results = objects(cli(*base, "--n", 30, "--seed", 1))
    assert [(r["prompt"], r["index"]) for r in results] == [(p, i) for p in range(3) for i in range(30)]


def test_padding_ids_are_never_generated(cli: Cli, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they are the likeliest; without a tokenizer nothing says that they are padding."""

    def prefer_padding(number: int, logits: np.ndarray) -> np.ndarray:
        logits[:, TOKENIZER_SIZE:] += 50
        return logits

    record_steps(monkeypatch, prefer_padding)
    base = ("--ids", IDS, "--n", 8, "--seed", 1, "--temperature", 2, "--ignore-eos", "--max-tokens", 12, "--json")
    results = objects(cli("generate", "--model", talker, *base, "--logprobs", 1))
    assert max(max(r["ids"]) for r in results) < TOKENIZER_SIZE
    assert results[0]["logprobs"][0]["top"][0]["token"] == f"<{results[0]['logprobs'][0]['top'][0]['id']}>"
    results = objects(cli("generate", "--model", H1, *base))
    assert min(min(r["ids"]) for r in results) >= TOKENIZER_SIZE


def test_logprobs(cli: Cli, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the model's own softmax."""
    kept: list[np.ndarray] = []

    def keep(number: int, logits: np.ndarray) -> np.ndarray:
        kept.append(logits[0].astype(np.float64))
        return logits

    record_steps(monkeypatch, keep)
    base = ("generate", "--model", talker, "--prompt", "the", "--max-tokens", 5, "--ignore-eos", "--seed", 1)
    result = one(cli(*base, "--logprobs", 3, "--json"))
    assert [entry["id"] for entry in result["logprobs"]] == result["ids"]
    for entry, logits in zip(result["logprobs"], kept, strict=True):
        wanted = logits - np.log(np.exp(logits).sum())
        # Both are computed in float64 from the same logits of magnitude below 32: a few roundings apart.
        assert abs(entry["logprob"] - wanted[entry["id"]]) < 32 * 2**-48
        assert [top["id"] for top in entry["top"]] == np.argsort(-wanted, kind="stable")[:3].tolist()
        assert {"id", "token", "logprob"} == entry["top"][0].keys()
    assert [entry["top"] for entry in one(cli(*base, "--logprobs", 0, "--json"))["logprobs"]] == [[]] * 5
    assert sum("   of " in line for line in cli(*base, "--logprobs", 3).stdout.splitlines()) == 5


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "expected --prompt, --prompt-file, --ids or --chat"),
        (["--prompt", ""], "--prompt is empty"),
        (["--chat", " "], "--chat is empty"),
        (["--chat", ""], "--chat is empty"),
        (["--prompt", "a", "--chat", "b"], "--prompt and --chat"),
        (["--prompt", "", "--ids", "1"], "--prompt and --ids"),
        (["--prompt", "x" * 512], "512 tokens"),
        (["--chat", "x" * 512], "max_position_embeddings"),
        (["--ids", ",".join(["1"] * 600)], "600 tokens"),
        (["--ids", "1,2,320"], "id 320 at position 2"),
        (["--ids", "-1"], "id -1 at position 0"),
        (["--ids", "1,x"], "1,x"),
        (["--ids", "/nonexistent.npy"], "/nonexistent.npy does not exist"),
        (["--prompt-file", "/nonexistent"], "/nonexistent does not exist"),
        (["--chat", "/nonexistent.json"], "/nonexistent.json does not exist"),
        (["--prompt", "a\udcff"], "not valid UTF-8"),
        (["--prompt", "a", "--temperature", "-1"], "temperature: got -1.0"),
        (["--prompt", "a", "--temperature", "nan"], "temperature: got nan"),
        (["--prompt", "a", "--temperature", "warm"], "warm"),
        (["--prompt", "a", "--top-p", "1.5"], "top-p: got 1.5"),
        (["--prompt", "a", "--top-k", "-1"], "top-k: got -1"),
        (["--prompt", "a", "--min-p", "-0.1"], "min-p: got -0.1"),
        (["--prompt", "a", "--repetition-penalty", "0"], "repetition-penalty: got 0.0"),
        (["--prompt", "a", "--seed", "-1"], "seed: got -1"),
        (["--prompt", "a", "--seed", str(2**64)], "seed: got 18446744073709551616"),
        (["--prompt", "a", "--greedy", "--temperature", "0"], "--greedy and --temperature"),
        (["--prompt", "a", "--greedy", "--top-k", "3"], "--greedy and --top-k"),
        (["--prompt", "a", "--n", "0"], "--n"),
        (["--prompt", "a", "--n", "65"], "1<=x<=64"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens"),
        (["--prompt", "a", "--logprobs", "-1"], "--logprobs"),
        (["--prompt", "a", "--stop", ""], "stop: got an empty string"),
        (["--prompt", "a", "--kv-memory", "much"], "--kv-memory: got 'much'"),
        (["--prompt", "a", "--kv-memory", "-1"], "--kv-memory: got '-1'"),
        (["--prompt", "a", "--kv-memory", "1kB"], "--kv-memory: got 1000 bytes, expected at least"),
        (["--prompt", "a", "--think"], "expected --chat"),
        (["--prompt", "a", "--backend", "cuda"], "libcuda.so.1"),
        (["--prompt", "a", "--dtype", "bfloat16"], "bfloat16"),
    ],
    ids=lambda value: " ".join(str(word)[:20] for word in value) if isinstance(value, list) else "",
)
def test_refusals(cli: Cli, talker: Path, arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceRunner, "step", lambda *_: pytest.fail("work began before the input was refused"))
    assert named in cli("generate", "--model", talker, *arguments).refused()
    ran = cli("generate", "--model", talker, *arguments, "--json")
    assert ran.status == 2 and ran.stdout == "" and len(ran.stderr.splitlines()) == 1


def test_models_that_cannot_be_had(cli: Cli, tmp_path: Path) -> None:
    assert "--model" in cli("generate", "--prompt", "a").refused()
    assert "/nonexistent/dir" in cli("generate", "--model", "/nonexistent/dir", "--prompt", "a").refused()
    assert "hf download Qwen/Qwen3-0.6B" in cli("generate", "--model", "Qwen/Qwen3-0.6B", "--prompt", "a").refused()


def test_chats_that_are_none(cli: Cli, talker: Path, tmp_path: Path) -> None:
    assert "no chat template" in cli("generate", "--model", H1, "--chat", "hi").refused()
    path = tmp_path / "m.json"
    for content, named in (
        ("[", "is not valid JSON"),
        ('{"a": 1}', "no list of messages"),
        ("[]", "messages is empty"),
        ('["hi"]', "messages[0]"),
        ('[{"role": "wizard", "content": "hi"}]', "messages[0].role is 'wizard'"),
        ('[{"role": "user"}]', "messages[0].content is missing"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "image_url"),
    ):
        path.write_text(content)
        assert named in cli("generate", "--model", talker, "--chat", path).refused()
    change(talker / "tokenizer_config.json", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    line = cli("generate", "--model", talker, "--chat", "hi", "--no-think").refused()
    assert "--no-think" in line and "enable_thinking" in line


def test_a_prompt_file_with_an_empty_line(cli: Cli, talker: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    for content, named in ((b"a\n\nb\n", "line 2"), (b"", "is empty"), (b"a\n\n", "line 2"), (b"a\xff", "byte 1")):
        path.write_bytes(content)
        assert named in cli("generate", "--model", talker, "--prompt-file", path).refused()


def test_a_generation_config_that_is_wrong(cli: Cli, talker: Path) -> None:
    for values, named in (({"top_p": 2.0}, "top-p: got 2.0"), ({"temperature": "hot"}, "temperature is 'hot'")):
        change(talker / "generation_config.json", **values)
        line = cli("generate", "--model", talker, "--prompt", "a").refused()
        assert "generation_config.json" in line and named in line
        change(talker / "generation_config.json", top_p=1.0, temperature=1.0)


def test_resident_weights_that_cannot_fit(cli: Cli, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyllm.commands.generation.available_bytes", lambda: 850_000)
    line = cli("generate", "--model", talker, "--prompt", "a", "--resident").refused()
    assert "--resident" in line and "--stream" in line
    ran = cli("generate", "--model", talker, "--prompt", "a", "--max-tokens", 2)
    assert ran.status == 0 and "weights: stream" in ran.stdout and "850.00 kB of host memory are free" in ran.stdout


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", 0),
        ("1000", 1000),
        ("10B", 10),
        ("2GB", 2 * 10**9),
        ("512MiB", 2**29),
        ("1.5g", 15 * 10**8),
        ("3 kib", 3072),
    ],
)
def test_sizes(text: str, wanted: int) -> None:
    assert parse_size(text, "--x") == wanted


@pytest.mark.parametrize("text", ["", "x", "1 apple", "GB", "1e9", "-5", "1..2", "nan", "٣"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--x: got"):
        parse_size(text, "--x")
