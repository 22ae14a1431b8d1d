"""An engine that this rank reads from: all its ranks, which of them hold what, and the plan for each."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from transfer.errors import (
    AgentError,
    HandshakeError,
    InvalidTransferError,
    MetadataError,
    PullFailedError,
    SettingsMismatchError,
)
from transfer.nixl.settings import reaches_other_hosts
from transfer.plan.boxes import LAYER, ShardLayout, clip_layout
from transfer.plan.few_pages import FewPages
from transfer.plan.page_lists import NOTHING, resolved
from transfer.plan.plan import Plan, plan
from transfer.plan.runs import Runs, concatenated
from transfer.plan.source_ranks import sources
from transfer.pull.batches import longest_run
from transfer.pull.layers import OnLayers, counted
from transfer.pull.pull_state import BlocksOfGroup, PagesOfGroup, Part
from transfer.pull.staging_area import StagedPart, StagingArea, staged_pages
from transfer.wire.handshake import differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transfer.nixl.agent import Agent
    from transfer.pull.verify import Verifier
    from transfer.wire.messages import RankMetadata


class RemoteEngine:
    """What is known of an engine in one incarnation. Everything is planned here, once; a request only adds its pages.

    Args:
        ranks: metadata of all its ranks, checked one by one.
        mine: our own.
        compatibility: what must agree.

    Attributes:
        engine_id: the engine.
        incarnation: which start of it.
        ranks: metadata by rank.
        words: lease words that every rank has.
        failure: why it is taken for dead; empty otherwise.
        staging: where pulls go through whose runs are too short for the wire; None where all are direct.
        verifier: compares what arrives with the source's page checks; None where that is not asked for.

    Raises:
        MetadataError: the metadata is not that of the ranks of one engine, or no rank holds what we need.
        HandshakeError: what must agree does not.
        SettingsMismatchError: UCX or NIXL settings differ.
    """

    def __init__(self, ranks: Sequence[RankMetadata], mine: RankMetadata, compatibility: Mapping[str, str]) -> None:
        self.ranks = sorted(ranks, key=lambda found: found.rank)
        first = self.ranks[0]
        self.engine_id, self.incarnation = first.engine_id, first.incarnation
        self.words = min(found.words for found in ranks)
        self.failure = ""
        self.verifier: Verifier | None = None
        self.staging: StagingArea | None = None
        _check_ranks(self.ranks)
        _check_fit(self.ranks, mine, compatibility)
        self._mine = mine
        layouts = [found.layout for found in self.ranks]
        self._parts: list[tuple[int, ShardLayout]] = sources(mine.layout, layouts, mine.rank)
        self._plans: dict[int, list[tuple[range, list[tuple[int, Plan]]]]] = {}
        ((_, planned),) = self._chunked(1)
        self._few = [self._few_pages(at, one) for at, one in planned]
        self._loaded: list[str] = []
        self._agent: Agent | None = None

    def _plan(self, at: int, local: ShardLayout) -> tuple[int, Plan]:
        return at, plan(local, self.ranks[at].layout)

    def _few_pages(self, at: int, planned: Plan) -> FewPages:
        there = self.ranks[at]
        return FewPages(at, planned, (self._mine.bases, there.bases), (self._mine.device, there.device))

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """The ranks that hold a part of what we need and are read from. The others are only told."""
        return tuple(at for at, _ in self._parts)

    @property
    def agent(self) -> Agent:
        """The agent that reads from this engine, and from no other one.

        Raises:
            PullFailedError: it was taken away, or never lent.
        """
        if self._agent is None:
            raise PullFailedError(f"engine {self.engine_id!r} is not loaded")
        return self._agent

    def load(self, agent: Agent) -> None:
        """Makes every rank known to the agent that reads from this engine from now on.

        Raises:
            AgentError: NIXL refuses one. None of them stays loaded.
        """
        self._agent = agent
        try:
            for found in self.ranks:
                agent.add_peer(found.agent_name, found.agent_metadata)
                self._loaded.append(found.agent_name)
        except AgentError:
            self.unload()
            raise

    def unload(self) -> None:
        """Makes the agent forget it, and returns the agent to the caller's use. No transfer may be in flight.

        What NIXL says of a dead peer is of no use.
        """
        loaded, self._loaded = self._loaded, []
        agent, self._agent = self._agent, None
        if agent is None or not agent.is_open:
            return
        for name in loaded:
            with suppress(AgentError):
                agent.remove_peer(name)

    def parts(
        self,
        key: str,
        groups: Sequence[PagesOfGroup | BlocksOfGroup],
        layer_chunks: int = 1,
        on_layers: OnLayers | None = None,
    ) -> list[Part]:
        """Returns what to read, in order: for each range of layers, for each rank that holds some of it.

        A page is compared as a whole, so with a verifier all layers come at once.

        Args:
            key: the pull, for messages.
            groups: for each group of the layout the pages here and there, and their tokens.
            layer_chunks: ranges of layers.
            on_layers: called with each range of layers once it is here.

        Raises:
            InvalidTransferError: pages or tokens that do not fit either layout.
        """
        if len(groups) != len(self._mine.layout.groups):
            raise InvalidTransferError(
                f"request {key!r}: pages for {len(groups)} groups, the layout has {len(self._mine.layout.groups)}"
            )
        if layer_chunks == 1 and on_layers is None and self.verifier is None:
            few = [part for pages in self._few if (part := pages.part(groups)) is not None]
            if len(few) == len(self._few):
                return few
        found: list[Part] = []
        for layers, plans in self._chunked(1 if self.verifier else layer_chunks):
            parts: list[Part] = []
            for at, planned in plans:
                try:
                    parts += self._parts_of(key, at, planned, groups)
                except InvalidTransferError as error:
                    raise InvalidTransferError(f"request {key!r}: rank {at} of {self.engine_id!r}: {error}") from error
            if on_layers is not None:
                counted(parts, layers, on_layers)
            found += parts
        return found

    def _parts_of(self, key: str, at: int, planned: Plan, named: Sequence[PagesOfGroup | BlocksOfGroup]) -> list[Part]:
        there, found = self.ranks[at], list[Part]()
        groups = [_resolved(planned, group, pages) for group, pages in enumerate(named)]
        if self.verifier is not None:
            part = self.verifier.part(key, planned, groups, at)
            return [] if part is None else [part]
        direct: list[Runs] = []
        for group, pages in enumerate(groups):
            pieces = staged_pages(planned, group, pages) if self.staging is not None else None
            if pieces is None or self.staging is None:
                direct.append(planned.runs(group, *pages, self._mine.bases, there.bases))
            else:
                planned.groups[group].local_pages(pages.local, planned.groups[group].tokens(pages.tokens))
                found += [
                    StagedPart(at, self.staging, planned, group, piece, there.bases, there.device) for piece in pieces
                ]
        runs = concatenated(direct)
        runs = runs.shortened(longest_run(runs.num_bytes))
        local, remote = runs.descriptors(self._mine.device, there.device)
        return [Part(at, local, remote, runs.num_bytes), *found]

    def _chunked(self, layer_chunks: int) -> list[tuple[range, list[tuple[int, Plan]]]]:
        if (planned := self._plans.get(layer_chunks)) is None:
            boxes = [box for group in self._mine.layout.groups for box in group.boxes]
            start = min((box.first[LAYER] for box in boxes), default=0)
            stop = max((box.end[LAYER] for box in boxes), default=0)
            edges = [start + (stop - start) * i // layer_chunks for i in range(layer_chunks + 1)]
            planned = [
                (layers, [self._plan(at, _within(local, layers, range(start, stop))) for at, local in self._parts])
                for layers in (range(*edge) for edge in pairwise(edges))
            ]
            self._plans[layer_chunks] = planned
        return planned


def _within(layout: ShardLayout, layers: range, everything: range) -> ShardLayout:
    return layout if layers == everything else clip_layout(layout, layers)


def _resolved(planned: Plan, group: int, pages: PagesOfGroup | BlocksOfGroup) -> PagesOfGroup:
    found = planned.groups[group]
    if isinstance(pages, BlocksOfGroup) and not found.stacks:
        return NOTHING  # this rank has no part of the group, and its page lists are not asked for any
    try:
        return resolved(pages, found.local, found.remote)
    except InvalidTransferError as error:
        raise InvalidTransferError(f"{found.where}: {error}") from error


def _check_ranks(ranks: Sequence[RankMetadata]) -> None:
    first = ranks[0]
    where = f"engine {first.engine_id!r}"
    same = {(found.engine_id, found.incarnation, found.ranks, found.memory_type) for found in ranks}
    if len(same) != 1:
        raise MetadataError(f"{where}: the metadata of its ranks tells of several engines or incarnations")
    if [found.rank for found in ranks] != list(range(first.ranks)):
        raise MetadataError(f"{where}: ranks {[found.rank for found in ranks][:16]}, it has {first.ranks}")
    if len({found.agent_name for found in ranks}) != len(ranks):
        raise MetadataError(f"{where}: two ranks have one agent name")


def _check_fit(ranks: Sequence[RankMetadata], mine: RankMetadata, compatibility: Mapping[str, str]) -> None:
    where = f"engine {ranks[0].engine_id!r}"
    for found in ranks:
        if differ := differences(compatibility, found.compatibility):
            raise HandshakeError(f"{where} rank {found.rank} is not compatible: {differ}")
        if differ := differences(mine.settings, found.settings):
            raise SettingsMismatchError(f"{where} rank {found.rank} runs with other UCX or NIXL settings: {differ}")
        if found.hostname != mine.hostname and not reaches_other_hosts(mine.settings):
            raise MetadataError(
                f"{where} rank {found.rank} is on host {found.hostname!r}; our transports stay on {mine.hostname!r}"
            )
        if len(found.layout.groups) != len(mine.layout.groups):
            raise MetadataError(
                f"{where} rank {found.rank} has {len(found.layout.groups)} page groups, ours has "
                f"{len(mine.layout.groups)}"
            )
