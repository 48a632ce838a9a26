"""Links of real ranks find the replica that leads their deployment."""

import asyncio
import signal
from collections import Counter
from dataclasses import replace

import pytest

from evenkeel_moe.adapters.grpc.controller_addresses import order_of
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.model.ids import DeploymentId, EpRank
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.wire import link
from tests.integration.controller_rig import SHAPE, Group, Rank
from tests.integration.replicas import replicas
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


class LinkedRank:
    """A real rank's link, and the messages that it received."""

    def __init__(self, group: Group, rank: int, addresses: list[str]) -> None:
        from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink

        self._rank = Rank(group, EpRank(rank))
        self.heard: list[object] = []
        self._running = asyncio.create_task(GrpcRankLink(addresses, seed=rank).run(self))

    def hello(self) -> m.Hello:
        return self._rank.hello()

    def heartbeat(self) -> link.Heartbeat:
        return link.Heartbeat(1, 2, 3)

    def received(self, stream: int, message: link.ToRankLink) -> None:
        self.heard.append(message)

    def lost(self, stream: int) -> None:
        self.heard.append("lost")

    @property
    def leader(self) -> str | None:
        """The leader that accepted the rank; None before that."""
        last = next(
            (m for m in reversed(self.heard) if isinstance(m, link.Registration) or m == "lost"),
            None,
        )
        return (
            last.leader.leader_id if isinstance(last, link.Registration) and last.leader else None
        )

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


def ports_that_spread(one, names):
    """Return two free ports, with which the hashes of these few names are not all alike by chance.

    Where the first replica is away, the other two get half of the names each.
    """
    for _ in range(200):
        free = free_ports(2)
        addresses = [one, *(f"127.0.0.1:{port}" for port in free)]
        orders = [order_of(DeploymentId(name), addresses) for name in names]
        first = Counter(order[0] for order in orders)
        other = Counter(next(each for each in order if each != one) for order in orders)
        if len(first) >= 2 and first[one] <= 4 and set(other.values()) == {len(names) // 2}:
            return free
    raise AssertionError("no two free ports spread the names")


async def test_deployments_are_shared_when_one_replica_becomes_three(tmp_path, store):
    """Ranks keep their streams; the roll-out that comes with more replicas spreads them."""
    one, two, three = replicas(tmp_path, store, "one", "two", "three")
    async with one:
        names = [f"model-{n}" for n in range(6)]
        free = ports_that_spread(one.address, names)
        for controller, port in zip((two, three), free, strict=True):
            controller.environment["EVENKEEL_GRPC__PORT"] = str(port)
        one.environment["EVENKEEL_GRPC__PORT"] = str(one.ports["grpc"])
        addresses = [one.address, *(f"127.0.0.1:{port}" for port in free)]
        fleets = {
            name: [LinkedRank(group, rank, addresses) for rank in range(group.shape.num_ranks)]
            for name, group in ((name, Group(deployment=name)) for name in names)
        }
        try:
            await until(lambda: leaders_of(fleets) == dict.fromkeys(fleets, {"one"}), within_s=60)
            async with two, three:
                await one.stop()
                # A pod takes seconds to come back. One that is back before its ranks have turned to
                # another replica leads them again.
                await until(lambda: settled(fleets, without="one"), within_s=60)
                await one.start()
                await until(lambda: settled(fleets), within_s=60)
                shares = Counter(next(iter(names)) for names in leaders_of(fleets).values())
                assert len(shares) >= 2 and max(shares.values()) <= 4, shares
        finally:
            await asyncio.gather(*(rank.close() for ranks in fleets.values() for rank in ranks))


async def test_the_deployments_of_a_replica_that_dies_are_shared_by_the_others(tmp_path, store):
    """Thirty deployments on three replicas: each finds a leader, and no replica gets them all."""
    controllers = replicas(tmp_path, store, "one", "two", "three", LEADER__LEASE_S="2.4")
    one, two, three = controllers
    shape = replace(SHAPE, num_logical_experts=2, num_ranks=1)
    groups = [Group(deployment=f"model-{n}", shape=shape) for n in range(30)]
    async with one, two, three:
        addresses = [each.address for each in controllers]
        fleets = {str(one.deployment): [LinkedRank(one, 0, addresses)] for one in groups}
        try:
            await until(lambda: settled(fleets), within_s=60)
            before = {name: names.pop() for name, names in leaders_of(fleets).items()}
            names = {
                each.address: each.environment["EVENKEEL_LEADER__REPLICA_ID"]
                for each in controllers
            }
            orders = {name: [names[one] for one in order_of(name, addresses)] for name in fleets}
            # Nearly all: a replica that answers late loses a deployment to the next one.
            assert sum(before[name] == orders[name][0] for name in fleets) >= 24
            one.process.send_signal(signal.SIGKILL)
            await until(lambda: settled(fleets, without="one"), within_s=60)
            after = {name: names.pop() for name, names in leaders_of(fleets).items()}
            moved = [name for name in fleets if before[name] == "one"]
            # Both replicas try as soon as a rank has asked them, so the order decides no winner.
            assert {after[name] for name in moved} == {"two", "three"}
            assert all(after[name] == before[name] for name in before if before[name] != "one")
        finally:
            await asyncio.gather(*(rank.close() for ranks in fleets.values() for rank in ranks))


def leaders_of(fleets: dict[str, list[LinkedRank]]) -> dict[str, set[str | None]]:
    """Return the leaders that accepted the ranks, by deployment."""
    return {name: {rank.leader for rank in ranks} for name, ranks in fleets.items()}


def settled(fleets: dict[str, list[LinkedRank]], without: str | None = None) -> bool:
    """Every rank is with a leader, none with `without`, and those of a deployment with the same."""
    return all(
        len(names) == 1 and not names & {None, without} for names in leaders_of(fleets).values()
    )


async def test_an_agents_link_that_asks_a_follower_is_led_to_the_leader(tmp_path, store):
    """The link of real ranks, given only the follower's address."""
    one, two = replicas(tmp_path, store)
    async with one, two, Group() as group:
        await group.connect(one.address)
        await until(lambda: one.state("ready"))
        await group.ranks[3].close()
        rank = LinkedRank(group, 3, [two.address])
        try:
            assert await until(lambda: rank.leader) == "one"
        finally:
            await rank.close()
