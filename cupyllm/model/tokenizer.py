"""A checkpoint's tokenizer: tokenizer.json run by the `tokenizers` package, and what the files beside it add.

    tokenizer.json            encoding, the decoder, added tokens and which of them are special
    tokenizer_config.json     bos, eos and pad token, chat template
    special_tokens_map.json   the same tokens in older checkpoints
    chat_template.jinja       the chat template in newer ones; comes first, as in transformers
    config.json, generation_config.json   ids that end a generation

Stop ids are the UNION of all three sources: config.json often names <|im_end|> only, generation_config.json adds
<|endoftext|>, and a converted checkpoint may have the right one in the tokenizer alone. Taking one source and ignoring
the others lets a model talk past its end. An id outside the vocabulary is ignored and noted.

`size` counts the ids that are tokens. Vocabularies are padded (Qwen3: 151669 of 151936), and a padding id must never be
generated.

Text is encoded as it stands: a special token's name in it becomes that token, as in transformers. With
`allow_special=False` every added token's name is plain text; that is a second tokenizer without added tokens, since
`tokenizers`' own switch (encode_special_tokens) leaves <think> and <tool_call> alone, which are added but not special.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from cupyllm.errors import CheckpointError, InputError
from cupyllm.files import load_json, read_regular, show_path, why_missing
from cupyllm.model.chat import ChatTemplate, no_template, read_templates
from cupyllm.model.detokenizer import ByteMap, Detokenizer

TOKENIZER_FILE = "tokenizer.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """An opened tokenizer. Ids are Python integers; `notes` are one-line remarks for the user.

    `special_ids`: the added tokens that tokenizer.json marks special; <think> and <tool_call> are added, not special.
    """

    def __init__(self, path: Path, text: str, vocab_size: int | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        self.path = path
        self.notes: list[str] = []
        self._text = text
        try:
            self._backend = Backend.from_str(text)
        except Exception as error:  # tokenizers raises plain Exception
            line = " ".join(str(error).split())
            raise CheckpointError(
                f"{show_path(path)} is not a tokenizer.json that can be read: {line}; download it again"
            ) from None
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab()
        if not vocabulary:
            raise CheckpointError(f"{show_path(path)} has no tokens, expected a vocabulary; download it again")
        self._ids: dict[str, int] = vocabulary
        self.size = max(vocabulary.values()) + 1
        added = self._backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: number for number, token in sorted(added.items())}
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._read_settings(path.parent, vocab_size)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """From a checkpoint directory, or from a tokenizer.json with its neighbours.

        Raises CheckpointError that names the file when it or one beside it cannot be read.
        """
        file = Path(path)
        if file.is_dir():
            file = file / TOKENIZER_FILE
        try:
            text = read_regular(file).decode("utf-8")
        except FileNotFoundError:
            raise CheckpointError(
                f"{why_missing(file)}; a tokenizer was expected: copy it from the checkpoint, or give token ids"
            ) from None
        except OSError as error:
            raise CheckpointError(f"cannot read {show_path(file)}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{show_path(file)} is not UTF-8 at byte {error.start}; download it again") from None
        return cls(file, text)

    def encode(self, text: str, *, allow_special: bool = True, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. `add_special_tokens`: what the tokenizer puts around a text (Llama's bos); Qwen3: nothing.

        `allow_special=False` encodes the names of added tokens as plain text.
        Raises InputError for text that is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"text: character {error.start} is not valid UTF-8, expected text; remove it") from None
        backend = self._backend if allow_special else self._without_added
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # tokenizers raises plain Exception: a word vocabulary without an unknown token, say
            line = " ".join(str(error).split())
            raise InputError(
                f"{show_path(self.path)} cannot encode the text: {line}; give token ids, or use another tokenizer.json"
            ) from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, invalid UTF-8 as U+FFFD: what a `Detokenizer` gives for them. Raises InputError."""
        stream = self.detokenizer(skip_special=skip_special)
        return stream.extend(ids) + stream.end()

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A new stream of ids to text."""
        return Detokenizer(self, skip_special=skip_special)

    def token(self, number: int) -> str:
        """A token as the vocabulary spells it, "" in a gap of the vocabulary. Raises InputError outside [0, size)."""
        if not 0 <= number < self.size:
            raise InputError(f"id {number} is no token of {show_path(self.path)}, expected 0 <= id < {self.size}")
        return self._backend.id_to_token(number) or ""

    def token_id(self, content: str) -> int | None:
        """The id of a token by its exact spelling; None where there is none."""
        return self._ids.get(content)

    def special_strings(self, text: str) -> list[str]:
        """The added tokens whose names occur in `text`: they would be encoded as tokens, not as text."""
        return [content for content in self.added_tokens if content in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """`chat_template.render(messages, **options)`, encoded without a further bos: the template has written it."""
        return self.encode(self.chat_template.render(messages, **options), add_special_tokens=False)

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises InputError where the checkpoint has none."""
        if not self._templates:
            raise no_template(show_path(self.path.parent))
        return ChatTemplate(self._templates, self.named_tokens, show_path(self.path.parent))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @cached_property
    def byte_map(self) -> ByteMap:
        """Raises CheckpointError for a decoder that is not supported."""
        decoder = self._backend.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())  # its part of tokenizer.json
        return ByteMap(state, show_path(self.path))

    @cached_property
    def _without_added(self) -> Any:
        """The same tokenizer with no added tokens, so that their names are split like any text."""
        from tokenizers import Tokenizer as Backend

        document = json.loads(self._text)
        document["added_tokens"] = []
        document["truncation"] = document["padding"] = None
        return Backend.from_str(json.dumps(document))

    def _read_settings(self, directory: Path, vocab_size: int | None) -> None:
        settings = read_object(directory / "tokenizer_config.json")
        older = read_object(directory / "special_tokens_map.json")
        where = show_path(directory / "tokenizer_config.json")
        self.named_tokens = {
            name: content
            for name in NAMED_TOKENS
            if (content := _content(settings.get(name, older.get(name)), f"{where}: {name}")) is not None
        }
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.pad_id = self._named_id("pad_token")
        self._templates = read_templates(settings.get("chat_template"), where) | _template_files(directory)
        config = read_object(directory / "config.json")
        stated = config.get("vocab_size")
        if vocab_size is None:
            vocab_size = stated if type(stated) is int and stated > 0 else self.size
        self.stop_ids = read_stop_ids(directory, vocab_size, self.eos_id, self.notes)

    def _named_id(self, name: str) -> int | None:
        content = self.named_tokens.get(name)
        number = None if content is None else self._ids.get(content)
        if content is not None and number is None:
            self.notes.append(f"{show_path(self.path)} has no token {content!r}, the {name}; it is ignored")
        return number


def read_stop_ids(
    directory: Path, vocab_size: int, tokenizer_eos: int | None = None, notes: list[str] | None = None
) -> tuple[int, ...]:
    """Ids that end a generation, ascending: config.json's, generation_config.json's and the tokenizer's.

    Those outside [0, vocab_size) are left out and named in `notes`. Also for checkpoints without a tokenizer.
    Raises CheckpointError for a value that is no id or list of ids.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_object(directory / name).get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        for number in values:
            if type(number) is not int:
                raise CheckpointError(
                    f"{show_path(directory / name)}: eos_token_id is {value!r}, expected an integer, a list of "
                    "integers or null"
                )
            if 0 <= number < vocab_size:
                found.add(number)
            elif notes is not None:
                notes.append(
                    f"{show_path(directory / name)}: eos_token_id {number} is outside the vocabulary of {vocab_size} "
                    "and is ignored"
                )
    if tokenizer_eos is not None:
        if tokenizer_eos < vocab_size:
            found.add(tokenizer_eos)
        elif notes is not None:
            notes.append(
                f"{show_path(directory)}: the tokenizer's eos {tokenizer_eos} is outside the vocabulary of "
                f"{vocab_size} and is ignored"
            )
    return tuple(sorted(found))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object beside a checkpoint's weights; {} when there is no such file. Raises CheckpointError."""
    try:
        value = load_json(read_regular(path))
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{why_missing(path)}; download the checkpoint again") from None
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot read {show_path(path)}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{show_path(path)} is not valid JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{show_path(path)} holds a JSON {type(value).__name__}, expected an object")
    return value


def _template_files(directory: Path) -> dict[str, str]:
    """chat_template.jinja, and additional_chat_templates/NAME.jinja beside it."""
    files = {"default": directory / "chat_template.jinja"}
    files.update({file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))})
    templates: dict[str, str] = {}
    for name, file in files.items():
        if not os.path.lexists(file):
            continue
        try:
            templates[name] = read_regular(file).decode("utf-8")
        except FileNotFoundError:
            raise CheckpointError(f"{why_missing(file)}; download the checkpoint again") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {show_path(file)}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{show_path(file)} is not UTF-8 at byte {error.start}; download it again") from None
    return templates


def _content(value: Any, what: str) -> str | None:
    """A token given as a string, as an AddedToken object, or as null."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{what} is {value!r}, expected a string, an object with content, or null")
    return value
