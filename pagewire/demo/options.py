"""The options of `pagewire demo`."""

from dataclasses import dataclass
from pathlib import Path

from pagewire.arguments import device, input_path, number, option, output_file, switch, whole
from pagewire.viewer import top_option

_PAGE_SIZE = whole(1, 1 << 20)
_TOKENS = whole(1, 1 << 20)
_SHARDS = whole(1, 64)
_PROCESSES = whole(1, 64)
_SEED = whole(0, (1 << 32) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The validated options of `pagewire demo`."""

    model: Path | None = option("DIR", input_path, None, "a directory of transformers; without it, a random Llama")
    prompts: Path | None = option("FILE", input_path, None, 'one prompt per line, or JSON lines with a "prompt"')
    requests: int | None = option("N", whole(1, 100_000), None, "number of prompts (default: those of the file, or 32)")
    page_size: int = option("P", _PAGE_SIZE, 16, "tokens of a page")
    group_layers: bool = switch("give layers with a window or chunks block tables of their own", rare=True)
    prefill_page_size: int | None = option(
        "P", _PAGE_SIZE, None, "page size of prefill (default: --page-size)", rare=True
    )
    decode_page_size: int | None = option(
        "P", _PAGE_SIZE, None, "page size of decode (default: --page-size)", rare=True
    )
    tp: int = option("N", _SHARDS, 1, "shards that the heads are split over")
    prefill_tp: int | None = option("N", _SHARDS, None, "shards of prefill (default: --tp)", rare=True)
    decode_tp: int | None = option("N", _SHARDS, None, "shards of decode (default: --tp)", rare=True)
    prefills: int = option("N", _PROCESSES, 1, "prefill processes")
    decodes: int = option("N", _PROCESSES, 1, "decode processes")
    json: Path | None = option("FILE", output_file, None, "also write the figures to this file")
    max_new_tokens: int = option("N", _TOKENS, 32, "most tokens to generate for a prompt")
    cache_mb: float = option(
        "MB", number(0, 1 << 24), 64.0, "memory for pages in each process, in 2**20 bytes", rare=True
    )
    concurrency: int = option("N", whole(1, 4096), 8, "most requests open at a time", rare=True)
    token_budget: int = option("N", _TOKENS, 512, "most tokens of one step of a process", rare=True)
    chunkwise: bool = switch(
        "pull a prompt's pages after the whole prompt has run, instead of chunk by chunk",
        default=True,
        name="--no-chunkwise",
        rare=True,
    )
    chaos: int | None = option(
        "SEED",
        _SEED,
        None,
        "inject faults: READs and notifications that fail, or arrive late, twice or wrong",
        nargs="?",
        const=0,
    )
    top: str | None = top_option("show every page; repeat the prompts until it is closed")
    curve: bool = switch("encrypt the processes' sockets, and admit no other process", rare=True)
    device: str = option("DEVICE", device, "cpu", "torch device of the model and its pages", rare=True)
    seed: int = option("N", _SEED, 0, "seed of the small Llama's weights", rare=True)
