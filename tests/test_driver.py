"""The driver keeps the order of actions that machines rely on, and answers every call."""

import asyncio
import contextvars

import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.driver import Driver
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.ids import EpRank, Generation, PlanId
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.control_messages import LeaseLost
from evenkeel_moe.protocol.messages import Commit, Leader, QueryState
from tests.waiting import deadline, until

RANK, LEADER = EpRank(0), Leader("a", 1)


def persist(name):
    return ctl.PersistDecision({"name": name})


def send(name):
    key = WaveKey(Generation("g1"), PlanId(name), 0, 1)
    return ctl.SendToRank(RANK, 0, Commit(LEADER, key))


def other(name):
    return ctl.Alert(Reason.MALFORMED, name)


def question(number):
    return ctl.SendToRank(RANK, 0, QueryState(LEADER, query=number))


def name_of(action):
    match action:
        case ctl.PersistDecision(row):
            return row["name"]
        case ctl.SendToRank(message=Commit(wave=wave)):
            return wave.plan_id
        case ctl.SendToRank(message=QueryState(query=query)):
            return f"question {query}"
        case ctl.Alert():
            return action.detail


class ScriptedMachine:
    """Answers each event as scripted, and records the events."""

    def __init__(self, script):
        self.script, self.seen = script, []

    def handle(self, event, now):
        self.seen.append(event)
        return self.script.get(event, [])


class SlowExecutor:
    """Records what it does. Persist actions wait for `gate`, and fail while `down`."""

    def __init__(self):
        self.done, self.down = [], False
        self.gate = asyncio.Event()
        self.gate.set()

    async def persist(self, actions):
        self.done.append(f"begin {'+'.join(name_of(a) for a in actions)}")
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.down:
            return ("failed",)
        self.done += [f"stored {name_of(a)}" for a in actions]
        return ()

    def perform(self, action):
        self.done.append(name_of(action))


@pytest.fixture
async def rig():
    """make(script) -> (driver, machine, executor, task), with the driver running."""
    tasks = []

    def make(script, *, tick_s=1000.0, **options):
        machine, executor = ScriptedMachine(script), SlowExecutor()
        driver = Driver(machine, executor, SystemClock(), tick="tick", tick_s=tick_s, **options)
        tasks.append(asyncio.create_task(driver.run()))
        return driver, machine, executor, tasks[-1]

    yield make
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_persists_of_a_batch_finish_before_its_sends_start(rig):
    driver, _, executor, _ = rig(
        {"e": [send("s1"), persist("p1"), other("o"), persist("p2"), send("s2")]}
    )
    executor.gate.clear()
    driver.post("e")
    await settle()
    assert executor.done == ["begin p1+p2"]
    executor.gate.set()
    await settle()
    assert executor.done == ["begin p1+p2", "stored p1", "stored p2", "s1", "o", "s2"]


async def test_a_later_batch_waits_for_an_earlier_ones_persists(rig):
    driver, machine, executor, _ = rig({"a": [persist("p"), send("s")], "b": [send("t")]})
    executor.gate.clear()
    driver.post("a")
    driver.post("b")
    await settle()
    assert machine.seen == ["tick", "a"]
    executor.gate.set()
    await settle()
    assert executor.done == ["begin p", "stored p", "s", "t"]


async def test_sends_of_a_batch_that_could_not_be_stored_are_not_carried_out(rig):
    driver, machine, executor, _ = rig(
        {"a": [persist("p"), send("s"), other("o"), question(1)], "failed": [other("f")]}
    )
    executor.down = True
    driver.post("a")
    driver.post("b")
    await settle()
    assert executor.done == ["begin p", "o", "question 1", "f"]
    assert machine.seen == ["tick", "a", "failed", "b"], (
        "the machine gets the failure before other events"
    )


async def test_ticks_come_without_events_and_missed_ticks_are_not_made_up_for(rig):
    _, machine, _, _ = rig({}, tick_s=0.01)
    await until(lambda: len(machine.seen) >= 3, every_s=0.01)
    assert set(machine.seen) == {"tick"}
    before = len(machine.seen)
    blocked_until = asyncio.get_running_loop().time() + 0.2
    while asyncio.get_running_loop().time() < blocked_until:
        pass
    await settle()
    assert len(machine.seen) <= before + 2


@pytest.mark.fault(
    "a deployment whose ticks took longer than the time between them",
    "handled ticks alone: no message of a rank was read any more",
)
async def test_events_are_handled_beside_ticks_that_take_longer_than_the_time_between_them():
    class LateClock(SystemClock):
        now = 0.0

        def monotonic(self):
            return self.now

    class SlowMachine(ScriptedMachine):
        def handle(self, event, now):
            clock.now += event == "tick"
            return super().handle(event, now)

    clock, machine = LateClock(), SlowMachine({"tick": [persist("p")]})
    driver = Driver(machine, SlowExecutor(), clock, tick="tick", tick_s=0.25)
    running = asyncio.create_task(driver.run())
    driver.post("e")
    await settle()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert machine.seen == ["tick", "e"]


async def test_a_caller_waits_until_its_actions_are_carried_out(rig):
    driver, _, executor, _ = rig({})
    executor.gate.clear()
    call = asyncio.create_task(driver.call(lambda now: ("answer", [persist("p"), send("s")])))
    await settle()
    assert not call.done()
    executor.gate.set()
    assert await call == "answer"
    assert executor.done == ["begin p", "stored p", "s"]


async def test_a_caller_gets_an_error_if_its_actions_are_not_stored(rig):
    driver, machine, executor, _ = rig({})
    executor.down = True
    with pytest.raises(Unavailable, match="tried again"):
        await driver.call(lambda now: ("answer", [persist("p"), send("s")]))
    assert machine.seen[-1] == "failed"
    assert "s" not in executor.done


async def test_after_a_lost_lease_the_error_promises_no_retry(rig):
    driver, machine, executor, _ = rig({})

    async def fenced(actions):
        return (LeaseLost(),)

    executor.persist = fenced
    with pytest.raises(
        Unavailable, match="changes that are not stored yet are not tried again"
    ) as caught:
        await driver.call(lambda now: ("answer", [persist("p"), send("s")]))
    assert caught.value.reason is Reason.LEASE_LOST
    assert machine.seen[-1] == LeaseLost()
    assert "s" not in executor.done


async def test_an_error_in_a_call_goes_to_the_caller_and_stops_nothing(rig):
    driver, _, _, task = rig({})

    def refuse(now):
        raise Conflict("no")

    with pytest.raises(Conflict):
        await driver.call(refuse)
    assert await driver.call(lambda now: (now > 0, [])) is True
    assert not task.done()


async def test_callers_are_not_left_waiting_when_the_driver_ends(rig):
    driver, _, executor, task = rig({})
    executor.gate.clear()
    calls = [asyncio.create_task(driver.call(lambda now: (1, [persist("p")]))) for _ in range(3)]
    await settle()
    task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert [(type(r), str(r)) for r in results] == [(Unavailable, "the controller is stopping")] * 3
    with pytest.raises(Unavailable, match="stopping"):
        await driver.call(lambda now: (1, []))


@pytest.mark.parametrize("turns", range(5))
async def test_a_caller_is_answered_at_whatever_moment_the_driver_ends(rig, turns):
    driver, _, executor, task = rig({})
    executor.gate.clear()
    await settle()
    call = asyncio.create_task(driver.call(lambda now: (1, [persist("p")])))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(Unavailable, match="stopping"):
        await asyncio.wait_for(call, deadline(5))


async def test_it_ends_when_cancelled_at_the_moment_an_event_comes(rig):
    driver, _, _, task = rig({})
    await settle()
    driver.post("e")
    task.cancel()
    await settle()
    assert task.cancelled()


async def test_after_is_called_for_every_batch(rig):
    seen = []
    executor: SlowExecutor
    driver, _, executor, _ = rig(
        {"a": [persist("p"), send("s")]}, after=lambda: seen.append(list(executor.done))
    )
    driver.post("a")
    await settle()
    assert seen == [[], ["begin p", "stored p", "s"]]


async def test_an_error_of_the_machine_ends_the_driver():
    class Broken:
        def handle(self, event, now):
            raise ZeroDivisionError

    driver = Driver(Broken(), SlowExecutor(), SystemClock(), tick="tick", tick_s=1.0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(driver.run(), 5)


async def test_the_actions_of_a_call_run_in_the_callers_context(rig):
    """Log lines of a call have the caller's trace id, those of other events do not."""
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")
    driver, _, executor, _ = rig({"event": [persist("theirs"), other("theirs")]})
    seen = []
    executor.perform = lambda action: seen.append((name_of(action), request.get()))

    def ask(now):
        seen.append(("ask", request.get()))
        return None, [other("own")]

    request.set("one")
    first = asyncio.create_task(driver.call(ask))
    request.set("two")
    await first
    await driver.call(lambda now: (None, [other("own")]))
    driver.post("event")
    await until(lambda: len(seen) == 4)
    assert seen == [("ask", "one"), ("own", "one"), ("own", "two"), ("theirs", "")]


async def test_an_event_is_told_when_it_waits_no_more(rig):
    """Also if the driver ends first: nothing may count as waiting for ever."""
    driver, machine, executor, task = rig({"first": [persist("a")]})
    executor.gate.clear()
    told = []
    for name in ("first", "second"):
        driver.post(name, lambda name=name: told.append(name))
    await until(lambda: executor.done)
    assert told == ["first"] and "second" not in machine.seen
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert told == ["first", "second"] and "second" not in machine.seen
    driver.post("third", lambda: told.append("third"))
    assert told == ["first", "second", "third"]
