"""These tests run in their own environment (`make test-sglang`). In other environments they are not collected."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang_engine import stand_ins

collect_ignore_glob = [] if stand_ins.install() else ["test_*.py"]

PAGE_SIZE = int(os.environ.get("PAGEWIRE_SGLANG_PAGE_SIZE", "16"))
if PAGE_SIZE != 16:  # The tests in these files choose their own page sizes, or need only one page size.
    collect_ignore = ["test_pools.py", "test_transfer_layouts.py", "test_transfer_deaths.py", "test_kernels.py"]


@pytest.fixture(scope="session")
def page_size() -> int:
    return PAGE_SIZE


def _saved(directory: Path, seed: int) -> Path:
    """Saves a small random Llama. It never generates its end token, so lengths are known."""
    from scheduler_adapters.hf.tiny import EOS, tiny_llama

    model = tiny_llama(seed=seed)
    model.lm_head.weight.data[EOS] = 0
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the small random Llama."""
    return _saved(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same model with other weights."""
    return _saved(tmp_path_factory.mktemp("other-model"), 1)


@pytest.fixture(scope="module")
def the_pair(model_dir: Path, page_size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process with SGLang's prefill scheduler, and one with its decode scheduler."""
    from tests.sglang_engine.pd_pair import Pair

    pair = Pair(model_dir, tmp_path_factory.mktemp("pair"), (page_size, page_size))
    yield pair
    pair.close()


@pytest.fixture(scope="session")
def other_reference(other_model_dir: Path) -> Any:
    """Returns the tokens that the model with the other weights appends to a prompt."""
    from scheduler_adapters.hf.runner import load_model, reference_tokens

    model = load_model(other_model_dir)
    model.generation_config.eos_token_id = None
    return lambda prompt, new: reference_tokens(model, prompt, new)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Any:
    """Returns the tokens that the model's own `generate` appends to a prompt, up to a token that the caller chooses."""
    from scheduler_adapters.hf.runner import load_model, reference_tokens

    model = load_model(model_dir)

    def tokens(prompt: list[int], new: int, stop: int | None = None) -> list[int]:
        model.generation_config.eos_token_id = stop
        return reference_tokens(model, prompt, new)

    return tokens


@pytest.fixture(scope="session")
def the_engine(model_dir: Path, page_size: int) -> Any:
    from tests.sglang_engine.engine import Engine

    return Engine(str(model_dir), page_size, "pagewire")


@pytest.fixture
def engine(the_engine: Any) -> Any:
    """The engine with an empty cache. After the test it must hold no pages."""
    assert the_engine.scheduler.flush_cache()
    the_engine.retracted = 0
    yield the_engine
    the_engine.run()
    assert the_engine.cache.protected_size() == 0
    assert the_engine.allocator.available_size() + the_engine.cache.evictable_size() == the_engine.allocator.size
    assert the_engine.scheduler.req_to_token_pool.available_size() == the_engine.scheduler.req_to_token_pool.size


@pytest.fixture(scope="session")
def plain(model_dir: Path, page_size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """SGLang's unchanged engine, in a process of its own."""
    from tests.sglang_engine.pd_pair import Options, Server

    log = tmp_path_factory.mktemp("plain") / "plain.log"
    server = Server(Options("null", str(model_dir), page_size, str(log))).wait_ready()
    yield server
    server.close()


@pytest.fixture(scope="session")
def expected(plain: Any) -> Any:
    """The answers of the plain engine."""
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: list[int], new: int = 12) -> list[int]:
        key = (new, *prompt)
        if key not in known:
            plain.ask("generate", name="plain", prompt=prompt, new=new)
            known[key] = plain.answer("plain", 120)["tokens"]
        return known[key]

    return tokens
