"""Rounds alternate and end with the budget."""

from evenkeel_moe.agent.profile.timing import time_points


class Device:
    """A clock, and a layer whose time follows a known staircase; every tenth call is an outlier."""

    def __init__(self, tile=64, base=1e-3, per_tile=1e-4):
        self.now, self.calls = 0.0, 0
        self.tile, self.base, self.per_tile = tile, base, per_tile
        self.asked: list[int] = []

    def seconds(self, tokens):
        return self.base + self.per_tile * -(-tokens // self.tile)

    def run(self, tokens):
        self.calls += 1
        self.asked.append(tokens)
        self.now += self.seconds(tokens) * (30 if self.calls % 10 == 0 else 1)

    def clock(self):
        return self.now


def test_the_budget_ends_the_rounds():
    device = Device(base=1.0)
    found = time_points(device.run, [64, 128], budget_s=10.0, rounds=1000, clock=device.clock)
    assert 1 <= found.rounds < 10
    assert device.asked[:4] == [64, 128, 64, 128], "one round to warm up"
    assert device.asked[4:6] == [128, 64], "then rounds in alternating order"
