"""The options of `pagewire serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagewire.arguments import (
    choice,
    device,
    endpoint,
    input_folder,
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
    """The validated options of `pagewire serve`."""

    what: What = option(
        "PROCESS",
        str,
        "all",
        "all, or one of front, prefill, decode",
        name="what",
        nargs="?",
        choices=("all", "front", "prefill", "decode"),
    )
    model: Path | None = option("DIR", input_path, None, "a directory of transformers; without it, a random Llama")
    placement: Literal["guess", "in-turns", "dynamo"] = option(
        "RULE",
        str,
        "guess",
        "choice of the prefill process: guess, in-turns, or dynamo (sends prompts in clear)",
        choices=("guess", "in-turns", "dynamo"),
    )
    served_model_name: str | None = option(
        "NAME", plain, None, "model name for clients (default: the directory's, or pagewire)", rare=True
    )
    prefills: int = option("N", _PROCESSES, 1, "number of prefill processes")
    decodes: int = option("N", _PROCESSES, 1, "number of decode processes")
    http_host: str = option(
        "HOST", plain, "127.0.0.1", "where HTTP listens (no keys: use a trusted network)", rare=True
    )
    http_port: int = option("PORT", whole(0, 65535), 8000, "port of HTTP; 0 takes a free one")
    host: str = option("HOST", plain, "127.0.0.1", "address of this host for processes on other hosts", rare=True)
    front: str | None = option("ENDPOINT", endpoint, None, "tcp://HOST:PORT of the front, which the others join")
    metrics: str | None = option(
        "HOST:PORT",
        plain,
        None,
        "where a prefill or decode process answers Prometheus (port 0: a free one); the front lists all at /targets",
        rare=True,
    )
    trace: bool = switch("decode processes record an OpenTelemetry span for each hand-over", rare=True)
    address_file: Path | None = option("FILE", output_file, None, "the front writes its endpoints there for the others")
    name: str | None = option(
        "NAME", plain, None, "name of a prefill or decode process, unique in the fleet (default: made up)", rare=True
    )
    secret: str | None = option("SECRET", plain, None, "secret of the fleet: file:PATH, env:NAME or plain text")
    keyring: Path | None = option(
        "FILE", input_path, None, "file with this process's keys, in place of a secret", rare=True
    )
    allowed_peers: str | None = option(
        "HOSTS", plain, None, "comma-separated hosts and networks that decode may read from", rare=True
    )
    page_size: int = option("P", _TOKENS, 16, "tokens of a page", rare=True)
    group_layers: bool = choice(
        "give layers with a window or chunks their own block tables, which free pages that no query sees; must be the "
        "same in all processes",
        default=True,
        rare=True,
    )
    tp: int = option("N", whole(1, 64), 1, "shards that the heads are split over", rare=True)
    cache_mb: float = option("MB", number(0, 1 << 24), 64.0, "MiB for pages in each process")
    max_tokens: int = option("N", _TOKENS, 4096, "most tokens of a request, including new ones", rare=True)
    max_requests: int = option("N", whole(1, 4096), 32, "requests that hold pages at a time in each process", rare=True)
    token_budget: int = option("N", _TOKENS, 512, "most tokens of one step of a process", rare=True)
    overlap: bool = switch("plan each step while the model runs the one before it (no recurrent models)", rare=True)
    lease_s: float = option("S", number(0, 3600), 10.0, "lifetime of a lease that its reader does not renew", rare=True)
    watch: bool = switch("let `pagewire top` watch; logs the addresses")
    device: str = option("DEVICE", device, "cpu", "torch device of the model and its pages", rare=True)
    checkpoints: Path | None = option(
        "DIR",
        input_folder,
        None,
        "clients may give the fleet the weights of a directory below DIR (POST /weights)",
        rare=True,
    )
    json: Path | None = option("FILE", output_file, None, "write the figures to this file at the end")
    seed: int = option("N", whole(0, (1 << 32) - 1), 0, "seed of the small Llama's weights", rare=True)
