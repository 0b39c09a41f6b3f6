"""Write tests/fixtures/tokenizer: a byte-level BPE tokenizer like Qwen3's with 296 ids instead of 151669.

    hf download Qwen/Qwen3-0.6B tokenizer.json tokenizer_config.json --local-dir qwen3
    python scripts/make_test_tokenizer.py --qwen3 qwen3 [--out tests/fixtures/tokenizer]

Normaliser, split pattern, decoder, the 26 added tokens and the chat template are Qwen3's own (Apache-2.0). The
vocabulary is 256 bytes and 14 merges, so that it fits the tests' models of 300 and 320 ids and leaves padding ids
there. Two of the merges form F0 9F 98, the first three bytes of many emoji: a character that ends inside a token's
neighbour is what streaming has to get right.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from cupyllm.model.detokenizer import byte_alphabet

ROOT = Path(__file__).resolve().parent.parent
NOTICE = """\
Made by scripts/make_test_tokenizer.py. The split pattern, the added tokens and the chat template are those of Qwen3
(https://huggingface.co/Qwen/Qwen3-0.6B, Copyright Alibaba Cloud, Apache License 2.0). The vocabulary is ours.
"""
# Pairs in the byte alphabet's characters: ð is F0, Ł 9F, ĺ 98, Ġ a space.
MERGES = (
    ("ð", "Ł"),
    ("ðŁ", "ĺ"),
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("in", "g"),
    ("a", "n"),
    ("e", "r"),
    ("o", "n"),
    ("o", "r"),
    ("e", "s"),
    ("Ġ", "a"),
    ("Ġ", "s"),
)


def tokenizer_json(real: dict[str, Any]) -> dict[str, Any]:
    """Qwen3's tokenizer.json with another vocabulary; added tokens keep their order and follow it."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    tokens = [characters[byte] for byte in range(256)] + [left + right for left, right in MERGES]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = {**real["model"], "vocab": vocabulary, "merges": [list(pair) for pair in MERGES]}
    added = [{**token, "id": len(tokens) + i} for i, token in enumerate(real["added_tokens"])]
    return {**real, "added_tokens": added, "model": model}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--qwen3", type=Path, required=True, help="a directory with Qwen3's tokenizer files")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures" / "tokenizer")
    arguments = parser.parse_args()
    small = tokenizer_json(json.loads((arguments.qwen3 / "tokenizer.json").read_text("utf-8")))
    settings = json.loads((arguments.qwen3 / "tokenizer_config.json").read_text("utf-8"))
    settings["added_tokens_decoder"] = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in small["added_tokens"]
    }
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    for name, value in (("tokenizer.json", small), ("tokenizer_config.json", settings)):
        text = json.dumps(value, ensure_ascii=False, indent=1)
        (arguments.out / name).write_text(text + "\n", encoding="utf-8")
    (arguments.out / "README.md").write_text(NOTICE, encoding="utf-8")
    print(f"{arguments.out}: {len(small['model']['vocab'])} + {len(small['added_tokens'])} ids")
    return 0


if __name__ == "__main__":
    sys.exit(main())
