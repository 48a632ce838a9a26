"""When links try which replica of a controller."""

import asyncio
from collections import Counter

from evenkeel_moe.adapters.grpc.controller_addresses import order_of
from evenkeel_moe.protocol.messages import Hello
from evenkeel_moe.wire.link import NotLeader
from tests.adapters.grpc.test_rank_link import ACCEPTED, linked
from tests.waiting import until


def test_the_deployments_of_a_replica_that_dies_are_shared_by_the_others():
    addresses = [f"10.0.0.{number}:50051" for number in range(3)]
    orders = [order_of(f"model-{number}", addresses) for number in range(300)]
    shares = Counter(order[0] for order in orders)
    assert all(70 < shares[address] < 130 for address in addresses)
    moved = Counter(order[1] for order in orders if order[0] == addresses[0])
    assert sorted(moved) == addresses[1:] and min(moved.values()) > 30
    for number, order in enumerate(orders):
        left = [address for address in order if address != addresses[0]]
        assert order_of(f"model-{number}", addresses[:0:-1]) == tuple(left)


async def test_a_leader_that_is_gone_is_tried_again_only_after_the_wait_that_a_follower_asks_for():
    """Or all ranks of a dead leader would come to the followers again and again."""
    began = asyncio.get_running_loop().time()
    gone = NotLeader("b", "127.0.0.1:1", 0.5)
    async with linked([gone], [gone], [gone], [ACCEPTED]) as (follower, listener):
        await until(lambda: listener.got)
    assert len(follower.of(Hello)) == 4
    # The first redirect is followed at once; each wait is 0.5 to 1 times what is asked for.
    assert asyncio.get_running_loop().time() - began >= 2 * 0.25
