"""`pagewire serve`: runs the frontend and its processes, or a single one, until a signal tells it to drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket as sockets
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import uvicorn
import zmq

from pagewire.arguments import small_file, write_json
from pagewire.listening import in_url
from pagewire.serve.options import ServeOptions
from scheduler_adapters.errors import AdapterError, ServiceError
from scheduler_adapters.front.app import make_app
from scheduler_adapters.front.frontend import Frontend, log
from scheduler_adapters.front.openai import ServedModel
from scheduler_adapters.front.placement import InTurns, Selected
from scheduler_adapters.hf.runner import load_tokenizer, vocab_size_of
from scheduler_adapters.service.fleet import MEMORY_VARIABLE, Fleet, RunFolder, memory_root
from scheduler_adapters.service.messages import Role
from scheduler_adapters.service.server import ServerConfig, keys_of, run
from scheduler_adapters.service.sockets import Context, bind_router
from transfer.errors import HandshakeError
from transfer.wire.allowed_peers import AllowedPeers

_READY_S = 1.0  # in seconds, between two `Ready` messages of one process
_RESTART_S = 5.0  # in seconds: a process that dies is restarted at most this often
_WATCH_S = 0.25
_START_S = 300.0  # in seconds: how long the processes may take to load the model
_ADDRESS_S = 120.0  # in seconds: how long the frontend may take to write its address file


class _Addresses(msgspec.Struct):
    """The endpoints of the frontend, as written to its address file."""

    http: str
    front: str
    watch: tuple[str, ...] = ()  # watch endpoints of the processes, for `pagewire top`


def run_serve(options: ServeOptions, listening: sockets.socket | None) -> int:
    """Serves until told to drain. Returns 0 if no page was held at the end. A `KVCacheError` says what went wrong.

    `listening` is the HTTP socket; None for a process without one.
    """
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    _check_keys(options)
    if options.what in ("prefill", "decode"):
        if options.json is not None:
            raise ServiceError(
                f"--json {str(options.json)!r}: a {options.what} process writes no file; give --json to the front"
            )
        with closing(RunFolder(memory_root())) as memory:
            os.environ[MEMORY_VARIABLE] = str(memory.path)
            return run(_server_config(options, options.what), (signal.SIGTERM, signal.SIGINT))
    if listening is None:
        raise ServiceError(f"serve {options.what}: pass a listening socket for HTTP")
    with ExitStack() as made:
        asyncio.run(_serve(options, listening, made))
    return 0


def _check_keys(options: ServeOptions) -> None:
    """Raises `ServiceError` if an endpoint is reachable from other hosts and there are no keys."""
    for endpoint in (f"tcp://{in_url(options.host)}:0", (options.front or "").replace(":*", ":0")):
        try:
            if endpoint and not (options.secret or options.keyring):
                AllowedPeers().check(endpoint)
        except HandshakeError as error:
            raise ServiceError(f"{endpoint} can be reached from other hosts: give --secret or --keyring") from error


def _server_config(options: ServeOptions, role: Role) -> ServerConfig:
    """Returns the settings of a process of this role."""
    return ServerConfig(
        model=None if options.model is None else str(options.model),
        seed=options.seed,
        page_size=options.page_size,
        group_layers=options.group_layers,
        cache_bytes=int(options.cache_mb * (1 << 20)),
        max_seq_len=options.max_tokens,
        max_requests=options.max_requests,
        token_budget=options.token_budget,
        overlap=options.overlap,
        tp=options.tp,
        device=options.device,
        lease_s=options.lease_s,
        name=options.name or f"{role}-{sockets.gethostname()}-{os.getpid()}",
        role=role,
        frontend=options.front or _front_in(options.address_file),
        listen=f"tcp://{in_url(options.host)}:*",
        handshake=f"tcp://{in_url(options.host)}:0",
        keyring=str(options.keyring or ""),
        secret=options.secret or "",
        allowed_peers=tuple(filter(None, (options.allowed_peers or "").split(","))),
        ready_s=_READY_S,
        metrics=options.metrics or "",
        trace=options.trace,
        watch=f"tcp://{in_url(options.host)}:0" if options.watch else "",
        kv_events=options.host if options.placement == "dynamo" else "",
    )


def _front_in(path: Path | None) -> str:
    """Waits until the frontend has written its address file, and returns the frontend's endpoint."""
    if path is None:
        raise ServiceError("give --front or --address-file, so that this process finds its front")
    deadline = time.monotonic() + _ADDRESS_S
    while time.monotonic() < deadline:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(small_file(path), type=_Addresses).front
        time.sleep(_WATCH_S)
    raise ServiceError(f"--address-file {str(path)!r}: no front wrote its address there within {_ADDRESS_S:.0f} s")


async def _serve(options: ServeOptions, listening: sockets.socket, made: ExitStack) -> None:
    name = options.served_model_name or (options.model.resolve().name if options.model else "pagewire")
    vocab_size = vocab_size_of(options.model)
    served = ServedModel(name, load_tokenizer(options.model, vocab_size), vocab_size)
    folder = made.enter_context(closing(RunFolder()))
    context: Context = zmq.Context.instance()  # pyright: ignore[reportUnknownVariableType] -- untyped there
    own = f"tcp://{in_url(options.host)}:*" if options.what == "front" else folder.endpoint("front")
    endpoint = options.front or own
    keyring = keys_of(str(options.keyring or ""), options.secret or "")
    router = bind_router(context, endpoint, None if endpoint.startswith("ipc:") else keyring)
    made.callback(router.close)
    endpoint = router.address
    placements: dict[str, type[InTurns | Selected]] = {"in-turns": InTurns, "dynamo": Selected}
    placement = placements.get(options.placement)
    frontend = Frontend(router, placement and placement(), keyring)
    server = _Server(
        uvicorn.Config(make_app(frontend, served, options.checkpoints), log_level="warning", lifespan="off")
    )
    configs = [] if options.what == "front" else _children(options, endpoint)
    with Fleet(configs) as fleet:
        hearing = asyncio.create_task(frontend.run())
        hearing.add_done_callback(lambda _: setattr(server, "should_exit", True))
        tasks = [hearing]
        try:
            names = [config.name for config in configs]
            await _until_there(names, fleet, frontend)
            tasks.append(asyncio.create_task(_watch(fleet)))
            http = f"http://{in_url(options.http_host)}:{listening.getsockname()[1]}"
            watch = tuple(filter(None, (member.ready.watch for member in frontend.members.values())))
            # The handlers are set before the address is published, because a signal may follow immediately.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
            _leave_addresses(options.address_file, _Addresses(http, endpoint, watch))
            if watch:
                log.warning("to see every page, run: pagewire top %s", " ".join(watch))
            log.warning("%s serves at %s; processes join at %s", name, http, endpoint)
            await server.serve(sockets=[listening])
            if hearing.done():
                hearing.result()  # raises the error that stopped the frontend's task, if there was one
            # At this point no client is connected, and no request is open.
            decodes = [config.name for config in configs if config.role == "decode"]
            await frontend.drain(decodes)
            await frontend.drain([name for name in names if name not in decodes])
            write_json(options.json, await _figures(frontend))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _figures(frontend: Frontend) -> dict[str, object]:
    """Returns the figures for `--json`: the frontend's counters, and the last counters of each process."""
    counts = frontend.counts
    processes = {**await frontend.stats(), **frontend.left}
    return {
        "requests": dict(counts.ended),
        "lost_attempts": counts.lost,
        "cached_tokens": counts.cached_tokens,
        "computed_tokens": counts.computed_tokens,
        "new_tokens": counts.new_tokens,
        "processes": {name: msgspec.to_builtins(stats) for name, stats in processes.items()},
    }


def _children(options: ServeOptions, endpoint: str) -> list[ServerConfig]:
    """Returns the configurations of this host's processes.

    If no other host joins, their endpoints are in a private folder.
    """
    counts: dict[Role, int] = {"prefill": options.prefills, "decode": options.decodes}
    options = replace(options, front=endpoint)
    configs = [
        _server_config(replace(options, name=f"{role}-{number + 1}"), role)
        for role, count in counts.items()
        for number in range(count)
    ]
    return [msgspec.structs.replace(one, listen="") for one in configs] if endpoint.startswith("ipc:") else configs


def _leave_addresses(path: Path | None, addresses: _Addresses) -> None:
    if path is not None:
        try:
            draft = path.with_name(f"{path.name}.{os.getpid()}")
            draft.write_bytes(msgspec.json.encode(addresses) + b"\n")
            draft.replace(path)  # atomic, so that no reader sees a half-written file
        except OSError as error:
            raise AdapterError(f"--address-file {str(path)!r} cannot be written: {error.strerror}") from error


async def _until_there(names: list[str], fleet: Fleet, frontend: Frontend) -> None:
    deadline = time.monotonic() + _START_S
    while missing := [name for name in names if name not in frontend.members]:
        for name in missing:
            if fleet.has_ended(name):
                raise ServiceError(f"the {name} process {fleet.how_ended(name)}")
        if time.monotonic() > deadline:
            raise ServiceError(f"not ready after {_START_S:.0f} s: {', '.join(missing)}")
        await asyncio.sleep(_WATCH_S)


async def _watch(fleet: Fleet) -> None:
    """Restarts processes that have died, but not processes that have drained."""
    again = dict.fromkeys(fleet.running, 0.0)
    while True:
        for name in again:
            if fleet.status(name) and time.monotonic() > again[name]:
                again[name] = time.monotonic() + _RESTART_S
                log.warning("%s %s; it is restarted", name, fleet.how_ended(name))
                fleet.restart(name)
        await asyncio.sleep(_WATCH_S)


class _Server(uvicorn.Server):
    """An HTTP server that leaves signals to `pagewire serve`, which first answers the open requests."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """A no-op: `pagewire serve` handles the signals of the whole process, even after HTTP has stopped."""
        yield
