"""`cupyllm chat`: a conversation, on a terminal with history and editing, elsewhere line by line from stdin.

Each turn renders the whole conversation through the chat template, as a server would get it; the engine finds the pages
of what has been computed before, so only what is new is computed (and at most one page of what is not). Keeping a
sequence open and feeding it only the new text was rejected: templates rewrite history (Qwen3's drops earlier
reasoning), so the next prompt need not begin with the last one's tokens.

Answers are kept as the model wrote them, reasoning included: what of it the next prompt shows is the template's
decision, as in transformers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyllm.cache import cache_subdir
from cupyllm.commands import inputs, session
from cupyllm.commands.generation import (
    Answer,
    Options,
    any_text,
    chat_tokenizer,
    check_think,
    interruptible,
    load_messages,
    make_plan,
    open_engine,
    summary,
    write,
)
from cupyllm.commands.output import Output
from cupyllm.errors import BackendError, CupyllmError, InputError
from cupyllm.files import show_path
from cupyllm.model.tokenizer import Tokenizer
from cupyllm.serve.engine import Engine
from cupyllm.serve.sampler import SamplingParams
from cupyllm.serve.text import partial_match
from cupyllm.text import Codec

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

LEAST_CONTEXT = 4096  # tokens that must fit beside resident weights; else the weights are streamed
THINK_BEGIN, THINK_END = "<think>", "</think>"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

HELP = """\
/system TEXT     set the system message
/think on|off    reasoning, for templates that know it
/reset           begin anew; the system message stays
/save FILE       write the conversation as JSON; generate --chat FILE reads it
/load FILE       go on with a saved conversation
/help, /quit
A line ending in \\ goes on in the next one, as does Esc Enter. A line that begins with a space is never a command.
Ctrl-C stops the answer, Ctrl-D quits."""


def run(*, system: str | None, as_json: bool, **shared: Any) -> int:
    """0, or without a terminal 2 after a line that was refused, 1 after an answer that failed."""
    options = Options(**shared)
    options.check()
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    if terminal and importlib.util.find_spec("prompt_toolkit") is None:
        raise BackendError("chat on a terminal needs prompt_toolkit; get it with: pip install prompt_toolkit")
    output = Output(as_json)
    any_text()
    lines = _typed_lines(_prompt_session()) if terminal else _piped_lines()
    with session.open_runtime(
        output, options.backend, options.dtype, batch_invariant=options.batch_invariant
    ) as runtime:
        with session.open_weights(output, model=options.model, size=None, layers=None) as weights:
            tokenizer = chat_tokenizer(weights, options.think)
            for line in tokenizer.notes:
                output.note(f"note: {line}")
            params, line = options.sampling(weights.checkpoint.path)
            output.note(line)
            limit = weights.config.max_position_embeddings
            dtype, plan = make_plan(
                output, options, runtime, weights, [limit], prompt_tokens=limit, least_tokens=LEAST_CONTEXT
            )
            context = min(limit, plan.num_tokens)
            with open_engine(runtime, weights, dtype, plan, options.batch_invariant) as engine:
                chat = Chat(engine, tokenizer, weights.codec, params, options, context, output, terminal)
                if system is not None:
                    chat.set_system(system)
                chat.encode([*chat.messages, {"role": "user", "content": "."}])  # a template that refuses does so now
                output.note(f"context: {context} tokens" + ("; /help says what can be done" if terminal else ""))
                output.begin(live=True)
                return _loop(chat, lines, terminal)


class Chat:
    """One conversation. Errors of a turn or a command are raised and leave it as it was."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        codec: Codec,
        params: SamplingParams,
        options: Options,
        context: int,
        output: Output,
        terminal: bool,
    ) -> None:
        self.engine, self.tokenizer, self.codec, self.params = engine, tokenizer, codec, params
        self.options, self.context, self.output, self.terminal = options, context, output, terminal
        self.think = options.think
        self.messages: list[Any] = []
        self.file: Path | None = None  # saved to or loaded from, so that /save may write it again
        self.num_turns = 0
        self.failed = False

    def encode(self, messages: list[Any]) -> list[int]:
        """The prompt's ids, the answer's beginning included."""
        return self.tokenizer.encode_chat(messages, enable_thinking=self.think)

    # -- a turn -------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> None:
        """Generate the answer to `text`, show it and keep both."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.encode(messages)
        room = self.context - len(ids)
        if room < 1:
            raise InputError(
                f"the conversation has {len(ids)} tokens with this message, the context holds {self.context}; "
                "shorten the message, or /save FILE if you like and /reset"
            )
        shown = _Dimmer(self._opens_thinking(ids)) if self.terminal else None
        show = None if self.output.as_json else shown.show if shown is not None else write
        answer = Answer(self.codec, self.options.stop, show)
        params = replace(self.params, seed=(self.params.seed + self.num_turns) % 2**64)
        limit = min(self.options.max_tokens or room, room)
        rows = self.engine.num_rows
        [generation] = self.engine.submit(ids, params, max_tokens=limit, on_token=answer.on_token)
        try:
            with interruptible(patience=2) as interrupted:
                while self.engine.busy and not interrupted():
                    self.engine.step()
        finally:
            self.engine.cancel(generation)  # does nothing where it has ended
            answer.end()
            if shown is not None:
                shown.end()
        self.num_turns += 1
        if generation.finish_reason == "stop" or (answer.stream.text and generation.finish_reason != "error"):
            self.messages = [*messages, {"role": "assistant", "content": answer.stream.text}]
        self._result(answer, generation.finish_reason, generation.error, generation.output, ids, rows)

    def _result(
        self, answer: Answer, reason: str | None, error: str, output: list[int], prompt: list[int], rows: int
    ) -> None:
        times = answer.times(len(output))
        computed = self.engine.num_rows - rows
        values = {
            "turn": self.num_turns,
            "prompt_tokens": len(prompt),
            "computed_tokens": computed,  # of the prompt and the answer
            "ids": output,
            "text": answer.stream.text,
            "finish_reason": reason,
            **times,
        }
        if reason == "error":
            self.failed = True
            values["error"] = error
        if self.output.as_json:
            self.output.result(values, [])
            return
        print(flush=True)
        if reason == "error":
            _complain(error)
        if self.terminal:
            cut = (
                "; cut short, so say: go on" if reason == "length" and len(prompt) + len(output) < self.context else ""
            )
            full = "; the context is full, /reset begins anew" if len(prompt) + len(output) >= self.context else ""
            line = summary("stopped" if reason == "cancelled" else str(reason), len(output), times)
            used = f"{len(prompt) + len(output)} of {self.context} tokens, {computed} computed"
            print(f"{DIM}{line}; {used}{cut}{full}{PLAIN}", flush=True)

    def _opens_thinking(self, ids: list[int]) -> bool:
        """Whether the template has begun the reasoning already (some models' do), so that the answer does not."""
        return self.tokenizer.decode(ids[-8:], skip_special=False).rstrip().endswith(THINK_BEGIN)

    # -- commands -----------------------------------------------------------------------------------------------

    def command(self, line: str) -> bool:
        """Obey a line that begins with "/"; False for /quit. Raises InputError for what it does not know."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        actions: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: self.output.note(HELP),
            "/system": self.set_system,
            "/think": self._set_think,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
        }
        if name in ("/quit", "/exit"):
            return False
        if name not in actions:
            raise InputError(
                f"{name} is no command, expected one of {', '.join(actions)}, /quit; begin a message that starts with "
                "/ with a space"
            )
        actions[name](rest)
        return True

    def set_system(self, text: str) -> None:
        """Put the system message first, or replace it."""
        if not text:
            raise InputError("/system: got no text, expected the system message")
        rest = self.messages[1:] if self.messages and self.messages[0]["role"] == "system" else self.messages
        messages = [{"role": "system", "content": text}, *rest]
        self.encode([*messages, {"role": "user", "content": "."}])  # raises where the template has no such role
        self.messages = messages

    def _set_think(self, text: str) -> None:
        if text not in ("on", "off"):
            raise InputError(f"/think: got {text!r}, expected on or off")
        check_think(self.tokenizer, text == "on")
        self.think = text == "on"

    def _reset(self, text: str) -> None:
        if text:
            raise InputError(f"/reset: got {text!r}, expected nothing after it")
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        self.output.note("a new conversation")

    def _save(self, text: str) -> None:
        path = self._path(text) if text else self.file
        if path is None:
            raise InputError("/save: got no file name, expected one")
        if os.path.lexists(path) and path != self.file:
            raise InputError(f"/save: {show_path(path)} exists already, expected a new file; give another name")
        inputs.save_json(path, self.messages)
        self.file = path
        self.output.note(f"saved to {show_path(path)}")

    def _load(self, text: str) -> None:
        if not text:
            raise InputError("/load: got no file name, expected one")
        path = self._path(text)
        messages, tools = load_messages(str(path), "/load")
        if tools:
            raise InputError(f"/load: {show_path(path)} has tools, expected messages only; use generate --chat")
        self.encode(messages)
        self.messages, self.file = messages, path
        self.output.note(f"{len(messages)} messages from {show_path(path)}")

    @staticmethod
    def _path(text: str) -> Path:
        return Path(os.path.abspath(os.path.expanduser(text)))


class _Dimmer:
    """Shows text, what lies between <think> and </think> dimmed. A tag may come in pieces."""

    def __init__(self, thinking: bool) -> None:
        self._held, self._thinking = "", thinking
        self._paint(DIM if thinking else "")

    def show(self, piece: str) -> None:
        self._held += piece
        while True:
            tag = THINK_END if self._thinking else THINK_BEGIN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            # The opening tag is dimmed too, and so is the closing one.
            write(before if not self._thinking else before + tag)
            self._thinking = not self._thinking
            self._paint(DIM if self._thinking else PLAIN)
            write(tag if self._thinking else "")
            self._held = after
        keep = partial_match(self._held, [tag])
        write(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]

    def end(self) -> None:
        write(self._held)
        self._held = ""
        self._paint(PLAIN if self._thinking else "")

    @staticmethod
    def _paint(code: str) -> None:
        sys.stdout.write(code)
        sys.stdout.flush()


def _loop(chat: Chat, lines: Iterator[str], terminal: bool) -> int:
    """Every line in turn. On a terminal a refusal costs one line; elsewhere the exit status tells of it too."""
    refused = False
    for line in lines:
        if not line.strip():
            continue
        try:
            if not line.startswith("/"):
                chat.ask(line)
            elif not chat.command(line.rstrip()):
                break
        except CupyllmError as error:
            refused = True
            _complain(str(error))
    if terminal:
        return 0
    return 2 if refused else 1 if chat.failed else 0


def _complain(message: str) -> None:
    print(f"cupyllm: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _piped_lines() -> Iterator[str]:
    """Lines of stdin; one that ends in a backslash goes on in the next."""
    pending = ""
    for raw in sys.stdin:
        line = raw.rstrip("\r\n")
        if line.endswith("\\"):
            pending += line[:-1] + "\n"
            continue
        yield pending + line
        pending = ""
    if pending:
        yield pending.removesuffix("\n")


def _prompt_session() -> PromptSession[str]:
    """A line editor with a history kept in the cache. Raises StorageError without a cache."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def accept(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    path = cache_subdir("chat") / "history"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # nobody else's to read
    return PromptSession(history=FileHistory(str(path)), key_bindings=keys, multiline=True, prompt_continuation="  ")


def _typed_lines(prompt: PromptSession[str]) -> Iterator[str]:
    """What the user types, until Ctrl-D."""
    while True:
        try:
            yield prompt.prompt("> ")
        except KeyboardInterrupt:
            continue  # the line is dropped
        except EOFError:
            return
