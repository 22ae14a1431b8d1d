"""The pictures in `docs/guides/top.md`: `python -m tests.pagewire.top.pictures FOLDER [CHROMIUM]`.

Processes of the service under faults, and a pool of four million pages, drawn as `pagewire top` draws them and exported
by Textual. Where the path of a Chromium is given, that browser opens, without a screen, the address that `pagewire demo
--top web --chaos 7` prints, and that of the large pool.
"""

from __future__ import annotations

import asyncio
import base64
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from kvcache import TextContext
from kvcache.watch.endpoint import ManagerWatch
from pagewire.top.app import TopApp
from pagewire.top.sources import LiveSource
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig
from tests.kvcache.build import manager_of

SIZE = (132, 40)
_DRAWN_BYTES = 30_000  # of a picture: it shows more than Textual's page before the program has drawn anything


def picture(addresses: list[str], path: Path, keys: list[str], seconds: float) -> None:
    """The screen after so long."""
    app = TopApp(LiveSource(addresses, 4.0))

    async def run() -> None:
        async with app.run_test(size=SIZE) as pilot:
            await pilot.pause(seconds)
            await pilot.press(*keys)
            await pilot.pause(0.6)
            path.write_text(app.export_screenshot(title="pagewire top"))  # noqa: ASYNC240 - nobody else waits

    asyncio.run(run())


def small(folder: Path) -> None:
    """Two processes and misbehaving transfers, with requests of several tenants all the while."""
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
        finally:
            over.set()
            talking.join()


def talk(fleet: Fleet, over: threading.Event) -> None:
    """Conversations of three tenants that begin alike."""
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
    """What a browser shows at the address that a command of ours prints."""
    program = subprocess.Popen([sys.executable, "-m", "pagewire", *arguments], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    try:
        url = next(line for line in program.stdout if "pagewire top: " in line).split("pagewire top: ")[1].strip()
        asyncio.run(shoot(chromium, url, path))
    finally:
        program.send_signal(signal.SIGINT)
        program.communicate()


async def shoot(chromium: str, url: str, path: Path) -> None:
    """Have a browser without a screen open an address, and take what it shows some seconds after it shows anything."""
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
    """Four million pages: a thousand requests that run, leases, and idle pages of every age."""
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


def main() -> None:
    """Make them."""
    folder, chromium = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    started = time.monotonic()
    small(folder)
    if chromium is not None:
        browse(["demo", "--top", "web", "--chaos", "7"], folder / "top_small.png", chromium)
    large(folder, chromium)
    print(f"made in {time.monotonic() - started:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
