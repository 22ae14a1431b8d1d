"""An engine that this rank reads from: all ranks of the engine, and a transfer plan for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvcache.replica.block_table import BlockTable
from transfer.errors import (
    AgentError,
    HandshakeError,
    InvalidTransferError,
    MetadataError,
    PullFailedError,
    SettingsMismatchError,
)
from transfer.failures import Failure, FailureKind
from transfer.nixl.agent import Agent
from transfer.nixl.settings import reaches_other_hosts
from transfer.plan.boxes import ShardLayout
from transfer.plan.page_lists import PageLists
from transfer.plan.plan import Plan, plan
from transfer.plan.runs import Runs, concatenated
from transfer.plan.source_ranks import sources
from transfer.pull.lease import LeaseRef
from transfer.pull.page_checks import Verifier
from transfer.pull.parts import FOREGROUND_BYTES, Part, longest_run
from transfer.pull.seals import TableSeals
from transfer.pull.staging_area import StagingArea, staged_parts
from transfer.wire.handshake import differences
from transfer.wire.messages import RankMetadata


class RemoteEngine:
    """One incarnation of a source engine. The transfer plans are computed once, here; a request only adds its pages.

    Attributes:
        ranks: metadata by rank.
        words: number of lease words that every rank has.
        failure: why the engine counts as dead; None if it does not.
        read_ranks: the ranks that are read from. The other ranks only get notes.
        staging: staging area for pulls whose runs are too short for the wire. None if all pulls are direct.
        seals: checks the seals of the engine's block tables. None if the engine makes none.
        verifier: compares arrived pages with the source's checksums. None if pages are not verified.

    Raises:
        MetadataError: the metadata does not come from the ranks of one engine, or no rank holds a part that we need.
        HandshakeError: entries that must agree differ.
        SettingsMismatchError: UCX or NIXL settings differ.
    """

    def __init__(self, ranks: Sequence[RankMetadata], mine: RankMetadata, compatibility: Mapping[str, str]) -> None:
        self.ranks = sorted(ranks, key=lambda found: found.rank)
        first = self.ranks[0]
        self.engine_id, self.incarnation = first.engine_id, first.incarnation
        self.words = min(found.words for found in ranks)
        self.failure: Failure | None = None
        self.verifier: Verifier | None = None
        self.staging: StagingArea | None = None
        _check_ranks(self.ranks)
        _check_fit(self.ranks, mine, compatibility)
        self.seals = TableSeals(first.table_key) if first.table_key else None
        self._mine = mine
        held = sources(mine.layout, [found.layout for found in self.ranks], mine.rank)
        self.read_ranks = tuple(at for at, _ in held)
        # The plans are computed now, so that an impossible plan is noticed at first contact.
        self._plans = [self._plan(at, local, mine) for at, local in held]
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        """The agent that reads only from this engine.

        Raises:
            PullFailedError: the engine is not loaded.
        """
        if self._agent is None:
            raise PullFailedError(f"engine {self.engine_id!r} is not loaded", FailureKind.SOURCE_GONE)
        return self._agent

    def load(self, agent: Agent) -> None:
        """Loads every rank into the agent that reads from this engine from now on.

        Raises:
            AgentError: NIXL refuses a rank. None of them stays loaded.
        """
        self._agent = agent
        try:
            for found in self.ranks:
                agent.add_peer(found.agent_name, found.agent_metadata)
        except AgentError:
            self.unload()
            raise

    def unload(self) -> None:
        """Unloads all ranks. After this the caller may reuse the agent. No transfer may be in flight."""
        agent, self._agent = self._agent, None
        if agent is not None and agent.is_open:
            for found in self.ranks:
                with suppress(AgentError):  # an error about a dead or refused peer does not matter here
                    agent.remove_peer(found.agent_name)

    def parts(self, key: str, groups: PageLists) -> list[Part]:
        """Returns the parts of a pull, in order: the runs to read from each rank that holds some of the pages.

        Raises:
            InvalidTransferError: the pages or tokens do not fit the layouts.
        """
        if len(groups) != len(self._mine.layout.groups):
            raise InvalidTransferError(
                f"request {key!r}: got pages for {len(groups)} groups, but the layout has "
                f"{len(self._mine.layout.groups)}"
            )
        found: list[Part] = []
        for planned in self._plans:
            try:
                found += self._parts_of(key, planned, groups)
            except InvalidTransferError as error:
                where = f"request {key!r}: rank {planned.rank} of {self.engine_id!r}"
                raise InvalidTransferError(f"{where}: {error}") from error
        return found

    def check_tables(self, key: str, lease: LeaseRef, tables: Sequence[BlockTable]) -> None:
        """Checks that this engine has sealed each table under the lease.

        Raises:
            PullFailedError: the seal of a table is missing or does not match.
        """
        for table in tables:
            # The comparison need not take constant time: refusing a pull takes far longer, and its duration varies more
            # than that of the comparison.
            try:
                is_sealed = self.seals is not None and self.seals.seal(lease.lease_id, table) in table.seals
            except (TypeError, ValueError, OverflowError, RecursionError):
                is_sealed = False
            if not is_sealed:
                raise PullFailedError(
                    f"request {key!r}: engine {self.engine_id!r} did not confirm that lease {lease.lease_id:#018x} "
                    f"holds the pages of this block table of {table.num_tokens} tokens. The table was changed in "
                    "transit, belongs to another lease or to an earlier start of the engine, or was made before the "
                    "offer",
                    FailureKind.REFUSED,
                )

    def begins(self, groups: PageLists) -> tuple[int, ...]:
        """Returns the first token to read for each group whose source has named its blocks, and 0 for other groups.

        Call `parts` with the same `groups` first, because `parts` checks them.
        """
        return tuple(map(max, zip(*(planned.begins(groups) for planned in self._plans), strict=True)))

    def small_part(self, groups: PageLists) -> Part | None:
        """Returns a single part that reads a small pull in one transfer.

        Returns None if the source has several ranks, if the pull is too large for one transfer, or if pages are
        verified.
        """
        if self.verifier is not None or len(self.ranks) > 1 or len(groups) != len(self._mine.layout.groups):
            return None
        (planned,) = self._plans
        few = planned.few(groups)
        return None if few is None or few[2] > FOREGROUND_BYTES else Part(planned.rank, *few)

    def _parts_of(self, key: str, planned: Plan, named: PageLists) -> list[Part]:
        if self.verifier is None and (few := planned.few(named)) is not None:
            return [Part(planned.rank, *few)]
        groups = planned.pages(named)
        if self.verifier is not None:
            part = self.verifier.part(key, planned, groups)
            return [] if part is None else [part]
        staged, direct = list[Part](), list[Runs]()
        for group, pages in enumerate(groups):
            parts = None if self.staging is None else staged_parts(self.staging, planned, group, pages)
            if parts is None:
                direct.append(planned.runs(group, *pages))
            else:
                staged += parts
        runs = concatenated(direct)
        runs = runs.shortened(longest_run(runs.num_bytes))
        return [Part(planned.rank, *runs.descriptors(*planned.devices), runs.num_bytes), *staged]

    def _plan(self, at: int, local: ShardLayout, mine: RankMetadata) -> Plan:
        there = self.ranks[at]
        return plan(local, there.layout, (mine.bases, there.bases), (mine.device, there.device), at)


def _check_ranks(ranks: Sequence[RankMetadata]) -> None:
    first = ranks[0]
    where = f"engine {first.engine_id!r}"
    same = {(found.engine_id, found.incarnation, found.ranks, found.memory_type) for found in ranks}
    if len(same) != 1:
        raise MetadataError(f"{where}: the metadata of its ranks names several engines or incarnations")
    if [found.rank for found in ranks] != list(range(first.ranks)):
        raise MetadataError(
            f"{where}: got ranks {[found.rank for found in ranks][:16]}; all {first.ranks} ranks are needed"
        )
    if len({found.agent_name for found in ranks}) != len(ranks):
        raise MetadataError(f"{where}: two ranks have the same agent name")


def _check_fit(ranks: Sequence[RankMetadata], mine: RankMetadata, compatibility: Mapping[str, str]) -> None:
    where = f"engine {ranks[0].engine_id!r}"
    for found in ranks:
        if differ := differences(compatibility, found.compatibility):
            raise HandshakeError(f"{where} rank {found.rank} is not compatible: {differ}")
        if differ := differences(mine.settings, found.settings):
            raise SettingsMismatchError(f"{where} rank {found.rank} has other UCX or NIXL settings: {differ}")
        if found.hostname != mine.hostname and not reaches_other_hosts(mine.settings):
            raise MetadataError(
                f"{where} rank {found.rank} is on host {found.hostname!r}, but UCX_TLS here reaches only "
                f"{mine.hostname!r}"
            )
        if len(found.layout.groups) != len(mine.layout.groups):
            raise MetadataError(
                f"{where} rank {found.rank} has {len(found.layout.groups)} page groups, this engine has "
                f"{len(mine.layout.groups)}"
            )
