"""`cupyllm verify`: every proof on this machine, as a report to hand on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from cupyllm import verify
from cupyllm.commands import session
from cupyllm.commands.inputs import check_writable
from cupyllm.commands.output import Output
from cupyllm.files import make_directory, show_path
from cupyllm.model.checkpoint import Checkpoint


def run(*, model: str | None, backend: str, out: str, as_json: bool) -> int:
    """1 when a proof does not hold, else 0."""
    output = Output(as_json)
    with ExitStack() as opened:
        runtime = opened.enter_context(session.open_runtime(output, backend, None))
        checkpoint = None if model is None else opened.enter_context(Checkpoint.open(model))
        make_directory(Path(out))
        for name in ("verify.md", "verify.json"):
            check_writable(str(Path(out) / name), "--out")
        verify.check_cache()
        output.begin(live=True)
        report = verify.verify(checkpoint, runtime, output.note)
    json_path, markdown_path = verify.write(report, out)
    values = {**report.to_json(), "report": [show_path(json_path), show_path(markdown_path)]}
    held = sum(proof.ok for proof in report.proofs)
    lines = [f"{held} of {len(report.proofs)} proofs hold; report: {show_path(markdown_path)}, {show_path(json_path)}"]
    output.result(values, lines)
    return 0 if report.ok else 1
