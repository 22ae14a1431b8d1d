"""What does the digest of a page cost, with SHA instructions and without them?

`prompt` is all pages of a new prompt, by `PrefixHasher`. `step` is one new page of each of 64 requests after 4,096
earlier tokens, as hashed in a decode step. Figures are for one page. `without` runs in a process whose OpenSSL is told
that the processor has no SHA instructions (`OPENSSL_ia32cap`); it is left out if that is impossible. A function that is
not one of our `hash_algorithm`s is a candidate, measured in the same loop. `sha256, hashlib` is sha256 without the
compiled `chained.c`. `keyed polynomial` is a universal hash: the tokens are the coefficients of a polynomial, and the
digest is its value at a secret point modulo 2**127 - 1, independent of the page size. numpy computes all pages of a
prompt, or of a step, at once. But a peer that sees such digests can compute the key from them, and our digests are sent
to routers and peers. Hiding them would cost another hash for each page. `blake3, one call` hashes a whole prompt
without a digest for each page. It shows the cost of hashing alone with the processor's full vector width.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import blake3
import numpy as np
from numpy.typing import NDArray

from benchmarks.frame import Row, machine, options, pin, report, samples, summary
from benchmarks.pools import Prompts
from kvcache.params import usable_hashes
from kvcache.replica.hashing import PrefixHasher, next_digests

BATCH, BEFORE = 64, 4096
PRIME = (1 << 127) - 1
CANDIDATES: dict[str, Callable[[], Any]] = {
    "blake2b": lambda: hashlib.blake2b(digest_size=32),
    "sha256, hashlib": hashlib.sha256,
}
_LIMBS = 8  # 16-bit limbs: their products with half a token, summed over a page, are exact in a float64
# the mask clears bit 29 of EBX of CPUID leaf 7, which announces SHA instructions
_WITHOUT = {"OPENSSL_ia32cap": ":~0x20000000"}
_CHILD = "import json; from benchmarks.hashing import measure; print(json.dumps(measure({lengths}, {repeats})))"
_STATISTICS = "columns us_min and us_median: minimum and median of the n samples of a row, for one page"


class KeyedPolynomial:
    """Hashes single pages under a secret key, and computes a digest of each prefix from the hashes of its pages."""

    def __init__(self, key: int, page_size: int) -> None:
        powers = [pow(key, page_size - 1 - at, PRIME) for at in range(page_size)]
        halves = [power * shifted % PRIME for power in powers for shifted in (1, 1 << 16)]
        self._factors = np.array([[half >> 16 * limb & 0xFFFF for limb in range(_LIMBS)] for half in halves], float)
        self._step = pow(key, page_size, PRIME)

    def pages(self, tokens: NDArray[np.int32]) -> list[int]:
        """The value of each page by itself."""
        halves = tokens.view(np.uint16).reshape(-1, len(self._factors)).astype(float)
        limbs = (halves @ self._factors).astype(np.int64)
        spread = np.empty((len(limbs), _LIMBS + 2), np.uint16)
        carry = np.zeros(len(limbs), np.int64)
        for at in range(_LIMBS):
            carry += limbs[:, at]
            spread[:, at] = carry & 0xFFFF
            carry >>= 16
        spread[:, _LIMBS], spread[:, _LIMBS + 1] = carry & 0xFFFF, carry >> 16
        return [int.from_bytes(one, "little") for one in spread.view(f"V{2 * _LIMBS + 4}").ravel().tolist()]

    def chained(self, before: int, value: int) -> int:
        """The digest of a prefix that is extended by a page with this value."""
        return (before * self._step + value) % PRIME

    def prompt(self, tokens: NDArray[np.int32]) -> list[bytes]:
        """The digest of each page of a prompt."""
        digest, found = 1, list[bytes]()
        for value in self.pages(tokens):
            digest = self.chained(digest, value)
            found.append(digest.to_bytes(16, "little"))
        return found

    def step(self, before: Sequence[int], tokens: NDArray[np.int32]) -> list[bytes]:
        """The digests of one new page of each request."""
        values = zip(before, self.pages(tokens), strict=True)
        return [self.chained(digest, value).to_bytes(16, "little") for digest, value in values]


def hasher(name: str, page_size: int) -> PrefixHasher:
    """Returns one of our hashers, or a candidate."""
    known = next((one for one in usable_hashes() if one == name), None)
    made = PrefixHasher(known or "sha256", page_size, None)
    if known is None:
        made.running = CANDIDATES[name]()
    return made


def _prompt(page: int, tokens: NDArray[np.int32], repeats: int) -> dict[str, list[float]]:
    count, polynomial = len(tokens) // page, KeyedPolynomial(PRIME // 3, page)
    times = {
        name: samples(repeats, lambda name=name: hasher(name, page), lambda one: one.digests(tokens, 0, count))
        for name in (*usable_hashes(), *CANDIDATES)
    }
    times["keyed polynomial"] = samples(repeats, lambda: tokens, polynomial.prompt)
    times["blake3, one call"] = samples(repeats, tokens.tobytes, lambda text: blake3.blake3(text).digest())
    return times


def _step(page: int, prompts: Prompts, repeats: int) -> dict[str, list[float]]:
    new = prompts.tokens(BATCH * page)
    times: dict[str, list[float]] = {}
    for name in (*usable_hashes(), *CANDIDATES):
        hashers = [hasher(name, page) for _ in range(BATCH)]
        for one in hashers:
            one.digests(prompts.tokens(BEFORE), 0, BEFORE // page)

        def step(first: int, hashers: list[PrefixHasher] = hashers) -> None:
            next_digests(hashers, [first] * BATCH, new.reshape(BATCH, page), lambda _: b"")

        times[name] = samples(repeats, lambda hashers=hashers: len(hashers[0].known) // hashers[0].width, step)
    polynomial, before = KeyedPolynomial(PRIME // 3, page), [PRIME // 7 + at for at in range(BATCH)]
    times["keyed polynomial"] = samples(repeats, lambda: new, lambda tokens: polynomial.step(before, tokens))
    return times


def measure(lengths: Sequence[int], repeats: int) -> list[Row]:
    """The rows for this process."""
    pin()
    prompts, rows = Prompts(), list[Row]()
    for page in (16, 128):
        cases = [("prompt", length, length // page) for length in lengths] + [("step", BATCH * page, BATCH)]
        for case, tokens, pages in cases:
            times = _step(page, prompts, repeats) if case == "step" else _prompt(page, prompts.tokens(tokens), repeats)
            rows += [
                {"case": case, "page": page, "tokens": tokens, "hash": name, **summary([one / pages for one in found])}
                for name, found in times.items()
            ]
    return rows


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    code = _CHILD.format(lengths=(4096, 32_768), repeats=15 if chosen.quick else 200)
    has_them = machine()["sha_extensions"]
    ways: dict[str, dict[str, str]] = {"with" if has_them else "without": {}}
    if has_them and platform.machine() == "x86_64":
        ways["without"] = _WITHOUT
    rows: list[Row] = []
    for way, added in ways.items():
        run = subprocess.run([sys.executable, "-c", code], env=os.environ | added, capture_output=True, check=True)  # noqa: S603 - our own text
        rows += [{"SHA instructions": way, **row} for row in json.loads(run.stdout)]
    report("hashing", rows, chosen, _STATISTICS)


if __name__ == "__main__":
    main()
