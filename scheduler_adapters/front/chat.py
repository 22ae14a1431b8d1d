"""The text of a chat: checks its messages against OpenAI's schema, and renders them with the model's chat template.

A chat template is a program of the model's authors. It may skip roles and calls that it does not know, and it may take
a content only as a text, or only as a list of parts. So the messages are first rendered with a marker in place of each
text. The markers in the result show which form the template takes, and what it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from scheduler_adapters.front.errors import OpenAIError

Json = dict[str, Any]
Template = Callable[[list[Json]], str]
_READ = ("content", "tool_calls")
_LONGEST = 300  # characters of a reason, which may repeat what the client sent


class _TextPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _ChatMessage(msgspec.Struct):
    """The fields of OpenAI's messages. Other fields go to the template unchanged."""

    role: str
    content: str | Annotated[list[_TextPart], Meta(min_length=1)] | None = None
    tool_calls: list[_ToolCall] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    # no template takes these
    refusal: None = None
    audio: None = None
    function_call: None = None


class _Chat(msgspec.Struct):
    messages: Annotated[list[_ChatMessage], Meta(min_length=1)]


class _MarkedText(NamedTuple):
    """A text of a chat: the index of its message, its path in the request body, and whether a template may omit it."""

    message: int
    path: str
    optional: bool


def render_chat(messages: Any, template: Template) -> str:
    """Returns the text of a chat.

    If the template takes only texts, newlines join the parts of a content, as in vLLM. Fields that are null are left
    out. The arguments of tool calls become objects, because templates expect them.

    Args:
        messages: the `messages` of a request body, unchecked.
        template: renders messages. Each content is a text or a list of text parts.

    Raises:
        OpenAIError: the messages break OpenAI's schema, contain more than text, or are refused or partly left out by
            the template.
    """
    chat = [
        _others(given) | _read(one, f"messages[{index}]")
        for index, (given, one) in enumerate(zip(messages, _checked(messages), strict=True))
    ]
    in_parts: frozenset[int] = frozenset()
    if lost := _left_out(chat, in_parts, template):
        tried = frozenset(one.message for one in lost)
        lost_in_parts = _left_out(chat, tried, template)
        in_parts = tried - {one.message for one in lost_in_parts if one.path.endswith("content")}
        lost = _left_out(chat, in_parts, template)
    try:
        text = template(_in_form(chat, in_parts))
    except Exception as error:
        reason = f"the chat template does not take these messages: {str(error)[:_LONGEST]}"
        raise OpenAIError(reason, param="messages") from error
    for one in lost:
        if not one.optional:
            raise OpenAIError(f"{one.path}: the model's chat template leaves it out", param=one.path)
    return text


def _checked(messages: Any) -> list[_ChatMessage]:
    try:
        return msgspec.convert({"messages": messages}, _Chat).messages
    except msgspec.ValidationError as error:
        reason, _, path = str(error).rpartition(" - at `$.")
        raise _refused(path.rstrip("`"), reason) from error


def _refused(path: str, reason: str) -> OpenAIError:
    taken = "; a content is a text, or a list of text parts" if ".content" in path else ""
    return OpenAIError(f"{path}: {reason[:_LONGEST]}{taken}", param=path)


def _others(message: Json) -> Json:
    """Returns the fields that `_read` does not."""
    return {name: value for name, value in message.items() if value is not None and name not in _READ}


def _read(message: _ChatMessage, path: str) -> Json:
    """Returns the content of a message as a list of parts, and its tool calls as templates take them."""
    calls, content = message.tool_calls or [], message.content
    if calls and message.role != "assistant":
        raise _refused(f"{path}.tool_calls", f"a message of the role {message.role[:100]!r} calls no tools")
    if content is None and not calls:
        raise _refused(f"{path}.content", "only a message that calls tools may omit it")
    parts = [_TextPart("text", content)] if isinstance(content, str) else content or []
    read: Json = {"content": [msgspec.structs.asdict(part) for part in parts]}
    if calls:
        read["tool_calls"] = [_call(one, f"{path}.tool_calls[{at}]") for at, one in enumerate(calls)]
    return read


def _call(call: _ToolCall, path: str) -> Json:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refused(f"{path}.function.arguments", f"not a JSON object: {error}") from error
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _in_form(chat: list[Json], in_parts: frozenset[int]) -> list[Json]:
    """Returns the chat with each content as one text, or as a list of parts for the messages `in_parts`."""
    return [
        one if index in in_parts else one | {"content": "\n".join(part["text"] for part in one["content"])}
        for index, one in enumerate(chat)
    ]


def _left_out(chat: list[Json], in_parts: frozenset[int], template: Template) -> list[_MarkedText]:
    """Returns the texts that the template leaves out, in this form: all if it refuses the form."""
    markers: dict[str, _MarkedText] = {}

    def marker(index: int, path: str, *, optional: bool = False) -> str:
        # A list of parts that a template prints as a value has an escape sequence in place of a newline.
        made = f"pagewire{len(markers)}{chr(10) if index in in_parts else ''}marker"
        markers[made] = _MarkedText(index, f"messages[{index}].{path}", optional)
        return made

    marked: list[Json] = []
    for index, one in enumerate(chat):
        # templates of reasoning models leave out what the assistant thought in earlier turns
        optional = one["role"] == "assistant"
        content = [
            part | {"text": marker(index, "content", optional=optional) if part["text"] else ""}
            for part in one["content"]
        ]
        calls = [
            call | {"function": call["function"] | {"name": marker(index, f"tool_calls[{at}]")}}
            for at, call in enumerate(one.get("tool_calls", ()))
        ]
        marked.append(one | {"content": content} | ({"tool_calls": calls} if calls else {}))
    try:
        text = template(_in_form(marked, in_parts))
    except Exception:  # noqa: BLE001 -- a template raises what it likes, and its reason is reported with the real texts
        return list(markers.values())
    return [one for made, one in markers.items() if made not in text]
