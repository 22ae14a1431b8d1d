"""`pagewire top`: runs in this terminal, or in a browser."""

from __future__ import annotations

import hmac
import os
import secrets
import shlex
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web
from textual_serve.server import Server

from kvcache.errors import WatchError
from pagewire.arguments import small_file, write_json
from pagewire.listening import in_url, listen
from pagewire.top.app import TopApp
from pagewire.top.options import TopOptions
from pagewire.top.printed import one_look, print_looks
from pagewire.top.sources import LiveSource, PlayedSource
from pagewire.top.terminal import has_terminal, run_for_browser, run_in_terminal
from pagewire.viewer import PROGRAM
from scheduler_adapters.errors import ServiceError
from transfer.wire.keys import load_keyring
from transfer.wire.secret import read_secret

COOKIE = "pagewire_top"
# Textual's page loads a font from another host, and shows nothing until that host answers, which never happens in a
# closed network.
_ONLY_OURS = "default-src 'self' 'unsafe-inline' data:; connect-src 'self' ws: wss:"


class _WatchAddresses(msgspec.Struct):
    """The part of `pagewire serve`'s address file that this command reads."""

    watch: tuple[str, ...] = ()


def run_top(options: TopOptions) -> int:
    """Shows the processes until the viewer quits. Returns the exit status.

    Without a terminal, it prints one snapshot of each process.

    A `KVCacheError` says in a sentence what went wrong.
    """
    if options.json is not None and (options.web or options.record is not None):
        raise WatchError(f"--json {str(options.json)!r} writes one snapshot: leave out --web and --record")
    if options.web:
        serve_web(options)
        return 0
    source = source_of(options)
    try:
        if options.json is not None:
            write_json(options.json, one_look(source))
            return 0
        if "TEXTUAL_DRIVER" in os.environ:
            return run_for_browser(TopApp(source, light=is_light(options)))
        if has_terminal():
            return run_in_terminal(TopApp(source, light=is_light(options)))
        return print_looks(source, until_interrupted=options.record is not None)
    finally:
        source.close()


def is_light(options: TopOptions) -> bool:
    """Returns whether to use the light theme. The theme "auto" matches the background of the terminal.

    If the terminal does not report its background, the theme "auto" is dark.
    """
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return options.theme == "light" or (options.theme == "auto" and background in ("7", "15"))


def source_of(options: TopOptions) -> LiveSource | PlayedSource:
    """Returns the source of snapshots. Raises `WatchError` if the options name no source, or exclude each other."""
    addresses = addresses_of(options)
    if options.play is not None:
        if addresses or options.record is not None:
            raise WatchError("--play shows a recording: leave out addresses and --record")
        return PlayedSource(options.play, options.speed)
    if not addresses:
        raise WatchError("give an ADDRESS, --address-file or --play to watch")
    secret = None if options.secret is None else read_secret(options.secret)
    keyring = load_keyring(options.keyring) if options.keyring is not None else secret and secret.keyring
    return LiveSource(addresses, options.updates, options.record, keyring and keyring.secure_client)


def addresses_of(options: TopOptions) -> Sequence[str]:
    """Returns the addresses on the command line, followed by those in the address file."""
    named = list(options.addresses)
    if options.address_file is not None:
        try:
            named += msgspec.json.decode(small_file(options.address_file), type=_WatchAddresses).watch
        except (OSError, msgspec.DecodeError) as error:
            raise WatchError(f"--address-file {str(options.address_file)!r}: {error}") from error
    return list(dict.fromkeys(named))


# ---- in a browser


class TokenServer(Server):
    """Textual's server, protected by a token: it answers only a browser that presents the token.

    A browser presents the token first as part of the printed address, and from then on in a cookie.
    """

    def __init__(self, command: str, host: str, port: int, token: str) -> None:
        url = f"http://{in_url(host)}:{port}"
        super().__init__(command, host, port, "pagewire top", url)  # pyright: ignore[reportUnknownMemberType]
        self._token = token

    @property
    def address(self) -> str:
        """The address for a browser, with its token."""
        return f"{self.public_url}/?token={self._token}"

    async def make_app(self) -> web.Application:
        """Returns the `aiohttp` application. It refuses every request without the token."""
        app = await self._make_app()
        app.middlewares.append(self._middleware)
        return app

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        brought = request.query.get("token", "")
        if not any(_same(one, self._token) for one in (brought, request.cookies.get(COOKIE, ""))):
            raise web.HTTPForbidden(text="pagewire top: the address with its token is needed\n")
        response = await handler(request)
        if not response.prepared:
            response.headers["Content-Security-Policy"] = _ONLY_OURS
            if brought:
                response.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict")
        return response

    async def on_startup(self, app: Any) -> None:
        """Prints the address."""
        del app
        self.console.print(f"pagewire top: {self.address}", highlight=False, soft_wrap=True)

    def run(self, listening: socket.socket) -> None:
        """Serves until interrupted."""
        web.run_app(self.make_app(), sock=listening, print=None, handle_signals=True)


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def serve_web(options: TopOptions) -> None:
    """Serves browsers, each with its own `pagewire top`, until interrupted."""
    if options.play is None:
        source_of(options).close()  # an error is reported here, instead of in each browser
    try:
        listening = listen(options.web_host, options.web_port)
    except OSError as error:
        raise ServiceError(f"--web cannot listen at {options.web_host}:{options.web_port}: {error.strerror}") from error
    port: int = listening.getsockname()[1]
    TokenServer(web_command(options), options.web_host, port, options.token or secrets.token_urlsafe(16)).run(listening)


def web_command(options: TopOptions) -> str:
    """Returns the command that the server runs for each browser: `pagewire top` with the same options.

    Each browser gets its own terminal.
    """
    named = {"updates": options.updates, "speed": options.speed, "play": options.play, "record": options.record}
    named |= {
        "theme": options.theme,
        "secret": options.secret,
        "keyring": options.keyring,
        "address-file": options.address_file,
    }
    told = [f"--{name}={value}" for name, value in named.items() if value is not None]
    return shlex.join([*PROGRAM, *options.addresses, *told])
