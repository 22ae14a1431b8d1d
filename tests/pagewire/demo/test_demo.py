"""Runs the demo as a user does: with real processes, real NIXL and the real command line. In tests with the fixture
`here`, the command runs in this process and its servers are forked, which saves seconds.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagewire import cli
from pagewire.demo import demo
from tests.forked import ForkedProgram

KEYS = [
    "requests",
    "tokens_equal",
    "ties",
    "prompt_tokens",
    "cached_tokens",
    "hit_rate",
    "pages_pulled",
    "bytes_pulled",
    "gbps",
    "ttft_ms_p50",
    "tpot_ms_p50",
    "leaked_pages",
]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "pagewire", "demo"]


class Done(NamedTuple):
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def here(forked_fleets: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:  # noqa: ARG001
    def run(*arguments: object) -> Done:
        status = cli.main(["demo", *map(str, arguments)])
        return Done(status, *capsys.readouterr())  # pyright: ignore[reportArgumentType]

    return run


def assert_equal_run(done: Done, json_file: Path, requests: int) -> dict[str, Any]:
    assert not done.stderr, done.stderr
    assert done.returncode == 0
    figures = json.loads(json_file.read_text())
    assert list(figures) == KEYS
    assert figures["tokens_equal"] is True
    assert figures["requests"] == requests
    assert (figures["ties"], figures["leaked_pages"]) == (0, 0)
    assert figures["pages_pulled"] > 0
    assert figures["bytes_pulled"] > figures["pages_pulled"]
    assert 0 <= figures["hit_rate"] < 1
    assert min(figures["gbps"], figures["ttft_ms_p50"], figures["tpot_ms_p50"]) > 0
    assert re.search(r"equal to the model's own generate +yes", done.stdout)
    return figures


@pytest.mark.slow
def test_the_default_model_on_the_default_prompts(here: Callable[..., Done], tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    figures = assert_equal_run(here("--requests", 9, "--json", out), out, 9)
    assert figures["cached_tokens"] > 1000  # The last five prompts share their documents with the first four prompts.
    assert figures["hit_rate"] == pytest.approx(figures["cached_tokens"] / figures["prompt_tokens"])


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("sides", [(), ("--decode-tp", 2)], ids=["verified", "tp 1 to 2"])
def test_under_chaos_every_answer_is_right_and_every_failure_has_a_reason(
    here: Callable[..., Done], tmp_path: Path, sides: tuple[Any, ...]
) -> None:
    out = tmp_path / "o.json"
    happened: Counter[str] = Counter()
    for seed in (3, 4, 5):  # a single run may not inject every kind of fault
        done = here("--requests", 40, "--max-new-tokens", 8, "--chaos", seed, "--json", out, *sides)
        assert done.returncode == 0, done.stdout + done.stderr
        figures = json.loads(out.read_text())
        assert_right_under_chaos(figures)
        happened.update(figures["faults"])
        if min(happened.values()) > 0:
            break
    # Silent corruption is injected only if pages are compared. The comparison needs equal page layouts at both sides.
    silent = set() if sides else {"short", "corrupt"}
    assert set(happened) == {"delay", "refuse", "break", "drop", "duplicate", "late"} | silent
    assert min(happened.values()) > 0, happened
    assert re.search(r"faults injected +\d+ delay, ", done.stdout)


def assert_right_under_chaos(figures: dict[str, Any]) -> None:
    assert list(figures) == [*KEYS, "failed", "faults"]
    assert figures["tokens_equal"] is True
    assert figures["leaked_pages"] == 0
    assert len(figures["failed"]) < 20
    assert all(figures["failed"].values())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "page_size", "tp"), [("qwen3", 128, 2), ("mistral", 16, 1)])
def test_a_saved_model_of_another_architecture(
    here: Callable[..., Done], model_dirs: Path, tmp_path: Path, kind: str, page_size: int, tp: int
) -> None:
    out, prompts = tmp_path / "o.json", tmp_path / "p.jsonl"
    head = "The same long head stands before every one of these questions. " * 4
    prompts.write_text("".join(json.dumps({"prompt": f"{head}{n}?"}) + "\n" for n in range(5)))
    done = here(
        *("--model", model_dirs / kind, "--prompts", prompts, "--page-size", page_size),
        *("--tp", tp, "--json", out, "--cache-mb", 4, "--max-new-tokens", 20, "--concurrency", 2),
    )
    assert_equal_run(done, out, 5)


@pytest.mark.slow
def test_a_wrong_token_is_found_and_shown(
    here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve = demo.serve

    def serve_and_spoil(workers: Any, served: list[demo.Served], *rest: Any) -> None:
        serve(workers, served, *rest)
        served[1].tokens[3] = (served[1].tokens[3] + 1) % 256

    monkeypatch.setattr(demo, "serve", serve_and_spoil)
    out = tmp_path / "o.json"
    done = here("--requests", 2, "--json", out)
    assert done.returncode == 1
    assert json.loads(out.read_text())["tokens_equal"] is False
    assert re.search("prompt-2: differs: token 3 is", done.stdout)
    assert "prompt-1" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "{tmp}/none"], "none' does not exist"),
        (["--model", "{tmp}"], "has no config.json"),
        (["--prompts", "{tmp}/none"], "file .*none' does not exist"),
        (["--prompts", "{tmp}/long", "--cache-mb", "1"], "prompt-2 has 3,001 tokens .* the cache holds only 512"),
        (["--page-size", "0"], "argument --page-size: '0' is not a whole number from 1 to 1,048,576"),
        (["--page-size", "100000"], "--page-size 100000: a page takes 204,800,000 bytes, but the cache has 67,108,864"),
        (["--requests", "-1"], "argument --requests: '-1' is not a whole number from 1"),
        (["--cache-mb", "9999999"], "2 processes with 9,999,999 MB each do not fit; the machine has"),
        (["--cache-mb", "0"], "argument --cache-mb: '0' is not a number above 0"),
        (["--tp", "3"], "n_kv_heads is 2"),
        (["--device", "nonsense"], "argument --device: 'nonsense' is not a device for pages"),
        (["--device", "meta"], "argument --device: 'meta' is not a device for pages"),
        (["--max-new-tokens", "70000", "--cache-mb", "500"], "the model has positions for only 65,536"),
        (["--json", "{tmp}/none/o.json"], "its folder does not exist"),
        (["--page-size", "x"], "'x' is not a whole number"),
        (["--nonsense"], "unknown option '--nonsense'"),
    ],
)
def test_bad_input_is_one_line_and_starts_no_process(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "long").write_text("short\n" + "x" * 3000 + "\n")
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **_options: started.append(command))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        status = cli.main(["demo", *(argument.format(tmp=tmp_path) for argument in arguments)])
    except SystemExit as error:
        status = error.code
    assert status == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"pagewire( demo)?: error: .*{named}.*\n", error)
    assert not started
    assert signal.getsignal(signal.SIGTERM) is handler


class Demo:
    """A running demo that has started to serve.

    Args:
        folder: folder for its output.
        arguments: arguments of the command.
        imports: True if the demo and its servers import everything themselves. Otherwise they are forks.
        ignores: a signal that the demo ignores from its start, as a command under nohup does.
    """

    def __init__(self, folder: Path, *arguments: str, imports: bool = False, ignores: int = 0) -> None:
        self.printed, self._said = folder / "out", folder / "err"
        command = [*COMMAND, *arguments]
        if ignores:
            code = f"import signal, sys; signal.signal({ignores:d}, signal.SIG_IGN); from pagewire import cli; "
            command = [sys.executable, "-c", f"{code} sys.exit(cli.main({command[3:]}))"]
        with self.printed.open("wb") as out, self._said.open("wb") as err:
            if imports:
                self._process: Any = subprocess.Popen(command, stdout=out, stderr=err, env=ENV)
            else:
                self._process = ForkedProgram(command, out, ENV, err)
        deadline = time.monotonic() + 60
        while "serving" not in self.printed.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                pytest.fail(f"the demo did not start: {self.printed.read_text()} {self._said.read_text()}")
            time.sleep(0.02)
        found = re.findall(r"(prefill|decode): pid (\d+)", self.printed.read_text())
        self.pids = {role: int(pid) for role, pid in found}
        assert set(self.pids) == {"prefill", "decode"}

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> tuple[int, str]:
        """Waits until the demo ends. Returns its exit status and its standard error."""
        deadline = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._process.poll() is None:
            self._process.kill()
        status = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return status, self._said.read_text()


def assert_gone_soon(pids: dict[str, int]) -> None:
    deadline = time.monotonic() + 10
    for role, pid in pids.items():
        stat = Path(f"/proc/{pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"the {role} process is an orphan"
            time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_child_ends_the_demo_with_one_line(role: str, tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--requests", "2000")
    os.kill(demo.pids[role], signal.SIGKILL)
    assert demo.end() == (2, f"pagewire demo: error: the {role} process died (signal 9)\n")
    assert_gone_soon(demo.pids)


@pytest.mark.slow
@pytest.mark.parametrize("imports", [False, pytest.param(True, marks=pytest.mark.ci)])
@pytest.mark.parametrize(  # the rest: `test_interrupts`
    ("number", "end"),
    [(signal.SIGKILL, (-9, "")), (signal.SIGINT, (130, "pagewire demo: interrupted by SIGINT\n"))],
    ids=["KILL", "INT"],
)
def test_a_demo_that_is_ended_leaves_no_process(
    number: int, end: tuple[int, str], imports: bool, tmp_path: Path
) -> None:
    demo = Demo(tmp_path, "--requests", "2000", imports=imports)
    demo.signal(number)
    assert demo.end() == end
    assert_gone_soon(demo.pids)
