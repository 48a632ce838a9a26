"""A stream is not read while too many bytes of it, of its deployment or of all wait."""

import asyncio

import pytest

from evenkeel_moe.adapters.grpc.inbound import InboundBudget, StreamInbound


def holding(budget: InboundBudget, deployment: str, nbytes: int):
    stream = StreamInbound(budget, deployment)
    stream.message_bytes = nbytes
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
    budget = InboundBudget(*limits)
    first, first_done = holding(budget, "a", 10)
    second, second_done = holding(budget, "a", 8)
    third, third_done = holding(budget, "b", 8)
    assert (first.is_full, second.is_full, third.is_full) == full
    waiting = asyncio.create_task(first.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    for done in (first_done, first_done, second_done, third_done):
        done()
    await waiting
    assert budget.waiting_bytes == 0 and not budget.by_deployment
