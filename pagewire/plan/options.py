"""The options of `pagewire plan`."""

import argparse
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from pagewire.arguments import input_path, num_bytes, number, option, output_file, whole

_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8")
_MOST_TOKENS = 1 << 30
_MOST_LENGTHS = 8
_MOST_BYTES = 1 << 60
_MOST_DEVICES = 1024


def _lengths(text: str) -> tuple[int, ...]:
    """Parses `--lengths`: comma-separated whole numbers."""
    parts = text.split(",")
    if len(parts) > _MOST_LENGTHS:
        raise argparse.ArgumentTypeError(f"{len(parts)} lengths: at most {_MOST_LENGTHS} are allowed")
    return tuple(sorted({whole(1, _MOST_TOKENS)(part) for part in parts}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The validated options of `pagewire plan`."""

    model: Path = option("DIR", input_path, MISSING, "a folder with the config.json of a model", required=True)
    memory: int = option(
        "BYTES", num_bytes(1, _MOST_BYTES), MISSING, "memory of each device for pages: 40GiB, 40e9, ...", required=True
    )
    devices: int = option("N", whole(1, _MOST_DEVICES), 8, "devices of a host; every division into TP x DP is shown")
    tp: int | None = option("N", whole(1, _MOST_DEVICES), None, "devices of a replica (default: all of them)")
    prefill_tp: int | None = option(
        "N",
        whole(1, _MOST_DEVICES),
        None,
        "devices of a prefill replica that pages are pulled from (default: as --tp)",
        rare=True,
    )
    page_size: int = option("TOKENS", whole(1, 4096), 16, "tokens of a page", rare=True)
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = option(
        "DTYPE", str, "auto", "type of keys and values: auto, float32, bfloat16, float16, fp8", choices=_DTYPES
    )
    lengths: tuple[int, ...] = option(
        "TOKENS,...", _lengths, (8192, 65_536), "lengths of requests, up to the model's limit"
    )
    step_tokens: int = option(
        "TOKENS",
        whole(1, _MOST_TOKENS),
        8192,
        "most tokens of a step, which need pages in layers with windows, too",
        rare=True,
    )
    first_token: float = option(
        "SECONDS", number(0, 86_400), 2.0, "longest allowed time from the prompt to decode's first step", rare=True
    )
    prefill_speed: float = option(
        "TOKENS", number(0, 1_000_000_000), 10_000.0, "tokens that a prefill replica computes in a second", rare=True
    )
    host_memory: int = option(
        "BYTES", num_bytes(0, _MOST_BYTES), 0, "memory of a host's tier below its devices", rare=True
    )
    trace: Path | None = option(
        "FILE", input_path, None, "replay this trace (JSON lines with hash_ids) with less and with more memory"
    )
    block_tokens: int = option("TOKENS", whole(1, 1 << 20), 512, "tokens of a block of the trace", rare=True)
    json: Path | None = option("FILE", output_file, None, "also write the figures to this file")
    plot: Path | None = option(
        "FILE", output_file, None, "draw hits against memory into this PNG; needs --trace", rare=True
    )

    def __post_init__(self) -> None:
        """Raises `ArgumentTypeError` if two options contradict each other."""
        if self.tp is not None and self.devices % self.tp:
            raise argparse.ArgumentTypeError(f"--tp is {self.tp}: a divisor of the {self.devices} devices is needed")
        if self.plot is not None and self.trace is None:
            raise argparse.ArgumentTypeError("--plot needs --trace: it draws hits against memory")
