"""An oracle of contents: an engine whose KV tells what it was computed from, and a comparison wherever it is read.

The KV of a token is a number that depends on the salt, on every token of the prefix, on the version of the weights
under which each of them was computed, and on the layer, the side and the head. A recurrent state is such a number, too.
Before each step, the engine compares everything that the step will see with these numbers. So it notices a page or a
state of another prompt, of other weights, of another request's time, or one that was overwritten, whatever path
brought it: a hit, a fork, a tier or a hand-over.

The moves are the calls of a real engine, drawn at random. The oracle knows only the public interface. It was written
without reading the random model (`random_model`), so that the two do not share a blind spot.
"""

# torch has no types for numpy arrays and for `tolist`.
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from kvcache import (
    Batch,
    BlockTable,
    DraftGroup,
    ImportProof,
    KVCacheError,
    LayerGroup,
    NoFreeStatePageError,
    PageCopy,
    PagedKVCacheManager,
    PageLease,
    PendingImport,
    SinkGroup,
    StatePageError,
    StateShape,
    StepInFlight,
    TextContext,
    WeightsChangedError,
)
from kvcache.pool.lru_order import LruOrder
from kvcache.replica.row_states import StateImportPart
from kvcache.types import RaggedKVCacheInputs
from kvcache.weights import Running, version_bytes
from tests.kvcache.build import manager_of
from tests.kvcache.tiers.stored_objects import COUNT, StoredObjects

Chain = NDArray[np.uint64]
Ints = NDArray[np.int64]
Contexts = Sequence[TextContext] | Batch

SIDES, HEADS, SSM = 2, 2, ("ssm",)
TOKENS = 240  # for how many tokens a replica has pages
SHAPE = StateShape(
    layers=1,
    heads=1,
    head_dim=1,
    groups=1,
    d_state=1,
    kernel=1,
    conv_dtype=torch.float64,
    ssm_dtype=torch.float64,
    form="linear",
)
KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "window": {"groups": (LayerGroup("full", (0,)), LayerGroup("window", (1,), 9))},
    "chunked": {"groups": (LayerGroup("full", (0,)), LayerGroup("chunked", (1,), 12))},
    "sinks": {"groups": (LayerGroup("full", (0,)), SinkGroup((1,), window=9, sinks=5))},
    "sinks alone": {"groups": (SinkGroup((0,), window=6, sinks=2), LayerGroup("window", (1,), 11))},
    "draft": {"groups": (LayerGroup("full", (0,)), DraftGroup((1,)))},
    "draft of windows": {"groups": (LayerGroup("window", (0,), 9), DraftGroup((1,)))},
    "windows alone": {"groups": (LayerGroup("window", (0,), 6), LayerGroup("window", (1,), 11))},
    "state": {"states": SHAPE},
    "window and state": {
        "groups": (LayerGroup("full", (0,)), LayerGroup("window", (1,), 9)),
        "states": SHAPE,
    },
}
RESETS = 0.15  # the weight of a reset among the random calls; a step has 8
SWITCHES = 0.7  # the weight of a switch to other weights
VERSIONS = (None, "a", "b", 3)
STALENESS = (0, 0, 0, 1, 3)
RUNNING: tuple[Running, ...] = ("finish", "recompute", "stop")
_PRIME, _OTHER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT, _LOW = np.uint64(29), np.uint64((1 << 52) - 1)


NAMES = [version_bytes("", version) for version in VERSIONS]  # as `lineage` reports them


def _mixed(words: Chain) -> Chain:
    words = (words ^ (words >> _SHIFT)) * _OTHER
    return words ^ (words >> np.uint64(32))


@dataclass(eq=False)
class Request:
    """One request of the engine, and the KV that its tokens must have."""

    context: TextContext
    weights: int  # how many resets had come when the request was last claimed; it runs on under the weights of then
    chain: list[int] = field(default_factory=list[int])  # a word for each token, which depends on its whole prefix
    # The index in `VERSIONS` of the weights under which each token was computed. The manager knows these.
    versions: list[int] = field(default_factory=list[int])
    lease: PageLease | None = None
    must: Running = "finish"  # what it must do before it runs again, because the weights have changed
    pulls: int = 0  # how many tables of it an exchange has leased
    # The end of the last step, or of an imported table. The next token was perhaps not known there, so a draft model
    # computes its KV at the last token before it again.
    drafted: int = -1

    @property
    def name(self) -> str:
        return self.context.request_id

    def words(self, end: int) -> Chain:
        """Returns the words of the first `end` tokens, uint64 `[end]`."""
        if not self.chain:
            self.chain = [xxhash.xxh3_64_intdigest(f"{self.weights} {self.context.cache_salt}".encode())]
        tokens = self.context.tokens
        while len(self.chain) <= end:
            at = len(self.chain) - 1
            token = int(tokens[at]) * 0x1000193 + at + 1 + (self.versions[at] << 40)
            self.chain.append(int(_mixed(np.array([self.chain[-1] ^ token], np.uint64) * _PRIME + _OTHER)[0]))
        return np.array(self.chain[1 : end + 1], np.uint64)

    def words_of(self, end: int, ahead: int) -> Chain:
        """Returns the words of the KV at each token that `end` known tokens give.

        A draft model, one token `ahead`, also needs the token after. It gets the KV at its last token again in the next
        step, so this token's version does not count.
        """
        if not ahead:
            return self.words(end)
        return _mixed(self.words(end - 1) ^ (self.context.tokens[1:end].astype(np.uint64) * _PRIME))

    def ran(self, start: int, end: int, version: int) -> None:
        """Record that the tokens `start` to `end` (excluded) are computed under `version`, or were found."""
        if self.versions[start:end] != [version] * (end - start):
            self.versions[start:] = [version] * (end - start)
            del self.chain[start + 1 :]

    def found(self, version: int) -> None:
        """Record that the tokens up to the context's start that are not computed were found under `version`."""
        self.ran(len(self.versions), max(len(self.versions), self.context.start_idx), version)

    def claimed_with(self, weights: int) -> None:
        self.weights, self.chain, self.versions, self.drafted, self.must = weights, [], [], -1, "finish"
        self.lease, self.pulls = None, 0  # an open lease holds the pages of the earlier claim alone


def kv_of(words: Chain, layers: Sequence[int]) -> NDArray[np.float64]:
    """Returns the KV of tokens, float64 `[tokens, sides, layers, heads]`."""
    of_layers = np.array(layers, np.uint64)[:, None] * np.uint64(16)
    place = (
        of_layers
        + np.arange(HEADS, dtype=np.uint64)
        + (np.arange(SIDES, dtype=np.uint64) * np.uint64(4))[:, None, None]
    )
    return (_mixed(words[:, None, None, None] + place * _PRIME) & _LOW).astype(np.float64)


def state_of(words: Chain, end: int) -> float:
    """Returns the recurrent state after `end` tokens. It is 0 before the first token."""
    return float(int(words[end - 1]) & int(_LOW)) if end else 0.0


class FrontFirst(LruOrder):
    """Evicts the first pages of a prompt before the later ones: a hit then takes the first ones from a lower tier."""

    def append(self, pages: NDArray[np.integer]) -> None:
        super().append(pages[::-1])


class Sizes(NamedTuple):
    """How large an engine's parts are, and whether it caches prefixes."""

    page: int  # the tokens of a page
    replicas: int = 1
    caching: bool = True
    host: int = 0  # how many pages of host memory there are below the device
    files: Path | None = None  # the folder of a tier of files below the host
    objects: StoredObjects | None = None  # the store of a tier of objects below the host


class Run(NamedTuple):
    """The tokens that a request runs in one step. Its context changes before a step in flight has run."""

    request: Request
    replica: int
    start: int
    active: int


@dataclass(eq=False)
class Flight:
    """A step that was planned while another one runs."""

    runs: list[Run]
    step: StepInFlight


class WrongContentError(AssertionError):
    """A request would read KV that is not its own."""


class Engine:
    """A manager, and a loop over it that knows what each token's KV must be."""

    def __init__(self, name: str, kind: str, random: Random, sizes: Sizes) -> None:
        self.name, self.kind, self.random, self.sizes, self.page = name, kind, random, sizes, sizes.page
        self.has_lower = sizes.files is not None or sizes.objects is not None
        self.importing: list[Request] = []  # requests that wait for an import
        self.version = 0  # the index in `VERSIONS` of the current weights
        self.history = [0]  # all versions that were current, the current one last
        self.front_first = sizes.host > 0 and random.random() < 0.5
        self.manager = self._made()
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # requests that were preempted
        self.batches: list[tuple[list[Request], Batch]] = []
        self.leases: list[tuple[Request, PageLease]] = []
        self.planned: Flight | None = None  # the next step, which waits for the tokens of the step that runs
        self.launched: Flight | None = None  # the step that the device runs
        self.weights, self.made = 0, 0
        self.reached: Counter[str] = Counter()

    def _made(self) -> PagedKVCacheManager:
        sizes, below = self.sizes, dict[str, object]()
        if sizes.objects is not None:
            below = {"object_tier_io": sizes.objects, "object_tier_pages": COUNT, "object_tier_timeout_s": 60.0}
            below |= {"file_tier_key": "weights 0"}
        elif sizes.files is not None:
            below = {"file_tier_dir": sizes.files / self.name, "file_tier_key": "weights 0", "file_tier_max_gb": 0.01}
        if self.front_first:
            below["eviction_order"] = FrontFirst
        return manager_of(
            TOKENS // sizes.page,
            page_size=sizes.page,
            rows=6,
            dp=sizes.replicas,
            max_seq_len=96,
            layers=2,
            heads=HEADS,
            head_dim=1,
            dtype=torch.float64,
            caching=sizes.caching,
            checks=False,
            host_slots=sizes.host,
            params={**KINDS[self.kind], **below, "weights": VERSIONS[self.version]},
        )

    # ---- the model

    def runs_of(self, requests: Sequence[Request]) -> list[Run]:
        """Returns the active tokens of these requests."""
        contexts = [(one, one.context) for one in requests]
        return [Run(one, self.manager.get_replica(it), it.start_idx, it.active_idx) for one, it in contexts]

    def run(self, runs: Sequence[Run], inputs: Sequence[RaggedKVCacheInputs]) -> None:
        """Compare all KV that these requests see, then write the KV of their active tokens."""
        for replica, entry in enumerate(inputs):
            self._run([one for one in runs if one.replica == replica], replica, entry)

    def _run(self, runs: Sequence[Run], replica: int, entry: RaggedKVCacheInputs) -> None:
        tables = entry.lookup_table[None] if entry.lookup_table.dim() == 2 else entry.lookup_table
        for at, (request, _, start, active) in enumerate(runs):
            request.ran(start, active, self.version)
            words = request.words(active)
            if int(entry.cache_lengths[at]) != start:
                raise WrongContentError(f"{request.name}: fetch says {int(entry.cache_lengths[at])} cached of {start}")
            for number, table in enumerate(self.manager.layer_tables.tables):
                pages, group = tables[number, at].tolist(), table.group
                ahead = int(isinstance(group, DraftGroup))  # whose KV at a token depends on the next token, too
                begin = start - ahead * (start == request.drafted)
                seen = np.arange(begin)
                seen = seen[(seen >= group.first_seen(start)) | (seen < getattr(group, "sinks", 0))]
                self._compare(request, entry.blocks, pages, seen, table.layers, ahead)
                tokens = request.context.tokens
                known = active + ahead * (active < len(tokens) and tokens[active] >= 0)
                values = kv_of(request.words_of(known, ahead)[begin:], table.layers)
                self._write(entry.blocks, pages, begin, values)
            request.drafted = active
            for states in self.manager.states[replica : replica + 1]:
                page = states.pages_at([request.name], [start])
                if start and (held := float(states.read(0, page, SSM).flatten()[0])) != state_of(words, start):
                    raise WrongContentError(f"{request.name}: the state after {start} tokens is {held}")
                states.write(0, page, SSM, torch.full((1, 1, 1, 1), state_of(words, active), dtype=torch.float64))
                states.advance(page, [active])
            self.reached["tokens seen"] += start

    def _compare(
        self,
        request: Request,
        blocks: torch.Tensor,
        pages: Sequence[int],
        places: Ints,
        layers: Sequence[int],
        ahead: int,
    ) -> None:
        if not len(places):
            return
        ids = np.array(pages)[places // self.page]
        if not ids.all():
            raise WrongContentError(f"{request.name}: token {places[ids == 0][0]} has no page")
        held = blocks[ids, :, : len(layers), places % self.page, :, 0].numpy()
        right = kv_of(request.words_of(int(places[-1]) + 1 + ahead, ahead)[places], layers)
        wrong = places[(held != right).any(axis=(1, 2, 3))]
        if len(wrong):
            raise WrongContentError(
                f"{request.name}: {len(wrong)} tokens of {places[0]} to {places[-1]} have another KV, first {wrong[0]}"
            )

    def _write(self, blocks: torch.Tensor, pages: Sequence[int], start: int, values: NDArray[np.float64]) -> None:
        places = np.arange(start, start + len(values))
        ids = np.array(pages)[places // self.page]
        blocks[ids, :, : values.shape[2], places % self.page, :, 0] = torch.from_numpy(values)

    # ---- the calls of an engine

    def claim(self, request: Request) -> bool:
        """Claim a request and reserve its first pages. Returns whether it runs now."""
        if not self.manager.admission(request.context).fits:
            return False
        self.manager.external_claim(request.name, self.manager.get_or_recommend_replica(request.context))
        request.claimed_with(self.weights)
        if not self.manager.maybe_reserve(request.context):
            self.manager.release(request.name)
            return False
        self._found(request)
        self.reached["hits"] += request.context.start_idx > 0
        self.running.append(request)
        return True

    def _found(self, request: Request) -> None:
        """Record what a reservation has found. The manager says of which version the request's first pages are."""
        told = [] if request.versions else self.manager.lineage(request.name)
        for first, count, version in told:
            number = NAMES.index(version)
            age = self.history[::-1].index(number)
            if age > request.context.max_staleness:
                raise WrongContentError(f"{request.name}: {count} of its tokens are {age} switches old")
            request.ran(first, first + count, number)
            self.reached["tokens of earlier weights"] += count * (age > 0)
        if told and len(request.versions) != request.context.start_idx:
            raise WrongContentError(f"{request.name}: {len(request.versions)} of {request.context.start_idx} are told")
        request.found(self.version)

    def new_request(self) -> Request:
        """Return a request whose prompt shares a prefix with many others."""
        self.made += 1
        stem, length = self.random.randrange(3), self.random.randrange(5, 60)
        tokens = [(stem * 31 + place * 7) % 251 for place in range(length)]
        tokens[self.random.randrange(length) :] = [self.random.randrange(4)]
        salt = self.random.choice([None, None, "a"])
        stale = self.random.choice(STALENESS)
        context = TextContext(tokens, 90, f"{self.name}-{self.made}", cache_salt=salt, max_staleness=stale)
        return Request(context, self.weights)

    def chunk(self, request: Request) -> None:
        """Let only a part of the request's tokens run next, sometimes."""
        context = request.context
        if context.active_length > 1 and self.random.random() < 0.6:
            context.set_token_indices(active_idx=self.random.randrange(context.start_idx + 1, context.end_idx + 1))

    @property
    def free(self) -> list[Request]:
        """The running requests that no step in flight runs, nor ran before they began anew."""
        busy = {run.request for flight in (self.planned, self.launched) if flight is not None for run in flight.runs}
        return [one for one in self.running if one not in busy and not one.context.has_future_token]

    def chosen(self) -> tuple[list[Request], Contexts]:
        """Return some requests that no step runs, as a list or as a `Batch` that lives for many steps."""
        del self.batches[:-3]
        free = self.free
        batches = [one for one in self.batches if all(request in free for request in one[0])]
        if batches and self.random.random() < 0.6:
            self.reached["steps of a batch"] += 1
            return self.random.choice(batches)
        some = self.random.sample(free, self.random.randrange(1, len(free) + 1))
        contexts = [one.context for one in some]
        if self.random.random() < 0.5:
            batch = self.manager.batch(contexts)
            self.batches.append((some, batch))
            return some, batch
        return some, contexts

    def step(self, *, finish: bool = True) -> None:
        """Run one step of some requests, or some steps of a `Batch` in a row."""
        for one in [one for one in self.free if one.must == "stop"]:
            self._stopped(one)
        if not self.free:
            return
        requests, contexts = self.chosen()
        while self._step(requests, contexts, finish=finish) and isinstance(contexts, Batch):
            if self.random.random() < 0.4:
                return

    def _step(self, requests: Sequence[Request], contexts: Contexts, *, finish: bool) -> bool:
        """Run one step. Returns whether these requests can run another."""
        for one in [one for one in requests if one.context.end_idx >= 88]:
            self.leave(one)
            return False
        for one in requests:
            self.chunk(one)
        if not self._reserved(requests, contexts):
            self.leave(self.random.choice(requests), again=True)
            return False
        if any(self._keeps_state(one) for one in requests):
            return False
        self.run(self.runs_of(requests), self.manager.fetch(contexts))
        self._sample(contexts)
        if self.random.random() < 0.2:  # a fork, a table or a preemption before the step is published
            self.random.choice((self.fork, self.preempt))()
        self.reached["steps"] += 1
        if not all(one in self.running for one in requests):
            return False
        if finish:
            self.manager.step(contexts)
            self._all_named(requests)
        return True

    def _stopped(self, request: Request) -> None:
        """Let a stopped request wait for another claim, because every call that would run it is refused."""
        call = self.random.choice((self.manager.maybe_reserve, self._reserve_alone, self._fetch_alone))
        try:
            call(request.context)
        except WeightsChangedError:
            self.reached["stopped"] += 1
            self.leave(request, again=True)
        else:
            raise WrongContentError(f"{request.name}: runs on with pages of before")

    def _reserve_alone(self, context: TextContext) -> None:
        self.manager.reserve_batch([context])

    def _fetch_alone(self, context: TextContext) -> None:
        self.manager.fetch([context])

    def _reserved(self, requests: Sequence[Request], contexts: Contexts) -> bool:
        """Reserve pages for all of these requests. Those that must be computed anew are, if there is room."""
        for one in [one for one in requests if one.must == "recompute"][:1]:
            try:
                self.manager.fetch([one.context])
            except KVCacheError:
                self.reached["refused until they are reserved"] += 1
            else:
                raise WrongContentError(f"{one.name}: runs on with pages of before")
        try:
            done = self.manager.reserve_batch(contexts)
        except NoFreeStatePageError:  # a lease keeps the state of a request that must begin anew
            self.reached["states kept by a lease"] += 1
            return False
        for one, has_pages in zip(requests, done, strict=True):
            if one.must == "recompute" and (has_pages or not self.manager.get_req_blocks(one.name)):
                self._forget_in_flight(one)
                one.claimed_with(self.weights)
                self.reached["recomputed"] += 1
        running = {run.request: run.active for run in self.launched.runs} if self.launched else {}
        for one, has_pages in zip(requests, done, strict=True):
            if has_pages:
                if one.context.start_idx > running.get(one, one.context.start_idx):
                    self._forget_in_flight(one)  # it goes on with pages that another request has computed meanwhile
                    self.reached["found what a step computes"] += 1
                self._found(one)
        return bool(done.all())

    def _forget_in_flight(self, request: Request) -> None:
        """Let the step that runs belong to a request of before, which has the pages of before."""
        if self.launched is None:
            return
        chain, versions = [*request.chain], [*request.versions]
        before = Request(request.context, request.weights, chain, versions, drafted=request.drafted)
        runs = [run._replace(request=before) if run.request is request else run for run in self.launched.runs]
        self.launched = Flight(runs, self.launched.step)

    def overlap(self, *, plan: bool = True) -> None:
        """Go on with the steps in flight: plan one, or wait for the one that runs and launch the next."""
        if self.manager.states:  # they are refused, because a step would overwrite the state before it
            return
        if plan and self.planned is None and (self.launched is None or self.random.random() < 0.8):
            self._plan_ahead()
            if self.random.random() < 0.4:  # a caller may want samples of a request, whatever its steps still do
                self.fork([run.request for flight in (self.launched, self.planned) if flight for run in flight.runs])
            return
        ran, self.launched = self.launched, None
        if ran is not None:
            self.run(ran.runs, ran.step.inputs)
            for one in ran.runs:
                one.request.context.realize_future_token(self.random.randrange(4))
        if self.planned is not None:
            self.launched, self.planned = self.planned, None
            for one in self.launched.runs:
                one.request.context.update_with_future_token()
        if ran is not None:
            self.reached["steps in flight"] += 1
            live = [one.request for one in ran.runs if one.request in self.running]
            if live and self.random.random() < 0.8:  # a loop may also leave it to a later step to publish the pages
                self.manager.step([one.context for one in live])
                self._all_named(live)
            self.manager.end_step(ran.step)

    def _plan_ahead(self) -> None:
        """Plan a step of some requests. Those of the step that runs have a token that is not known yet."""
        able = [one for one in self.running if one.context.end_idx < 88 and one.context.active_length]
        running = [run.request for run in self.launched.runs] if self.launched else []
        able = [one for one in able if one.must != "stop" and (one in running or not one.context.has_future_token)]
        if not able:
            return
        some = self.random.sample(able, self.random.randrange(1, len(able) + 1))
        for one in some:
            self.chunk(one)
        contexts = [one.context for one in some]
        if not self._reserved(some, contexts):
            return
        self.planned = Flight(self.runs_of(some), self.manager.fetch_ahead(contexts))

    def wait(self) -> None:
        """End all steps in flight."""
        while self.planned is not None or self.launched is not None:
            self.overlap(plan=False)

    def _sample(self, contexts: Contexts) -> None:
        """Give each request its next token."""
        tokens = np.array([self.random.randrange(4) for _ in contexts], np.int32)
        if isinstance(contexts, Batch):
            contexts.update(tokens)
        else:
            for one, token in zip(contexts, tokens.tolist(), strict=True):
                one.update(token)

    def _keeps_state(self, request: Request) -> bool:
        """Release a request whose lease keeps the state that the next step would overwrite."""
        replica = self.manager.get_replica(request.context)
        for states in self.manager.states[replica : replica + 1]:
            try:
                states.pages_at([request.name], [request.context.start_idx])
            except StatePageError:
                self.reached["states kept by a lease"] += 1
                self.leave(request)
                return True
        return False

    def _all_named(self, requests: Sequence[Request]) -> None:
        """Compare the number of digests with the full pages. A reader could not find or check the others."""
        for one in requests:
            if (one.lease is not None or one.pulls) and self.manager.states:  # such a table promises the state
                continue
            try:
                table = self.manager.block_table(one.name)
            except KVCacheError:  # another table promises more than can be kept
                continue
            full = table.num_tokens // self.page
            named = len(table.digests) // 32 if self.sizes.caching else full
            if table.num_tokens != one.context.computed_idx or named != full:
                raise WrongContentError(
                    f"{one.name}: {named} of {full} full pages are published; its table covers "
                    f"{table.num_tokens} of {one.context.computed_idx} tokens"
                )

    def fork(self, parents: Sequence[Request] = ()) -> None:
        """Fork a running request, of `parents` if some of these run, whatever is in flight."""
        if not self.running:
            return
        parent = self.random.choice([one for one in parents if one in self.running] or self.running)
        self.made += 1
        twin, computed = parent.context.fork(f"{self.name}-{self.made}"), parent.context.computed_idx
        if computed and self.random.random() < 0.5:  # another sample, or a longer answer that others may have computed
            further = [self.random.randrange(4)] * min(90 - computed, self.random.randrange(1, 9))
            tokens = [*twin.tokens[:computed].tolist(), *further]
            twin = TextContext(tokens, 90, twin.request_id, cache_salt=twin.cache_salt)
        child = Request(twin, parent.weights, [])
        try:
            done = self.manager.fork(parent.context, child.context)
        except KVCacheError:
            self.reached["forks refused"] += 1
            return
        if done:
            start = child.drafted = child.context.start_idx
            child.chain, child.versions = parent.chain[: start + 1], parent.versions[:start]
            child.must = parent.must
            self.running.append(child)
            self.reached["forks"] += 1

    def leave(self, request: Request, *, again: bool = False) -> None:
        """Release a request. With `again` it waits, and is claimed again later."""
        self.running.remove(request)
        self.manager.release(request.name)
        self.batches = [one for one in self.batches if request not in one[0]]
        if again:
            request.context.reset()
            self.waiting.append(request)
            self.reached["preemptions"] += 1

    def preempt(self) -> None:
        """Preempt a request that no step runs."""
        if self.free:
            self.leave(self.random.choice(self.free), again=True)

    def end(self) -> None:
        if self.running:
            self.leave(self.random.choice(self.running))

    def admit(self) -> None:
        """Claim a waiting or a new request."""
        if self.waiting and self.random.random() < 0.5:
            if self.claim(self.waiting[0]):
                self.waiting.pop(0)
        elif len(self.running) < 6:
            request = self.new_request()
            if self.has_lower and len(self.waiting) < 3 and self.random.random() < 0.5:
                self.reached["prefetches"] += self.manager.prefetch(request.context)
                self.waiting.append(request)
            else:
                self.claim(request)

    def restart(self) -> None:
        """Start anew over the files and objects. These hold the pages of before."""
        self.end_all()
        self.manager.flush_tiers()
        self.manager.close()
        self.manager, self.history = self._made(), [self.version]
        self.reached["restarts"] += 1

    def end_all(self) -> None:
        """End all steps in flight, leases and requests, and recount the manager, which then holds no page."""
        self.wait()
        while self.leases:
            self.end_lease()
        while self.running:
            self.end()
        self.manager.check()
        if self.manager.num_held_blocks:
            raise WrongContentError(f"{self.name}: {self.manager.num_held_blocks} pages are held at the end")

    def reset(self) -> None:
        """Load other weights. Running requests go on with their own pages, as an engine that finishes them does."""
        self.manager.reset_prefix_cache()
        self.weights += 1
        for one in self.running:
            if not self.manager.get_req_blocks(one.name):  # it begins anew in any case
                one.claimed_with(self.weights)
        self.reached["resets"] += bool(self.running)

    def switch(self, version: int | None = None) -> None:
        """Set other weights, or those of before again, whatever is in flight."""
        before, self.version = self.version, self.random.randrange(len(VERSIONS)) if version is None else version
        running = self.random.choice(RUNNING)
        self.manager.set_weights(VERSIONS[self.version], running)
        if self.version != before:
            self.history.append(self.version)
        for one in [*self.running, *self.importing] if self.version != before else ():
            if not self.manager.get_req_blocks(one.name):  # it begins anew in any case
                continue
            one.must = max(one.must, running, key=RUNNING.index)
        self.reached["switches"] += bool(self.running)
        self.reached["switches with steps in flight"] += self.launched is not None

    def lease(self) -> None:
        """Lease a running request, and sometimes release it."""
        free = [one for one in self.running if one.lease is None]
        if free:
            one = self.random.choice(free)
            one.lease = self.manager.lease(one.name)
            self.leases.append((one, one.lease))
            self.reached["leases"] += 1

    def end_lease(self) -> None:
        if self.leases:
            request, lease = self.leases.pop(self.random.randrange(len(self.leases)))
            self.manager.end_lease(lease)
            if request.lease is lease:
                request.lease = None


class HandOver:
    """One import of a reader from a source's tables. It copies now or later, as a transfer would."""

    def __init__(self, source: Engine, reader: Engine, request: Request, table: BlockTable) -> None:
        self.source, self.reader, self.of, self.table = source, reader, request, table
        self.request = Request(request.context.fork(f"{reader.name}-of-{request.name}-{reader.made}"), request.weights)
        reader.made += 1
        self.request.chain, self.request.drafted = request.chain[: table.num_tokens + 1], table.num_tokens
        self.request.versions = request.versions[: table.num_tokens]
        self.pending: PendingImport | None = None
        self.is_leased = request.lease is not None

    def begin(self) -> bool:
        """Reserve pages. Returns False if the reader refuses the table or is full."""
        context = self.request.context
        context.reset()
        if not self.table.num_tokens or len(context.tokens) <= self.table.num_tokens:
            return False
        if not self.reader.manager.admission(context).fits:
            return False
        self.reader.manager.external_claim(context.request_id, self.reader.manager.get_or_recommend_replica(context))
        try:
            self.pending = self.reader.manager.import_block_table(context, self.table)
            self.request.found(self.reader.version)
        except KVCacheError:
            self.reader.reached["tables refused"] += 1
        if self.pending is None:
            self.reader.manager.release(context.request_id)
        else:
            self.reader.importing.append(self.request)
        return self.pending is not None

    def finish(self) -> None:
        """Copy the bytes as they lie at the source now, and commit."""
        pending, reader = self.pending, self.reader
        assert pending is not None
        reader.manager.commit_import(self.request.context, pending, self.copied(pending))
        reader.importing.remove(self.request)
        reader.running.append(self.request)
        reader.reached["imports"] += 1

    def copied(self, pending: PendingImport) -> ImportProof:
        """Copy all pages of the import as they lie at the source now."""
        copier = self.reader.manager.copier(pending)
        self.copy(pending, copier.take())
        return copier.prove()

    def copy(self, pending: PendingImport, copies: Sequence[PageCopy]) -> None:
        """Copy these pages as they lie at the source now."""
        reader = self.reader
        for part, copy in zip(pending.parts, copies, strict=True):
            sources, targets = np.array(copy.src_pages), np.array(copy.dst_pages)
            if not (sources.all() and targets.all()):
                raise WrongContentError(f"{self.request.name}: an import copies the null page")
            if isinstance(part, StateImportPart):
                if len(sources):
                    ours = reader.manager.states[pending.replica_idx]
                    theirs = self.source.manager.states[pending.src_replica_idx]
                    ours.write(
                        0,
                        torch.from_numpy(targets),
                        ("ssm",),
                        theirs.read(0, torch.from_numpy(sources), ("ssm",)).clone(),
                    )
                continue
            places = np.arange(*copy.tokens)
            ours = reader.manager.device_tensors[pending.replica_idx][0]
            theirs = self.source.manager.device_tensors[pending.src_replica_idx][0]
            (here, to), (there, of) = (
                (pages[places // size - copy.tokens[0] // size], places % size)
                for pages, size in ((targets, reader.page), (sources, self.source.page))
            )
            ours[here, :, :, to] = theirs[there, :, :, of]


class Pair:
    """Two engines of one kind. The second one imports what the first one exports at any moment."""

    hand_overs: ClassVar = 4  # the weight of a hand-over among the random calls

    def __init__(self, kind: str, seed: int, folder: Path | None = None) -> None:
        """With `folder`, every fifth pair has a tier of files in it, and another fifth has a store of objects, which
        both engines share. The seed also decides the sizes.
        """
        self.random = Random(f"{kind} {seed}")
        page, replicas, caching = (4, 3, 8, 1)[seed % 4], 1 + (seed % 3 == 1), seed % 6 != 2
        sizes = Sizes(page, replicas=replicas, caching=caching, host=20 * (caching and seed % 3 == 0))
        self.store = StoredObjects() if folder is not None and caching and seed % 5 == 1 else None
        if self.store is not None:
            sizes = sizes._replace(host=20, objects=self.store)
        elif folder is not None and caching and seed % 5 == 0:
            sizes = sizes._replace(host=20, files=folder / kind / str(seed))
        other = sizes._replace(page=sizes.page if seed % 3 else (3, 4, 2, 8)[seed % 4])
        self.engines = [Engine("p", kind, self.random, sizes), Engine("d", kind, self.random, other)]
        self.overlapped = seed % 2 == 1 and "states" not in KINDS[kind]  # whether most steps are planned ahead
        self.open: list[HandOver] = []
        self.calls = 0

    def hand_over(self) -> None:
        """Export a request that runs, with or without a lease, and import it in the other engine."""
        source, reader = self.engines
        if not source.running or len(reader.running) + len(self.open) >= 5:
            return
        request = self.random.choice(source.running)
        if request.context.computed_idx == 0 or request.weights != reader.weights:
            return  # the managers do not know which weights came with a reset, so the caller must refuse them
        try:
            one = self.exported(request)
        except KVCacheError:
            source.reached["exports refused"] += 1
            return
        if one is None or not one.begin():
            return
        if not one.is_leased or self.random.random() < 0.5:
            one.finish()
        else:  # the lease promises that the table's pages stay as they are
            self.open.append(one)

    def exported(self, request: Request) -> HandOver | None:
        """Export a table of the request. Returns None if this request is not to be handed over now."""
        source, reader = self.engines
        if request.lease is None and not self.random.randrange(2):
            return None
        table = source.manager.block_table(request.name, full_pages=self.random.random() < 0.5)
        return HandOver(source, reader, request, table)

    def further_moves(self) -> list[tuple[float, Callable[[], object]]]:
        """Return the moves of a kind of pair, each with its weight."""
        return []

    def end_hand_over(self) -> None:
        if self.open:
            self.open.pop(self.random.randrange(len(self.open))).finish()

    def end_hand_overs(self) -> None:
        while self.open:
            self.end_hand_over()

    def reset(self) -> None:
        """Load the same new weights in both engines, also while imports are open."""
        for engine in self.engines:
            engine.reset()

    def move(self) -> None:
        """Make one random call."""
        self.calls += 1
        engine = self.random.choice(self.engines)
        leases = {id(one.of) for one in self.open}
        moves = [
            (3 if self.overlapped else 8, engine.step),
            (1, lambda: engine.step(finish=False)),
            (14 if self.overlapped else 3, engine.overlap),
            (5, engine.admit),
            (1, engine.end),
            (1, engine.preempt),
            (1, engine.fork),
            (1, engine.lease),
            (self.hand_overs, self.hand_over),
            (2, self.end_hand_over),
            (RESETS, self.reset),
            (SWITCHES, engine.switch),
        ]
        if engine.has_lower and not self.open:
            moves.append((0.5, engine.restart))
        if not leases:
            moves.append((1, engine.end_lease))
        moves += self.further_moves()
        weights, calls = zip(*moves, strict=True)
        self.random.choices(calls, weights)[0]()

    def run(self, moves: int) -> Counter[str]:
        """Make so many moves, end everything, and recount both managers. Returns how often each event was reached."""
        for _ in range(moves):
            self.move()
        self.end_hand_overs()
        for engine in self.engines:
            engine.end_all()
            engine.manager.close()
        reached = sum((engine.reached for engine in self.engines), Counter[str]())
        reached["bytes of objects"] = 0 if self.store is None else self.store.read_bytes
        return reached
