"""Makes the pictures of the commands in `docs/guides`: `make pictures`, or `python -m tests.pagewire.pictures FOLDER`.

Rich exports the terminal output of `demo`, `doctor`, `plan`, `replay` and `serve`. Textual exports `pagewire top`: a
faulty service in both themes, and a pool of four million pages. `--browser` names a Chromium. Without a screen, this
browser opens the address that `pagewire demo --top web --chaos 7` prints, and the address of the large pool. `--only`
makes a single picture.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from kvcache import TextContext
from kvcache.endpoints.watch import ManagerWatch
from pagewire.top.app import TopApp
from pagewire.top.sources import LiveSource
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig
from tests.kvcache.build import manager_of

SIZE = (132, 40)
COMMAND = (sys.executable, "-m", "pagewire")
WIDTH = 100  # The width of the output of the other commands, in characters.
CONFIG = Path(__file__).parent / "plan/configs/gemma-3-27b"
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_SERVE_S = 120.0
# A picture with more bytes shows content. Before the program has drawn, Textual serves an empty page with fewer bytes.
_DRAWN_BYTES = 30_000


def printed(path: Path, arguments: Sequence[str], shown: str = "", *, coloured: bool = True) -> None:
    """Draws the output of a command as in a terminal, below its command line."""
    environment = terminal() if coloured else None
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=True, env=environment)
    export(path, f"pagewire {shown or ' '.join(arguments)}", done.stdout)


def terminal() -> dict[str, str]:
    """Sets an environment in which rich treats a pipe as a terminal."""
    return {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}


def export(path: Path, command: str, text: str) -> None:
    """Draws a command line and its output. The picture loads no font from a server."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    for line in text.splitlines():
        console.print(Text.from_ansi(line.rstrip("\n")))
    path.write_text(_FONTS.sub("", console.export_svg(title="pagewire")))


def demo(folder: Path) -> None:
    """Draws a demo of eight prompts across two processes."""
    # Without colours, the frames of the progress bar are left out.
    printed(folder / "demo.svg", ["demo", "--requests", "8"], coloured=False)


def doctor(folder: Path) -> None:
    """Draws the findings on this host."""
    printed(folder / "doctor.svg", ["doctor"])


def plan(folder: Path) -> None:
    """Draws the plan of a model with windows."""
    arguments = ["--memory", "40GiB", "--prefill-speed", "40000", "--step-tokens", "2048"]
    printed(
        folder / "plan.svg", ["plan", "--model", str(CONFIG), *arguments], f"plan --model DIR {' '.join(arguments)}"
    )


def replay(folder: Path) -> None:
    """Draws the replay of growing conversations, some of which are resumed later."""
    rng, lines = random.Random(5), list[str]()
    for turn in range(2000):
        first = 10 + 50 * rng.randrange(turn // 4, turn // 2 + 2)
        lines.append(json.dumps({"hash_ids": [*range(4), *range(first, first + turn % 50 + 1)]}))
    with tempfile.TemporaryDirectory() as made:
        trace = Path(made) / "conversations.jsonl"
        trace.write_text("\n".join(lines) + "\n")
        printed(folder / "replay.svg", ["replay", str(trace), "--capacity", "5000"], "replay TRACE --capacity 5000")


def serve(folder: Path) -> None:
    """Draws a watched service, until the service gets the command to drain."""
    arguments = ["serve", "--prefills", "2", "--watch"]
    command = [*COMMAND, *arguments, "--http-port", "0"]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=terminal())
    assert program.stderr is not None
    lines = list[str]()
    for line in program.stderr:
        lines.append(line)
        if " serves at " in line:
            program.send_signal(signal.SIGTERM)
    program.wait(_SERVE_S)
    export(folder / "serve.svg", f"pagewire {' '.join(arguments)}", "".join(lines))


def picture(addresses: list[str], path: Path, keys: list[str], seconds: float, *, light: bool = False) -> None:
    """Draws the screen after this many seconds."""
    app = TopApp(LiveSource(addresses, 4.0), light=light)

    async def run() -> None:
        async with app.run_test(size=SIZE) as pilot:
            await pilot.pause(seconds)
            await pilot.press(*keys)
            await pilot.pause(0.6)
            drawn = _FONTS.sub("", app.export_screenshot(title="pagewire top"))
            path.write_text(drawn)  # noqa: ASYNC240 - nobody else waits

    asyncio.run(run())


def small(folder: Path, chromium: str | None) -> None:
    """Draws two processes with faulty transfers, while several tenants send requests."""
    config = ServerConfig(
        model=None, seed=0, page_size=16, cache_bytes=3 << 20, max_seq_len=1024, max_requests=8, token_budget=128,
        tp=1, device="cpu", chaos=7, verify=True, lease_s=3.0, watch="tcp://127.0.0.1:0",
    )  # fmt: skip
    roles: tuple[msg.Role, ...] = ("prefill", "decode")
    with Fleet([msgspec.structs.replace(config, role=role) for role in roles]) as fleet:
        over = threading.Event()
        talking = threading.Thread(target=talk, args=(fleet, over))
        talking.start()
        try:
            addresses = [ready.watch for ready in fleet.ready.values()]
            picture(addresses, folder / "top_small.svg", ["2"], 6.0)
            picture(addresses, folder / "top_light.svg", ["1"], 4.0, light=True)
        finally:
            over.set()
            talking.join()
    if chromium is not None:
        browse(["demo", "--top", "web", "--chaos", "7"], folder / "top_small.png", chromium)


def talk(fleet: Fleet, over: threading.Event) -> None:
    """Runs conversations of three tenants with a common beginning."""
    rng, number, open_ones = random.Random(3), 0, 0
    while not over.is_set():
        while open_ones < 8:
            number, open_ones = number + 1, open_ones + 1
            tenant = rng.choice(["acme", "globex", None])
            prompt = [ord(letter) for letter in f"You help {tenant}." * 8] + [
                rng.randrange(250) for _ in range(rng.randrange(40, 500))
            ]
            fleet.send("decode", msg.Submit(request_id=f"chat-{number}", prompt=tuple(prompt), max_new_tokens=60,
                                            cache_salt=tenant, serial=number))  # fmt: skip
        open_ones -= sum(isinstance(one, msg.Tokens) and one.finished is not None for one in fleet.receive(0.05))


def browse(arguments: list[str], path: Path, chromium: str) -> None:
    """Draws the page at the address that a command of pagewire prints."""
    program = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    try:
        url = next(line for line in program.stdout if "pagewire top: " in line).split("pagewire top: ")[1].strip()
        asyncio.run(shoot(chromium, url, path))
    finally:
        program.send_signal(signal.SIGINT)
        program.communicate()


async def shoot(chromium: str, url: str, path: Path) -> None:
    """Opens an address in a headless browser. Takes a picture some seconds after the page shows content."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,800", "--remote-debugging-port=0"]
    browser = await asyncio.create_subprocess_exec(chromium, *flags, "about:blank", stderr=asyncio.subprocess.PIPE)
    assert browser.stderr is not None
    try:
        while "DevTools listening on " not in (line := (await browser.stderr.readline()).decode()):
            pass
        port = line.split(":")[2].split("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{port}/json/new?{url}") as answer:
                page = await answer.json(content_type=None)
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                found = b""
                for number in range(60):
                    seconds = 6 if len(found) > _DRAWN_BYTES else 1
                    await asyncio.sleep(seconds)
                    await socket.send_json({"id": number, "method": "Page.captureScreenshot"})
                    found = base64.b64decode((await socket.receive_json())["result"]["data"])
                    if seconds > 1:
                        break
        path.write_bytes(found)  # noqa: ASYNC240 - as above
    finally:
        browser.terminate()
        await browser.wait()


def large(folder: Path, chromium: str | None) -> None:
    """Draws four million pages: a thousand running requests, leases, and idle pages of every age."""
    manager = manager_of(4_000_000, page_size=16, rows=1024, max_seq_len=65_536, checks=False, head_dim=1)
    rng = np.random.default_rng(1)
    names: list[str] = []

    def serve(name: str, pages: int, salt: str | None) -> None:
        context = TextContext(rng.integers(0, 1000, pages * 16, dtype=np.int32), 65_536, name, cache_salt=salt)
        manager.external_claim(name)
        if not manager.maybe_reserve(context):
            raise RuntimeError(name)
        manager.fetch([context])
        context.update(1)
        manager.step([context])
        names.append(name)

    for number in range(1400):
        serve(f"chat-{number}", int(rng.integers(300, 4000)), ["acme", "globex", None][number % 3])
        if len(names) > 500:
            name = names.pop(int(rng.integers(len(names))))
            if number % 9 == 0:
                manager.lease(name)
            manager.release(name)
    watch = ManagerWatch(manager, name="decode-7", clear_names=True)
    picture([watch.address], folder / "top_large.svg", ["1"], 4.0)
    if chromium is not None:
        browse(["top", watch.address, "--web"], folder / "top_large.png", chromium)
    watch.close()


PRINTED: dict[str, Callable[[Path], None]] = {
    "demo": demo,
    "doctor": doctor,
    "plan": plan,
    "replay": replay,
    "serve": serve,
}
DRAWN: dict[str, Callable[[Path, str | None], None]] = {"top_small": small, "top_large": large}


def main() -> None:
    """Makes the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.pagewire.pictures", description=__doc__)
    parser.add_argument("folder", type=Path, help="where they go")
    parser.add_argument("--only", choices=(*PRINTED, *DRAWN), help="one of them")
    parser.add_argument("--browser", metavar="FILE", help="a Chromium, for pictures of a browser")
    chosen = parser.parse_args()
    for name in [chosen.only] if chosen.only else [*PRINTED, *DRAWN]:
        started = time.monotonic()
        if name in PRINTED:
            PRINTED[name](chosen.folder)
        else:
            DRAWN[name](chosen.folder, chosen.browser)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
