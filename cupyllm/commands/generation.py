"""What generate and chat share: their options, how to sample, the engine, and one answer's text and times."""

from __future__ import annotations

import math
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from cupyllm.commands.inputs import exclusive
from cupyllm.commands.output import Output, gigabytes
from cupyllm.commands.session import Weights, choose_dtype
from cupyllm.errors import CheckpointError, InputError
from cupyllm.files import load_json, read_regular, show_path, why_missing
from cupyllm.hostmem import available_bytes
from cupyllm.kvcache.blocks import PAGE_TOKENS
from cupyllm.model.chat import no_template
from cupyllm.model.tokenizer import Tokenizer, read_object, read_stop_ids
from cupyllm.runtime import Runtime
from cupyllm.serve.engine import Engine, Generation
from cupyllm.serve.plan import Memory, Plan
from cupyllm.serve.plan import plan as plan_memory
from cupyllm.serve.runner import Runner
from cupyllm.serve.sampler import Choice, SamplingParams
from cupyllm.serve.text import TextStream, id_stream
from cupyllm.text import Codec

SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # any of them asks for sampling
GENERATION_CONFIG = "generation_config.json"

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Options:
    """The options of both commands as given; None where they were not."""

    model: str
    backend: str
    dtype: str | None
    max_tokens: int | None
    greedy: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: tuple[str, ...]
    kv_memory: str | None
    stream: bool | None
    think: bool | None
    batch_invariant: bool

    def check(self) -> None:
        """Raise InputError for what is wrong whatever the model is."""
        names = [name for name in SAMPLING if getattr(self, name) is not None]
        if self.greedy and names:
            exclusive(greedy=True, **{names[0]: True})
        SamplingParams(**self._sampling())
        TextStream(id_stream(Codec(256)), self.stop)
        if self.kv_memory is not None:
            parse_size(self.kv_memory, "--kv-memory")

    def sampling(self, directory: Path, logprobs: int = 0) -> tuple[SamplingParams, str]:
        """How to sample, and a line that says why so.

        generation_config.json decides as in transformers: sampling when its do_sample is true, else greedy; an option
        replaces its value. Without --seed one is drawn, and told.
        """
        path = directory / GENERATION_CONFIG
        raw = read_object(path)
        stated = _stated_sampling(raw, path)
        given = self._sampling()
        values: dict[str, Any] = {**stated, **given, "logprobs": logprobs}
        asked = any(name in given for name in SAMPLING)
        if self.greedy or not (asked or raw.get("do_sample") is True):
            for name in SAMPLING:
                values.pop(name, None)
            why = "as asked" if self.greedy else f"{GENERATION_CONFIG} asks for no sampling"
            params = SamplingParams(**{**values, "temperature": 0.0})
        else:
            why = "as asked" if asked else f"as {GENERATION_CONFIG} says"
            params = SamplingParams(**{"temperature": 1.0, "seed": secrets.randbits(32), **values})
        return params, f"sampling: {_described(params)}, {why}"

    def _sampling(self) -> dict[str, Any]:
        names = (*SAMPLING, "repetition_penalty", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def parse_size(text: str, option: str) -> int:
    """Bytes of "512MiB", "2GB", "1.5g" or "1000000". Raises InputError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{option}: got {text!r}, expected bytes, or a number with kB, MB, GB, kiB, MiB or GiB")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return math.floor(float(number) * base ** (" kmgt".index(prefix.lower()) if prefix else 0))


def stop_ids(weights: Weights) -> tuple[int, ...]:
    """Ids that end an answer; a checkpoint without a tokenizer may state some too."""
    tokenizer = weights.codec.tokenizer
    if tokenizer is not None:
        return tokenizer.stop_ids
    return read_stop_ids(weights.checkpoint.path, weights.config.vocab_size)


def chat_tokenizer(weights: Weights, think: bool | None) -> Tokenizer:
    """The tokenizer of a checkpoint that has a chat template, one that knows `think` if given. Raises InputError."""
    tokenizer = weights.codec.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise no_template(show_path(weights.checkpoint.path))
    check_think(tokenizer, think)
    return tokenizer


def check_think(tokenizer: Tokenizer, think: bool | None) -> None:
    """Raise InputError when the template would ignore `think`."""
    if think is not None and "enable_thinking" not in tokenizer.chat_template.source(with_tools=False):
        name = "--think" if think else "--no-think"
        raise InputError(f"{name}: the model's chat template knows no enable_thinking; leave it out")


def load_messages(path: str, option: str) -> tuple[list[Any], list[Any] | None]:
    """(messages, tools or None) of a JSON file: a list of messages, or an object with messages and tools."""
    try:
        value = load_json(read_regular(path))
    except FileNotFoundError:
        raise InputError(f"{option}: {why_missing(path)}; give a JSON file of messages") from None
    except OSError as error:
        raise InputError(f"{option}: cannot read {show_path(path)}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{option}: {show_path(path)} is not valid JSON: {error}") from None
    messages = value.get("messages") if isinstance(value, dict) else value
    tools = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(messages, list):
        raise InputError(f'{option}: {show_path(path)} holds no list of messages, expected [{{"role", "content"}}, …]')
    return messages, tools


def make_plan(
    output: Output,
    options: Options,
    runtime: Runtime,
    weights: Weights,
    lengths: Sequence[int],
    *,
    prompt_tokens: int,
    least_tokens: int | None = None,
) -> tuple[str, Plan]:
    """The activation dtype and the memory plan, both noted."""
    dtype = choose_dtype(options.dtype, runtime, weights.checkpoint)
    device = None if runtime.backend is None else runtime.backend.free_bytes()
    memory = Memory(available_bytes(), device)
    kv_memory = None if options.kv_memory is None else parse_size(options.kv_memory, "--kv-memory")
    plan = plan_memory(
        weights.checkpoint,
        dtype,
        memory,
        lengths,
        prompt_tokens=prompt_tokens,
        least_tokens=least_tokens,
        stream=options.stream,
        kv_memory=kv_memory,
    )
    where = "host" if device is None else "device"
    free = memory.host_bytes if device is None else device
    why = "as asked" if options.stream is not None else f"{gigabytes(free)} of {where} memory are free"
    output.note(f"weights: {plan.mode}, {gigabytes(plan.weight_bytes)} in {where} memory, {dtype}; {why}")
    total = plan.num_pages * plan.page_bytes
    travels = ""
    if plan.kv_bytes is not None:
        travels = f"; at most {gigabytes(plan.kv_bytes)} on the device, the rest travels from host memory"
    output.note(f"KV cache: {plan.num_pages} pages of {PAGE_TOKENS} tokens, {gigabytes(total)}{travels}")
    return dtype, plan


@contextmanager
def open_engine(
    runtime: Runtime, weights: Weights, dtype: str, plan: Plan, batch_invariant: bool = False
) -> Iterator[Engine]:
    """An engine whose runner has the plan's sizes."""
    runner: Runner
    if runtime.backend is None:
        from cupyllm.reference.runner import ReferenceRunner

        runner = ReferenceRunner(
            weights.checkpoint,
            num_pages=plan.num_pages,
            max_pages=plan.max_pages,
            page_tokens=PAGE_TOKENS,
            max_rows=plan.max_rows,
            max_sequences=plan.max_sequences,
            mode="resident" if plan.mode == "resident" else "stream",
        )
    else:
        from cupyllm.model.runner import DeviceRunner

        runner = DeviceRunner(
            weights.checkpoint,
            runtime.backend,
            dtype,
            num_pages=plan.num_pages,
            max_pages=plan.max_pages,
            page_tokens=PAGE_TOKENS,
            max_rows=plan.max_rows,
            max_sequences=plan.max_sequences,
            mode=plan.mode,
            kv_bytes=plan.kv_bytes,
            batch_invariant=batch_invariant,
        )
    with closing(runner), np.errstate(over="ignore", invalid="ignore"):  # the sampler says which logit is no number
        yield Engine(runner, stop_ids=stop_ids(weights), valid_vocab=weights.codec.valid_vocab)


class Answer:
    """The text and the times of one sequence. `show` gets text as it becomes certain."""

    def __init__(self, codec: Codec, stops: Sequence[str], show: Callable[[str], None] | None = None) -> None:
        self.stream = TextStream(id_stream(codec), stops)
        self._show = show
        self.restart()

    def restart(self) -> None:
        """Start the clock."""
        self.began = time.perf_counter()
        self.first = self.last = self.ended = 0.0

    def on_token(self, generation: Generation, choice: Choice) -> bool:
        """For Engine.submit; True once a stop string is complete."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self._display(self.stream.push(choice.token))
        return self.stream.stopped

    def end(self) -> None:
        """The sequence has ended; a second call does nothing."""
        if not self.ended:
            self.ended = time.perf_counter()
            self._display(self.stream.end())

    def times(self, num_tokens: int) -> dict[str, float | None]:
        """Seconds, seconds to the first token, tokens/s after it (None below two tokens)."""
        spent = self.last - self.first
        return {
            "seconds": self.ended - self.began,
            "ttft_seconds": (self.first or self.ended) - self.began,
            "tokens_per_s": (num_tokens - 1) / spent if num_tokens > 1 and spent > 0 else None,
        }

    def _display(self, piece: str) -> None:
        if piece and self._show is not None:
            self._show(piece)


@contextmanager
def interruptible(patience: int = 1) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C came, so that a step under way is finished first.

    More than `patience` of them raise KeyboardInterrupt. Only in the main thread; elsewhere signals do not arrive.
    """
    came = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came > patience:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came > 0
    finally:
        signal.signal(signal.SIGINT, before)


def write(text: str) -> None:
    """Model text to stdout at once; on a terminal, control characters are shown and not obeyed."""
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
    print(text, end="", flush=True)


def any_text() -> None:
    """Let stdout print what its encoding lacks as escapes (model text is any Unicode), stdin read any bytes."""
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "surrogateescape")):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)


def summary(reason: str, num_tokens: int, times: Mapping[str, float | None]) -> str:
    """A line about an answer's end and times."""
    speed = "" if times["tokens_per_s"] is None else f", then {times['tokens_per_s']:.1f} tokens/s"
    first = f"first token {times['ttft_seconds']:.2f} s"
    return f"{reason} after {num_tokens} tokens, {times['seconds']:.2f} s: {first}{speed}"


def _stated_sampling(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What generation_config.json says about sampling; null is not said. Raises CheckpointError."""
    stated: dict[str, Any] = {}
    for name in (*SAMPLING, "repetition_penalty"):
        value = raw.get(name)
        if value is None:
            continue
        if name == "top_k" and type(value) is float and value.is_integer():
            value = int(value)  # 20.0, as some tools write it
        if type(value) not in ((int,) if name == "top_k" else (int, float)):
            expected = "an integer" if name == "top_k" else "a number"
            raise CheckpointError(f"{show_path(path)}: {name} is {value!r}, expected {expected} or null")
        stated[name] = value
    try:
        SamplingParams(**stated)
    except InputError as error:
        raise CheckpointError(f"{show_path(path)}: {error}") from None
    return stated


def _described(params: SamplingParams) -> str:
    parts = ["greedy"] if params.temperature == 0 else [f"temperature {params.temperature:g}"]
    if params.temperature:
        parts += [f"top-k {params.top_k}"] if params.top_k else []
        parts += [f"top-p {params.top_p:g}"] if params.top_p < 1 else []
        parts += [f"min-p {params.min_p:g}"] if params.min_p else []
    parts += [f"repetition penalty {params.repetition_penalty:g}"] if params.repetition_penalty != 1 else []
    parts += [f"seed {params.seed}"] if params.temperature else []
    return ", ".join(parts)
