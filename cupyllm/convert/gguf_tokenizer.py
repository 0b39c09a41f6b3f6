"""The tokenizer inside a GGUF file, as Hugging Face's tokenizer.json and tokenizer_config.json.

GGUF keeps tokens, their types, and merges or scores, but names the rest only: `tokenizer.ggml.pre` stands for the
pattern that splits text before merging. The patterns below are those of the models' published tokenizer.json; a name
that is not listed is an error, since a wrong pattern gives plausible ids that the model has never seen.

    gpt2   byte-level BPE: merges are listed
    llama  sentencepiece BPE: the piece with the highest score merges first, so merges are every way to write a piece
           as two others, best score first (as transformers' generate_merges); bytes that are no piece become <0xNN>

Token types: 1 normal, 2 unknown, 3 control (special), 4 user-defined (added, not special), 5 unused (padding of the
vocabulary, left out), 6 byte.
"""

from __future__ import annotations

from typing import Any

from cupyllm.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _NORMAL = 2, 3, 4, 5, 1

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_GPT2_WORDS = {**_BYTE_LEVEL, "use_regex": True}  # GPT-2's own pattern is built into ByteLevel
_MARK = "\u2581"  # sentencepiece's space

# End-of-generation tokens beside the file's eos: the same names as llama.cpp looks for, among control tokens.
_ENDINGS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<|eom_id|>")


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTE_LEVEL]}


PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": _GPT2_WORDS,
    "gpt-2": _GPT2_WORDS,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2_WORDS]},
    "qwen2": _split(_QWEN2_SPLIT),
    "deepseek-r1-qwen": _split(_QWEN2_SPLIT),
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "llama3": _split(_LLAMA3_SPLIT),
    "llama-v3": _split(_LLAMA3_SPLIT),
}
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # their published tokenizers apply NFC first
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token is not merged


class GgufTokenizer:
    """What `metadata` says of the tokenizer; `where` is the file's name for messages. Raises CheckpointError."""

    def __init__(self, metadata: dict[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where
        self.model: str = self._get("model", str, "")
        if self.model not in ("gpt2", "llama"):
            raise CheckpointError(f"{where}: tokenizer.ggml.model is {self.model!r}, expected gpt2 or llama")
        self.tokens: list[str] = self._strings("tokens")
        if not self.tokens:
            raise CheckpointError(f"{where} has no tokenizer.ggml.tokens, expected the vocabulary; use another file")
        types = self._get("token_type", list, [_NORMAL] * len(self.tokens))
        if len(types) != len(self.tokens):
            raise CheckpointError(f"{where}: {len(types)} token types for {len(self.tokens)} tokens; it is damaged")
        self.types: list[int] = types
        self.pre: str = self._get("pre", str, "default")
        self.bos_id = self._id("bos_token_id")
        self.eos_id = self._id("eos_token_id")
        self.pad_id = self._id("padding_token_id")
        self.unk_id = self._id("unknown_token_id")

    def stop_ids(self) -> list[int]:
        """eos, end of turn, and the control tokens that are known to end a generation; ascending."""
        found = {i for i in (self.eos_id, self._id("eot_token_id")) if i is not None}
        kinds = zip(self.tokens, self.types, strict=True)
        found |= {i for i, (token, kind) in enumerate(kinds) if kind == _CONTROL and token in _ENDINGS}
        return sorted(found)

    def description(self) -> str:
        """For a reader."""
        return f"{self.pre} byte-level BPE" if self.model == "gpt2" else "sentencepiece BPE with byte fallback"

    def tokenizer_json(self) -> dict[str, Any]:
        """The object of a tokenizer.json."""
        parts = self._byte_level() if self.model == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **parts,
            "post_processor": self._post_processor(),
        }

    def settings(self) -> dict[str, Any]:
        """The object of a tokenizer_config.json."""
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id, "unk_token": self.unk_id}
        result: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._adds("bos"),
            "add_eos_token": self._adds("eos"),
            **{name: None if number is None else self.tokens[number] for name, number in named.items()},
        }
        templates = self._chat_templates()
        if templates:
            result["chat_template"] = templates
        return result

    def _chat_templates(self) -> str | list[dict[str, str]] | None:
        default = self._metadata.get("tokenizer.chat_template")
        prefix = "tokenizer.chat_template."
        named = {key[len(prefix) :]: value for key, value in self._metadata.items() if key.startswith(prefix)}
        if not named:
            return default
        if default is not None:
            named = {"default": default, **named}
        return [{"name": name, "template": template} for name, template in named.items()]

    def _byte_level(self) -> dict[str, Any]:
        if self.pre not in PRE_TOKENIZERS:
            raise CheckpointError(
                f"{self._where}: tokenizer.ggml.pre is {self.pre!r}, expected one of {', '.join(PRE_TOKENIZERS)}"
            )
        merges = [merge.split(" ", 1) for merge in self._strings("merges")]
        if any(len(pair) != 2 for pair in merges):
            raise CheckpointError(f"{self._where}: a merge in tokenizer.ggml.merges is no pair; the file is damaged")
        return {
            "normalizer": {"type": "NFC"} if self.pre in _NORMALIZED else None,
            "pre_tokenizer": PRE_TOKENIZERS[self.pre],
            "decoder": _BYTE_LEVEL,
            "model": self._bpe(merges, None, ignore_merges=self.pre in _WHOLE_WORDS),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        prefix = self._get("add_space_prefix", bool, True)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
        show = {"type": "Replace", "pattern": {"String": _MARK}, "content": " "}
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([{"type": "Prepend", "prepend": _MARK}] if prefix else []), replace],
            },
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [show, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if prefix else [])],
            },
            "model": self._bpe(self._merges_by_score(), None if self.unk_id is None else self.tokens[self.unk_id]),
        }

    def _bpe(self, merges: list[Any], unknown: str | None, ignore_merges: bool = False) -> dict[str, Any]:
        fallback = self.model == "llama"
        vocabulary: dict[str, int] = {}
        for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != _UNUSED:
                vocabulary.setdefault(token, i)
        known = [[left, right] for left, right in merges if left + right in vocabulary]
        if len(known) != len(merges):
            raise CheckpointError(f"{self._where}: a merge makes a piece that is no token; the file is damaged")
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": fallback,
            "byte_fallback": fallback,
            "ignore_merges": ignore_merges,
            "vocab": vocabulary,
            "merges": known,
        }

    def _merges_by_score(self) -> list[tuple[str, str]]:
        listed = self._metadata.get("tokenizer.ggml.merges")
        if listed is not None:
            return [(left, right) for left, _, right in (merge.partition(" ") for merge in self._strings("merges"))]
        scores = self._get("scores", list, [])
        if len(scores) != len(self.tokens):
            raise CheckpointError(
                f"{self._where}: {len(scores)} tokenizer.ggml.scores for {len(self.tokens)} tokens, expected as many"
            )
        pieces = {
            token: i for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)) if kind == _NORMAL
        }
        merges: list[tuple[str, str, float]] = []
        for piece, i in pieces.items():
            cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
            halves = [(left, right) for left, right in cuts if left in pieces and right in pieces]
            halves.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
            merges += [(left, right, scores[i]) for left, right in halves]
        merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
        return [(left, right) for left, right, _ in merges]

    def _added_tokens(self) -> list[dict[str, Any]]:
        special = {_CONTROL, _UNKNOWN}
        return [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind in special,
            }
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in special or kind == _USER_DEFINED
        ]

    def _post_processor(self) -> dict[str, Any] | None:
        """bos before and eos after a text, where the file asks for them; both only in plain text, never in a chat."""
        byte_level = {**_BYTE_LEVEL, "trim_offsets": False}
        around = {"bos": self.bos_id, "eos": self.eos_id}
        used = {name: number for name, number in around.items() if number is not None and self._adds(name)}
        if not used:
            return byte_level if self.model == "gpt2" else None

        def special(name: str) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": self.tokens[used[name]], "type_id": 0}}] if name in used else []

        def text(name: str, number: int) -> list[dict[str, Any]]:
            return [*special("bos"), {"Sequence": {"id": name, "type_id": number}}, *special("eos")]

        template = {
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": text("A", 0) + text("B", 1),
            "special_tokens": {
                self.tokens[i]: {"id": self.tokens[i], "ids": [i], "tokens": [self.tokens[i]]} for i in used.values()
            },
        }
        return {"type": "Sequence", "processors": [byte_level, template]} if self.model == "gpt2" else template

    def _adds(self, name: str) -> bool:
        """Files from before the flag leave it out; llama.cpp's defaults are taken then."""
        default = name == "bos" and (self.model == "llama" or self.pre in _WHOLE_WORDS)
        return bool(self._get(f"add_{name}_token", bool, default))

    def _id(self, name: str) -> int | None:
        number = self._get(name, int, None)
        if number is not None and not 0 <= number < len(self.tokens):
            return None  # llama.cpp ignores these too: some files say 0xFFFFFFFF for "none"
        return number

    def _strings(self, name: str) -> list[str]:
        value = self._get(name, list, [])
        if not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"{self._where}: tokenizer.ggml.{name} is no list of strings; the file is damaged")
        return value

    def _get(self, name: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return default
        if type(value) is not kind:
            raise CheckpointError(
                f"{self._where}: tokenizer.ggml.{name} is {value!r:.60}, expected {kind.__name__}; the file is damaged"
            )
        return value
