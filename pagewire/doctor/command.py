"""`pagewire doctor`: prints the findings as lines, or writes them as JSON. Needs no extra."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec

from pagewire.arguments import write_json
from pagewire.doctor.findings import Findings, Refusal, find, refusals
from pagewire.doctor.options import DoctorOptions

_NAME = 14  # width of a line's name, in characters


def run_doctor(options: DoctorOptions) -> int:
    """Reports the findings. Returns 0 whatever they are.

    Raises `AdapterError` if the file of `--json` cannot be written.
    """
    found = find()
    refused = refusals(found)
    write_json(options.json, {**msgspec.to_builtins(found), "refusals": refused})
    sys.stdout.write("\n".join([*_lines(found), "", *_refused(refused)]) + "\n")
    return 0


def _lines(found: Findings) -> Iterator[str]:
    yield _line("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items()))
    whole = [extra for extra, missing in found.missing.items() if not missing]
    yield _line("extras", ", ".join(whole) or "none")
    yield _line("NIXL plugins", ", ".join(found.nixl_plugins) or found.nixl_error)
    yield _line("UCX settings", " ".join(f"{name}={value}" for name, value in sorted(found.nixl_settings.items())))
    yield _line("huge pages", found.huge_pages or "the kernel has none")
    yield _line("GPUs", ", ".join(f"{one.name}, {one.num_bytes / 2**30:.0f} GiB" for one in found.gpus) or "none")
    hashes = ", ".join(f"{name} {took:.2f} µs" for name, took in found.page_hash_us.items())
    yield _line("page hashes", f"{hashes} for 16 tokens (sha256 by {found.sha256_by})")


def _refused(refused: list[Refusal]) -> Iterator[str]:
    if not refused:
        yield "Nothing would be refused."
        return
    yield "Would be refused:"
    for one in refused:
        yield f"  {one.what}: {one.why}. To have it: {one.fix}"


def _line(name: str, value: str) -> str:
    return f"{name:{_NAME}}{value}"
