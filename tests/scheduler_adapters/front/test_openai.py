"""Request bodies become requests or errors, and tokens become answers."""

import json
from typing import Any

import pytest

from scheduler_adapters.front.errors import OpenAIError
from scheduler_adapters.front.openai import Answer, ServedModel, TextStream, read_request, room_for
from scheduler_adapters.hf.tiny import BOS, EOS, VOCAB_SIZE, ByteTokenizer

SERVED = ServedModel("tiny", ByteTokenizer(), VOCAB_SIZE)


class ChatTokenizer(ByteTokenizer):
    chat_template = "any"

    def apply_chat_template(self, messages: list[Any], *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text)[not add_special_tokens :]


def asked(kind: Any = "completion", served: ServedModel = SERVED, **body: Any) -> Any:
    first: dict[str, Any] = {"model": "tiny"} | ({"prompt": "abc"} if kind == "completion" else {})
    return read_request(kind, json.dumps(first | body).encode(), served)


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [BOS, 97, 98, 99], [[BOS, 97, 98, 99]]])
def test_a_prompt_is_a_text_or_tokens(prompt: Any) -> None:
    assert asked(prompt=prompt).prompt == (BOS, 97, 98, 99)


WRONG = [
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": 0.7}, "temperature"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"logprobs": 0}, "logprobs"),
    ({"stop": "x"}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"min_tokens": 3, "ignore_eos": False}, "min_tokens"),
    ({"min_tokens": 17, "ignore_eos": True}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"model": "another"}, "model"),
    ({"model": None}, "model"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_impossible_values_are_refused_with_the_name_of_the_parameter(body: dict[str, Any], param: str) -> None:
    with pytest.raises(OpenAIError) as caught:
        asked(**body)
    error = caught.value.body()["error"]
    assert (error["param"], caught.value.status) == (param, 404 if body.get("model") else 400)
    assert error["type"] == "invalid_request_error"
    assert (param or "the body") in error["message"] or "is not in the vocabulary, 0 to" in error["message"]


@pytest.mark.parametrize("data", [b"", b"[1]", b"{", b"\xff", b"[" * 5000])
def test_an_invalid_body_is_refused(data: bytes) -> None:
    with pytest.raises(OpenAIError, match="the body is not a valid request"):
        read_request("completion", data, SERVED)


def test_values_that_change_nothing_are_accepted() -> None:
    body = {"temperature": 0.0, "n": 1, "stop": None, "logprobs": None, "top_p": 0.9, "seed": 3, "user": "u"}
    assert asked(**body, presence_penalty=0, ignore_eos=False).max_tokens == 16


def test_a_length_is_fixed_as_load_generators_fix_it() -> None:
    assert not asked(min_tokens=0).ignore_eos
    for body in ({}, {"min_tokens": 5}, {"min_tokens": 0}):
        one = asked(max_tokens=5, ignore_eos=True, **body)
        assert (one.max_tokens, one.ignore_eos) == (5, True)


def test_a_request_fits_or_is_refused() -> None:
    assert room_for(asked(max_tokens=6), 10) == 6
    with pytest.raises(OpenAIError, match="4 prompt tokens and 7 new ones are 11 tokens; at most 10 are allowed"):
        room_for(asked(max_tokens=7), 10)


@pytest.mark.parametrize(
    ("kind", "limits", "capacity", "param"),
    [
        ("completion", {"max_tokens": 2}, 5, "max_tokens"),
        ("completion", {}, 5, "max_tokens"),  # the default is 16
        ("completion", {"max_completion_tokens": 1, "max_tokens": 2}, 5, "max_tokens"),
        ("completion", {"max_tokens": 1}, 4, "prompt"),
        ("completion", {"max_tokens": 9}, 3, "prompt"),
        ("chat", {"max_tokens": 2}, 20, "max_tokens"),
        ("chat", {"max_completion_tokens": 2}, 20, "max_completion_tokens"),
        ("chat", {"max_completion_tokens": 2, "max_tokens": 1}, 20, "max_completion_tokens"),
        ("chat", {"max_completion_tokens": 1}, 19, "messages"),
        ("chat", {}, 19, "messages"),
    ],
)
def test_the_error_names_the_prompt_if_it_leaves_no_room_and_else_the_limit_on_new_tokens(
    kind: Any, limits: dict[str, int], capacity: int, param: str
) -> None:
    served = ServedModel("tiny", ChatTokenizer(), VOCAB_SIZE)
    content = {"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {}
    one = asked(kind, served, **content, **limits)
    assert len(one.prompt) == (19 if kind == "chat" else 4)
    with pytest.raises(OpenAIError, match=f"at most {capacity} are allowed") as caught:
        room_for(one, capacity)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_a_chat_needs_a_template_and_may_use_all_remaining_tokens() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(OpenAIError, match="no chat template"):
        asked("chat", messages=messages)
    served = ServedModel("tiny", ChatTokenizer(), VOCAB_SIZE)
    one = asked("chat", served, messages=messages)
    assert bytes(one.prompt) == b"<user>hi<assistant>"
    assert room_for(one, 100) == 100 - len(one.prompt)
    assert asked("chat", served, messages=messages, max_completion_tokens=3, max_tokens=9).max_tokens == 3
    for bad, param in ((None, "messages"), ([], "messages"), ([{"role": "user"}], "messages[0].content")):
        with pytest.raises(OpenAIError, match="messages") as caught:
            asked("chat", served, messages=bad)
        assert caught.value.param == param


def test_text_comes_in_whole_characters_and_incomplete_ones_come_last() -> None:
    data = "aé漢🙂z".encode()
    stream = TextStream(ByteTokenizer())
    parts = [stream.add([byte], last=False) for byte in data]
    assert parts == ["a", "", "é", "", "", "漢", "", "", "", "🙂", "z"]
    assert stream.add([0xC3], last=False) == ""
    assert stream.add([EOS], last=True) == "\ufffd"
    whole = TextStream(ByteTokenizer())
    assert whole.add(list(data), last=True) == "aé漢🙂z"


def test_answers_have_openais_form() -> None:
    request = asked(max_tokens=3, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    answer = Answer(request, ByteTokenizer())
    first, last = answer.add([97], None, 0), answer.add([98, 99], "length", 3)
    assert first["object"] == "text_completion"
    assert first["usage"] is None
    assert first["choices"][0] == {
        "index": 0,
        "text": "a",
        "token_ids": [97],
        "prompt_token_ids": [BOS, 97, 98, 99],
        "logprobs": None,
        "finish_reason": None,
    }
    assert last["choices"][0]["finish_reason"] == "length"
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert answer.usage_part()["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 3}}
    whole = answer.whole()
    assert whole["choices"][0]["text"] == "abc"
    assert whole["choices"][0]["token_ids"] == [97, 98, 99]


def test_a_chat_gets_a_chat_answer() -> None:
    served = ServedModel("tiny", ChatTokenizer(), VOCAB_SIZE)
    request = asked("chat", served, messages=[{"role": "user", "content": "hi"}], stream=True)
    answer = Answer(request, ByteTokenizer())
    first, last = answer.add([97], None, 0), answer.add([EOS], "eos", 0)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert last["choices"][0] == {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "stop"}
    assert answer.whole()["object"] == "chat.completion"
    assert answer.whole()["choices"][0]["message"] == {"role": "assistant", "content": "a"}
