"""The Prometheus metrics of the frontend."""

from collections.abc import Callable, Iterator

from kvcache.endpoints.families import Family, FamilyCollector, Sample
from scheduler_adapters.front.frontend import Frontend

_ENDS = ("eos", "length", "cancelled", "refused", "error")


def _processes(front: Frontend) -> Iterator[Sample]:
    said = [one.ready for one in list(front.members.values())]
    for role in ("prefill", "decode"):
        for state in ("serving", "draining"):
            there = [one for one in said if one.role == role and one.draining == (state == "draining")]
            yield (role, state), len(there)


def _prompt_tokens(front: Frontend) -> Iterator[Sample]:
    yield ("cached",), front.counts.cached_tokens
    yield ("computed",), front.counts.computed_tokens


def _figure(name: str) -> Callable[[Frontend], Iterator[Sample]]:
    return lambda front: iter([((), getattr(front.counts, name))])


def _ended(front: Frontend) -> Iterator[Sample]:
    return (((how,), front.counts.ended[how]) for how in _ENDS)


def _first_token(front: Frontend) -> Iterator[Sample]:
    found = front.counts.first_token
    yield (), (found.bounds, found.counts.copy(), found.total)


FAMILIES = (
    Family(
        "pagewire_front_processes", "gauge", "Processes of the fleet, by role and state.", ("role", "state"), _processes
    ),
    Family("pagewire_front_requests", "gauge", "Open requests.", (), _figure("open")),
    Family(
        "pagewire_front_ended_requests_total",
        "counter",
        "Requests that have ended: by a token, by length, cancelled by their client, refused, or with an error.",
        ("how",),
        _ended,
    ),
    Family(
        "pagewire_front_lost_attempts_total",
        "counter",
        "Attempts that were lost with their decode process or refused by it; usually another one follows.",
        (),
        _figure("lost"),
    ),
    Family(
        "pagewire_front_unsent_requests_total",
        "counter",
        "Requests whose client closed its connection before it had sent all of them.",
        (),
        _figure("unsent"),
    ),
    Family(
        "pagewire_front_prompt_tokens_total",
        "counter",
        "Prompt tokens of successful requests, by source: computed, or cached at the prefill process.",
        ("source",),
        _prompt_tokens,
    ),
    Family("pagewire_front_new_tokens_total", "counter", "Tokens sent to clients.", (), _figure("new_tokens")),
    Family(
        "pagewire_front_first_token_seconds",
        "histogram",
        "Time from the arrival of a request to its first token.",
        (),
        _first_token,
    ),
)


class FrontCollector(FamilyCollector):
    """Collects requests, tokens and processes of a frontend. `labels` are added to every sample."""

    def __init__(self, frontend: Frontend, **labels: object) -> None:
        super().__init__("front", lambda: frontend, FAMILIES, labels)
