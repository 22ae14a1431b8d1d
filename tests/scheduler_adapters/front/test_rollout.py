"""The order in which the front changes the weights of its processes, and where requests go meanwhile. The processes are
sockets of the test. `tests/pagewire/serve/test_rollout.py` runs real ones.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from scheduler_adapters.errors import RefusedError, ServiceError
from scheduler_adapters.service import messages as msg
from tests.scheduler_adapters.front.test_frontend import Booked, Fronted, Peer, played, tokens_of

__all__ = ["played"]  # a fixture
OLD, NEW = "0a", "0b"
Play = Callable[..., None]


async def joined(all_of: Fronted, *names: str, weights: str = OLD) -> list[Peer]:
    peers = all_of.join(*names)
    for peer in peers:
        has(peer, weights)
    await all_of.until(lambda: all(peer.ready.name in all_of.front.members for peer in peers))
    await all_of.until(lambda: all(all_of.front.members[one.ready.name].ready.weights == weights for one in peers))
    return peers


def has(peer: Peer, weights: str) -> None:
    peer.ready = replace(peer.ready, weights=weights)
    peer.say(peer.ready)


async def loads(peer: Peer, **more: Any) -> None:
    asked = await peer.heard(msg.Load)
    answer = {"weights": NEW, **more}
    peer.say(msg.Loaded(name=peer.ready.name, model=asked.model, **answer))


async def switches(peer: Peer) -> None:
    assert (await peer.heard(msg.Switch)).weights == NEW
    has(peer, NEW)


async def still(*peers: Peer) -> None:
    """These processes are not told to switch yet."""
    await asyncio.sleep(0.05)
    for peer in peers:
        assert not peer.heard_now(msg.Switch), peer.ready.name


def test_each_kind_always_has_a_process_of_either_version_to_go_to(played: Play) -> None:
    async def story(all_of: Fronted) -> None:
        p1, p2, d1, d2 = await joined(all_of, "p1", "p2", "d1", "d2")
        rolling = asyncio.create_task(all_of.front.rollout.to("dir"))
        for peer in (p1, p2, d1, d2):  # those of one host, one after another
            await loads(peer)
        assert (await p1.heard(msg.Switch)).weights == NEW
        await still(p2, d1, d2)
        has(p1, NEW)
        assert await d1.heard(msg.Switch)
        asked = all_of.ask()
        submit = await d2.heard(msg.Submit)  # d1 changes its weights
        await still(p2, d2)
        d2.tell(submit, 7, finished="length", weights=OLD)
        assert (await asked)[-1].weights == OLD
        has(d1, NEW)
        assert await d2.heard(msg.Switch)
        asked = all_of.ask()
        d1.tell(await d1.heard(msg.Submit), 8, finished="length")
        assert tokens_of(await asked) == [8]
        has(d2, NEW)
        await switches(p2)
        assert await rolling == NEW
        assert not any(one.is_switching for one in all_of.front.members.values())

    played(story)


def test_with_one_of_each_kind_requests_wait_and_do_not_fail(played: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_adapters.front.frontend._WAIT_S", 0.2)

    async def story(all_of: Fronted) -> None:
        p1, d1 = await joined(all_of, "p1", "d1")
        rolling = asyncio.create_task(all_of.front.rollout.to("dir"))
        await asyncio.gather(loads(p1), loads(d1))
        assert await d1.heard(msg.Switch)
        assert all_of.front.capacity == 100, "a client is not told to come back later"
        asked = all_of.ask()
        await asyncio.sleep(0.5)  # longer than a request waits for a process otherwise
        has(d1, NEW)
        assert await p1.heard(msg.Switch)
        await asyncio.sleep(0.05)
        assert not d1.heard_now(msg.Submit), "it has no prefill process of its weights"
        has(p1, NEW)
        assert await rolling == NEW
        d1.tell(await d1.heard(msg.Submit), 7, finished="length")
        assert tokens_of(await asked) == [7]

    played(story)


def test_a_request_that_is_handed_back_goes_to_the_same_process_with_its_new_weights(played: Play) -> None:
    async def story(all_of: Fronted) -> None:
        p1, d1 = await joined(all_of, "p1", "d1")
        asked = all_of.ask()
        submit = await d1.heard(msg.Submit)
        rolling = asyncio.create_task(all_of.front.rollout.to("dir"))
        await asyncio.gather(loads(p1), loads(d1))
        assert await d1.heard(msg.Switch)
        d1.tell(submit, finished="error", error="no prefill process", elsewhere=True, weights=OLD)
        await asyncio.sleep(0.05)
        assert not asked.done(), "the roll-out goes on"
        has(d1, NEW)
        await switches(p1)
        assert await rolling == NEW
        d1.tell(await d1.heard(msg.Submit), 7, finished="length", weights=NEW)
        assert tokens_of(await asked) == [7]

    played(story)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (({}, {"error": "no room"}), "d1: no room"),
        (({}, {"weights": "0c"}), "'dir' has the weights 0b at p1; 'dir' has the weights 0c at d1"),
    ],
)
def test_if_one_process_cannot_load_no_process_changes(played: Play, answers: Any, told: str) -> None:
    async def story(all_of: Fronted) -> None:
        p1, d1 = await joined(all_of, "p1", "d1")
        rolling = asyncio.create_task(all_of.front.rollout.to("dir"))
        await asyncio.gather(loads(p1, **answers[0]), loads(d1, **answers[1]))
        with pytest.raises(ServiceError, match=told):
            await rolling
        for peer in (p1, d1):
            assert (await peer.heard(msg.Load)).model == "", "what it has loaded is dropped"
        await still(p1, d1)
        assert (all_of.front.rollout.weights, all_of.front.rollout.is_running) == ("", False)

    played(story)


def test_an_answer_about_another_directory_is_not_waited_for(played: Play) -> None:
    """A frontend that was restarted hears what a process has loaded for the frontend before it."""

    async def story(all_of: Fronted) -> None:
        (p1,) = await joined(all_of, "p1")
        rolling = asyncio.create_task(all_of.front.rollout.to("dir"))
        await p1.heard(msg.Load)
        p1.say(msg.Loaded(name="p1", model="earlier", weights="0c"))
        await still(p1)
        p1.say(msg.Loaded(name="p1", model="dir", weights=NEW))
        await switches(p1)
        assert await rolling == NEW

    played(story)


def test_a_second_roll_out_waits_for_its_turn(played: Play) -> None:
    async def story(all_of: Fronted) -> None:
        with pytest.raises(RefusedError, match="no process"):
            await all_of.front.rollout.to("dir")
        (p1,) = await joined(all_of, "p1")
        rolling = asyncio.create_task(all_of.front.rollout.to("dir"))
        await loads(p1)
        with pytest.raises(RefusedError, match="getting the weights of 'dir' now"):
            await all_of.front.rollout.to("other")
        await switches(p1)
        assert await rolling == NEW

    played(story)


def test_a_process_that_dies_is_not_waited_for_and_its_successor_catches_up(played: Play) -> None:
    async def story(all_of: Fronted) -> None:
        p1, p2, d1 = await joined(all_of, "p1", "p2", "d1")
        rolling = asyncio.create_task(all_of.front.rollout.to("dir"))
        for peer in (p1, p2, d1):
            await loads(peer)
        assert await p1.heard(msg.Switch)
        p1.die()
        await switches(d1)
        await switches(p2)
        assert await rolling == NEW
        (again,) = all_of.join("p3")
        has(again, OLD)
        await loads(again)
        await switches(again)
        (other,) = all_of.join("p4")
        has(other, OLD)
        await loads(other, error="no such directory")
        await asyncio.sleep(0.6)
        assert not other.heard_now(msg.Load | msg.Switch)[1:], "it is not asked again"

    played(story)


def test_an_answer_that_has_begun_goes_on_with_its_own_weights_or_ends(played: Play) -> None:
    async def story(all_of: Fronted) -> None:
        _, _, d1, d2 = await joined(all_of, "p1", "p2", "d1", "d2")
        (d3,) = await joined(all_of, "d3", weights=NEW)
        asked = all_of.ask(prefill="p1")
        await all_of.until(lambda: all_of.front.members["d1"].serials or all_of.front.members["d2"].serials)
        first, second = (d1, d2) if all_of.front.members["d1"].serials else (d2, d1)
        submit = await first.heard(msg.Submit)
        first.tell(submit, 7)
        await all_of.until(lambda: all_of.front.counts.new_tokens == 1)
        first.die()
        again = await second.heard(msg.Submit)
        assert again.prompt[-1] == 7
        second.die()
        with pytest.raises(ServiceError, match="no process has the weights 0a any more"):
            await asked
        assert not d3.heard_now(msg.Submit)

    played(story)


def test_the_placement_chooses_among_prefill_processes_of_equal_weights(played: Play) -> None:
    async def story(all_of: Fronted) -> None:
        _, d1 = await joined(all_of, "p1", "d1")
        await joined(all_of, "p2", weights=NEW)
        asked = all_of.ask()
        submit = await d1.heard(msg.Submit)
        assert submit.prefill == "p1", "`Booked` chooses the last one"
        d1.tell(submit, 7, finished="length")
        await asked

    played(story, Booked())
