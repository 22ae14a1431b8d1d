"""OpenAI's completions and chat completions: turns request bodies into prompts, and tokens into answers.

The module does no input or output. A request for a feature that the service lacks (sampling, several choices, log
probabilities) is refused with an error that names the parameter. Values without effect are accepted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from scheduler_adapters.front.chat import render_chat
from scheduler_adapters.front.errors import OpenAIError
from scheduler_adapters.service.messages import Finished

if TYPE_CHECKING:
    from scheduler_adapters.hf.runner import Tokenizer

Json = dict[str, Any]
RequestKind = Literal["completion", "chat"]

_DEFAULT_TOKENS = 16  # the default of completions; a chat uses all the room that is left
_UNFINISHED = "\ufffd"  # what a tokenizer decodes an incomplete character to
# Parameters that the service does not support, each with the values that change nothing and are accepted. None is
# always accepted.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "temperature": (0,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "stop": ("", []),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}
_ENDS = {"eos": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that is served, and what its requests may contain.

    Attributes:
        name: the model name that requests must give.
        tokenizer: its tokenizer.
        vocab_size: number of tokens in its vocabulary.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    """The fields that completions and chats share.

    Fields that are not listed here are checked against `_NEUTRAL` or ignored.
    """

    model: str
    prompt: Any = None
    messages: Any = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # as in vLLM
    return_token_ids: bool | None = None  # as in vLLM
    ignore_eos: bool | None = None  # as in vLLM
    min_tokens: Annotated[int, Meta(ge=0)] | None = None  # as in vLLM
    kv_transfer_params: Json | None = None  # as in vLLM


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A checked request.

    Attributes:
        kind: completion or chat.
        prompt: its tokens.
        max_tokens: most tokens to generate; None means as many as fit.
        limited_by: the parameter that limits the new tokens.
        stream: whether the answer is streamed.
        include_usage: whether a stream ends with the usage.
        cache_salt: requests with different salts share no pages.
        return_token_ids: whether the answer includes token ids.
        ignore_eos: whether generation continues after an end-of-sequence token.
        model: the model name that the client gave.
        request_id: id of the answer.
        transfer: `kv_transfer_params`, which a router passes from the prefill process to the decode process.
        created: in seconds since 1970.
    """

    kind: RequestKind
    prompt: tuple[int, ...]
    max_tokens: int | None
    limited_by: str
    stream: bool
    include_usage: bool
    cache_salt: str | None
    return_token_ids: bool
    ignore_eos: bool
    model: str
    request_id: str
    transfer: Json = field(default_factory=dict[str, Any])
    created: int = field(default_factory=lambda: int(time.time()))


def read_request(kind: RequestKind, data: bytes, served: ServedModel) -> ClientRequest:
    """Parses the body of a request.

    Raises:
        OpenAIError: the body is not JSON, names another model, or asks for a feature that the service lacks.
    """
    try:
        whole = msgspec.json.decode(data, type=dict[str, Any])
        body = msgspec.convert(whole, _Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OpenAIError(f"the body is not a valid request: {error}", param=_param(str(error))) from error
    if body.model != served.name:
        reason = f"the model {body.model[:200]!r} does not exist; this service has {served.name!r}"
        raise OpenAIError(reason, status=404, param="model", code="model_not_found")
    for name, values in _NEUTRAL.items():
        if (given := whole.get(name)) is not None:
            _refuse_unless_neutral(name, given, values)
    tokens = _chat_tokens(body, served) if kind == "chat" else _prompt_tokens(body.prompt, served)
    _check_tokens(tokens, served, "messages" if kind == "chat" else "prompt")
    of_chat = body.max_completion_tokens if kind == "chat" else None
    most = of_chat or body.max_tokens
    if body.stream_options is not None and not body.stream:
        raise OpenAIError("stream_options needs stream to be true", param="stream_options")
    limit = most if most or kind == "chat" else _DEFAULT_TOKENS
    transfer = body.kv_transfer_params or {}
    # vLLM's router asks the prefill process for exactly one token (min_tokens 1), but this process generates none.
    least = 0 if transfer.get("do_remote_decode") else body.min_tokens
    if least and (not body.ignore_eos or (limit and limit < least)):
        reason = f"min_tokens is {least}: it needs ignore_eos, and a value up to max_tokens"
        raise OpenAIError(reason, param="min_tokens")
    prefix = "chatcmpl" if kind == "chat" else "cmpl"
    return ClientRequest(
        kind=kind,
        prompt=tuple(tokens),
        max_tokens=limit,
        limited_by="max_completion_tokens" if of_chat else "max_tokens",
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        cache_salt=body.cache_salt,
        return_token_ids=bool(body.return_token_ids),
        ignore_eos=bool(body.ignore_eos),
        model=body.model,
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        transfer=transfer,
    )


def room_for(asked: ClientRequest, capacity: int) -> int:
    """Returns how many tokens the request may generate. `capacity` is the limit on the sum of prompt and new tokens.

    Raises:
        OpenAIError: the prompt and the new tokens do not fit. The error names the prompt if it alone leaves no room.
    """
    length = len(asked.prompt)
    most = max(1, capacity - length) if asked.max_tokens is None else asked.max_tokens
    if length + most > capacity:
        prompt = "messages" if asked.kind == "chat" else "prompt"
        param = prompt if length >= capacity else asked.limited_by
        reason = (
            f"{length} prompt tokens and {most} new ones are {length + most} tokens; at most {capacity} are allowed"
        )
        raise OpenAIError(reason, param=param, code="context_length_exceeded")
    return most


def _refuse_unless_neutral(name: str, given: object, values: tuple[object, ...]) -> None:
    for one in values:
        if given == one and isinstance(given, bool) == isinstance(one, bool):
            return
    shown = f"{str(given)[:100]!r}" if isinstance(given, str) else str(given)[:100]
    only = f"; it takes only {' or '.join(map(repr, values))}" if values else ""
    raise OpenAIError(f"{name} is {shown}: this service does not support it{only}", param=name)


def _param(error: str) -> str | None:
    """Returns the field that an msgspec error names."""
    _, _, path = error.rpartition("`$.")
    return path.split("[")[0].rstrip("`") if path != error else None


def _prompt_tokens(prompt: Any, served: ServedModel) -> list[int]:
    """Returns the tokens of a prompt: one string, one list of token ids, or a list that holds one of these."""
    try:
        found: list[str | int | list[int]] | str = msgspec.convert(prompt, list[str | int | list[int]] | str)
        whole = found[0] if len(found) == 1 and not isinstance(found[0], int) else found
        return served.tokenizer.encode(whole) if isinstance(whole, str) else msgspec.convert(whole, list[int])
    except msgspec.ValidationError as error:
        raise OpenAIError("prompt must be one text, or one list of token ids", param="prompt") from error


def _chat_tokens(body: _Body, served: ServedModel) -> list[int]:
    template: Any = getattr(served.tokenizer, "apply_chat_template", None)
    if template is None or not getattr(served.tokenizer, "chat_template", None):
        raise OpenAIError(f"the model {served.name!r} has no chat template: use completions", param="messages")
    text = render_chat(body.messages, lambda messages: template(messages, add_generation_prompt=True, tokenize=False))
    return served.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[call-arg] -- of transformers


def _check_tokens(tokens: list[int], served: ServedModel, param: str) -> None:
    if not tokens:
        raise OpenAIError(f"{param}: no tokens", param=param)
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < served.vocab_size:
            raise OpenAIError(f"token {token} is not in the vocabulary, 0 to {served.vocab_size - 1}", param=param)


class TextStream:
    """Decodes tokens as they arrive, and returns only whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._from = 0  # index of the first token that is decoded again; tokens before it no longer affect later text
        self._said = 0  # number of tokens whose text has been returned

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Returns the text that these tokens add.

        Incomplete characters are kept for later, unless these are the `last` tokens.
        """
        self._tokens += tokens
        before = self._decoded(self._from, self._said)
        text = self._decoded(self._from, len(self._tokens))
        if not last and (text.endswith(_UNFINISHED) or len(text) <= len(before)):
            return ""
        self._from, self._said = self._said, len(self._tokens)
        return text[len(before) :]

    def _decoded(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)


class Answer:
    """The answer to a request, whole or in parts.

    Args:
        asked: the checked request.
        tokenizer: the tokenizer of the answer's text.
    """

    def __init__(self, asked: ClientRequest, tokenizer: Tokenizer) -> None:
        self._asked = asked
        self._text = TextStream(tokenizer)
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._reason: str | None = None
        self._cached = 0
        self._weights = ""

    def add(self, tokens: Sequence[int], finished: Finished | None, cached_tokens: int, weights: str = "") -> Json:
        """Adds tokens that have arrived, which these weights have computed. Returns the part of a stream with them."""
        self._weights = weights or self._weights
        first = not self._tokens
        self._tokens += tokens
        self._reason = None if finished is None else _ENDS.get(finished, finished)
        self._cached = max(self._cached, cached_tokens)
        text = self._text.add(tokens, last=finished is not None)
        self._texts.append(text)
        if self._asked.kind == "chat":
            content: Json = {"delta": {"content": text} | ({"role": "assistant"} if first else {})}
        else:
            content = {"text": text}
        part = self._frame(content | self._ids(list(tokens), with_prompt=first), part=True)
        return part | ({"usage": None} if self._asked.include_usage else {})

    def whole(self) -> Json:
        """The answer to a request that is not streamed."""
        text = "".join(self._texts)
        content: Json = {"text": text}
        if self._asked.kind == "chat":
            content = {"message": {"role": "assistant", "content": text}}
        framed = self._frame(content | self._ids(self._tokens, with_prompt=True), part=False)
        return framed | {"usage": self.usage()}

    def usage_part(self) -> Json:
        """The last part of a stream, if the client has asked for the usage."""
        return self._frame({}, part=True) | {"choices": [], "usage": self.usage()}

    def usage(self) -> Json:
        """The counts of prompt tokens, cached prompt tokens and new tokens."""
        prompt, new = len(self._asked.prompt), len(self._tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def _ids(self, tokens: list[int], *, with_prompt: bool) -> Json:
        if not self._asked.return_token_ids:
            return {}
        return {"token_ids": tokens} | ({"prompt_token_ids": list(self._asked.prompt)} if with_prompt else {})

    def _frame(self, content: Json, *, part: bool) -> Json:
        asked = self._asked
        kind = (
            "text_completion" if asked.kind == "completion" else "chat.completion.chunk" if part else "chat.completion"
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": self._reason}
        return {
            "id": asked.request_id,
            "object": kind,
            "created": asked.created,
            "model": asked.model,
            "choices": [choice],
            **({"system_fingerprint": self._weights} if self._weights else {}),
        }
