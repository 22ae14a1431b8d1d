"""`pagewire demo`: serve prompts across a prefill and a decode process, and compare with the model's own output."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvcache.errors import PoolTooSmallError
from kvcache.manager import PagedKVCacheManager
from scheduler_adapters.demo.prompts import default_prompts, read_prompts, take
from scheduler_adapters.demo.report import Figures, Reporter
from scheduler_adapters.errors import AdapterError, PromptsError, WorkerError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Workers
from scheduler_adapters.service.server import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

DEFAULT_REQUESTS = 32
_STALL_S = 120.0  # nothing new for this long: something hangs
_SETTLE_S = 5.0  # for the last notifications to come in
# Under chaos notifications are lost: pages whose reader is done stay until their lease ends by itself.
_LEASE_S, _CHAOS_LEASE_S = 10.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says; see `cli`."""

    model: str | None = None
    prompts: str | None = None
    requests: int | None = None
    page_size: int = 16
    prefill_page_size: int | None = None
    decode_page_size: int | None = None
    json: str | None = None
    max_new_tokens: int = 32
    cache_mb: float = 64.0
    concurrency: int = 8
    token_budget: int = 512
    tp: int = 1
    prefill_tp: int | None = None
    decode_tp: int | None = None
    prefills: int = 1
    decodes: int = 1
    chunkwise: bool = True
    chaos: int | None = None
    curve: bool = False
    device: str = "cpu"
    seed: int = 0


@dataclass(slots=True)
class Served:
    """One prompt and what became of it. Times are of `time.perf_counter`, in seconds."""

    request_id: str
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    submitted: float = 0.0
    first: float = 0.0
    last: float = 0.0
    finished: bool = False
    error: str = ""


def run_demo(options: DemoOptions) -> int:
    """Run the demo; 0 where every output is the model's own and no page is left held, else 1.

    Raises:
        KVCacheError: an option, a file or a process that does not work, in one sentence. No process is left.
    """
    from scheduler_adapters.hf.runner import load_model  # noqa: PLC0415  (heavy, and of an optional extra)

    _check_options(options)
    reporter = Reporter()
    texts = read_prompts(options.prompts) if options.prompts else None
    reporter.line(f"model: {options.model or 'a small random Llama over bytes'}")
    model = load_model(options.model, options.seed, options.device)
    served = _requests(options, model, texts)
    configs = _worker_configs(options, model, served)
    reporter.line("starting " + ", ".join(f"{config.name}" for config in configs))
    with Workers(configs, curve=options.curve) as workers:
        reporter.line("  " + ", ".join(f"{name}: pid {pid}" for name, pid in workers.pids.items()))
        with reporter.phase("serving", len(served)) as show:
            serve(workers, served, options, show)
        stats = settled_stats(workers)
    notes, ties, equal = _compare(options, model, served, reporter)
    figures = _figures(served, stats, equal=equal, ties=ties)
    if options.chaos is not None:
        failed = {one.request_id: one.error for one in served if one.error}
        figures = msgspec.structs.replace(figures, failed=failed, faults=_faults(stats))
    sides = [f"{side.title()} of {_of(options, side)}" for side in ("prefill", "decode")]
    where = sides[0] + " to " + sides[1].lower() + ", over NIXL"
    reporter.table(figures, where, notes + _leaks(stats))
    if options.json:
        _write(options.json, figures)
    return 0 if figures.tokens_equal and not figures.leaked_pages else 1


def serve(workers: Workers, served: list[Served], options: DemoOptions, show: Callable[[int, str], None]) -> None:
    """Submit every request, at most `concurrency` at a time, and collect the tokens.

    Raises:
        WorkerError: a process died, or nothing came for two minutes.
    """
    by_id = {one.request_id: one for one in served}
    waiting = list(reversed(served))
    decodes = [name for name in workers.running if workers.role(name) == "decode"]
    running = done = submitted = 0
    heard = time.monotonic()
    while done < len(served):
        while waiting and running < options.concurrency:
            one = waiting.pop()
            one.submitted = time.perf_counter()
            submit = msg.Submit(
                request_id=one.request_id,
                prompt=one.prompt,
                max_new_tokens=options.max_new_tokens,
                serial=submitted + 1,  # 0 is for none
            )
            workers.send(decodes[submitted % len(decodes)], submit)
            submitted += 1
            running += 1
        for message in workers.receive(0.1):
            heard = time.monotonic()
            if isinstance(message, msg.Tokens) and _take(by_id[message.request_id], message):
                running, done = running - 1, done + 1
        show(done, f"{running} on their way")
        if time.monotonic() - heard > _STALL_S:
            raise WorkerError(f"no token within {_STALL_S:.0f} s; {running} requests are on their way")


def settled_stats(workers: Workers) -> dict[str, msg.Stats]:
    """The counters once nothing is held any more, or as they are after five seconds.

    The last notification may still be on its way to prefill when the last token is here.
    """
    deadline = time.monotonic() + _SETTLE_S
    while True:
        stats = workers.stats()
        if not any(one.pages_held or one.open_requests for one in stats.values()) or time.monotonic() > deadline:
            return stats
        time.sleep(0.01)


def _write(path: str, figures: Figures) -> None:
    try:
        Path(path).write_bytes(msgspec.json.encode(figures) + b"\n")
    except OSError as error:
        raise AdapterError(f"--json {path!r} cannot be written: {error.strerror}") from error


def _check_options(options: DemoOptions) -> None:
    """What the types of the arguments, each by itself, cannot see."""
    processes = options.prefills + options.decodes
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    if options.device == "cpu" and processes * options.cache_mb > machine:
        needed = f"{processes} processes with {options.cache_mb:,.0f} MB each"
        raise PoolTooSmallError(f"--cache-mb {options.cache_mb:g}: {needed}, the machine has {machine:,.0f}")


def _requests(options: DemoOptions, model: PreTrainedModel, texts: list[str] | None) -> list[Served]:
    from scheduler_adapters.hf.runner import load_tokenizer  # noqa: PLC0415  (heavy, and of an optional extra)

    vocab_size = model.config.get_text_config().vocab_size
    tokenizer = load_tokenizer(options.model, vocab_size)
    if texts is None:
        texts = default_prompts(options.requests or DEFAULT_REQUESTS)
    served = []
    for number, text in enumerate(take(texts, options.requests)):
        tokens = tuple(tokenizer.encode(text))
        if not tokens:
            raise PromptsError(f"prompt-{number + 1} has no tokens: {text[:40]!r}")
        if max(tokens) >= vocab_size:
            raise PromptsError(f"prompt-{number + 1} has the token {max(tokens)}, the model's vocabulary {vocab_size}")
        served.append(Served(f"prompt-{number + 1}", tokens))
    return served


def _tp(options: DemoOptions, role: msg.Role) -> int:
    return (options.prefill_tp if role == "prefill" else options.decode_tp) or options.tp


def _page_size(options: DemoOptions, role: msg.Role) -> int:
    return (options.prefill_page_size if role == "prefill" else options.decode_page_size) or options.page_size


def _is_alike(options: DemoOptions) -> bool:
    """Whether a page of prefill is a page of decode, so that it can be verified."""
    sides = ("prefill", "decode")
    return len({(_tp(options, side), _page_size(options, side)) for side in sides}) == 1


def _of(options: DemoOptions, role: msg.Role) -> str:
    shards = _tp(options, role)
    return f"pages of {_page_size(options, role)} tokens" + (f" on {shards} shards" if shards > 1 else "")


def _worker_configs(options: DemoOptions, model: PreTrainedModel, served: list[Served]) -> list[WorkerConfig]:
    """What the processes are told, checked: it fits the memory, and every prompt fits the caches."""
    from scheduler_adapters.hf.runner import max_positions_of  # noqa: PLC0415  (heavy, and of an optional extra)

    longest = max(served, key=lambda one: len(one.prompt))
    needed = len(longest.prompt) + options.max_new_tokens
    asked = f"{longest.request_id} has {len(longest.prompt):,} tokens and may get {options.max_new_tokens} more"
    positions = max_positions_of(model.config)
    if positions and needed > positions:
        raise PromptsError(f"{asked}: the model has positions for {positions:,}")
    counts: tuple[tuple[msg.Role, int], ...] = (("prefill", options.prefills), ("decode", options.decodes))
    configs: list[WorkerConfig] = []
    for role, count in counts:
        capacity = _capacity(options, model, role)
        if needed - 1 > capacity:
            raise PromptsError(f"{asked}: the cache holds {capacity:,} (--cache-mb {options.cache_mb:g})")
        for number in range(count):
            config = WorkerConfig(
                model=options.model,
                seed=options.seed,
                page_size=_page_size(options, role),
                cache_bytes=int(options.cache_mb * (1 << 20)),
                max_seq_len=needed,
                max_requests=options.concurrency,
                token_budget=options.token_budget,
                tp=_tp(options, role),
                device=options.device,
                chunkwise=options.chunkwise,
                chaos=None if options.chaos is None else options.chaos + 1000 * len(configs),
                verify=options.chaos is not None and _is_alike(options),
                lease_s=_LEASE_S if options.chaos is None else _CHAOS_LEASE_S,
                name=role if count == 1 else f"{role}-{number + 1}",
                role=role,
            )
            configs.append(config)
    return configs


def _capacity(options: DemoOptions, model: PreTrainedModel, role: msg.Role) -> int:
    """Tokens that the pages of one process hold."""
    from scheduler_adapters.hf.runner import kv_params_of, num_layers_of, state_bytes_of  # noqa: PLC0415  (as above)

    page_size, tp = _page_size(options, role), _tp(options, role)
    params = kv_params_of(model.config, page_size=page_size, n_devices=tp)
    layers = num_layers_of(model.config)
    memory = int(options.cache_mb * (1 << 20)) - state_bytes_of(model, tp, options.concurrency)
    capacity = PagedKVCacheManager.max_supported_sequence_length(params, layers, memory) if memory > 0 else 0
    if not capacity:
        page_bytes = params.bytes_per_token(layers) * page_size
        raise PoolTooSmallError(f"--page-size {page_size}: a page takes {page_bytes:,} bytes, the cache has {memory:,}")
    return capacity


def _take(one: Served, message: msg.Tokens) -> bool:
    """Book what came for a request; whether it has ended."""
    now = time.perf_counter()
    if message.tokens:
        one.first = one.first or now
        one.last = now
        one.tokens += message.tokens
    one.error = message.error
    one.finished = message.finished is not None
    return one.finished


def _compare(
    options: DemoOptions, model: PreTrainedModel, served: list[Served], reporter: Reporter
) -> tuple[list[str], int, bool]:
    """Compare each output with the model's own: what to say of those that differ, ties, whether all are equal."""
    from scheduler_adapters.hf.runner import is_rounding_tie, reference_tokens  # noqa: PLC0415  (heavy, and of an extra)

    notes, ties, equal = [], 0, True
    with reporter.phase("checking against generate", len(served)) as show:
        for number, one in enumerate(served):
            theirs = reference_tokens(model, one.prompt, options.max_new_tokens)
            if one.error:
                equal = equal and options.chaos is not None  # it said so; an answer that is not the model's would not
                notes.append(f"{one.request_id}: failed: {one.error}")
            elif one.tokens != theirs and is_rounding_tie(model, one.prompt, one.tokens, theirs):
                ties += 1
                notes.append(f"{one.request_id}: a rounding tie: {_difference(one.tokens, theirs)}")
            elif one.tokens != theirs:
                equal = False
                notes.append(f"{one.request_id}: differs: {_difference(one.tokens, theirs)}")
            show(number + 1, "")
    return notes, ties, equal


def _difference(ours: list[int], theirs: list[int]) -> str:
    pairs = enumerate(zip(ours, theirs, strict=False))
    for position, (mine, other) in pairs:
        if mine != other:
            return f"token {position} is {mine}, the model's own is {other}"
    return f"{len(ours)} tokens, the model's own are {len(theirs)}"


def _faults(stats: dict[str, msg.Stats]) -> dict[str, int]:
    """How often each fault was injected, all processes together; 0 for one that was not."""
    total: Counter[str] = Counter()
    for one in stats.values():
        for fault, count in one.faults.items():
            total[fault] += count
    return dict(total)


def _figures(served: list[Served], stats: dict[str, msg.Stats], *, equal: bool, ties: int) -> Figures:
    every = list(stats.values())
    prompt_tokens, cached_tokens = sum(one.prompt_tokens for one in every), sum(one.cached_tokens for one in every)
    bytes_pulled, pull_seconds = sum(one.bytes_pulled for one in every), sum(one.pull_seconds for one in every)
    first = [one.first - one.submitted for one in served if one.tokens]
    further = [(one.last - one.first) / (len(one.tokens) - 1) for one in served if len(one.tokens) > 1]
    return Figures(
        requests=len(served),
        tokens_equal=equal,
        ties=ties,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_rate=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        pages_pulled=sum(one.pages_pulled for one in every),
        bytes_pulled=bytes_pulled,
        gbps=bytes_pulled / pull_seconds / 1e9 if pull_seconds else 0.0,
        ttft_ms_p50=statistics.median(first) * 1e3 if first else 0.0,
        tpot_ms_p50=statistics.median(further) * 1e3 if further else 0.0,
        leaked_pages=sum(one.pages_held for one in every),
    )


def _leaks(stats: dict[str, msg.Stats]) -> list[str]:
    return [f"{name}: {one.pages_held} pages are still held" for name, one in stats.items() if one.pages_held]
