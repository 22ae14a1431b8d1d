"""The process to which the front sends a request, and the request's end if the process leaves, refuses the request,
stops or restarts. The processes are sockets of the test, which send what the test chooses. `tests/pagewire/serve` runs
real processes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from scheduler_adapters.errors import RefusedError, ServiceError
from scheduler_adapters.front.frontend import Frontend
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import bind_router, join_frontend

WITHIN_S = 20.0
PROMPT = (5, 6, 7)


class Peer:
    """A simulated process of the fleet."""

    def __init__(self, context: Any, folder: Path, name: str, role: msg.Role) -> None:
        self._watched = bind_router(context, f"ipc://{folder}/{name}.pulse")
        self._socket = context.socket(zmq.DEALER)
        join_frontend(self._socket, f"ipc://{folder}/front", name, None)
        self.ready = msg.Ready(
            name=name,
            role=role,
            incarnation="1",
            max_tokens=100,
            listen=f"at-{name}" if role == "prefill" else "",
            pulse=f"ipc://{folder}/{name}.pulse",
        )
        self.say(self.ready)

    def say(self, message: Any) -> None:
        self._socket.send(msg.encode(message))

    def tell(self, to: msg.Submit, *tokens: int, **more: Any) -> None:
        self.say(msg.Tokens(request_id=to.request_id, serial=to.serial, tokens=tokens, **more))

    async def heard(self, kind: type[Any]) -> Any:
        """Returns the next message of this type."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                if self._socket.poll(0):
                    message = msg.decode(self._socket.recv())
                    if isinstance(message, kind):
                        return message
                await asyncio.sleep(0.002)

    def heard_now(self, kind: type[Any]) -> list[Any]:
        """Returns the messages of this type that have arrived."""
        messages = [msg.decode(self._socket.recv()) for _ in iter(lambda: self._socket.poll(20), 0)]
        return [one for one in messages if isinstance(one, kind)]

    def stop(self) -> None:
        """Makes the process send nothing, although it still receives messages."""
        self._watched.close(0)

    def die(self) -> None:
        self._watched.close(0)
        self._socket.close(0)


class Booked:
    """A placement that records its calls and always chooses the last process."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def place(self, request_id: str, prompt: Any, prefills: Any) -> str:
        self.calls.append(f"place {request_id} {len(prompt)}")
        return max(prefills)

    async def prefilled(self, request_id: str) -> None:
        self.calls.append(f"prefilled {request_id}")

    async def over(self, request_id: str) -> None:
        self.calls.append(f"over {request_id}")

    async def follow(self, members: Any) -> None:
        pass


class Fronted:
    """A front and its processes."""

    def __init__(self, folder: Path, placement: Any = None) -> None:
        self.folder = folder
        self.context: Any = zmq.Context()
        self.socket = bind_router(self.context, f"ipc://{folder}/front")
        self.front = Frontend(self.socket, placement)
        self.peers: list[Peer] = []

    def join(self, *names: str) -> list[Peer]:
        roles: dict[str, msg.Role] = {"p": "prefill", "d": "decode"}
        joined = [Peer(self.context, self.folder, name, roles[name[0]]) for name in names]
        self.peers += joined
        return joined

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)

    async def there(self, *names: str) -> None:
        await self.until(lambda: set(self.front.members) == set(names))

    def ask(self, new: int = 5, **more: Any) -> "asyncio.Task[list[msg.Tokens]]":
        submit = msg.Submit(request_id="r", prompt=PROMPT, max_new_tokens=new, **more)

        async def all_news() -> list[msg.Tokens]:
            return [one async for one in self.front.generate(submit)]

        return asyncio.create_task(all_news())


@asynccontextmanager
async def fronted(folder: Path, placement: Any = None) -> AsyncIterator[Fronted]:
    made = Fronted(folder, placement)
    hearing = asyncio.create_task(made.front.run())
    try:
        yield made
    finally:
        hearing.cancel()
        await asyncio.wait([hearing])
        for peer in made.peers:
            peer.die()
        made.socket.close(0)
        made.context.term()  # `term` would hang if the front had left a socket open.


Story = Callable[[Fronted], Coroutine[Any, Any, None]]


@pytest.fixture
def played(tmp_path: Path) -> Callable[..., None]:
    def play(story: Story, placement: Any = None) -> None:
        async def run() -> None:
            async with fronted(tmp_path, placement) as made:
                await story(made)

        asyncio.run(run())

    return play


def stats_of(peer: Peer, held: int) -> msg.Stats:
    return msg.Stats(name=peer.ready.name, role=peer.ready.role, pages_held=held, open_requests=0)


def tokens_of(news: list[msg.Tokens]) -> list[int]:
    return [token for one in news for token in one.tokens]


@pytest.mark.parametrize("how", ["dies", "stops", "is started anew", "has failed"])
def test_another_decode_process_continues_after_the_tokens_that_the_client_has(
    played: Callable[..., None], how: str
) -> None:
    async def story(all_of: Fronted) -> None:
        (first,) = all_of.join("d1")
        await all_of.there("d1")
        asked = all_of.ask(cache_salt="s", ignore_eos=True)
        submit = await first.heard(msg.Submit)
        (second,) = all_of.join("d2")
        first.tell(submit, 7)
        await all_of.until(lambda: all_of.front.counts.new_tokens == 1)
        match how:
            case "dies":
                first.die()
            case "stops":
                first.stop()
            case "is started anew":
                first.say(msg.Ready(name="d1", role="decode", incarnation="2", pulse=first.ready.pulse, draining=True))
            case _:
                first.tell(submit, finished="error", error="out of pages", elsewhere=True)
        again = await second.heard(msg.Submit)
        assert (again.prompt, again.max_new_tokens) == ((*PROMPT, 7), 4)
        assert (again.cache_salt, again.ignore_eos) == ("s", True)
        assert again.serial != submit.serial
        second.tell(again, 8, 9, finished="length", cached_tokens=1)
        assert tokens_of(await asked) == [7, 8, 9]
        counts = all_of.front.counts
        assert (counts.open, counts.lost, counts.ended) == (0, 1, {"length": 1})
        assert (counts.cached_tokens, counts.computed_tokens) == (1, 2)

    played(story)


def test_a_process_that_refused_a_request_is_not_asked_again_and_if_all_refuse_it_fails(
    played: Callable[..., None],
) -> None:
    async def story(all_of: Fronted) -> None:
        peers = all_of.join("d1", "d2")
        await all_of.there("d1", "d2")
        asked = all_of.ask()
        # The front first asks the process with the fewest requests. Among equal processes it asks the earliest one.
        for peer in peers:
            submit = await peer.heard(msg.Submit)
            peer.tell(submit, finished="error", error="one too many", elsewhere=True)
        with pytest.raises(RefusedError, match="d1, d2 have refused it"):
            await asked
        assert all_of.front.counts.ended == {"refused": 1}
        asked = all_of.ask()
        submit = await peers[0].heard(msg.Submit)
        peers[0].tell(submit, finished="error", error="the prompt is too long")
        with pytest.raises(ServiceError, match="the prompt is too long"):
            await asked
        assert all_of.front.counts.ended == {"refused": 1, "error": 1}

    played(story)


def test_requests_go_to_the_process_with_the_fewest_that_does_not_drain(played: Callable[..., None]) -> None:
    async def story(all_of: Fronted) -> None:
        first, second, drains = all_of.join("d1", "d2", "d3")
        await all_of.there("d1", "d2", "d3")
        drains.say(msg.Ready(name="d3", role="decode", incarnation="1", pulse=drains.ready.pulse, draining=True))
        await all_of.until(lambda: all_of.front.members["d3"].ready.draining)
        asked = [all_of.ask() for _ in range(4)]
        submits = {peer: [await peer.heard(msg.Submit) for _ in range(2)] for peer in (first, second)}
        assert drains.heard_now(msg.Submit) == []
        for peer, some in submits.items():
            for submit in some:
                peer.tell(submit, 1, finished="eos")
        assert [tokens_of(await one) for one in asked] == [[1]] * 4

    played(story)


def test_a_request_whose_client_is_gone_is_aborted(played: Callable[..., None]) -> None:
    async def story(all_of: Fronted) -> None:
        (peer,) = all_of.join("d1")
        await all_of.there("d1")
        asked = all_of.ask()
        submit = await peer.heard(msg.Submit)
        asked.cancel()
        abort = await peer.heard(msg.Abort)
        assert (abort.request_id, abort.serial) == (submit.request_id, submit.serial)
        peer.tell(submit, 3)  # This token was still on its way, or it belongs to an earlier front.
        assert (await peer.heard(msg.Abort)).serial == submit.serial
        peer.tell(submit, finished="cancelled")
        assert peer.heard_now(msg.Abort) == []
        assert all_of.front.members["d1"].serials == set()
        assert all_of.front.counts.ended == {"cancelled": 1}

    played(story)


def test_each_process_learns_which_prefill_processes_accept_prompts(played: Callable[..., None]) -> None:
    async def story(all_of: Fronted) -> None:
        (decode,) = all_of.join("d1")
        first, second = all_of.join("p1", "p2")
        await all_of.there("d1", "p1", "p2")
        assert all_of.front.capacity == 100
        for peer, left in ((first, ("at-p2",)), (second, ())):
            peer.say(msg.Left(stats=stats_of(peer, 0)))
            async with asyncio.timeout(WITHIN_S):
                while (await decode.heard(msg.Members)).prefills != left:
                    pass
        with pytest.raises(RefusedError, match="no prefill process"):
            _ = all_of.front.capacity

    played(story)


def test_a_process_that_drains_ends_and_leaves_nothing_held_or_it_is_an_error(played: Callable[..., None]) -> None:
    async def story(all_of: Fronted) -> None:
        for name, held in (("d1", 0), ("d2", 3)):
            (peer,) = all_of.join(name)
            await all_of.there(name)
            draining = asyncio.create_task(all_of.front.drain([name]))
            await peer.heard(msg.Drain)
            assert not draining.done()
            peer.say(msg.Left(stats=stats_of(peer, held)))
            if held:
                with pytest.raises(ServiceError, match="d2 process has drained, but still holds 3 pages"):
                    await draining
            else:
                await draining
            assert all_of.front.left[name].pages_held == held
            await all_of.there()

    played(story)


def test_a_placement_counts_a_prompt_until_its_pages_were_pulled(played: Callable[..., None]) -> None:
    booked = Booked()

    async def story(all_of: Fronted) -> None:
        (peer, *_) = all_of.join("d1", "p1", "p2")
        await all_of.there("d1", "p1", "p2")
        asked = all_of.ask()
        submit = await peer.heard(msg.Submit)
        assert submit.prefill == "p2"
        for tokens, last in (((7,), "prefilled r"), ((8,), "over r"), ((9,), "over r")):
            peer.tell(submit, *tokens)
            await all_of.until(lambda last=last, token=tokens[0]: all_of.front.counts.new_tokens == token - 6)
            assert booked.calls[-1] == last
        assert booked.calls == ["place r 3", "prefilled r", "over r"]
        (other,) = all_of.join("d2")
        await all_of.there("d1", "d2", "p1", "p2")
        peer.die()
        again = await other.heard(msg.Submit)
        assert booked.calls[3:] == ["over r", "place r 6"]
        other.tell(again, 1, finished="eos")
        await asked
        assert booked.calls[-1] == "over r"

    played(story, booked)


def test_a_process_with_an_invalid_pulse_address_is_not_accepted(played: Callable[..., None]) -> None:
    async def story(all_of: Fronted) -> None:
        all_of.join("d1")
        await all_of.there("d1")
        (stray,) = all_of.join("d2")
        await all_of.there("d1", "d2")
        stray.say(msg.Ready(name="d2", role="decode", incarnation="2", pulse="nowhere"))
        await all_of.there("d1")
        assert all_of.front.members.keys() == {"d1"}

    played(story)
