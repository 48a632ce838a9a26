"""The order in which links try the replicas of a controller."""

from collections import Counter

from evenkeel_moe.adapters.grpc.rank_link import order_of


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
