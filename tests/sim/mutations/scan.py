"""Finds what can be deleted from a kernel's text: barriers, cp.async waits and commits, and conditions.

A scanner of tokens and brackets, no C++ parser: it relies on our formatting (a comparison has a space on both sides,
the angle brackets of a template have none) and refuses a text that it cannot read that way, so nothing is missed
silently. Macros are not looked into. A compiler's syntax tree was rejected: libclang is one more dependency, to find
about 350 places.

A condition is an operand of `&&`, `||` or `?`, or the whole of an `if` or `while`, or anything that compares. Its
mutant protects nothing: the condition is true, in the `if` of a return or the like false, and a loop takes one turn
more.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

OPEN, CLOSE = "([{", ")]}"
COMPARISONS = ("<", ">", "<=", ">=", "==", "!=")
SEPARATORS = (*",;?:", "&&", "||", "=", "+=", "-=", "*=", "/=", "|=", "&=", "^=", ">>=", "<<=", "return")
ASYNC_OPS = ("cp.async.wait", "cp.async.commit", "barrier", "bar.sync", "bar.warp")

_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M)
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|::|->|\+\+|--|<<=|>>=|<<|&&|\|\||[<>=!+\-*/%&|^]=|[^\s\w]")
_FUNCTION = re.compile(r"\bKERNEL\((\w+)\)|\bDEVICE\b[^;{}()]*?(\w+)(?:<[^()]*?>)?\s*\(")
_ASM = re.compile(r"\basm\b[^;]*;")
_BARRIER = re.compile(r"\b__sync(?:threads|warp)\w*\([^()]*\);")


@dataclass(frozen=True)
class Place:
    """One text that a mutant lacks. `number` counts equal ones of a function, from 1."""

    file: str
    line: int
    column: int  # from 0
    function: str
    kind: str  # "barrier", "async", "condition", "loop"
    raw: str  # the text itself
    number: int
    replacement: str  # true or false for a condition, one turn more for a loop

    @property
    def key(self) -> str:
        """What expected.txt calls it; stands still when lines move."""
        return f"{self.file}: {self.function}: {self.text}" + (f" #{self.number}" if self.number > 1 else "")

    @property
    def text(self) -> str:
        """In one line."""
        return " ".join(self.raw.split())


@dataclass(frozen=True)
class _Token:
    text: str
    start: int
    end: int
    spaced: bool  # white space on both sides


class ScanError(Exception):
    """A text that is not formatted as the scanner needs it."""


def scan(file: str, text: str) -> list[Place]:
    """Every place of a source text, in order. Raises ScanError."""
    code = _SKIPPED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    found = [(start, end, kind, new) for start, end, kind, new in (*_barriers(code), *_async(code, text))]
    found += _conditions(file, code)
    starts = [match.start() for match in _FUNCTION.finditer(code)]
    names = [match[1] or match[2] for match in _FUNCTION.finditer(code)]
    places: list[Place] = []
    seen: dict[tuple[str, str], int] = {}
    for start, end, kind, replacement in sorted(found):
        at = bisect_right(starts, start) - 1
        function, what = names[at] if at >= 0 else "", " ".join(text[start:end].split())
        number = seen[function, what] = seen.get((function, what), 0) + 1
        line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start) - 1
        places.append(Place(file, line, column, function, kind, text[start:end], number, replacement))
    return places


_Found = tuple[int, int, str, str]  # start, end, kind, replacement


def _barriers(code: str) -> list[_Found]:
    return [(match.start(), match.end(), "barrier", ";") for match in _BARRIER.finditer(code)]


def _async(code: str, text: str) -> list[_Found]:
    """Waits, commits and barriers in inline PTX: the calls of the function that consists of one, or the statement."""
    found = []
    for statement in _ASM.finditer(code):
        if not any(op in text[statement.start() : statement.end()] for op in ASYNC_OPS):
            continue
        wrapper = re.search(r"\bDEVICE void (\w+)\([^()]*\) \{\s*$", code[: statement.start()])
        if wrapper is None or not code[statement.end() :].lstrip().startswith("}"):
            found.append((statement.start(), statement.end(), "async", ";"))
            continue
        for call in re.finditer(rf"(?<!void )\b{wrapper[1]}(?:<[^<>;]*>)?\([^()]*\);", code):
            found.append((call.start(), call.end(), "async", ";"))
    return found


def _tokens(file: str, code: str) -> list[_Token]:
    tokens = []
    for match in _TOKEN.finditer(code):
        start, end = match.span()
        spaced = code[start - 1 : start].isspace() and code[end : end + 1].isspace()
        if match[0] in COMPARISONS[2:] and not spaced and not code[:start].endswith("operator"):
            raise ScanError(f"{file}:{code.count(chr(10), 0, start) + 1}: no space around {match[0]}")
        tokens.append(_Token(match[0], start, end, spaced))
    return tokens


def _compares(token: _Token) -> bool:
    return token.text in COMPARISONS and token.spaced


def _conditions(file: str, code: str) -> list[_Found]:
    tokens = _tokens(file, code)
    match = _brackets(file, tokens)
    found: list[_Found] = []
    for index, token in enumerate(tokens):
        if token.text in OPEN:
            found += _in_bracket(code, tokens, match, index)
    return found


def _brackets(file: str, tokens: list[_Token]) -> dict[int, int]:
    """Closing token of each opening one."""
    match: dict[int, int] = {}
    stack: list[int] = []
    for index, token in enumerate(tokens):
        if token.text in OPEN:
            stack.append(index)
        elif token.text in CLOSE:
            if not stack or OPEN.index(tokens[stack[-1]].text) != CLOSE.index(token.text):
                raise ScanError(f"{file}: brackets do not match")
            match[stack.pop()] = index
    if stack:
        raise ScanError(f"{file}: a bracket is not closed")
    return match


def _in_bracket(code: str, tokens: list[_Token], match: dict[int, int], opening: int) -> list[_Found]:
    """Conditions directly inside one pair of brackets, those of inner brackets left to themselves."""
    head = tokens[opening - 1].text if opening and tokens[opening].text == "(" else ""
    found: list[_Found] = []
    semicolons = 0
    for first, last in _segments(tokens, match, opening + 1, match[opening]):
        before, after = tokens[first - 1].text, tokens[last].text
        semicolons += before == ";"
        own = _outside_inner(tokens, match, first, last)
        compares = any(_compares(token) for token in own)
        logical = before in ("&&", "||") or after in ("&&", "||", "?") or (head in ("if", "while") and before == "(")
        if not (compares or logical) or (not compares and _only_inner(tokens, match, first, last)):
            continue
        start, end = tokens[first].start, tokens[last - 1].end
        order = next((token for token in own if _compares(token) and token.text in "<>"), None)
        if head == "for" and semicolons == 1 and order is not None:
            once_more = f"{code[start : order.end]}={code[order.end : end]}"
            found.append((start, end, "loop", once_more))
        else:
            clamps = after == "?" and order is not None and _text(tokens, last) == code[order.end : end].strip()
            leaves = _is_guard(tokens, match, opening) != _is_negated(tokens, match, opening)
            found.append((start, end, "condition", "false" if clamps or leaves else "true"))
    return found


def _text(tokens: list[_Token], question: int) -> str:
    """What stands between `?` and `:`, if it is one name: of `x < low ? low : x`, which bounds x, the mutant is x."""
    return tokens[question + 1].text if tokens[question + 2].text == ":" else ""


def _segments(tokens: list[_Token], match: dict[int, int], index: int, closing: int) -> list[tuple[int, int]]:
    """[first, last) between the separators of one bracket level."""
    found, first = [], index
    while index < closing:
        text = tokens[index].text
        if text in OPEN:
            index = match[index]
            if text == "{" or (tokens[index + 1].text not in SEPARATORS and _heads_statement(tokens, first)):
                found.append((first, index + 1))
                first = index + 1
        elif text in SEPARATORS or text in ("else", "do"):
            found.append((first, index))
            first = index + 1
        index += 1
    found.append((first, closing))
    return [(a, b) for a, b in found if b > a]


def _heads_statement(tokens: list[_Token], first: int) -> bool:
    return tokens[first].text in ("if", "for", "while", "switch")


def _outside_inner(tokens: list[_Token], match: dict[int, int], first: int, last: int) -> list[_Token]:
    own, index = [], first
    while index < last:
        own.append(tokens[index])
        index = match[index] + 1 if index in match else index + 1
    return own


def _only_inner(tokens: list[_Token], match: dict[int, int], first: int, last: int) -> bool:
    """Whether it is a bracket around conditions, negated or not: these are found inside it."""
    while tokens[first].text == "!":
        first += 1
    if tokens[first].text != "(" or match[first] != last - 1:
        return False
    inner = _outside_inner(tokens, match, first + 1, last - 1)
    return any(_compares(token) or token.text in ("&&", "||") for token in inner)


def _enclosing(match: dict[int, int], opening: int) -> int | None:
    around = [i for i, j in match.items() if i < opening and j > match[opening]]
    return max(around, default=None)


def _is_guard(tokens: list[_Token], match: dict[int, int], opening: int) -> bool:
    """Whether the condition belongs to an `if` that leaves: deleting it means never to leave."""
    place: int | None = opening
    while place is not None and tokens[place].text == "(":
        if tokens[place - 1].text == "if":
            after = match[place] + 1
            after += tokens[after].text == "{"
            return tokens[after].text in ("return", "continue", "break")
        place = _enclosing(match, place)
    return False


def _is_negated(tokens: list[_Token], match: dict[int, int], opening: int) -> bool:
    place: int | None = opening
    negated = False
    while place is not None and tokens[place].text == "(":
        negated ^= tokens[place - 1].text == "!"
        place = _enclosing(match, place)
    return negated
