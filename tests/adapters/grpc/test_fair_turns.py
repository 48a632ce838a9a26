"""Turns to decode go round the peers."""

import asyncio

import pytest

from evenkeel_moe.adapters.grpc.fair_turns import FairTurns


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Workers:
    """Tasks that wait for turns and hold them until told."""

    def __init__(self):
        self.turns, self.served, self.tasks = FairTurns(), [], []
        self._ends = {}

    def start(self, name):
        self._ends[name] = asyncio.Event()
        self.tasks.append(asyncio.create_task(self._work(name), name=name))
        return self.tasks[-1]

    async def _work(self, name):
        async with self.turns.turn(name[0]):
            self.served.append(name)
            await self._ends[name].wait()

    async def end(self, name):
        self._ends[name].set()
        await settle()


async def test_each_peer_gets_a_turn_after_the_other_however_many_tasks_one_has():
    workers = Workers()
    for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
        workers.start(name)
    await settle()
    for number in range(7):
        assert len(workers.served) == number + 1
        await workers.end(workers.served[-1])
    assert workers.served == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    workers.start("d1")
    await settle()
    assert workers.served[-1] == "d1"
    await workers.end("d1")


@pytest.mark.parametrize("late", [False, True])
async def test_a_task_that_is_cancelled_while_it_waits_keeps_nobody_waiting(late):
    """Late: the turn is given in the same moment."""
    workers = Workers()
    workers.start("a1")
    waits = workers.start("b1")
    workers.start("c1")
    await settle()
    if late:
        workers._ends["a1"].set()
        await asyncio.sleep(0)
    waits.cancel()
    await settle()
    if not late:
        await workers.end("a1")
    assert workers.served == ["a1", "c1"]
    await workers.end("c1")
    assert all(task.done() for task in workers.tasks)


async def test_a_task_that_fails_in_its_turn_passes_it_on():
    turns = FairTurns()
    with pytest.raises(ValueError, match="wrong"):
        async with turns.turn("a"):
            raise ValueError("wrong")
    async with asyncio.timeout(5), turns.turn("b"):
        pass
