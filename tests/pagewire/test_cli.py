"""Every argument of every command, with invalid values. The command must print one line and end with a status, and
never with a traceback.
"""

import argparse
import difflib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from pagewire import arguments, cli
from pagewire.demo import demo
from pagewire.plan import command as plan_command
from pagewire.replay import command as replay_command

NEVER = ("inf", "-inf", "nan", "-1", "1e30", "1e400", "0x10", "", " ", "text", "1\n2", "\udcff", "٣x", "9" * 5000)
NUMBERS = ("0", "1", "2", "0.5", "1_0", str(2**31), str(2**32), str(2**40), str(2**63), str(2**64))
PATHS = ("{tmp}/none", "{tmp}/none/none", "{tmp}", "{tmp}/file", "/proc/self/mem", "/dev/zero", "{tmp}/file/x", "a\0b")
LONG = ("x" * 300, "x/" * 3000)
HOSTILE = (*NEVER, *NUMBERS, *PATHS, *LONG)

TRACE = '{"hash_ids": [1, 2, 3]}\n{"hash_ids": [1, 2, 4]}\n'


class Reached(Exception):  # noqa: N818  (no error: the command line was taken)
    pass


def commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = [
        action.choices for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    return dict(choices)


def valued() -> list[Any]:
    """Returns the options that take a value. `make test` runs one option of each type and unit."""
    found, kinds = list[Any](), set[tuple[Any, ...]]()
    for command, parser in commands().items():
        for action in parser._actions:
            if action.nargs != 0:
                kind = (getattr(action.type, "__qualname__", None), action.metavar, type(action.default))
                name = action.option_strings[-1] if action.option_strings else action.dest
                marks = pytest.mark.ci if kind in kinds else ()
                found.append(pytest.param(command, action, id=f"{command} {name}", marks=marks))
                kinds.add(kind)
    return found


def needed(command: str, trace: Path) -> list[str]:
    """Returns the arguments that a command requires."""
    plan = ["--model", str(Path(__file__).parent / "plan/configs/gpt-oss-120b"), "--memory", "1GiB"]
    return {"replay": [str(trace)], "plan": plan}.get(command, [])


def command_line(command: str, action: argparse.Action, value: str, trace: Path) -> list[str]:
    if not action.option_strings:
        return [command, "--", value]
    return [command, *needed(command, trace), f"{action.option_strings[-1]}={value}"]


@pytest.fixture
def status_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[list[str]], int | None]:
    """Returns a function that runs a command line, but stops before processes are started or pages are made. The
    function returns the exit status. It returns None if the command line was stopped.
    """

    def reached(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.setattr(demo, "Fleet", reached)
    monkeypatch.setattr(subprocess, "Popen", reached)
    monkeypatch.setattr(replay_command, "replay", reached)
    monkeypatch.setattr(plan_command, "plan_memory", reached)
    monkeypatch.chdir(tmp_path)

    def run(line: list[str]) -> int | None:
        capsys.readouterr()
        try:
            status = cli.main(line)
        except SystemExit as error:
            status = int(str(error.code))
        except Reached:
            return None
        printed = capsys.readouterr().err
        assert printed.startswith(f"pagewire {line[0]}: error: "), line
        assert printed.count("\n") == 1, printed
        assert len(printed) < 1100, printed
        return status

    return run


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """Limits this process to a gigabyte, so that reading an endless file cannot use up the machine's memory."""
    before, limits = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "in KiB"


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize(("command", "action"), valued())
def test_a_hostile_value_is_accepted_or_refused_in_one_line(
    command: str, action: argparse.Action, status_of: Callable[[list[str]], int | None], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    trace.write_text(TRACE)
    (tmp_path / "file").write_text("{]\n")
    numeric = action.default not in (None, argparse.SUPPRESS) and isinstance(action.default, int | float)
    numeric = numeric or action.metavar in ("N", "P", "SEED")
    for text in HOSTILE:
        value = text.replace("{tmp}", str(tmp_path))
        status = status_of(command_line(command, action, value, trace))
        assert status in (2, None), (value, status)
        if numeric and text not in NUMBERS:
            assert status == 2, value
        large = (str(2**63), str(2**64)) if action.metavar == "BYTES" else (str(2**40), str(2**63), str(2**64))
        if numeric and text in large:
            assert status == 2, value
        if text == "{tmp}" and action.type in (arguments.input_path, arguments.output_file):
            assert status == 2, value
        if text == "{tmp}/file" and action.type is arguments.input_folder:
            assert status == 2, value
        if text in ("", "a\0b"):
            assert status == 2, value
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", tmp_path / "trace"]


@pytest.mark.parametrize("seed", range(4))
def test_combined_arguments_in_range_are_accepted_or_refused_in_one_line(
    seed: int, status_of: Callable[[list[str]], int | None], tmp_path: Path
) -> None:
    trace, rng = tmp_path / "trace", random.Random(seed)
    trace.write_text(TRACE)
    (tmp_path / "prompts").write_text("short\n" + "x" * 3000 + "\n")
    found = set()
    for _ in range(25):
        for command, parser in commands().items():
            line = [command, *needed(command, trace)]
            for action in rng.sample(parser._actions, min(3, len(parser._actions))):
                if action.nargs != 0 and action.option_strings:
                    value = rng.choice([*NUMBERS, "3", "7", "1000", "50000", str(tmp_path / "prompts")])
                    line.append(f"{action.option_strings[-1]}={value}")
            found.add(status_of(line))
    assert found == {2, None}


@pytest.mark.parametrize("text", ["0", "-1", "10.5", "nan", "inf", "-inf", "text"])
def test_a_number_is_within_both_its_limits(text: str) -> None:
    assert arguments.number(0, 10)("10") == 10.0
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0 and up to 10"):
        arguments.number(0, 10)(text)


@pytest.mark.parametrize("command", ["", *commands()])
def test_help_fits_a_screen_and_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    printed = capsys.readouterr().out
    assert printed.count("\n") <= 24
    assert max(map(len, printed.splitlines())) <= 80
    assert f"example: pagewire {command}" in printed
    example = printed[printed.index("example: ") :].split(";")[0].split()[2:]
    parsed = vars(cli.build_parser().parse_args([one.replace("DIR", ".").replace("TRACE", ".") for one in example]))
    assert parsed["command"] == example[0]


@pytest.mark.parametrize("command", commands())
def test_every_option_is_in_the_whole_help_and_every_command_writes_json(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help-all"])
    printed = capsys.readouterr().out
    options = {one for action in commands()[command]._actions for one in action.option_strings} - {"--help-all"}
    assert {one for one in options if one not in printed} == set()
    assert "--json" in options


def misspelt(option: str, rng: random.Random) -> list[str]:
    """Returns spellings of an option that are no option, and no abbreviation of one."""
    word = option.removeprefix("--")
    at = rng.randrange(1, len(word) - 1)
    made = {word[:at] + word[at + 1] + word[at] + word[at + 2 :], word[:at] + word[at + 1 :], f"{word}s", f"{word}-x"}
    return sorted(f"--{one}" for one in made | {word.replace("-", "_")} if not option.startswith(f"--{one}"))


@pytest.mark.parametrize("command", commands())
def test_an_unknown_option_is_named_with_the_nearest_one(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "trace").write_text(TRACE)
    options = [one for action in commands()[command]._actions for one in action.option_strings]
    positional = {"serve": ["prefill"], "top": ["tcp://127.0.0.1:1"], "replay": [str(tmp_path / "trace")]}
    before, after = positional.get(command, []), ["--json", str(tmp_path / "out.json")]
    tried = 0
    for option in options:
        for wrong in misspelt(option, random.Random(option)) if len(option) > 4 else []:
            if any(one.startswith(wrong) for one in options):
                continue
            for line in ([wrong, "hunter2", *before], [*before, wrong, *after], [*after, *before, f"{wrong}=hunter2"]):
                with pytest.raises(SystemExit, match="2"):
                    cli.main([command, *line])
                printed = capsys.readouterr().err
                assert printed.startswith(f"pagewire {command}: error: unknown option '{wrong}'; "), line
                assert printed.count("\n") == 1
                assert "hunter2" not in printed, "what follows may be a secret"
                tried += 1
            assert f"did you mean {option}?" in printed or difflib.SequenceMatcher(None, wrong, option).ratio() < 0.9
    assert tried > 20


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["--verson"], "pagewire: error: unknown option '--verson'; did you mean --version?"),
        (["--model", "x", "serve"], "pagewire: error: unknown option '--model'; pagewire --help lists all"),
        (["-x", "serve"], "pagewire: error: unknown option '-x'; pagewire --help lists all"),
        (["serve", "-m", "x"], "pagewire serve: error: unknown option '-m'; pagewire serve --help-all lists all"),
        (["serve", "-model", "x"], "pagewire serve: error: unknown option '-model'; did you mean --model?"),
        (["serve", "--seed", "-1", "--sed"], "pagewire serve: error: unknown option '--sed'; did you mean --seed?"),
        (["serve", "--model\x1b"], "pagewire serve: error: unknown option '--model\\x1b'; did you mean --model?"),
        # these are known, or values, and argparse complains about something else
        (["serve", "--secret", "-hunter2"], "pagewire serve: error: argument --secret: expected one argument"),
        (["serve", "--secre", "-hunter2"], "pagewire serve: error: argument --secret: expected one argument"),
        (["serve", "--seed", "-1"], "pagewire serve: error: argument --seed: '-1' is not a whole number"),
        (["serve", "--pre", "0"], "pagewire serve: error: argument --prefills: '0' is not a whole number"),
        (["serve", "--", "--modle"], "pagewire serve: error: argument PROCESS: invalid choice: '--modle'"),
        (["srve", "--modle"], "pagewire: error: argument COMMAND: invalid choice: 'srve'"),
    ],
)
def test_only_an_unknown_option_is_called_unknown(
    line: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(line)
    printed = capsys.readouterr().err
    assert printed.startswith(told)
    assert printed.count("\n") == 1
    assert "hunter2" not in printed


BROKEN = {
    "empty": b"",
    "blank": b"\n\n",
    "no JSON": b"{]",
    "cut": TRACE.encode()[:-20],
    "zeros": bytes(100),
    "no text": b"\xff\xfe{}",
    "deep": b'{"x": ' + b"[" * 100_000,
    "deep first": b"[" * 100_000,
    "surrogate": b'{"hash_ids": [1], "x": "\\ud800"}',
    "huge id": b'{"hash_ids": [' + b"9" * 10_000 + b"]}",
    "2**31": b'{"hash_ids": [2147483648]}',
    "fraction": b'{"hash_ids": [1.5]}',
    "true": b'{"hash_ids": [true]}',
    "no ids": b'{"hash_ids": []}',
    "null": b'{"hash_ids": null}',
    "other": b'{"prompt": 7}',
    "longer than the pool": json.dumps({"hash_ids": [*range(20_000)]}).encode(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(TRACE.encode() + BROKEN[name] if name != "empty" else b"")
    assert cli.main(["replay", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1

    def reached(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.setattr(demo, "Fleet", reached)
    path.write_bytes(BROKEN[name])
    try:
        assert cli.main(["demo", "--prompts", str(path)]) == 2
    except Reached:  # lines that are not JSON objects count as prompts
        return
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed


@pytest.mark.parametrize("seed", range(3))
def test_a_trace_with_changed_bytes_is_replayed_or_refused_in_one_line(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, path, found = random.Random(seed), tmp_path / "trace", set()
    for _ in range(40):
        data = bytearray(TRACE.encode())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice(b'0123456789[]{},:"\n\xff-e. ')
        path.write_bytes(data)
        status = cli.main(["replay", str(path), "--capacity", "50", "--host-blocks", str(rng.choice([0, 1, 9]))])
        assert capsys.readouterr().err.count("\n") == (status == 2)
        found.add(status)
    assert found == {0, 2}


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(TRACE)
    command = [sys.executable, "-m", "pagewire", "replay", str(trace)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process:
        assert process.stderr.read() == b""
        assert process.wait(60) in (1, 141)


def test_a_port_that_is_taken_is_reported_before_anything_heavy_is_imported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = (
            "import sys, pagewire.cli as cli\n"
            f"print(cli.main(['serve', '--http-port', '{port}']))\n"
            "print({'msgspec', 'numpy', 'torch', 'zmq'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout == "2\nset()\n"
    assert done.stderr == f"pagewire serve: error: HTTP cannot listen at 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("host", ["a..b", "nowhere.invalid", "256.1.1.1", "x" * 100])
def test_an_invalid_host_is_refused_in_one_line(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--http-host", host, "--http-port", "0"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"pagewire serve: error: HTTP cannot listen at {host}:0: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("line", [["serve", "decode", "--front"], ["serve", "front", "--front"], ["top", "--"]])
@pytest.mark.parametrize("port", ["65536", "99999", "9" * 100])
def test_an_endpoint_with_an_impossible_port_is_refused_in_one_line(
    line: list[str], port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*line, f"tcp://127.0.0.1:{port}"])
    printed = capsys.readouterr().err
    assert printed.endswith("a port from 0 to 65,535 is needed\n")
    assert printed.count("\n") == 1


CONFIG_FILES = {"none": None, "no JSON": "{]", "another type": "[]", "nothing": "{}", "unknown": '{"model_type": "x"}'}


@pytest.mark.parametrize("config", CONFIG_FILES)
@pytest.mark.parametrize(
    "line", [["demo"], ["serve", "--http-port=0"], ["plan", "--memory=1GiB"]], ids=lambda line: line[0]
)
def test_a_folder_without_a_model_is_refused_in_one_line(
    line: list[str], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (content := CONFIG_FILES[config]) is not None:
        (tmp_path / "config.json").write_text(content)
    assert cli.main([*line, "--model", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"pagewire {line[0]}: error: ")
    assert printed.count("\n") == 1, printed
    assert str(tmp_path) in printed


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"pagewire {kvcache.__version__}\n"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert kvcache.__version__ == project["version"]


def test_nothing_heavy_is_imported_before_signals_are_handled() -> None:
    """If torch were imported earlier, an interrupt during its import would print a traceback, and `--help` would take
    seconds.
    """
    program = "import sys, pagewire.cli; print({'msgspec', 'numpy', 'torch', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout == "set()\n"
