"""Every shape of a chat's messages reaches the model as the text that it is, or is refused with its place.

The templates are those of real model families, shortened. transformers renders them.
"""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scheduler_adapters.front.errors import OpenAIError
from scheduler_adapters.front.openai import ServedModel, read_request

ROLES = ("user", "system", "developer", "assistant", "tool")
CALL = {"id": "call_123a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
TEMPLATES = {
    # ChatML: any role, the content is concatenated
    "concatenates": "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '/' }}{% endfor %}",
    # the content is written, so that a list would be written as Python writes it
    "writes": "{% for m in messages %}<{{ m.role }}>{{ m.content }}/{% endfor %}",
    # LLaVA: any role, the parts are iterated; a text would be a list of characters, without a word of it written
    "iterates": (
        "{% for m in messages %}<{{ m.role }}>"
        "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}/"
        "{% endfor %}"
    ),
    # as above, and a text is an error
    "iterates strictly": (
        "{% for m in messages %}<{{ m.role }}>"
        "{% for part in m.content %}{{ raise_exception('no parts') if part is string else part.text }}{% endfor %}/"
        "{% endfor %}"
    ),
    # Llama 3.2 Vision: both forms
    "takes both": (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}/{% endfor %}"
    ),
    # a system message is written, the others are iterated
    "mixed": (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}/{% endfor %}"
    ),
    # as above, and a text is an error
    "mixed strictly": (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ raise_exception('no parts') if part is string else part.text }}{% endfor %}"
        "{% endif %}/{% endfor %}"
    ),
    # Zephyr: three roles, the others are skipped
    "skips": (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}/"
        "{% elif m.role == 'system' %}<system>{{ m.content }}/"
        "{% elif m.role == 'assistant' %}<assistant>{{ m.content }}/{% endif %}{% endfor %}"
    ),
    # Gemma: a system message is an error
    "refuses": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}/{% endfor %}"
    ),
    # Qwen: calls of tools, and results as JSON
    "calls": (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments | tojson }})"
        "{% endfor %}/{% endfor %}"
    ),
    # DeepSeek R1: what the assistant thought in earlier turns is left out
    "forgets thoughts": (
        "{% for m in messages %}{% if not (m.role == 'assistant' and not loop.last) %}<{{ m.role }}>{{ m.content }}/"
        "{% endif %}{% endfor %}"
    ),
}
TAKES_LISTS = ("iterates", "iterates strictly", "takes both", "mixed", "mixed strictly")


def served(template: str) -> ServedModel:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = template
    return ServedModel("tiny", tokenizer, len(letters))


SERVED = {name: served(template) for name, template in TEMPLATES.items()}


def text_of(messages: Any, template: str) -> str:
    """Returns the text that the model gets for a request with these messages."""
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    one = SERVED[template]
    return one.tokenizer.decode(read_request("chat", body, one).prompt)


def refused(messages: Any, template: str = "writes") -> tuple[str, str]:
    """Returns the place and the text of the error."""
    with pytest.raises(OpenAIError) as caught:
        text_of(messages, template)
    told = caught.value.body()["error"]
    assert caught.value.status == 400
    assert told["type"] == "invalid_request_error"
    assert len(told["message"]) < 1000
    return told["param"], told["message"]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    known = {"tool_call_id": "call_123a"} if role == "tool" else {}
    return {"role": role, "content": content} | known | more


@pytest.mark.parametrize("template", [*TAKES_LISTS, "concatenates", "writes"])
@pytest.mark.parametrize("role", ROLES)
def test_a_text_and_its_parts_reach_the_model_as_one_text(role: str, template: str) -> None:
    given = [said("user", "first"), said(role, "hello, wörld ✓")]
    assert text_of(given, template) == f"<user>first/<{role}>hello, wörld ✓/"
    assert text_of([given[0], said(role, parts("hello, wörld ✓"))], template) == text_of(given, template)
    # with two parts, a template that takes parts joins them itself
    joined = "onetwo" if template in TAKES_LISTS and template != "takes both" else "one\ntwo"
    joined = "one\ntwo" if template.startswith("mixed") and role == "system" else joined
    assert text_of([said(role, parts("one", "two"))], template) == f"<{role}>{joined}/"


@pytest.mark.parametrize("template", TEMPLATES)
def test_fields_that_clients_send_empty_change_nothing(template: str) -> None:
    empty = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "name": None}
    for calls in (None, []):
        given = [said("user", "hi"), said("assistant", "yes", **(empty | {"tool_calls": calls}))]
        assert text_of(given, template) == text_of([said("user", "hi"), said("assistant", "yes")], template)
        assert "None" not in text_of(given, template)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_an_assistant_that_calls_tools_needs_no_content(content: dict[str, Any]) -> None:
    given = [said("user", "rain?"), {"role": "assistant", "tool_calls": [CALL]} | content, said("tool", 'a "b"')]
    assert text_of(given, "calls") == '<user>rain?/<assistant>(weather {"city": "Ulm"})/<tool>"a \\"b\\""/'
    without = CALL | {"function": {"name": "weather", "arguments": ""}}
    assert "(weather {})" in text_of([{"role": "assistant", "tool_calls": [without]} | content], "calls")


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "calls"])
def test_a_call_that_the_template_leaves_out_is_refused(template: str) -> None:
    given = [said("user", "rain?"), {"role": "assistant", "content": "I look", "tool_calls": [CALL]}]
    param, message = refused(given, template)
    assert (param, message) == (
        "messages[1].tool_calls[0]",
        "messages[1].tool_calls[0]: the model's chat template leaves it out",
    )


@pytest.mark.parametrize("role", ["developer", "tool", "ipython"])
def test_a_message_that_the_template_skips_is_refused(role: str) -> None:
    for content in ("be brief", parts("be brief")):
        assert refused([said(role, content), said("user", "hi")], "skips")[0] == "messages[0].content"


def test_a_template_says_itself_why_it_refuses() -> None:
    for content in ("be brief", parts("be brief")):
        param, message = refused([said("system", content), said("user", "hi")], "refuses")
        assert (param, message) == ("messages", "the chat template does not take these messages: no system role")


def test_a_template_may_leave_out_what_the_assistant_said_earlier() -> None:
    for content in ("long ago", parts("long ago")):
        given = [said("assistant", content), said("user", "hi")]
        assert text_of(given, "forgets thoughts") == "<user>hi/"


OTHER_PARTS = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"file_id": "f"}},
    {"type": "video_url", "video_url": {"url": "http://127.0.0.1/x"}},
    {"type": "refusal", "refusal": "no"},
    {"type": "x" * 5000, "text": "hello"},
]
"""Parts of OpenAI's schema and of vLLM's that are no text, and one that nobody knows."""


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("part", OTHER_PARTS, ids=lambda part: part["type"][:12])
def test_a_part_that_is_no_text_is_refused_with_its_type_and_place(part: Any, template: str) -> None:
    for role in ROLES:
        param, message = refused([said("user", "hi"), said(role, [*parts("see"), part])], template)
        assert param == "messages[1].content[1].type"
        assert part["type"][:100] in message
        assert "a content is a text, or a list of text parts" in message


JUNK = [0, 7, 1.5, True, False, {}, {"type": "text", "text": "hello"}]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("role", ROLES)
def test_a_content_that_is_no_text_is_refused_with_its_place(role: str, template: str) -> None:
    def place(content: Any) -> str:
        return refused([said("user", "hi"), said(role, content)], template)[0]

    for junk in (*JUNK, [], None):
        assert place(junk) == "messages[1].content", junk
    for junk in (*JUNK[:-1], None, "hello", [], ["hello"]):
        expected = "messages[1].content[1]"
        assert place([*parts("hello"), junk]) in (expected, f"{expected}.type"), junk
    for junk in (*JUNK, None, []):
        assert place([{"type": "text", "text": junk}]) == "messages[1].content[0].text", junk
    for junk in (*JUNK, None, []):
        assert place([{"type": junk, "text": "hello"}]) == "messages[1].content[0].type", junk
    assert place([{"type": "text"}]) == place([{"text": "hello"}]) == "messages[1].content[0]"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        *[(junk, "messages") for junk in (None, [], "hi", 5, True, {}, {"role": "user", "content": "hi"})],
        *[([junk], "messages[0]") for junk in (None, "hi", 5, [], {}, {"content": "hi"})],
        *[([said("user", "hi") | {"role": junk}], "messages[0].role") for junk in (None, 5, [], {})],
        ([said("user", "hi", name=5)], "messages[0].name"),
        ([said("tool", "hi", tool_call_id=5)], "messages[0].tool_call_id"),
        ([said("assistant", None, refusal="I cannot")], "messages[0].refusal"),
        ([said("assistant", None, audio={"id": "a"})], "messages[0].audio"),
        ([said("assistant", None, function_call={"name": "f", "arguments": ""})], "messages[0].function_call"),
        ([said("user", "hi", tool_calls=[CALL])], "messages[0].tool_calls"),
        ([said("assistant", None, tool_calls=5)], "messages[0].tool_calls"),
        ([said("assistant", None, tool_calls=[])], "messages[0].content"),
        ([said("assistant", None, tool_calls=[5])], "messages[0].tool_calls[0]"),
        ([said("assistant", None, tool_calls=[CALL | {"id": 5}])], "messages[0].tool_calls[0].id"),
        ([said("assistant", None, tool_calls=[CALL | {"type": "custom"}])], "messages[0].tool_calls[0].type"),
        ([said("assistant", None, tool_calls=[CALL | {"function": {}}])], "messages[0].tool_calls[0].function"),
    ],
)
def test_messages_that_are_none_are_refused_with_their_place(messages: Any, param: str) -> None:
    assert refused(messages)[0] == param


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "null", '"a"', "[" * 5000, '{"a":' * 5000])
def test_arguments_of_a_call_that_are_no_json_object_are_refused(arguments: str) -> None:
    call = CALL | {"function": {"name": "weather", "arguments": arguments}}
    given = [said("user", "rain?"), {"role": "assistant", "tool_calls": [CALL, call]}]
    assert refused(given, "calls")[0] == "messages[1].tool_calls[1].function.arguments"


def test_a_template_gets_the_fields_that_only_it_knows() -> None:
    one = served("{% for m in messages %}{{ m.reasoning_content }}|{{ m.name }}|{{ m.content }}{% endfor %}")
    given = [said("assistant", "yes", reasoning_content="hm", name="ann")]
    body = json.dumps({"model": "tiny", "messages": given}).encode()
    assert one.tokenizer.decode(read_request("chat", body, one).prompt) == "hm|ann|yes"
