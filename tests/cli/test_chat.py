"""`cupyllm chat`: turns, commands, what is computed anew, and the terminal."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.commands.chat import DIM, PLAIN, _Dimmer
from cupyllm.model.tokenizer import Tokenizer
from tests.cli.conftest import Cli
from tests.cli.test_generate import change, make_talker, objects, record_steps

PAGE = 64
READS = "\x1b[?2004h"  # bracketed paste is switched on whenever a line is to be read
SYSTEM = "You are the one who answers in another tone. " * 4


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    return make_talker(tmp_path / "talker")


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    """say("ab", "c"): the model's answers, byte by byte, each ended by <|im_end|>."""

    def set_answers(*answers: str) -> list[Any]:
        tokens = [[*answer.encode(), 272] for answer in answers]
        script = [token for answer in tokens for token in answer]

        def scripted(number: int, logits: np.ndarray) -> np.ndarray:
            logits[:] = 0
            logits[:, script.pop(0)] = 9
            return logits

        return record_steps(monkeypatch, scripted)

    return set_answers


# ---- turns


def test_a_conversation(cli: Cli, talker: Path, say: Any) -> None:
    """Every prompt is the whole conversation through the template."""
    steps = say("Hello.", "Two\nlines")
    ran = cli("chat", "--model", talker, "--greedy", "--system", "Be brief.", stdin="hi\n\nand \\\nmore\n")
    assert ran.status == 0 and ran.stderr == ""
    head, answers = ran.stdout[: ran.stdout.index("context: 512 tokens\n") + 20], ran.stdout.split("512 tokens\n")[1]
    assert head.startswith("backend: reference") and answers == "Hello.\nTwo\nlines\n"
    tokenizer = Tokenizer.open(talker)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "and \nmore"},
    ]
    prompts = [step.ids.tolist() for step in steps if len(step.ids) > 1]
    assert prompts == [tokenizer.encode_chat(messages[:2]), tokenizer.encode_chat(messages)]


def test_only_what_is_new_is_computed(cli: Cli, talker: Path) -> None:
    """Whole pages of the common beginning of two prompts are reused; the rest of the prompt and the answer are not."""
    lines = ["what is the weather on another day", "and on the next", "thanks"]
    base = ("--model", talker, "--greedy", "--max-tokens", 9, "--system", SYSTEM, "--no-think")
    turns = objects(cli("chat", *base, "--json", stdin="\n".join(lines)))
    tokenizer = Tokenizer.open(talker)
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    known: list[int] = []
    computed = 0
    for line, turn in zip(lines, turns, strict=True):
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.encode_chat(messages, enable_thinking=False)
        common = 0
        while common < min(len(known), len(prompt)) and known[common] == prompt[common]:
            common += 1
        assert turn["prompt_tokens"] == len(prompt)
        # A token that ends the answer is chosen from the row of the one before, and needs no row itself.
        rows_of_answer = len(turn["ids"]) - (turn["finish_reason"] == "length")
        assert turn["computed_tokens"] == len(prompt) - common // PAGE * PAGE + rows_of_answer
        known = prompt + turn["ids"]
        messages.append({"role": "assistant", "content": turn["text"]})
        computed += turn["computed_tokens"]
    assert computed < 0.6 * sum(turn["prompt_tokens"] + len(turn["ids"]) for turn in turns)
    assert turns[1]["computed_tokens"] < len(prompt) // 2


def test_reused_pages_change_no_answer(cli: Cli, talker: Path, tmp_path: Path) -> None:
    """Each turn's answer is what generate gives for the saved conversation."""
    saved = tmp_path / "c.json"
    base = ("--model", talker, "--greedy", "--max-tokens", 9, "--json")
    turns = objects(cli("chat", *base, "--system", SYSTEM, stdin=f"one\ntwo\nthree\n/save {saved}\n"))
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 3]
    for number, turn in enumerate(turns):
        history = tmp_path / f"{number}.json"
        history.write_text(json.dumps(messages[: 2 + 2 * number]))
        [alone] = objects(cli("generate", *base, "--chat", history))
        assert (alone["ids"], alone["text"]) == (turn["ids"], turn["text"])
        assert messages[2 + 2 * number]["content"] == turn["text"]


def test_turns_are_drawn_apart(cli: Cli, talker: Path) -> None:
    """The same seed gives the same conversation, but not the same draws in each turn."""
    base = ("chat", "--model", talker, "--seed", 3, "--temperature", 5, "--top-k", 0, "--max-tokens", 8, "--json")
    first = objects(cli(*base, stdin="hi\n/reset\nhi\n"))
    assert first[0]["prompt_tokens"] == first[1]["prompt_tokens"] and first[0]["ids"] != first[1]["ids"]
    assert [turn["ids"] for turn in objects(cli(*base, stdin="hi\n/reset\nhi\n"))] == [turn["ids"] for turn in first]


def test_on_a_device(on_device: Cli, talker: Path, cli: Cli) -> None:
    base = ("chat", "--model", talker, "--greedy", "--max-tokens", 5, "--system", SYSTEM, "--json")
    there = objects(on_device(*base, "--kv-memory", "100kiB", stdin="one\ntwo\n"))
    assert there[1]["computed_tokens"] < there[1]["prompt_tokens"] - PAGE
    here = objects(on_device(*base, stdin="one\ntwo\n"))
    assert [turn["ids"] for turn in there] == [turn["ids"] for turn in here]


# ---- how a turn ends


def test_a_full_context(cli: Cli, talker: Path) -> None:
    """An answer ends where the context does; the next message is refused until /reset, and the refusal says so."""
    change(talker / "config.json", max_position_embeddings=100)
    ran = cli("chat", "--model", talker, "--greedy", "--json", stdin="one\n" + "more\n" * 3 + "/reset\nagain\n")
    assert ran.status == 2
    turns = [json.loads(line) for line in ran.stdout.splitlines()]
    assert turns[0]["prompt_tokens"] + len(turns[0]["ids"]) <= 100
    refusals = [line for line in ran.stderr.splitlines() if "error" in line]
    assert refusals and all("the context holds 100" in line and "/reset" in line for line in refusals)
    assert len(turns) + len(refusals) == 5
    prompt = Tokenizer.open(talker).encode_chat([{"role": "user", "content": "again"}])
    assert turns[-1]["prompt_tokens"] == len(prompt)


def test_ctrl_c_stops_the_answer_and_not_the_program(
    cli: Cli, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said so far stays in the conversation; nothing that was interrupted at once does."""
    steps = 0

    def interrupt(number: int, logits: np.ndarray) -> np.ndarray:
        nonlocal steps
        steps = number
        if number in (4, 6):
            signal.raise_signal(signal.SIGINT)
        logits[:] = 0
        logits[:, ord("a") + number if number != 5 else 272] = 9
        return logits

    record_steps(monkeypatch, interrupt)
    saved = tmp_path / "c.json"
    before = signal.getsignal(signal.SIGINT)
    stdin = f"one\ntwo\nthree\n/save {saved}\n"
    turns = objects(cli("chat", "--model", talker, "--greedy", "--max-tokens", 7, "--json", stdin=stdin))
    assert [turn["finish_reason"] for turn in turns] == ["cancelled", "stop", "cancelled"]
    assert [turn["text"] for turn in turns] == ["bcde", "", "g"] and steps == 6
    assert [m["content"] for m in json.loads(saved.read_text())] == ["one", "bcde", "two", "", "three", "g"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_that_fails(cli: Cli, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(number: int, logits: np.ndarray) -> np.ndarray:
        return logits * np.float32(np.nan) if number == 2 else logits

    record_steps(monkeypatch, spoil)
    saved = tmp_path / "c.json"
    ran = cli("chat", "--model", talker, "--max-tokens", 3, "--json", stdin=f"one\ntwo\n/save {saved}\n")
    turns = objects(ran, status=1)
    assert [turn["finish_reason"] for turn in turns] == ["error", "length"] and "NaN" in turns[0]["error"]
    assert [m["content"] for m in json.loads(saved.read_text())] == ["two", turns[1]["text"]]


# ---- commands


def test_system_think_and_reset(cli: Cli, talker: Path, say: Any) -> None:
    steps = say("A", "B", "C", "D")
    stdin = "one\n/system Be kind.\n/think off\ntwo\n/reset\n/think on\nthree\n /help\n"
    assert cli("chat", "--model", talker, stdin=stdin).status == 0
    tokenizer = Tokenizer.open(talker)
    one = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "A"}]
    system = [{"role": "system", "content": "Be kind."}]
    three = [*system, {"role": "user", "content": "three"}]
    help_ = [*three, {"role": "assistant", "content": "C"}, {"role": "user", "content": " /help"}]
    assert [step.ids.tolist() for step in steps if len(step.ids) > 1] == [
        tokenizer.encode_chat(one[:1]),
        tokenizer.encode_chat([*system, *one, {"role": "user", "content": "two"}], enable_thinking=False),
        tokenizer.encode_chat(three, enable_thinking=True),
        tokenizer.encode_chat(help_, enable_thinking=True),
    ]


def test_reasoning_is_kept_as_it_was_written(cli: Cli, talker: Path, tmp_path: Path, say: Any) -> None:
    """And the template drops it from the next prompt, as in transformers."""
    steps = say("<think>\nhm\n</think>\n\nYes.", "B")
    saved = tmp_path / "c.json"
    ran = cli("chat", "--model", talker, stdin=f"one\ntwo\n/save {saved}\n")
    assert "<think>\nhm\n</think>\n\nYes.\nB\n" in ran.stdout and DIM not in ran.stdout
    messages = json.loads(saved.read_text())
    assert messages[1]["content"] == "<think>\nhm\n</think>\n\nYes."
    prompts = [step.ids.tolist() for step in steps if len(step.ids) > 1]
    tokenizer = Tokenizer.open(talker)
    assert prompts[1] == tokenizer.encode_chat(messages[:3]) and "hm" not in tokenizer.decode(prompts[1])


def test_save_and_load(cli: Cli, talker: Path, tmp_path: Path, say: Any) -> None:
    steps = say("A", "B", "C")
    saved, other = tmp_path / "my talk.json", tmp_path / "other.json"
    other.write_text("mine")
    stdin = f"one\n/save {saved}\ntwo\n/save\n/save {other}\n/reset\n/load {saved}\nthree\n/save\n"
    ran = cli("chat", "--model", talker, stdin=stdin)
    assert ran.status == 2 and ran.stderr.splitlines() == [
        f"cupyllm: error: /save: {other} exists already, expected a new file; give another name"
    ]
    assert [m["content"] for m in json.loads(saved.read_text())] == ["one", "A", "two", "B", "three", "C"]
    assert other.read_text() == "mine" and sorted(p.name for p in tmp_path.glob("*.json*")) == [saved.name, other.name]
    prompts = [step.ids.tolist() for step in steps if len(step.ids) > 1]
    assert prompts[-1] == Tokenizer.open(talker).encode_chat(json.loads(saved.read_text())[:5])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("/frobnicate", "/frobnicate is no command, expected one of /help"),
        ("/think maybe", "'maybe', expected on or off"),
        ("/system", "/system: got no text"),
        ("/reset all", "/reset: got 'all'"),
        ("/save", "/save: got no file name"),
        ("/save /nonexistent/x.json", "/nonexistent/x.json"),
        ("/load", "/load: got no file name"),
        ("/load /nonexistent", "/nonexistent does not exist"),
        ("x" * 600, "the context holds 512"),
        (b"a\xff", "not valid UTF-8"),
    ],
)
def test_refused_lines(cli: Cli, talker: Path, say: Any, line: Any, named: str) -> None:
    """One line each, and the conversation goes on as if nothing had been said."""
    say("A")
    data = line if isinstance(line, bytes) else line.encode()
    ran = cli("chat", "--model", talker, "--json", stdin=data + b"\nhello\n")
    assert ran.status == 2
    [error] = [text for text in ran.stderr.splitlines() if text.startswith("cupyllm: error: ")]
    assert named in error
    [turn] = [json.loads(text) for text in ran.stdout.splitlines()]
    assert turn["turn"] == 1
    prompt = Tokenizer.open(talker).encode_chat([{"role": "user", "content": "hello"}])
    assert turn["prompt_tokens"] == len(prompt)


def test_help_and_quit(cli: Cli, talker: Path) -> None:
    ran = cli("chat", "--model", talker, stdin="/help\n/quit\n/frobnicate\n")
    assert ran.status == 0 and "/save FILE" in ran.stdout and ran.stderr == ""
    assert cli("chat", "--model", talker, stdin="").status == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--top-p", "1.5"], "top-p: got 1.5"),
        (["--greedy", "--temperature", "1"], "--greedy and --temperature"),
        (["--kv-memory", "1kB"], "--kv-memory"),
        (["--system", ""], "/system: got no text"),
        (["--backend", "cuda"], "libcuda.so.1"),
    ],
)
def test_refusals(cli: Cli, talker: Path, options: list[str], named: str) -> None:
    assert named in cli("chat", "--model", talker, *options, stdin="hi\n").refused()


def test_models_that_cannot_chat(cli: Cli, talker: Path) -> None:
    change(talker / "tokenizer_config.json", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "enable_thinking" in cli("chat", "--model", talker, "--think", stdin="hi\n").refused()
    ran = cli("chat", "--model", talker, "--max-tokens", 1, stdin="hi\n/think on\n")
    assert ran.status == 2 and "enable_thinking" in ran.stderr
    change(talker / "tokenizer_config.json", chat_template="{{ raise_exception('no system') }}")
    assert "no system" in cli("chat", "--model", talker, stdin="hi\n").refused()
    change(talker / "tokenizer_config.json", chat_template=None)
    assert "no chat template" in cli("chat", "--model", talker, stdin="hi\n").refused()


# ---- the terminal


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "thinking", "wanted"),
    [
        ("plain <b> text", False, "plain <b> text"),
        ("<think>hm</think>yes", False, f"{DIM}<think>hm</think>{PLAIN}yes"),
        ("hm</think>yes <thin", True, f"{DIM}hm</think>{PLAIN}yes <thin"),
        ("a<think>b", False, f"a{DIM}<think>b{PLAIN}"),
    ],
)
def test_reasoning_is_dimmed(
    capsys: pytest.CaptureFixture[str], text: str, thinking: bool, wanted: str, size: int
) -> None:
    dimmer = _Dimmer(thinking)
    for start in range(0, len(text), size):
        dimmer.show(text[start : start + size])
    dimmer.end()
    assert capsys.readouterr().out == wanted


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, arguments: list[str], cache: Path, code: str = "") -> None:
        self.fd, child = os.openpty()
        program = f"{code}\nimport sys; from cupyllm.cli import cli; cli.main(sys.argv[1:])"
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stdin=child, stdout=child, stderr=child, env=environment
        )
        os.close(child)
        self.output = ""

    def read_until(self, text: str) -> str:
        """What came up to `text`."""
        deadline = time.monotonic() + 60
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            if not select.select([self.fd], [], [], 1)[0]:
                continue
            try:
                data = os.read(self.fd, 1 << 16)
            except OSError:  # the other end is closed
                data = b""
            assert data, f"ended without {text!r}: {self.output}"
            self.output += data.decode(errors="replace")
        before, _, self.output = self.output.partition(text)
        return before

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        """Read the rest and return the exit status."""
        try:
            while data := os.read(self.fd, 1 << 16):
                self.output += data.decode(errors="replace")
        except OSError:
            pass  # the other end is closed
        os.close(self.fd)
        return self.process.wait(60)


def test_a_terminal(talker: Path, tmp_path: Path) -> None:
    """Editing, a line of two, Ctrl-C at the prompt, history, Ctrl-D."""
    arguments = ["chat", "--model", str(talker), "--backend", "reference", "--greedy", "--max-tokens", "4"]
    terminal = Terminal(arguments, tmp_path)
    assert "backend: reference" in terminal.read_until("context: 512 tokens; /help")
    terminal.read_until(READS)
    terminal.send("hellx\x7fo\r")
    assert "hello" in terminal.read_until(f"{DIM}")
    assert "of 512 tokens" in terminal.read_until(PLAIN)
    terminal.send("a\\\rb\r")
    terminal.read_until("after")
    terminal.read_until(READS)
    terminal.send("/frobnicate\r")
    terminal.read_until("/frobnicate is no command")
    terminal.read_until(READS)
    terminal.send("dropped\x03")
    terminal.read_until(READS)
    terminal.send("\x04")
    assert terminal.end() == 0
    history = tmp_path / "cupyllm" / "chat" / "history"
    entries = [line for line in history.read_text().splitlines() if line.startswith("+")]
    assert entries == ["+hello", "+a", "+b", "+/frobnicate"]
    assert history.stat().st_mode & 0o077 == 0


def test_a_terminal_without_prompt_toolkit(talker: Path, tmp_path: Path) -> None:
    """Without a terminal nothing is missed: the other tests have none."""
    arguments = ["chat", "--model", str(talker), "--backend", "reference", "--max-tokens", "2"]
    missing = "import sys; sys.modules['prompt_toolkit'] = None"
    terminal = Terminal(arguments, tmp_path, missing)
    terminal.read_until("pip install prompt_toolkit")
    assert terminal.end() == 2
    piped = subprocess.run(
        [sys.executable, "-c", f"{missing}\nfrom cupyllm.cli import cli; cli.main(sys.argv[1:])", *arguments],
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert piped.returncode == 0 and "context: 512 tokens" in piped.stdout
