"""`pagewire demo`: serves prompts across prefill and decode processes, and compares the output with the model's own."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvcache.errors import PoolTooSmallError
from kvcache.manager import PagedKVCacheManager
from pagewire.arguments import write_json
from pagewire.demo.options import DemoOptions
from pagewire.demo.prompts import default_prompts, read_prompts, take
from pagewire.demo.report import Figures, Reporter
from pagewire.viewer import viewer
from scheduler_adapters.errors import PromptsError, ServiceError
from scheduler_adapters.hf.recurrent import text_config_of
from scheduler_adapters.hf.runner import (
    is_rounding_tie,
    kv_params_of,
    load_model,
    load_tokenizer,
    num_layers_of,
    reference_tokens,
    state_bytes_of,
)
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_REQUESTS = 32
_STALL_S = 120.0  # in seconds: if no message arrives for this long, some process hangs
_SETTLE_S = 5.0  # in seconds: how long the last notifications may take to arrive
# With injected faults, notifications get lost, so pages that were read stay leased until their lease expires.
_LEASE_S, _CHAOS_LEASE_S = 10.0, 3.0
_MEGABYTE = 1 << 20


@dataclass(slots=True)
class Served:
    """One prompt and its outcome. Times are from `time.perf_counter`, in seconds."""

    request_id: str
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list[int])
    submitted: float = 0.0
    first: float = 0.0
    last: float = 0.0
    error: str = ""


class _Side(NamedTuple):
    """The processes of one role."""

    role: msg.Role
    processes: int
    page_size: int
    tp: int

    def __str__(self) -> str:
        return f"pages of {self.page_size} tokens" + (f" on {self.tp} shards" if self.tp > 1 else "")


def run_demo(options: DemoOptions) -> int:
    """Runs the demo. Returns 0 if every output equals the model's own and no page is held at the end, else 1.

    Raises:
        KVCacheError: an option, a file or a process does not work; the message names it. All processes have been
            stopped.
    """
    reporter = Reporter()
    prefill, decode = sides = _sides(options)
    texts = read_prompts(options.prompts) if options.prompts else default_prompts(options.requests or DEFAULT_REQUESTS)
    reporter.line(f"model: {options.model or 'a small random Llama over bytes'}")
    model = load_model(options.model, options.seed, options.device)
    served = _requests(options, model, take(texts, options.requests))
    configs = _server_configs(options, sides, model, served)
    reporter.line("starting " + ", ".join(config.name for config in configs))
    with Fleet(configs, curve=options.curve) as fleet:
        reporter.line("  " + ", ".join(f"{name}: pid {pid}" for name, pid in fleet.pids.items()))
        if options.top is not None:
            serve_watched(fleet, served, options, options.top)
        else:
            with reporter.phase("serving", len(served)) as show:
                serve(fleet, served, options, show)
        stats = settled_stats(fleet)
    notes, ties, equal = _compare(options, model, served, reporter)
    notes += [f"{name}: {one.pages_held} pages are still held" for name, one in stats.items() if one.pages_held]
    figures = _figures(served, stats, equal=equal, ties=ties)
    if options.chaos is not None:
        failed = {one.request_id: one.error for one in served if one.error}
        figures = msgspec.structs.replace(figures, failed=failed, faults=_faults(stats))
    reporter.table(figures, f"Prefill of {prefill} to decode of {decode}, over NIXL", notes)
    write_json(options.json, figures)
    return 0 if figures.tokens_equal and not figures.leaked_pages else 1


def serve_watched(fleet: Fleet, served: list[Served], options: DemoOptions, where: str) -> None:
    """Serves every request, and repeats the requests until the viewer is closed.

    The outcomes of the first round are recorded in `served`. The outcomes of the repetitions are dropped.
    """
    addresses = [ready.watch for ready in fleet.ready.values()]
    keys = ["--keyring", str(fleet.viewer_keys)] if options.curve else []
    with viewer(addresses, where, keys) as is_open:
        serve(fleet, served, options, lambda _done, _told: None)
        first = len(served)
        while is_open():
            again = [Served(f"{one.request_id}.{first}", one.prompt) for one in served]
            serve(fleet, again, options, lambda _done, _told: None, first)
            first += len(served)


def serve(
    fleet: Fleet,
    served: list[Served],
    options: DemoOptions,
    show: Callable[[int, str], None],
    earlier: int = 0,
) -> None:
    """Submits every request, at most `concurrency` at a time, and collects the tokens.

    `earlier` is the number of requests that were sent to these processes before.

    Raises:
        ServiceError: no message has arrived for a long time.
    """
    by_id = {one.request_id: one for one in served}
    decodes = [name for name in fleet.running if fleet.role(name) == "decode"]
    submitted = done = 0
    heard = time.monotonic()
    while done < len(served):
        for one in served[submitted : done + options.concurrency]:
            one.submitted = time.perf_counter()
            submit = msg.Submit(
                request_id=one.request_id,
                prompt=one.prompt,
                max_new_tokens=options.max_new_tokens,
                serial=earlier + submitted + 1,  # 0 means no serial
            )
            fleet.send(decodes[submitted % len(decodes)], submit)
            submitted += 1
        for message in fleet.receive(0.1):
            heard = time.monotonic()
            if isinstance(message, msg.Tokens):
                done += _take(by_id[message.request_id], message)
        show(done, f"{submitted - done} on their way")
        if time.monotonic() - heard > _STALL_S:
            raise ServiceError(f"no token within {_STALL_S:.0f} s; {submitted - done} requests are still open")


def _take(one: Served, message: msg.Tokens) -> bool:
    """Records the tokens of a message. Returns whether the request has ended."""
    if message.tokens:
        one.last = time.perf_counter()
        one.first = one.first or one.last
        one.tokens += message.tokens
    one.error = message.error
    return message.finished is not None


def settled_stats(fleet: Fleet) -> dict[str, msg.Stats]:
    """Returns the counters once no page is held any more, or after five seconds.

    Pages may be held for a moment after the last token, because some notifications arrive after it.
    """
    deadline = time.monotonic() + _SETTLE_S
    while True:
        stats = fleet.stats()
        if not any(one.pages_held or one.open_requests for one in stats.values()) or time.monotonic() > deadline:
            return stats
        time.sleep(0.01)


def _sides(options: DemoOptions) -> tuple[_Side, _Side]:
    """Returns the processes for prefill and for decode.

    Raises `PoolTooSmallError` if their caches exceed the memory.
    """
    processes = options.prefills + options.decodes
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _MEGABYTE
    if options.device == "cpu" and processes * options.cache_mb > machine:
        needed = f"{processes} processes with {options.cache_mb:,.0f} MB each"
        raise PoolTooSmallError(
            f"--cache-mb {options.cache_mb:g}: {needed} do not fit; the machine has {machine:,.0f} MB"
        )
    page_size, tp = options.page_size, options.tp
    return (
        _Side("prefill", options.prefills, options.prefill_page_size or page_size, options.prefill_tp or tp),
        _Side("decode", options.decodes, options.decode_page_size or page_size, options.decode_tp or tp),
    )


def _requests(options: DemoOptions, model: PreTrainedModel, texts: Sequence[str]) -> list[Served]:
    vocab_size: int = text_config_of(model.config).vocab_size
    tokenizer = load_tokenizer(options.model, vocab_size)
    served: list[Served] = []
    for number, text in enumerate(texts, 1):
        tokens = tuple(tokenizer.encode(text))
        if not tokens:
            raise PromptsError(f"prompt-{number} has no tokens: {text[:40]!r}")
        if max(tokens) >= vocab_size:
            raise PromptsError(
                f"prompt-{number} has the token {max(tokens)}, but the model's vocabulary has {vocab_size} tokens"
            )
        served.append(Served(f"prompt-{number}", tokens))
    return served


def _server_configs(
    options: DemoOptions, sides: Sequence[_Side], model: PreTrainedModel, served: Sequence[Served]
) -> list[ServerConfig]:
    """Returns the configurations of the processes. Raises if a prompt does not fit the model or the caches."""
    longest = max(served, key=lambda one: len(one.prompt))
    needed = len(longest.prompt) + options.max_new_tokens
    asked = f"{longest.request_id} has {len(longest.prompt):,} tokens and may get {options.max_new_tokens} more"
    positions = getattr(text_config_of(model.config), "max_position_embeddings", None)
    if positions and needed > positions:
        raise PromptsError(f"{asked}, but the model has positions for only {positions:,}")
    # Pulled pages can be compared with checksums of the source's pages only if both sides have the same page layout.
    alike = len({(side.page_size, side.tp) for side in sides}) == 1
    configs: list[ServerConfig] = []
    for side in sides:
        capacity = _capacity(options, model, side)
        if needed - 1 > capacity:
            raise PromptsError(f"{asked}, but the cache holds only {capacity:,} (--cache-mb {options.cache_mb:g})")
        for number in range(side.processes):
            config = ServerConfig(
                model=None if options.model is None else str(options.model),
                seed=options.seed,
                page_size=side.page_size,
                group_layers=options.group_layers,
                cache_bytes=int(options.cache_mb * _MEGABYTE),
                max_seq_len=needed,
                max_requests=options.concurrency,
                token_budget=options.token_budget,
                tp=side.tp,
                device=options.device,
                chunkwise=options.chunkwise,
                chaos=None if options.chaos is None else options.chaos + 1000 * len(configs),
                verify=options.chaos is not None and alike,
                lease_s=_LEASE_S if options.chaos is None else _CHAOS_LEASE_S,
                name=side.role if side.processes == 1 else f"{side.role}-{number + 1}",
                role=side.role,
                watch="tcp://127.0.0.1:0" if options.top is not None else "",
            )
            configs.append(config)
    return configs


def _capacity(options: DemoOptions, model: PreTrainedModel, side: _Side) -> int:
    """Returns the number of tokens that the pages of one process hold."""
    params = kv_params_of(model.config, page_size=side.page_size, n_devices=side.tp, group_layers=options.group_layers)
    layers = num_layers_of(model.config)
    memory = int(options.cache_mb * _MEGABYTE) - state_bytes_of(model, side.tp, options.concurrency)
    capacity = PagedKVCacheManager.max_supported_sequence_length(params, layers, memory) if memory > 0 else 0
    if not capacity:
        page = params.bytes_per_token(layers) * side.page_size
        raise PoolTooSmallError(
            f"--page-size {side.page_size}: a page takes {page:,} bytes, but the cache has {memory:,}"
        )
    return capacity


def _compare(
    options: DemoOptions, model: PreTrainedModel, served: Sequence[Served], reporter: Reporter
) -> tuple[list[str], int, bool]:
    """Compares each output with the model's own output.

    Returns notes on the differences, the number of rounding ties, and whether all outputs are equal.
    """
    notes, ties, equal = list[str](), 0, True
    with reporter.phase("checking against generate", len(served)) as show:
        for number, one in enumerate(served):
            theirs = reference_tokens(model, one.prompt, options.max_new_tokens)
            if one.error:
                # With injected faults, a failed request is acceptable, but a wrong answer is not.
                equal = equal and options.chaos is not None
                notes.append(f"{one.request_id}: failed: {one.error}")
            elif one.tokens != theirs and is_rounding_tie(model, one.prompt, one.tokens, theirs):
                ties += 1
                notes.append(f"{one.request_id}: a rounding tie: {_difference(one.tokens, theirs)}")
            elif one.tokens != theirs:
                equal = False
                notes.append(f"{one.request_id}: differs: {_difference(one.tokens, theirs)}")
            show(number + 1, "")
    return notes, ties, equal


def _difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return f"token {position} is {mine}, the model's own is {other}"
    return f"{len(ours)} tokens, the model's own are {len(theirs)}"


def _faults(stats: Mapping[str, msg.Stats]) -> dict[str, int]:
    """Returns how often each fault was injected, over all processes."""
    total: Counter[str] = Counter()
    for one in stats.values():
        total.update(one.faults)
    return dict(total)


def _figures(served: Sequence[Served], stats: Mapping[str, msg.Stats], *, equal: bool, ties: int) -> Figures:
    def total(name: str) -> Any:
        return sum(getattr(one, name) for one in stats.values())

    prompt_tokens, cached_tokens = total("prompt_tokens"), total("cached_tokens")
    bytes_pulled, pull_seconds = total("bytes_pulled"), total("pull_seconds")
    first = [one.first - one.submitted for one in served if one.tokens]
    further = [(one.last - one.first) / (len(one.tokens) - 1) for one in served if len(one.tokens) > 1]
    return Figures(
        requests=len(served),
        tokens_equal=equal,
        ties=ties,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_rate=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        pages_pulled=total("pages_pulled"),
        bytes_pulled=bytes_pulled,
        gbps=bytes_pulled / pull_seconds / 1e9 if pull_seconds else 0.0,
        ttft_ms_p50=statistics.median(first) * 1e3 if first else 0.0,
        tpot_ms_p50=statistics.median(further) * 1e3 if further else 0.0,
        leaked_pages=total("pages_held"),
    )
