"""What peers may hold: shares, turns, and who gives way. Rates are tested with the HTTP server."""

import asyncio
from dataclasses import dataclass, field

import pytest

from evenkeel_moe.adapters.grpc.rank_stream import RankStream
from evenkeel_moe.peer_budget import Places, Share, Shares, refusals, refused


@dataclass(eq=False)
class Opened:
    host: str
    waits: bool = True
    ended: list = field(default_factory=list)

    def give_way(self):
        self.ended.append(self)


def test_the_oldest_that_waits_of_the_busiest_address_gives_way():
    places, ended = Places(4, "gave_way"), []
    before = refusals["gave_way"]
    alone = Opened("quiet", ended=ended)
    used = Opened("busy", waits=False, ended=ended)
    crowd = [Opened("busy", ended=ended) for _ in range(4)]
    for one in (alone, used, *crowd[:2]):
        places.add(one)
    assert ended == []
    for one in crowd[2:]:
        places.add(one)
    assert ended == crowd[:2] and list(places) == [alone, used, *crowd[2:]]
    assert refusals["gave_way"] == before + 2
    places.remove(alone)
    places.remove(alone)
    assert len(places) == 3


def test_a_new_one_gives_way_if_no_other_waits():
    places = Places(1, "gave_way")
    places.add(Opened("a", waits=False))
    new = Opened("b", waits=False)
    places.add(new)
    assert new.ended == [new] and len(places) == 1


def test_places_are_limited_for_each_and_in_all_and_an_unused_share_is_forgotten():
    whole = Share(3)
    shares = Shares(2, whole)
    one, other = shares.of("a"), shares.of("b")
    one.add(2)
    assert one.exceeded(1) is one and other.exceeded(1) is None and shares.of("a") is one
    other.add(1)
    assert other.exceeded(1) is whole and other.exceeded() is None
    one.add(-1)
    assert one.exceeded(1) is None
    del one, other
    assert len(shares) == 0


def test_a_small_amount_fits_whatever_the_others_hold():
    shares = Shares(90, Share(100), always=10)
    for name in "ab":
        (share := shares.of(name)).add(60)
    small = shares.of("c")
    assert small.exceeded(10) is None and small.exceeded(11) is not None
    assert share.exceeded() is not None


def holding(share, nbytes):
    stream = RankStream(1, "peer", capacity=1)
    stream.waiting, stream.message_bytes = share, nbytes
    return stream, stream.hold()


@pytest.mark.parametrize(
    ("limits", "full"),
    [
        ((9, 99, 99), (True, False, False)),
        ((99, 15, 99), (True, True, False)),
        ((99, 99, 25), (True,) * 3),
    ],
)
async def test_each_limit_stops_the_streams_that_it_concerns(limits, full):
    of_stream, of_deployment, in_all = limits
    whole = Share(in_all)
    deployments = Shares(of_deployment, whole)
    held = [
        holding(Share(of_stream, deployments.of(name)), nbytes)
        for name, nbytes in (("a", 10), ("a", 8), ("b", 8))
    ]
    assert tuple(stream.waiting.exceeded() is not None for stream, _ in held) == full
    waiting = asyncio.create_task(held[0][0].waiting.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    for _, processed in held:
        processed()
    await waiting
    assert whole.held == 0


async def test_each_peer_gets_a_turn_after_the_other_however_many_tasks_one_has():
    shares, everyone, served = {name: Share(1) for name in "abc"}, asyncio.Lock(), []

    async def work(name):
        async with shares[name[0]].turn, everyone:
            served.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
            tasks.create_task(work(name))
    assert served == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_refusal_is_counted_and_logged_with_its_peer(capsys):
    before = refusals["too_much"]
    refused("too_much", "10.0.0.1", detail="more than 3")
    assert refusals["too_much"] == before + 1
    assert "10.0.0.1" in capsys.readouterr().out
