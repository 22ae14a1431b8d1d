"""The options of `pagewire serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagewire.arguments import (
    choice,
    device,
    endpoint,
    input_path,
    number,
    option,
    output_file,
    plain,
    switch,
    whole,
)

_TOKENS = whole(1, 1 << 20)
_PROCESSES = whole(1, 64)
What = Literal["all", "front", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the command line, each validated."""

    what: What = option(
        None,
        str,
        "all",
        "all of it on this host, or one process: the front, which the others join, a prefill or a decode process",
        name="what",
        nargs="?",
        choices=("all", "front", "prefill", "decode"),
    )
    model: Path | None = option(
        "DIR", input_path, None, "a directory saved by transformers; without it, a small random Llama"
    )
    placement: Literal["guess", "in-turns", "dynamo"] = option(
        None,
        str,
        "guess",
        "who computes a prompt: each decode process's guess at what is cached where, each prefill process in turn, or "
        "Dynamo's SelectionService, fed by KV events: these carry prompts in clear, a network that you trust",
        choices=("guess", "in-turns", "dynamo"),
    )
    served_model_name: str | None = option(
        "NAME", plain, None, "as clients ask for it; without it, the directory's, or pagewire"
    )
    prefills: int = option("N", _PROCESSES, 1, "prefill processes (all)")
    decodes: int = option("N", _PROCESSES, 1, "decode processes (all)")
    http_host: str = option(
        "HOST", plain, "127.0.0.1", "where HTTP listens; it knows no keys: a network that you trust"
    )
    http_port: int = option("PORT", whole(0, 65535), 8000, "the same; 0 takes a free one")
    host: str = option("HOST", plain, "127.0.0.1", "address of this host for the processes on other ones")
    front: str | None = option(
        "ENDPOINT", endpoint, None, "the front's tcp://HOST:PORT: where it listens, and whom the others join"
    )
    metrics: str | None = option(
        "HOST:PORT",
        plain,
        None,
        "where Prometheus reads a prefill or decode process, port 0 a free one; the front's /targets tells them",
    )
    trace: bool = switch("a span of OpenTelemetry for each hand-over, from decode processes")
    address_file: Path | None = option(
        "FILE", output_file, None, "the front leaves its endpoints there, and the others look there for it"
    )
    name: str | None = option(
        "NAME", plain, None, "of a prefill or decode process, its own in the fleet; without it, made up"
    )
    secret: str | None = option(
        "SECRET", plain, None, "of the fleet: file:PATH, env:NAME, or itself; keys of all sockets"
    )
    keyring: Path | None = option("FILE", input_path, None, "this process's keys, in place of a secret")
    allowed_peers: str | None = option(
        "HOSTS", plain, None, "hosts and networks that decode may read from, with commas"
    )
    page_size: int = option("P", _TOKENS, 16, "tokens of a page")
    group_layers: bool = choice(
        "layers that see a window or a chunk have block tables of their own, and give back what no query sees any "
        "more: alike in all processes",
        default=True,
    )
    tp: int = option("N", whole(1, 64), 1, "shards that the heads are split over")
    cache_mb: float = option("MB", number(0, 1 << 24), 64.0, "memory for pages in each process, in 2**20 bytes")
    max_tokens: int = option("N", _TOKENS, 4096, "most tokens of a request, new ones included")
    max_requests: int = option("N", whole(1, 4096), 32, "requests that hold pages at a time in each process")
    token_budget: int = option("N", _TOKENS, 512, "most tokens of one step of a process")
    lease_s: float = option("S", number(0, 3600), 10.0, "that a lease stands without a word of its reader")
    watch: bool = switch("let `pagewire top` watch the processes: addresses are logged, and left in --address-file")
    device: str = option("DEVICE", device, "cpu", "torch device of the model and its pages")
    seed: int = option("N", whole(0, (1 << 32) - 1), 0, "of the small Llama's weights")
