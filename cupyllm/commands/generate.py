"""`cupyllm generate`: prompts to text, one sequence as it comes, several one after another."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from cupyllm.commands import inputs, session
from cupyllm.commands.generation import (
    Answer,
    Options,
    any_text,
    chat_tokenizer,
    interruptible,
    load_messages,
    make_plan,
    open_engine,
    summary,
    write,
)
from cupyllm.commands.output import Output
from cupyllm.config import ModelConfig
from cupyllm.errors import InputError
from cupyllm.serve.engine import Engine, Generation
from cupyllm.serve.sampler import Choice, SamplingParams
from cupyllm.text import Codec

DEFAULT_MAX_TOKENS = 128

_ID_LIST = re.compile(r"\s*-?\d+\s*(,\s*-?\d+\s*)*,?\s*")


def run(
    *,
    prompt: str | None,
    prompt_file: str | None,
    ids: str | None,
    chat: str | None,
    n: int,
    logprobs: int | None,
    ignore_eos: bool,
    as_json: bool,
    **shared: Any,
) -> int:
    """1 when a sequence ended with an error, else 0. `shared` are the fields of generation.Options."""
    options = Options(**shared)
    options.check()
    # A prompt of no characters is given all the same.
    sources = {"prompt": prompt, "prompt_file": prompt_file, "ids": ids, "chat": chat}
    inputs.exclusive(**{name: value is not None for name, value in sources.items()})
    if all(value is None for value in sources.values()):
        raise InputError("no prompt was given, expected --prompt, --prompt-file, --ids or --chat")
    if options.think is not None and chat is None:
        raise InputError("--think and --no-think are for chat templates, expected --chat with them; leave them out")
    output = Output(as_json)
    any_text()
    with session.open_runtime(
        output, options.backend, options.dtype, batch_invariant=options.batch_invariant
    ) as runtime:
        with session.open_weights(output, model=options.model, size=None, layers=None) as weights:
            prompts = _prompts(weights, prompt, prompt_file, ids, chat, options.think)
            for line in [] if weights.codec.tokenizer is None else weights.codec.tokenizer.notes:
                output.note(f"note: {line}")
            if weights.codec.tokenizer is None:
                output.note(f"text: {weights.codec.description}; other ids are shown as <id>")
            max_tokens = options.max_tokens or DEFAULT_MAX_TOKENS
            lengths = [_length(weights.config, ids, max_tokens, what) for what, ids in prompts for _ in range(n)]
            params, line = options.sampling(weights.checkpoint.path, logprobs or 0)
            output.note(line)
            prompt_tokens = sum(len(ids) for _, ids in prompts)
            dtype, plan = make_plan(output, options, runtime, weights, lengths, prompt_tokens=prompt_tokens)
            with open_engine(runtime, weights, dtype, plan, options.batch_invariant) as engine:
                work = _Work(engine, weights.codec, options.stop, output, logprobs is not None)
                for _, prompt_ids in prompts:
                    work.submit(prompt_ids, params, max_tokens, n, ignore_eos)
                output.begin()
                return work.run()


class _Work:
    """The sequences of one command, shown in the order of their prompts."""

    def __init__(self, engine: Engine, codec: Codec, stops: tuple[str, ...], output: Output, logprobs: bool) -> None:
        self.engine, self.codec, self.stops, self.output, self.logprobs = engine, codec, stops, output, logprobs
        self.answers: dict[Generation, Answer] = {}  # in the order of submission
        self.places: dict[Generation, tuple[int, int]] = {}  # prompt and choice, from 0
        self.num_prompts = self.num_shown = 0
        self.failed = False

    def submit(self, ids: list[int], params: SamplingParams, max_tokens: int, n: int, ignore_eos: bool) -> None:
        made = self.engine.submit(
            ids, params, max_tokens=max_tokens, n=n, ignore_eos=ignore_eos, on_token=self._on_token
        )
        for index, generation in enumerate(made):
            self.places[generation] = (self.num_prompts, index)
            self.answers[generation] = Answer(self.codec, self.stops, self._show)
        self.num_prompts += 1

    def run(self) -> int:
        """Generate and show everything; the exit status. Raises KeyboardInterrupt once what there is has been shown."""
        for answer in self.answers.values():
            answer.restart()
        with interruptible() as interrupted:
            while self.engine.busy and not interrupted():
                for generation in self.engine.step():
                    self.answers[generation].end()
                self._show_ended()
            stopped = interrupted()
        if stopped:
            for generation, answer in self.answers.items():
                self.engine.cancel(generation)
                answer.end()
            self._show_ended()
            raise KeyboardInterrupt
        return 1 if self.failed else 0

    @property
    def live(self) -> bool:
        """Whether text is shown as it comes."""
        return len(self.answers) == 1 and not self.output.as_json

    def _on_token(self, generation: Generation, choice: Choice) -> bool:
        return self.answers[generation].on_token(generation, choice)

    def _show(self, piece: str) -> None:
        if self.live:
            write(piece)

    def _show_ended(self) -> None:
        """Every sequence that has ended and comes next."""
        for generation in list(self.answers)[self.num_shown :]:
            if generation.finish_reason is None:
                return
            self.num_shown += 1
            self._result(generation, self.answers[generation])

    def _result(self, generation: Generation, answer: Answer) -> None:
        prompt, index = self.places[generation]
        times = answer.times(len(generation.output))
        values: dict[str, Any] = {
            "prompt": prompt,
            "index": index,
            "prompt_ids": generation.prompt,
            "ids": generation.output,
            "text": answer.stream.text,
            "finish_reason": generation.finish_reason,
            "logprobs": [self._logprob(choice) for choice in generation.choices] if self.logprobs else None,
            "seed": generation.params.seed if generation.params.temperature else None,
            **times,
        }
        end = summary(str(generation.finish_reason), len(generation.output), times)
        if generation.finish_reason == "error":
            self.failed = True
            values["error"] = generation.error
            end = f"error: {generation.error}; {end}"
        if self.output.as_json:
            self.output.result(values, [])
            return
        if not self.live:
            print(f"== prompt {prompt + 1}, choice {index + 1}", flush=True)
            write(answer.stream.text)
        lines = [_logprob_line(entry) for entry in values["logprobs"] or []]
        print("\n".join(["", *lines, f"-- {end}"]), flush=True)

    def _logprob(self, choice: Choice) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, "token": self.codec.decode(token), "logprob": logprob}

        return {**entry(choice.token, choice.logprob), "top": [entry(*pair) for pair in choice.top]}


def _logprob_line(entry: dict[str, Any]) -> str:
    others = "  ".join(f"{other['token']!r} {other['logprob']:.4f}" for other in entry["top"])
    return f"{entry['token']!r} {entry['logprob']:.4f}" + (f"   of {others}" if others else "")


def _prompts(
    weights: session.Weights,
    prompt: str | None,
    prompt_file: str | None,
    ids: str | None,
    chat: str | None,
    think: bool | None,
) -> list[tuple[str, list[int]]]:
    """(what it is called in messages, ids) of each prompt, from the one option that was given."""
    codec = weights.codec
    if prompt is not None:
        return [("--prompt", _encoded(codec, prompt, "--prompt"))]
    if prompt_file is not None:
        lines = inputs.read_lines(prompt_file, "--prompt-file")
        named = [(f"--prompt-file, line {number}", line) for number, line in enumerate(lines, 1)]
        return [(what, _encoded(codec, line, what)) for what, line in named]
    if ids is not None:
        rows = _id_rows(ids, weights.config.vocab_size)
        return [("--ids" if len(rows) == 1 else f"--ids, row {i}", row.tolist()) for i, row in enumerate(rows)]
    assert chat is not None
    tokenizer = chat_tokenizer(weights, think)
    messages: list[Any] = [{"role": "user", "content": chat}]
    tools = None
    if chat.endswith(".json"):
        messages, tools = load_messages(chat, "--chat")
    elif not chat.strip():
        raise InputError("--chat is empty, expected a message or a JSON file of messages")
    return [("--chat", tokenizer.encode_chat(messages, tools=tools, enable_thinking=think))]


def _encoded(codec: Codec, text: str, what: str) -> list[int]:
    if not text:
        raise InputError(f"{what} is empty, expected text of at least one token")
    encoded: list[int] = codec.encode(text).tolist()
    if not encoded:
        raise InputError(f"{what} gives no token, expected at least one; the tokenizer dropped all of it")
    return encoded


def _id_rows(ids: str, vocab_size: int) -> np.ndarray:
    """int64 [B,T] of "1,2,3" or of a .npy file."""
    if not _ID_LIST.fullmatch(ids):
        return inputs.load_ids(ids, "--ids", vocab_size)
    row = [int(number) for number in ids.split(",") if number.strip()]
    bad = next((i for i, number in enumerate(row) if not 0 <= number < vocab_size), None)
    if bad is not None:
        raise InputError(f"--ids: id {row[bad]} at position {bad} is out of range, expected 0 <= id < {vocab_size}")
    return np.array([row], np.int64)


def _length(config: ModelConfig, ids: list[int], max_tokens: int, what: str) -> int:
    """Tokens that a sequence may come to. Raises InputError for a prompt that leaves the model no room."""
    limit = config.max_position_embeddings
    if len(ids) >= limit:
        raise InputError(
            f"{what} has {len(ids)} tokens, expected fewer than the model's {limit} (max_position_embeddings); "
            "shorten it"
        )
    return min(len(ids) + max_tokens, limit)
