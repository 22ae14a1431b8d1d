"""Tests the module of `chained.c` alone: how it is built, and how digests are computed without it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hatch_build
from kvcache.replica import hashing
from tests.kvcache.replica.compiled import ROOT, compiled_chain

PAGES = bytes(range(256)) * 3


@pytest.fixture
def chain() -> Any:
    return compiled_chain()(b"seed")


def wanted(pages: bytes, size: int, seed: bytes = b"seed") -> bytes:
    return b"".join(hashlib.sha256(seed + pages[:end]).digest() for end in range(size, len(pages) + 1, size))


@pytest.mark.parametrize("size", [1, 3, 8, 55, 56, 64, 100, 256, 512])
def test_chains_agree_with_hashlib_for_pages_and_seeds_of_any_size(size: int) -> None:
    pages = PAGES[: len(PAGES) // size * size]
    for seed in (b"", b"s", b"s" * 63, b"s" * 64, b"s" * 1000):
        one = compiled_chain()(seed)
        one.extend(pages, size)
        assert one.known == wanted(pages, size, seed)


def test_any_buffer_of_contiguous_bytes_will_do(chain: Any) -> None:
    tokens = np.arange(32, dtype=np.int32)
    for one in (tokens, bytearray(tokens), memoryview(tokens), tokens.reshape(4, 8)):  # pyright: ignore[reportArgumentType]
        twin = chain.copy()
        twin.extend(one, 32)
        assert twin.known == wanted(tokens.tobytes(), 32)
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        chain.extend(tokens[::2], 8)


def test_a_copy_goes_on_by_itself_and_known_is_one_object(chain: Any) -> None:
    known = chain.known
    chain.extend(PAGES[:256], 64)
    twin = chain.copy()
    twin.extend(PAGES[256:], 64)
    assert known is chain.known is not twin.known
    assert chain.known == wanted(PAGES[:256], 64)
    assert twin.known == wanted(PAGES, 64)
    chain.update(b"key")
    chain.extend(b"x", 1)
    assert chain.known[256 // 64 * 32 :] == hashlib.sha256(b"seed" + PAGES[:256] + b"keyx").digest()


def test_hashing_no_pages_returns_no_digests(chain: Any) -> None:
    chain.extend(b"", 64)
    chain.update(b"")
    assert chain.known == b""
    assert type(chain).extend_each([], [], b"") == b""


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda one: one.extend(PAGES, 0), ValueError, "768 bytes do not fill pages of 0"),
        (lambda one: one.extend(PAGES, -1), ValueError, "768 bytes do not fill pages of -1"),
        (lambda one: one.extend(PAGES, 100), ValueError, "768 bytes do not fill pages of 100"),
        (lambda one: one.extend(PAGES, 1 << 70), OverflowError, ""),
        (lambda one: one.extend(PAGES, 64.0), TypeError, ""),
        (lambda one: one.extend("text", 4), TypeError, "bytes-like"),
        (lambda one: one.extend(None, 4), TypeError, "bytes-like"),
        (lambda one: one.extend(PAGES), TypeError, "2 arguments"),
        (lambda one: one.update("text"), TypeError, "bytes-like"),
        (lambda one: one.extend_each([one, one], [0, 0], b"odd"), ValueError, "3 bytes are no page each for 2 chains"),
        (lambda one: one.extend_each([one], [0], b""), ValueError, "0 bytes are no page each for 1 chains"),
        (lambda one: one.extend_each([], [], b"page"), ValueError, "4 bytes are no page each for 0 chains"),
        (lambda one: one.extend_each([one], [], b"page"), ValueError, "for 1 chains after 0 pages"),
        (lambda one: one.extend_each([], [0], b""), ValueError, "for 0 chains after 1 pages"),
        (lambda one: one.extend_each([one, None], [0, 0], b"page"), TypeError, "what is at 1 of the list"),
        (lambda one: one.extend_each([one, b"x" * 200], [0, 0], b"page"), TypeError, "is no Sha256Chain"),
        (lambda one: one.extend_each([one], [None], b"page"), TypeError, ""),
        (lambda one: one.extend_each([one], [1 << 70], b"page"), OverflowError, ""),
        (lambda one: one.extend_each((one,), [0], b"page"), TypeError, "list"),
        (lambda one: one.extend_each([one], (0,), b"page"), TypeError, "list"),
        (lambda one: one.extend_each([one], [0], "page"), TypeError, "bytes-like"),
        (lambda one: type(one)(), TypeError, ""),
        (lambda one: type(one)("text"), TypeError, "bytes-like"),
        (lambda one: type(one)(b"seed", b"more"), TypeError, ""),
        (lambda one: type(one)(seed=b"seed"), TypeError, ""),
        (lambda one: type("Sub", (type(one),), {}), TypeError, "not an acceptable base type"),
        (lambda one: setattr(one, "known", bytearray()), AttributeError, "readonly"),
        (lambda one: setattr(type(one), "known", 1), TypeError, "immutable type"),
    ],
)
def test_malformed_arguments_raise_and_change_nothing(chain: Any, call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message or None):
        call(chain)
    assert chain.known == b""
    chain.extend(PAGES, 64)
    assert chain.known == wanted(PAGES, 64)


def test_a_step_of_chains_that_are_elsewhere_changes_nothing(chain: Any) -> None:
    other = chain.copy()
    other.extend(PAGES[:64], 64)
    for firsts in ([0, 0], [1, 1], [0, 2], [-1, 1]):
        assert chain.extend_each([chain, other], firsts, PAGES[:128]) is None
    found = chain.extend_each([chain, other], [0, 1], PAGES[:128])
    assert found == chain.known + other.known[32:]
    assert other.known == wanted(PAGES[:128], 64)
    chain.known.append(0)  # The caller has corrupted the chain, so the chain returns no digests.
    assert chain.extend_each([chain], [1], PAGES[:64]) is None


def test_digests_with_an_open_buffer_cannot_grow_and_lose_nothing(chain: Any) -> None:
    chain.extend(PAGES[:64], 64)
    with memoryview(chain.known):
        with pytest.raises(BufferError, match="Existing exports of data"):
            chain.extend(PAGES[64:], 64)
        with pytest.raises(BufferError, match="Existing exports of data"):
            chain.extend_each([chain], [1], PAGES[64:128])
    chain.extend(PAGES[64:], 64)
    assert chain.known == wanted(PAGES, 64)


def test_calls_keep_no_reference_to_their_arguments(chain: Any) -> None:
    kind, pages, chains, firsts = type(chain), bytearray(PAGES), [chain], [0]
    given = (kind, chain, chain.known, chains, firsts)
    before = list(map(sys.getrefcount, given))
    for call in (
        lambda: chain.copy().extend(pages, 64),
        lambda: chain.copy().extend(pages, 100),
        lambda: chain.extend_each(chains, firsts, pages[:0]),
        lambda: chain.extend_each(chains, [1], pages),
        lambda: chain.extend_each([chain, None], [0, 0], pages),
        lambda: kind(pages),
        lambda: kind(pages, 1),
        lambda: chain.update(pages[:0]),
        lambda: kind.extend_each([chain.copy() for _ in range(3)], [0] * 3, pages),
    ):
        for _ in range(50):
            try:
                call()
            except (TypeError, ValueError):
                continue
    assert list(map(sys.getrefcount, given)) == before
    pages.clear()  # If a call still held a buffer of `pages`, `clear` would raise an error.


def test_threads_hash_beside_each_other(chain: Any) -> None:
    pages, digests = PAGES * 40, wanted(PAGES * 40, 256)
    wrong: list[int] = []

    def hash_some(at: int) -> None:
        for _ in range(60):
            one = chain.copy()
            one.extend(pages[: at * 256], 256)
            one.extend(pages[at * 256 :], 256)
            if one.known != digests:
                wrong.append(at)

    shared = chain.copy()
    threads = [threading.Thread(target=hash_some, args=(at,)) for at in range(4)]
    threads += [threading.Thread(target=lambda: [shared.extend(b"same", 4) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert shared.known == wanted(b"same" * 2000, 4)


def test_the_compiled_module_is_used_unless_it_is_forbidden_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    name, real = "kvcache.replica.chained", compiled_chain()
    monkeypatch.delenv(hashing.PLAIN, raising=False)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(Sha256Chain=real))
    assert hashing._compiled() == (real, "chained.c")
    monkeypatch.setenv(hashing.PLAIN, "1")
    assert hashing._compiled() == (hashing._NotCompiled, "hashlib: PAGEWIRE_PLAIN_SHA256 is set")
    monkeypatch.delenv(hashing.PLAIN)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(Sha256Chain=lambda _: real(b"another seed")))
    assert hashing._compiled() == (hashing._NotCompiled, "hashlib: chained.c gives other digests here")
    monkeypatch.setitem(sys.modules, name, None)
    used, why = hashing._compiled()
    assert used is hashing._NotCompiled
    assert why.startswith("hashlib: ")
    assert name in why


@pytest.mark.parametrize("forbidden", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_without_the_compiled_module_hashlib_computes_the_same_digests(forbidden: bool) -> None:
    """The module is forbidden, or its import fails. The tokens have another integer dtype."""
    code = (
        "import sys; sys.modules['kvcache.replica.chained'] = None\n"
        * (not forbidden)
        + "import numpy as np\nfrom kvcache.replica import hashing\n"
        "made = hashing.PrefixHasher('sha256', 4, 's')\n"
        "digests = made.digests(np.arange(40) * 7919, 0, 10).tobytes()\n"
        "print(type(made.running).__module__, hashing.SHA256_BY, digests.hex())"
    )
    environ = os.environ | ({hashing.PLAIN: "1"} if forbidden else {})
    said = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True).stdout
    assert said.startswith("_hashlib hashlib: ")
    tokens = np.arange(40, dtype=np.int32) * 7919
    assert said.split()[-1] == hashing.PrefixHasher("sha256", 4, "s").digests(tokens, 0, 10).tobytes().hex()


def test_without_a_compiler_the_build_says_so_and_an_older_module_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiled module is cached for all tests. It is made here, before this test changes the settings.
    compiled_chain()
    built, settings = tmp_path / "chained.so", dict(sysconfig.get_config_vars())
    monkeypatch.setattr(sysconfig, "get_config_vars", lambda: settings)
    headers, real = sysconfig.get_path("include"), settings["LDSHARED"]

    def hindered(shared: str | None, headers: str = headers) -> str:
        built.write_text("older")
        settings["LDSHARED"] = shared
        monkeypatch.setattr(sysconfig, "get_path", lambda _: headers)
        said = hatch_build.compile_chained(ROOT, built)
        assert built.exists() is (not said)
        return said

    assert hindered("no-such-compiler -shared") == "there is no C compiler (no-such-compiler)"
    assert hindered(None) == "there is no C compiler (Python names none)"
    assert hindered("true", str(tmp_path)) == f"Python's headers are not in {tmp_path}"
    assert hindered("false") == "false: 1"
    assert hindered("sh -c 'echo it breaks >&2; exit 3'") == "sh: it breaks"
    assert not hindered(real)
