"""Every place that fails a pull names the kind of the failure, and no failure is "other" by accident."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from transfer import errors, failures
from transfer.errors import AgentError, PullFailedError, TransferError
from transfer.failures import Failure, FailureKind

TRANSFER = Path(failures.__file__).parent

# For each error, the kind of failure that the error gives to a pull. A new error needs an entry here.
KINDS = {
    "AgentError": FailureKind.TRANSPORT,
    "AlreadyConnectedError": FailureKind.OTHER,
    "EngineClosedError": FailureKind.SHUTDOWN,
    "HandshakeError": FailureKind.HANDSHAKE,
    "InvalidEngineError": FailureKind.OTHER,
    "InvalidLeaseError": FailureKind.OTHER,
    "InvalidTransferError": FailureKind.OTHER,
    "MetadataError": FailureKind.HANDSHAKE,
    "NoFreePortError": FailureKind.OTHER,
    "PeerFailedError": FailureKind.SOURCE_GONE,
    "PullFailedError": FailureKind.OTHER,
    "SettingsMismatchError": FailureKind.HANDSHAKE,
    "TransferError": FailureKind.OTHER,
    "TransferFailedError": FailureKind.TRANSPORT,
    "TransferIncompleteError": FailureKind.OTHER,
    "TransferParamsError": FailureKind.OTHER,
    "TransferTimeoutError": FailureKind.TIMEOUT,
    "UnknownPeerError": FailureKind.OTHER,
    "UnknownTransferError": FailureKind.OTHER,
}
# The places in the code where a failure is "other" on purpose: the caller's own call is wrong, or pagewire has not
# raised the error.
OTHER = {
    ("errors.py", "TransferError"): 1,
    ("errors.py", "PullFailedError"): 1,
    ("pull/pull.py", "Puller"): 1,
    ("pull/replica.py", "ReplicaTransfer"): 1,
}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(TRANSFER.rglob("*.py")):
        yield path.relative_to(TRANSFER).as_posix(), ast.parse(path.read_text())


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in nodes if isinstance(node.func, ast.Name) and node.func.id == name]


def test_every_error_gives_the_kind_of_failure_in_the_table() -> None:
    found = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    ours = {name: error for name, error in found.items() if issubclass(error, TransferError)}
    assert {name: error("why").failure for name, error in ours.items()} == {
        name: Failure(kind, "why") for name, kind in KINDS.items()
    }
    assert AgentError("why", peer_lost=True).failure == Failure(FailureKind.SOURCE_GONE, "why")
    assert PullFailedError("why", FailureKind.CHECKS).failure == Failure(FailureKind.CHECKS, "why")


def test_every_failed_pull_that_is_raised_names_its_kind() -> None:
    unnamed = [
        f"{name}:{call.lineno}"
        for name, tree in trees()
        for call in calls(tree, "PullFailedError")
        if len(call.args) < 2
    ]
    assert unnamed == []


def test_failures_are_other_only_in_the_listed_places() -> None:
    found: dict[tuple[str, str], int] = {}
    for name, tree in trees():
        for top in tree.body:
            count = sum(isinstance(node, ast.Attribute) and node.attr == "OTHER" for node in ast.walk(top))
            if count and name != "failures.py":
                found[name, getattr(top, "name", "")] = count
    assert found == OTHER


@pytest.mark.parametrize("method", ["fail", "_fail", "withdraw", "fail_engine", "disconnect", "_forget", "_give_back"])
def test_functions_that_fail_a_pull_take_a_failure_and_not_a_text(method: str) -> None:
    """These functions require a `Failure`, so the type checker finds every call that names no kind."""
    for name in ("pull/pull.py", "pull/rank.py", "pull/replica.py", "pull/directory.py"):
        tree = ast.parse((TRANSFER / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == method:
                taken = {ast.unparse(one.annotation) for one in node.args.args if one.annotation is not None}
                assert "Failure" in taken, f"{name}:{node.lineno}"


def test_no_code_that_counts_or_decides_reads_the_text_of_a_failure() -> None:
    assert "text" not in {
        node.attr
        for name in ("stats.py", "prometheus.py", "watch.py")
        for node in ast.walk(ast.parse((TRANSFER / name).read_text()))
        if isinstance(node, ast.Attribute)
    }
