"""Runs each command without each package that it may need.

The command must work, or say in one line what to install.
"""

import io
import json
import re
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvcache.endpoints.watch import ManagerWatch
from pagewire.extras import EXTRAS
from pagewire.top.sources import LiveSource
from pagewire.top.view import TopView
from tests import forked
from tests.pagewire.distributions import DISTRIBUTIONS
from tests.pagewire.top.test_app import busy_manager

pytestmark = pytest.mark.slow

OURS = ("kvcache", "transfer", "scheduler_adapters", "pagewire")
NEEDED = ("msgspec", "numpy", "torch", "zmq")  # without an extra
CONFIG = Path(__file__).parent / "plan/configs/gpt-oss-120b"
# For each command, the packages that it needs in addition to the dependencies of pagewire.
NEEDS = {
    "demo": {"nixl", "rich", "transformers"},
    "plan": {"rich", "transformers"},
    "plan --plot": {"rich", "transformers", "matplotlib"},
    "replay": {"rich"},
    "replay --plots": {"rich", "matplotlib"},
    "serve": {"nixl", "transformers", "prometheus_client", "starlette", "uvicorn"},
    "serve --placement": {"nixl", "transformers", "prometheus_client", "starlette", "uvicorn", "dynamo"},
    "serve --trace": {"nixl", "transformers", "prometheus_client", "starlette", "uvicorn", "opentelemetry"},
    "serve prefill": {"nixl", "transformers", "prometheus_client", "starlette", "uvicorn"},
    "top": {"rich", "textual", "textual_serve", "aiohttp"},
}


def run_without(conn: Connection, package: str, line: list[str]) -> None:
    """Runs a command line and stops it before it starts processes. Sends its output and its exit status. The status is
    None if the command was stopped.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] in (package, *OURS):
            del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # as if it were not installed
    import subprocess

    class Reached(Exception):  # noqa: N818  (no error: it needs nothing that is missing)
        pass

    def reached(*_: object, **__: object) -> None:
        raise Reached

    subprocess.Popen = reached  # type: ignore[assignment,misc]
    from pagewire import cli

    printed, status = io.StringIO(), None
    with redirect_stderr(printed), redirect_stdout(io.StringIO()):
        try:
            status = cli.main(line)
        except Reached:
            pass
        except SystemExit as error:
            status = error.code
        except BaseException as error:  # noqa: BLE001  (that is what the test is about)
            conn.send(("traceback", repr(error)))
            return
    conn.send((status, printed.getvalue()))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("files")
    trace, looks = folder / "trace", folder / "looks"
    trace.write_text("".join(json.dumps({"hash_ids": [1, 2, at]}) + "\n" for at in (3, 4)))
    watch = ManagerWatch(busy_manager())
    source = LiveSource([watch.address], 20.0, looks)
    view = TopView([watch.address])
    while not view.pools():
        view.take(source.poll(view.followed))
    source.close()
    watch.close()
    plan = ["plan", "--model", str(CONFIG), "--memory", "10GiB"]
    serve = ["serve", "--http-port", "0"]
    return {
        "demo": ["demo", "--requests", "1"],
        "plan": plan,
        "plan --plot": [*plan, "--trace", str(trace), "--plot", str(folder / "plot.png")],
        "replay": ["replay", str(trace)],
        "replay --plots": ["replay", str(trace), "--plots", str(folder)],
        "serve": serve,
        "serve --placement": [*serve, "--placement", "dynamo"],
        "serve --trace": [*serve, "--trace"],
        "serve prefill": ["serve", "prefill", "--front", "tcp://127.0.0.1:1"],
        "top": ["top", "--play", str(looks)],
    }


def told_without(package: str, line: list[str]) -> Any:
    process, conn = forked.start(run_without, package, line)
    try:
        assert conn.poll(60)
        return conn.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("command", "package"), [(name, one) for name, needs in NEEDS.items() for one in sorted(needs)]
)
def test_a_command_without_what_it_needs_names_the_extra(
    command: str, package: str, lines: dict[str, list[str]]
) -> None:
    status, printed = told_without(package, lines[command])
    assert (status, printed.count("\n")) == (2, 1), printed
    assert printed.startswith(f"pagewire {command.partition(' ')[0]}: error: ")
    extras = re.findall(r"pip install 'pagewire\[(\w+)\]'", printed)
    assert [package in EXTRAS[extra] for extra in extras] == [True], printed
    assert package in printed


@pytest.mark.parametrize("command", ["replay", "plan", "top"])
@pytest.mark.parametrize("package", NEEDED)
def test_a_damaged_installation_is_reported_in_one_line(
    command: str, package: str, lines: dict[str, list[str]]
) -> None:
    status, printed = told_without(package, lines[command])
    assert (status, printed.count("\n")) == (2, 1), printed
    assert package in printed
    assert "pip install" in printed


@pytest.mark.parametrize("command", ["replay", "top"])
def test_a_command_works_without_packages_that_it_does_not_need(command: str, lines: dict[str, list[str]]) -> None:
    for package in sorted({one for brought in EXTRAS.values() for one in brought} - NEEDS[command]):
        status, printed = told_without(package, lines[command])
        assert (status, printed) == (0, ""), (package, printed)


ALSO = {("top", "rich"): "textual"}


def test_each_extra_installs_the_documented_packages() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    def brought(extra: str) -> set[str]:
        names: set[str] = set()
        for one in declared["optional-dependencies"][extra]:
            inner = re.fullmatch(r"pagewire\[([\w,]+)\]", one)
            names |= set().union(*map(brought, inner[1].split(","))) if inner else {re.split("[<>=]", one)[0]}
        return names

    assert "nixl" not in {re.split("[<>=]", one)[0] for one in declared["dependencies"]}
    for extra, packages in EXTRAS.items():
        needed = {ALSO.get((extra, one), DISTRIBUTIONS.get(one, one)) for one in packages}
        assert needed <= brought(extra), extra
        assert needed <= brought("all"), extra
