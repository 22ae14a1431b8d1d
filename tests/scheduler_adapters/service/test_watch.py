"""`pagewire top` shows the pages, phases, leases and pulls that a real service has."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcache.endpoints import watch as endpoint
from kvcache.endpoints.follower import Followed, WatchClient
from kvcache.endpoints.watch import ManagerWatch
from kvcache.watch.messages import PageState
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import service_beside
from tests.kvcache.watch.recount import assert_same
from tests.scheduler_adapters.server_config import server_config
from tests.scheduler_adapters.service.processes import Service, Side
from transfer.wire.keys import load_keyring

PROMPTS = [[(7 * at + number) % 250 for at in range(40 + 25 * number)] for number in range(6)]


@pytest.fixture
def service(model: Any, tmp_path: Path) -> Iterator[Service]:
    made = Service(model, tmp_path / "s", Side(pages=24, count=2, budget=32), Side(pages=20, count=2), lease_s=2.0)
    yield made
    made.close()


@pytest.mark.slow
def test_a_watch_agrees_with_random_states_of_a_service(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_LEAST_S", 0.0)
    monkeypatch.setattr(endpoint, "_SHARE", 1e6)
    rng, seen, told, states = random.Random(5), Counter[PageState](), Counter[str](), 0
    schedulers = {**service.prefills, **service.decodes}
    with ExitStack() as stack:
        watches = {}
        for name, loop in service.loops.items():
            beside = service_beside(schedulers[name], service.exchanges[name])
            watches[name] = stack.enter_context(
                closing(ManagerWatch(loop.manager, name=name, beside=beside, clear_names=True))
            )
        clients = {name: stack.enter_context(closing(WatchClient(one.address))) for name, one in watches.items()}
        followed = {name: Followed() for name in watches}
        submitted = 0
        while states < 500:
            if rng.random() < 0.3 and len(service.decode._requests) < 6:
                name = rng.choice(list(service.decodes))
                service.submit_one(f"r{submitted}", rng.choice(PROMPTS), 6, service.decodes[name])
                submitted += 1
            if rng.random() < 0.04 and service.decode._requests:
                service.decode.abort(rng.choice(list(service.decode._requests)))
            service.poll()
            for name, client in clients.items():
                client.ask(followed[name].ask)
                frames = client.answer(30.0)
                assert frames is not None
                look = followed[name].apply(frames)
                seen += assert_same(followed[name], service.loops[name].manager)
                pairs = zip(look.owners.request_ids, look.owners.phases, strict=True)
                phases = {key: phase for key, phase in pairs if phase != "quarantined"}
                for key, request in schedulers[name]._requests.items():
                    assert phases[key] == request.phase
                told.update(phases.values())
                told["lease"] += len(look.leases)
                told["pull"] += len(look.pulls)
                states += 1
        service.until(lambda: len(service.ended) == submitted, "the last token")
    assert all(seen[state] > 15 for state in PageState if state != PageState.QUARANTINED), seen
    assert {"lease", "pull", "held", "decoding", "pulling", "leasing"} <= set(+told), told


@pytest.mark.usefixtures("forked_fleets")
def test_processes_are_watched_with_keys_and_recount_when_they_are_asked(tiny_model: Any) -> None:
    del tiny_model
    config = server_config(cache_bytes=1 << 22, watch="tcp://127.0.0.1:0")
    configs = [msgspec.structs.replace(config, role=role) for role in ("prefill", "decode")]
    with Fleet(configs, curve=True) as fleet, ExitStack() as stack:
        addresses = {name: ready.watch for name, ready in fleet.ready.items()}
        assert set(addresses) == {"prefill", "decode"}
        stranger = stack.enter_context(closing(WatchClient(addresses["decode"])))
        stranger.ask(Followed().ask)
        keyring = load_keyring(fleet.viewer_keys)
        for name, address in addresses.items():
            client = stack.enter_context(closing(WatchClient(address, keyring.secure_client)))
            followed = Followed()
            for _ in range(100):
                client.ask(msgspec.structs.replace(followed.ask, check=followed.look is None))
                frames = client.answer(30.0)
                assert frames is not None
                look = followed.apply(frames)
                assert look.name == name
                if look.check is not None:
                    break
            assert look.check is not None
            assert look.check.error == ""
            assert look.check.counts["0"] == look.pools[0].counts
        assert stranger.answer(0.2) is None, "a client without a key must get no answer"
