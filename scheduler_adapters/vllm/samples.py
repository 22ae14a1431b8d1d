"""The requests that vLLM makes of one client's request: the samples of a prompt (`n`), and several prompts.

All of them have the same `kv_transfer_params`, and vLLM's answer has the params of only one: of the first prompt, and
of its sample that ends last. The samples of a prompt therefore share one lease at prefill. At decode, the first sample
loads the pages, and the others find them in vLLM's prefix cache. Prompts after the first are not handed over.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request

# vLLM names the samples of request R "0_R", "1_R", and so on.
_SAMPLE = re.compile(r"\d+_(.+)", re.DOTALL)
# The completions API names the prompts of request R "cmpl-R-0", "cmpl-R-1", and so on. vLLM adds a random suffix.
_SUFFIX = "" if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION else "-[0-9a-f]{8}"
_LATER_PROMPT = re.compile(rf"(?:\d+_)?cmpl-.*-[1-9]\d*{_SUFFIX}", re.DOTALL)
_MOST_KNOWN = 4096


def parent_of(request_id: str) -> str:
    """Returns the id that all samples of a prompt have in common: of "2_R" and of "R", this is "R"."""
    found = _SAMPLE.fullmatch(request_id)
    return found[1] if found else request_id


def is_later_prompt(request_id: str) -> bool:
    """Whether the request has a prompt after the first one in its client's request."""
    return _LATER_PROMPT.fullmatch(request_id) is not None


@dataclass(slots=True, eq=False)
class _Samples:
    """The samples of a prompt.

    Attributes:
        holder: the sample whose pages are leased; empty if there is no lease.
        running: the samples that have not ended.
    """

    holder: str = ""
    running: set[str] = field(default_factory=set[str])


class SharedLeases:
    """At prefill: which sample of each prompt has the lease. A prompt with a single sample has its own."""

    def __init__(self) -> None:
        self._by_parent: dict[str, _Samples] = {}

    def join(self, request_id: str) -> None:
        """Records a sample whose pages are to be offered."""
        self._by_parent.setdefault(parent_of(request_id), _Samples()).running.add(request_id)

    def __contains__(self, request_id: str) -> bool:
        lease = self._by_parent.get(parent_of(request_id))
        return lease is not None and request_id in lease.running

    def holder(self, request_id: str) -> str:
        """Returns the sample of this request's prompt that has the lease; empty if none has."""
        lease = self._by_parent.get(parent_of(request_id))
        return "" if lease is None else lease.holder

    def hold(self, request_id: str) -> None:
        """Records that the lease was granted for this sample's pages."""
        self._by_parent[parent_of(request_id)].holder = request_id

    def leave(self, request_id: str) -> bool:
        """Records that a sample has ended. Returns whether all samples of its prompt have ended."""
        lease = self._by_parent[parent_of(request_id)]
        lease.running.discard(request_id)
        self._clean(request_id)
        return not lease.running

    def over(self, request_id: str) -> None:
        """Records that the lease of this sample's pages has ended or is about to end."""
        lease = self._by_parent.get(parent_of(request_id))
        if lease is not None and lease.holder == request_id:
            lease.holder = ""
            self._clean(request_id)

    def _clean(self, request_id: str) -> None:
        # As long as the lease is open, a sample that arrives late shares it.
        if not (lease := self._by_parent[parent_of(request_id)]).running and not lease.holder:
            del self._by_parent[parent_of(request_id)]


@dataclass(slots=True, eq=False)
class FirstSample:
    """The sample of a prompt that arrived first.

    Attributes:
        params: its `kv_transfer_params`.
        request: the request, until it has ended.
        has_failed: whether it has ended because its load failed.
    """

    params: Any
    request: Request | None
    has_failed: bool = False


class SharedLoads:
    """At decode: which sample of each prompt loads the pages. Only prompts with several samples are recorded."""

    def __init__(self) -> None:
        # Samples arrive within milliseconds of each other. The first one is remembered for longer, because it may have
        # ended before the last one arrives.
        self._first: OrderedDict[str, FirstSample] = OrderedDict()
        self._followers: dict[str, FirstSample] = {}

    def join(self, request: Request) -> bool:
        """Records a request. Returns whether it is the first sample of its prompt."""
        parent = parent_of(request.request_id)
        if parent == request.request_id or request.kv_transfer_params is None:
            return True
        first = self._first.get(parent)
        if first is not None and first.params == request.kv_transfer_params:
            self._followers[request.request_id] = first
            return False
        self._first[parent] = FirstSample(copy(request.kv_transfer_params), request)
        if len(self._first) > _MOST_KNOWN:
            self._first.popitem(last=False)
        return True

    def first(self, request_id: str) -> FirstSample | None:
        """Returns the first sample of this request's prompt; None if it is the request itself."""
        return self._followers.get(request_id)

    def leave(self, request: Request) -> None:
        """Records that a request has ended."""
        self._followers.pop(request.request_id, None)
        first = self._first.get(parent_of(request.request_id))
        if first is not None and first.request is request:
            first.request, first.has_failed = None, request.status == RequestStatus.FINISHED_ERROR
