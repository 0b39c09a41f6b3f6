"""expected.txt: the committed verdict on every place, so that a new barrier or condition in a kernel must be judged.

    attention.cuh: attend: __syncthreads(); #2 | reported
    embedding.cu: embedding_chain: later < N #2 | free: the id of the next position, not an address

reported: the mutant is reported in every kernel whose code it changes. Where it is not in some of them, these follow,
with the proof that no execution of theirs can differ: `reported, but equal in linear_dgrad: <proof>`.
equal: <proof>: no execution of any kernel can differ.
free: <reason>: a condition that bounds no access; what its mutant computes is wrong and breaks no rule of memory.
untried: <reason>: the mutant has no meaning, such as one that counts past an array held in registers.

All but the last are tried. Reported must be reported, equal and free must not, and equal must give equal bits in every
case. Barriers and asynchronous copies are never free or untried.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.sim.mutations.judge import Judged, Outcome
from tests.sim.mutations.scan import Place

PATH = Path(__file__).parent / "expected.txt"
VERDICTS = ("reported", "equal", "free", "untried")
_EXCEPT = re.compile(r"^reported, but equal in ([\w ]+)$")


@dataclass(frozen=True)
class Verdict:
    """What a line of expected.txt says."""

    name: str
    reason: str = ""
    equal_in: tuple[str, ...] = ()  # kernels, of "reported"


def read(path: Path = PATH) -> dict[str, Verdict]:
    """Verdicts by place.key. Raises ValueError on a line that is none."""
    verdicts: dict[str, Verdict] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        key, bar, text = line.rpartition(" | ")
        head, _, reason = text.partition(": ")
        exception = _EXCEPT.match(head)
        name = "reported" if exception else head
        unreasoned = bool(reason) == (name == "reported" and exception is None)
        if not bar or name not in VERDICTS or unreasoned or key in verdicts:
            raise ValueError(f"{path.name}:{number}: {line!r}, expected `place | verdict: reason`, each place once")
        verdicts[key] = Verdict(name, reason, tuple(exception[1].split()) if exception else ())
    return verdicts


def unclassified(places: list[Place], verdicts: dict[str, Verdict]) -> list[str]:
    """Where file and kernels do not go together."""
    keys = {place.key: place for place in places}
    lines = [f"{key}: not in {PATH.name}; judge it" for key in keys if key not in verdicts]
    lines += [f"{key}: in {PATH.name}, but in no kernel" for key in verdicts if key not in keys]
    for key, place in keys.items():
        if place.kind in ("barrier", "async") and key in verdicts and verdicts[key].name in ("free", "untried"):
            lines.append(f"{key}: a barrier or a wait is reported or equal, not {verdicts[key].name}")
    return lines


def complaints(judged: Judged, verdict: Verdict) -> list[str]:
    """How the outcome contradicts the verdict; nothing when it does not."""
    key = judged.place.key
    if judged.error:
        return [f"{key}: the mutant does not compile: {judged.error}"]
    lines = [line for outcome in judged.outcomes if (line := _complaint(outcome, verdict))]
    if verdict.name == "reported" and not lines and not any(outcome.kinds for outcome in judged.outcomes):
        lines.append("no kernel reports it")
    lines += [f"{name} is named, but its code does not change" for name in _unused(judged, verdict)]
    return [f"{key}: {line}" for line in lines]


def _complaint(outcome: Outcome, verdict: Verdict) -> str:
    equal = verdict.name == "equal" or outcome.kernel in verdict.equal_in
    if verdict.name == "reported" and not equal:
        silent = f"not reported in {outcome.kernel}, {outcome.launches} launches"
        return "" if outcome.kinds else silent + ("" if outcome.same_bits else f", other numbers in {outcome.case}")
    if outcome.kinds:
        return f"stale: reported in {outcome.kernel}: {outcome.line}"
    if equal and not outcome.same_bits:
        return f"not equal: other numbers in {outcome.kernel}, {outcome.case}"
    return ""


def _unused(judged: Judged, verdict: Verdict) -> list[str]:
    changed = {outcome.kernel for outcome in judged.outcomes}
    return [name for name in verdict.equal_in if name not in changed]


def draft(judged: Judged) -> str:
    """A line for a new place, to be completed by hand unless every kernel reported it."""
    silent = [outcome for outcome in judged.outcomes if not outcome.kinds]
    if judged.outcomes and not silent:
        return f"{judged.place.key} | reported"
    words = "equal" if all(outcome.same_bits for outcome in silent) else "free"
    if len(silent) < len(judged.outcomes):
        words = f"reported, but {words} in {' '.join(outcome.kernel for outcome in silent)}"
    return f"{judged.place.key} | {words}: TODO {judged.error}"
