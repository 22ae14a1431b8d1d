"""`pagewire top` as a command, as a server for browsers, and together with the demo and a replay."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kvcache.endpoints.watch import ManagerWatch
from pagewire import viewer as viewer_module
from pagewire.cli import main
from pagewire.top.command import COOKIE, TokenServer, is_light, source_of, web_command
from pagewire.top.options import TopOptions
from pagewire.top.sources import LiveSource
from tests.pagewire.top.test_app import busy_manager


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["top", *arguments]) == 2
    return capsys.readouterr().err


def test_arguments_that_cannot_be_shown_are_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "f").write_text("{}")
    assert "to watch" in complaint(capsys)
    assert "cannot be watched" in complaint(capsys, "nowhere")
    assert "not a recording" in complaint(capsys, "--play", str(tmp_path / "f"))
    assert "leave out addresses" in complaint(capsys, "tcp://127.0.0.1:1", "--play", str(tmp_path / "f"))
    assert "to watch" in complaint(capsys, "--address-file", str(tmp_path / "f"))
    assert "shared secret" in complaint(capsys, "tcp://127.0.0.1:1", "--secret", "short")


def test_a_look_at_each_process_is_written_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    watch, path = ManagerWatch(busy_manager(), name="decode"), tmp_path / "look.json"
    try:
        assert main(["top", watch.address, "--json", str(path)]) == 0
    finally:
        watch.close()
    (look,) = json.loads(path.read_text()).values()
    assert (look["name"], look["pools"][0]["num_pages"]) == ("decode", 64)
    assert sum(look["pools"][0]["counts"]) == 64
    assert capsys.readouterr() == ("", "")
    assert "--web" in complaint(capsys, watch.address, "--json", str(path), "--web")
    assert "--record" in complaint(capsys, watch.address, "--json", str(path), "--record", str(tmp_path / "r"))


def test_addresses_come_from_the_file_that_a_front_leaves(tmp_path: Path) -> None:
    path = tmp_path / "addresses"
    path.write_text(json.dumps({"http": "http://h", "front": "tcp://f", "watch": ["tcp://127.0.0.1:9"]}))
    source = source_of(TopOptions(addresses=("tcp://127.0.0.1:8",), address_file=path))
    assert isinstance(source, LiveSource)
    assert source.addresses == ["tcp://127.0.0.1:8", "tcp://127.0.0.1:9"]
    source.close()


def test_a_browser_needs_the_token_once() -> None:
    server = TokenServer("true", "127.0.0.1", 1, "secret-token")

    async def run() -> None:
        async with TestClient(TestServer(await server.make_app())) as client:
            for path in ("/", "/?token=secret-tokem", "/static/js/textual.js", "/ws"):
                assert (await client.get(path)).status == 403, path
            page = await client.get("/?token=secret-token")
            assert page.status == 200
            assert "pagewire top" in await page.text()
            # Otherwise a browser waits for the server that has the font of Textual's page, and shows no content
            # meanwhile.
            assert "default-src 'self'" in page.headers["Content-Security-Policy"]
            cookie = page.cookies[COOKIE]
            assert cookie["httponly"]
            assert cookie["samesite"] == "Strict"
            assert (await client.get("/static/js/textual.js")).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("theme", "background", "light"),
    [
        ("auto", None, False),
        ("auto", "15;0", False),
        ("auto", "0;15", True),
        ("auto", "0;default;7", True),
        ("dark", "0;15", False),
        ("light", None, True),
    ],
)
def test_the_theme_is_as_asked_for_or_the_terminals(
    theme: Literal["auto", "dark", "light"], background: str | None, light: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLORFGBG", raising=False)
    if background is not None:
        monkeypatch.setenv("COLORFGBG", background)
    assert is_light(TopOptions(addresses=(), theme=theme)) is light


def test_each_browser_gets_the_same_program_without_the_server() -> None:
    command = web_command(TopOptions(addresses=("tcp://127.0.0.1:8",), web=True, updates=3.0))
    assert "--web" not in command
    assert "tcp://127.0.0.1:8 --updates=3.0" in command


def test_the_server_of_browsers_says_where_and_ends_when_told() -> None:
    manager = busy_manager()
    watch = ManagerWatch(manager)
    program = subprocess.Popen(
        [sys.executable, "-m", "pagewire", "top", watch.address, "--web"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    found = re.search(r"http://127.0.0.1:\d+/", line := program.stdout.readline())
    assert found, line
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(found[0])  # noqa: S310
    address = line.split("pagewire top: ")[1].strip()
    with urllib.request.urlopen(address) as page:  # noqa: S310
        assert b"pagewire top" in page.read()
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=60)
    watch.close()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replaces the drawing program by a program that follows every address until it has seen pages. The program then
    reports the pages.
    """
    path = tmp_path / "looked.json"
    program = tmp_path / "look.py"
    program.write_text(LOOKS.format(path=str(path)))
    monkeypatch.setattr(viewer_module, "PROGRAM", (sys.executable, str(program)))
    return path


LOOKS = """
import json, sys, time
from pathlib import Path
from kvcache.endpoints.follower import Followed, WatchClient
seen = {{}}
for address in (one for one in sys.argv[1:] if "://" in one):
    client, followed = WatchClient(address), Followed()
    for _ in range(400):
        client.ask(followed.ask)
        frames = client.answer(30.0)
        look = followed.apply(frames)
        if look.pools[0].counts[1] and look.figures.get("optimum_hit_rate", 1.0):
            break
        time.sleep(0.05)
    seen[look.name] = [look.pools[0].counts[1], look.figures.get("optimum_hit_rate")]
    client.close()
Path({path!r}).write_text(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_fleets")
def test_the_demo_serves_until_its_view_is_quit(looked: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--top", "--requests", "4", "--max-new-tokens", "4"]) == 0
    seen = json.loads(looked.read_text())
    assert set(seen) == {"prefill", "decode"}
    assert all(idle > 0 for idle, _ in seen.values())
    assert "yes" in capfd.readouterr().out


def test_a_replay_is_shown_at_its_speed_beside_the_optimum(looked: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"hash_ids": [1, 2, 3, at]}) + "\n" for at in range(10, 60)))
    assert main(["replay", str(trace), "--capacity", "32", "--top", "--speed", "50"]) == 0
    idle, optimum = json.loads(looked.read_text())["replay"]
    assert idle > 0
    assert 0 < optimum <= 0.75
