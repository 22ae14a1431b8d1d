"""Tries mutants with the tests beside their file, and the surviving mutants with other tests."""

import queue
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import NamedTuple

from tests.mutants.chosen import Batch
from tests.mutants.harmless import reason_of
from tests.mutants.mutation import ROOT
from tests.mutants.places import beside, elsewhere
from tests.mutants.session import NOT_CALLED, Session
from tests.mutants.sites import Mutant
from tests.mutants.tree import Run, Tree

BESIDE, ELSEWHERE, SURVIVED, SURVIVED_BESIDE = "noticed beside", "noticed elsewhere", "survived", "survived beside"
HARMLESS, BROKEN = "harmless", "no program"


class Tried(NamedTuple):
    """A mutant, and the results of its trials.

    Attributes:
        mutant: the mutant.
        beside: outcome of the tests beside its file.
        elsewhere: outcome of the other tests; None if these were not run.
        reason: why the mutant is harmless, if `harmless.txt` says so.
        is_changed: whether the mutant belongs to a changed function.
    """

    mutant: Mutant
    beside: Run
    elsewhere: Run | None = None
    reason: str = ""
    is_changed: bool = False

    @property
    def verdict(self) -> str:
        """The tests that have noticed the mutant, as a text. The text is "survived beside" if only the tests beside its
        file were run.
        """
        if self.beside.outcome == "broken":
            return BROKEN
        if self.beside.outcome != "passed":
            return BESIDE
        if self.elsewhere and self.elsewhere.outcome not in {"passed", "broken"}:
            return ELSEWHERE
        if self.reason:
            return HARMLESS
        return SURVIVED if self.elsewhere else SURVIVED_BESIDE

    @property
    def is_uncalled(self) -> bool:
        """Whether no test calls the function of the mutant."""
        return (self.elsewhere or self.beside).by == NOT_CALLED

    @property
    def is_gap(self) -> bool:
        """Returns whether the mutant is a gap: no test beside its file notices it, and `harmless.txt` does not explain
        it.
        """
        return self.verdict in {ELSEWHERE, SURVIVED, SURVIVED_BESIDE} and not self.reason


class Trial:
    """Tries batches of mutants, in copies of the repository.

    Args:
        tell: called with the result of each mutant, and with a line for every other event.
        known: reasons why mutants are harmless, by key.
        seconds: time from now after which no mutant is begun.
        asks_elsewhere: whether mutants that survive the tests beside their file are tried with the other tests.
    """

    def __init__(
        self,
        tell: Callable[[Tried | str], None],
        known: Mapping[str, str],
        seconds: float,
        *,
        asks_elsewhere: bool,
    ) -> None:
        self._tell_one = tell
        self._known = known
        self._deadline = monotonic() + seconds
        self._asks_elsewhere = asks_elsewhere
        self._lock = Lock()
        self.tried: list[Tried] = []

    def run(self, batches: Sequence[Batch], jobs: int) -> list[Tried]:
        """Tries the batches, `jobs` at a time. Returns the results of the mutants that were tried before the time was
        over.
        """
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()

        def one(batch: Batch) -> list[Tried]:
            if monotonic() > self._deadline:
                return []
            tree = trees.get()
            try:
                return self._batch(tree, batch)
            finally:
                trees.put(tree)

        with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ExitStack() as stack:
            for number in range(jobs):
                tree = Tree(Path(folder, str(number)).absolute())
                stack.callback(tree.close)
                tree.check_imports()
                trees.put(tree)
            with ThreadPoolExecutor(jobs) as pool:
                return [tried for some in pool.map(one, batches) for tried in some]

    def _batch(self, tree: Tree, batch: Batch) -> list[Tried]:
        found: dict[Mutant, Tried] = {}

        def take(mutant: Mutant, run: Run) -> None:
            found[mutant] = one = Tried(mutant, run, None, reason_of(mutant, self._known), batch.is_changed)
            self._tell(one)

        def take_elsewhere(mutant: Mutant, run: Run) -> None:
            found[mutant] = one = found[mutant]._replace(elsewhere=run)
            self._tell(one)

        self._by(tree, beside(batch.path), batch, batch.mutants, take)
        left = [one.mutant for one in found.values() if one.verdict == SURVIVED_BESIDE]
        if self._asks_elsewhere and left and monotonic() < self._deadline:
            others = elsewhere(batch.path)
            self._by(tree, others, batch, left, take_elsewhere, but=beside(batch.path))
        return list(found.values())

    def _by(
        self,
        tree: Tree,
        files: Sequence[str],
        batch: Batch,
        mutants: Sequence[Mutant],
        take: Callable[[Mutant, Run], None],
        but: Sequence[str] = (),
    ) -> None:
        """Tries mutants of one file with some test files, until the time is over."""
        source, cold = (ROOT / batch.path).read_text(), list[Mutant]()
        try:
            session = Session(tree, files, but)
        except RuntimeError as error:
            self._tell(f"not tried: {error}")
            return
        try:
            took = f"{session.seconds:.0f} s without a change, while they are watched"
            self._tell(f"{batch.path}: tests that take {took}")
            for failed in session.failed:
                self._tell(f"fails without a change: {failed}")
            for mutant in mutants:
                if monotonic() < self._deadline:
                    run = self._one(session, mutant, source)
                    if run.outcome == "cold":
                        cold.append(mutant)
                    else:
                        take(mutant, run)
        except RuntimeError as error:
            self._tell(f"not tried: {error}")
        finally:
            session.close()
        for mutant in cold:
            if monotonic() < self._deadline:
                take(mutant, session.run_cold(batch.path, mutant.function, mutant.applied(source)))

    def _one(self, session: Session, mutant: Mutant, source: str) -> Run:
        after = mutant.applied(source)
        try:
            compile(after, str(mutant.path), "exec", dont_inherit=True)
        except SyntaxError as error:
            return Run("broken", str(error), 0.0)
        return session.run(mutant.path, mutant.function, source, after)

    def _tell(self, what: Tried | str) -> None:
        with self._lock:
            self._tell_one(what)
