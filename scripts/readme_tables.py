"""README's performance section, made from benchmarks/*.json.

python scripts/readme_tables.py           # rewrite the section
python scripts/readme_tables.py --check   # exit 1 when README does not say what the files say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- performance:begin (made from benchmarks/*.json) -->", "<!-- performance:end -->"


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / name).read_text())
    return result


def commands_table(report: dict[str, Any]) -> list[str]:
    """Wall time of whole processes, and what they report."""
    lines = ["| command | what | wall s |", "|---|---|---|"]
    for name, row in report["commands"].items():
        lines.append(f"| {name} | {_outcome(row['result'])} | {row['wall_seconds']:.1f} |")
    return lines


def _outcome(result: dict[str, Any]) -> str:
    if "streamed_bytes" in result and "tokens_per_s" in result:
        lossless = "; streamed = resident, every bit" if result.get("lossless") else ""
        return (
            f"{result['dtype']}, {result['layers']} layers, {result['tokens']} tokens: pass {result['seconds']:.2f} s, "
            f"{result['streamed_bytes'] / 1e9:.2f} GB read, peak GPU {result['peak_device_bytes'] / 1e9:.2f} GB "
            f"(ours {result['peak_allocator_bytes'] / 1e9:.2f}), "
            f"host {result['peak_host_bytes'] / 1e9:.2f} GB{lossless}"
        )
    if "losses" in result:
        return f"{result['dtype']}: loss {result['losses'][0]:.3f} to {result['losses'][-1]:.3f}, falling at every step"
    if "mb_per_s" in result:
        return f"{result['mb_per_s'] / 1e3:.2f} GB/s"
    if result.get("ok") is True:
        return "all proofs hold"
    return "failed"


def bfloat16_table(report: dict[str, Any]) -> list[str]:
    """Error against float64, ours and Hugging Face's."""
    lines = ["| tensor | ours | transformers | ratio |", "|---|---|---|---|"]
    for name, row in {**report["layer"], **report["logits"]}.items():
        label = f"logits, {name}" if name in report["logits"] else name
        lines.append(f"| {label} | {row['ours']:.2e} | {row['huggingface']:.2e} | {row['ratio']:.2f} |")
    return lines


def linear_table(report: dict[str, Any]) -> list[str]:
    """Ratios to torch, a section a line; then few rows of Qwen3-32B beside the read bandwidth."""
    lines = ["| products | goal | geometric mean | worst | |", "|---|---|---|---|---|"]
    for name, part in report["sections"].items():
        mean, worst = (_ratio(part[key]) for key in ("geometric_mean", "worst"))
        lines.append(f"| {name} ({len(part['rows'])}) | {part['goal']} | {mean} | {worst} | {_met(part)} |")
    few = report["sections"].get("few rows", {"rows": []})["rows"]
    shown = [row for row in few if row["size"] == "32b" and row["M"] in (1, 16) and "skipped" not in row]
    if shown:
        lines += [
            "",
            "| Qwen3-32B, rows | variant | us | share of the read bandwidth | torch / ours |",
            "|---|---|---|---|---|",
        ]
    for row in shown:
        share = f"{100 * row['read_share']:.0f}%"
        cells = (f"{row['projection']}, {row['M']}", row["variant"], f"{row['us']:.1f}", share, _ratio(row["ratio"]))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ratio(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _met(part: dict[str, Any]) -> str:
    return "met" if part["met"] else "not met"


def section() -> str:
    spine, bf16 = load("spine.json"), load("bf16_parity.json")
    layer = spine["commands"]["grad-check, layer of Qwen3-32B, float32"]["result"]["layer"]["errors"]
    worst = max(layer, key=lambda name: layer[name])
    lines = [
        f"Measured on one {bf16['device']} with {spine['cpus']} CPU cores, {spine['date']}, "
        "with bfloat16 products by wgmma and the plain kernels for the rest; "
        "each row is a process of its own, from start to exit.",
        "",
        *commands_table(spine),
        "",
        f"A layer of Qwen3-32B in float32, 128 tokens, against float64: {len(layer)} tensors, largest relative L2 "
        f"error {layer[worst]:.1e} ({worst}). The same layer in bfloat16, beside transformers' bfloat16 (SDPA) on the "
        "same input, and the logits of a 64-layer model:",
        "",
        *bfloat16_table(bf16),
    ]
    if (ROOT / "benchmarks" / "linear.json").is_file():
        linear = load("linear.json")
        lines += [
            "",
            f"Matrix products beside torch {linear['torch']} (cuBLAS) in one run, {linear['device']}, driver "
            f"{linear['driver']}, {linear['date']}: torch's time over ours, medians on rotated random inputs, read "
            f"bandwidth {linear['read_gb_per_s']:.0f} GB/s:",
            "",
            *linear_table(linear),
        ]
    return "\n".join(lines)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    made = f"{head}{BEGIN}\n{section()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        return 0 if made == text else 1
    readme.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
