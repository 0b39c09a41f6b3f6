"""Chat messages to a prompt: a checkpoint's jinja template, rendered as Hugging Face transformers renders it.

The environment is transformers': jinja2's ImmutableSandboxedEnvironment (templates are downloaded code) with
trim_blocks, lstrip_blocks, loop controls and the {% generation %} tag; `tojson` is json.dumps with ensure_ascii False
(jinja2's own writes < and ' as \\u003c and \\u0027, which no model saw in training); raise_exception and strftime_now
exist; the tokenizer's named special tokens are variables. Like transformers 5, keys that are null are dropped from
messages, and reasoning given as `reasoning` or `thinking` is also given as `reasoning_content`.

Stricter than transformers where it would be silent:
- Templates of text models turn a list as content into nothing. Text parts are joined with "" before the template
  sees them; a part of another type is an error.
- enable_thinking is true or false. Qwen3 compares it with `is false`, so "false", 0 and null would mean ON.
- A role that the template does not mention is an error; Qwen3's template would leave the message out.
- Null content is "" beside tool_calls and an error elsewhere.

Content is pasted into the template as it is, and the rendered text is encoded as a whole. So a user who types
<|im_end|> ends the turn, exactly as in transformers; services that pass on text of strangers should refuse or escape it
(`Tokenizer.special_strings`). Rejected: encoding content apart from the template, with other ids where a token would
have spanned the seam.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from cupyllm.errors import CheckpointError, InputError

ROLES = ("system", "user", "assistant", "tool")

_REASONING = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """The templates of one checkpoint by name; a single one is called "default".

    `variables` are the special tokens that templates refer to (bos_token, eos_token, ...); `where` names the file in
    messages.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str], where: str) -> None:
        self.templates = dict(templates)
        self.variables = dict(variables)
        self.where = where

    def source(self, with_tools: bool) -> str:
        """The template's text: "tool_use" for tools where there is one, else "default". Raises InputError."""
        if with_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        try:
            return self.templates["default"]
        except KeyError:
            names = ", ".join(sorted(self.templates))
            raise InputError(f"{self.where}: chat templates {names}, expected one named default; add it") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        `messages` are {"role", "content", ...} as in OpenAI's API; `tools` JSON schemas; `enable_thinking` None leaves
        it to the template (Qwen3: on); `variables` are further template variables (chat_template_kwargs).
        Raises InputError for messages, tools or variables that cannot be rendered, CheckpointError for a template that
        is not jinja.
        """
        from jinja2 import TemplateError

        source = self.source(bool(tools))
        extra = self._check_variables(variables, enable_thinking)
        plain = [_check_message(message, f"messages[{i}]", source) for i, message in enumerate(_list(messages))]
        if not plain:
            raise InputError("messages is empty, expected at least one message; add a user message")
        template = _compile(source, self.where)
        try:
            return template.render(
                messages=plain,
                tools=_check_tools(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.variables, **extra},
            )
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # the template's own code raised: by raise_exception, or because the messages lack what it reads
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"the chat template of {self.where} refuses these messages: {reason}") from None
        except RecursionError:
            raise InputError(f"the chat template of {self.where} recurses too deeply for these messages") from None

    @staticmethod
    def _check_variables(variables: Mapping[str, Any] | None, enable_thinking: bool | None) -> dict[str, Any]:
        if variables is not None and not isinstance(variables, Mapping):
            raise InputError(f"chat_template_kwargs is {variables!r}, expected an object")
        extra = dict(variables or {})
        reserved = next((name for name in _RESERVED if name in extra), None)
        if reserved is not None:
            raise InputError(f"chat_template_kwargs has {reserved!r}, which is set otherwise; leave it out")
        if enable_thinking is not None:
            extra["enable_thinking"] = enable_thinking
        if "enable_thinking" in extra and not isinstance(extra["enable_thinking"], bool):
            raise InputError(f"enable_thinking is {_shown(extra['enable_thinking'])}, expected true or false")
        return extra


def no_template(where: str) -> InputError:
    """The error for a chat with a checkpoint that has none."""
    return InputError(
        f"{where} has no chat template, expected chat_template in tokenizer_config.json or a chat_template.jinja; "
        "use an instruction-tuned checkpoint, or give plain text with --prompt"
    )


def read_templates(value: Any, where: str) -> dict[str, str]:
    """chat_template as tokenizer_config.json has it: a string, or a list of {"name", "template"}; by name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    templates: dict[str, str] = {}
    for entry in entries:
        named = isinstance(entry, dict) and isinstance(entry.get("name"), str)
        if not named or not isinstance(entry.get("template"), str):
            raise CheckpointError(
                f'{where}: chat_template holds {_shown(entry)}, expected a string or a list of {{"name", "template"}}'
            )
        templates[entry["name"]] = entry["template"]
    return templates


def _list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"messages is {_shown(messages)}, expected a list of messages")
    return messages


def _check_message(message: Any, where: str, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is {_shown(message)}, expected an object with role and content")
    result = {key: value for key, value in message.items() if value is not None}
    role = result.get("role")
    known = list(dict.fromkeys([*ROLES, *([role] if isinstance(role, str) and _mentions(template, role) else [])]))
    if role not in known:
        raise InputError(f"{where}.role is {_shown(role)}, expected one of {', '.join(known)}")
    calls = result.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise InputError(f"{where}.tool_calls is {_shown(calls)}, expected a list of objects")
    result["content"] = _text_of(result.get("content", "" if calls else None), f"{where}.content")
    reasoning = next((result[key] for key in _REASONING if key in result), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InputError(f"{where}.reasoning_content is {_shown(reasoning)}, expected a string")
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _text_of(content: Any, where: str) -> str:
    """A string, or the texts of a list of parts joined with ""."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where} is {_shown(content)}, expected a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InputError(
                f'{where}[{i}] has type {_shown(kind)}, expected {{"type": "text", "text": string}}: the model reads '
                "text only"
            )
        texts.append(part["text"])
    return "".join(texts)


def _check_tools(tools: Any) -> list[Any] | None:
    if not tools and tools in (None, [], ()):
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError(f"tools is {_shown(tools)}, expected a list of JSON schemas (objects)")
    return list(tools)


def _mentions(template: str, role: str) -> bool:
    return f"'{role}'" in template or f'"{role}"' in template


def _shown(value: Any) -> str:
    text = "missing or null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@lru_cache(maxsize=16)
def _compile(source: str, where: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        reason = " ".join(str(error.message).split())
        raise CheckpointError(
            f"{where}: the chat template is not valid jinja: {reason} (its line {error.lineno})"
        ) from None


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks the assistant's tokens for training; here it only shows them.

        A call block, as in transformers, so that variables set inside stay inside.
        """

        tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as a set of the class

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

        def _show(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
