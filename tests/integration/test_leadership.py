"""Leadership of real processes: paused, restarted, unreachable and dead leaders (R2, R12, R13)."""

import asyncio
import os
import signal
import time

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.wire import link
from tests.integration.controller_rig import Group, Rank
from tests.integration.replicas import replicas
from tests.integration.store_server import until_stored
from tests.waiting import deadline, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

#: `STOP_LEADER_S=60 pytest tests/integration/test_leadership.py` pauses as long as a bad host does.
STOP_S = float(os.environ.get("STOP_LEADER_S", "8"))
_BEFORE_DATA = frozenset(
    {
        Reason.RANKS_MISSING,
        Reason.RECOVERING,
        Reason.NO_STEPS,
        Reason.INSUFFICIENT_DATA,
        Reason.STALE_DATA,
        Reason.NOT_LEADER,
        Reason.STORE_UNAVAILABLE,
        Reason.PLANNER_STARTING,
        Reason.PLANNER_FAILED,
    }
)
"""Decisions that stopped at the data gate or before it."""


class BoundRank(Rank):
    """A rank that knows its leader, and refuses each earlier one (R2)."""

    bound: m.Leader | None = None
    obeyed: list[m.Leader]
    refused: list[m.Leader]

    def __init__(self, group: Group, rank: int) -> None:
        super().__init__(group, rank)
        self.obeyed, self.refused = [], []

    async def _hear(self, message) -> None:
        leader = getattr(message, "leader", None)
        if leader is not None:
            bound = self.group.bound.get(self.rank)  # type: ignore[attr-defined]
            if bound is not None and (
                leader.term < bound.term or (leader.term == bound.term and leader != bound)
            ):
                self.refused.append(leader)
                await self.send(m.TermRefused(self.identity, bound))
                return
            self.group.bound[self.rank] = leader  # type: ignore[attr-defined]
            self.obeyed.append(leader)
        await super()._hear(message)


def bound_group(**settings) -> Group:
    """A group whose ranks remember their leader over streams."""
    group = Group(**settings)
    group.bound = {}  # type: ignore[attr-defined]
    group.ranks = [BoundRank(group, rank) for rank in range(group.shape.num_ranks)]
    return group


async def _reached(group, controller) -> bool:
    """Every rank tries, as links do, until the replica leads."""
    for rank in group.ranks:
        await rank.close()
    await asyncio.gather(*(rank.connect(controller.address) for rank in group.ranks))
    return all(isinstance(rank.answer, link.Registration) for rank in group.ranks)


async def _follows(controller, leader: str) -> bool:
    """Return True if a replica without the lease names the leader and reports no old state."""
    for path in ("/v1/deployments/demo", "/v1/deployments/demo/policy"):
        answer = (await controller.http.get(path)).json()
        if (answer.get("reason"), answer.get("leader")) != ("not_leader", leader):
            return False
    (row,) = (await controller.http.get("/v1/deployments")).json()["items"]
    return (row["state"], row["leader"], row["epoch"]) == ("follower", leader, None)


async def test_a_paused_leader_is_replaced_and_steps_down_when_it_wakes(tmp_path, store):
    one, two = replicas(tmp_path, store)
    async with one, two, bound_group() as group:
        await group.connect(one.address)
        await until(lambda: one.state("ready"))
        await group.serve(64)
        # Every rank holds a wave and none got a Commit: the next leader must end it (R12).
        for rank in group.ranks:
            rank.votes = False
        target = group.placement.phy2log.copy()
        row = target[0].reshape(group.shape.num_ranks, -1)
        row[[0, 1]] = row[[1, 0]]
        body = {
            "plan_id": "held",
            "approve": True,
            "target": {"physical_to_logical": target.tolist()},
        }
        await until(lambda: one.events("planner_ready"), within_s=90)

        async def taken():
            # A starved machine may cost the lease for a moment; a client asks again by the same id.
            answer = await one.http.post("/v1/deployments/demo/plans", json=body)
            assert answer.is_success or answer.status_code == 503, answer.text
            return answer.is_success

        await until(taken)
        await until(lambda: all(rank.state is m.ParticipantState.PREPARED for rank in group.ranks))

        first = await one.status()
        os.kill(one.process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            for rank in group.ranks:
                rank.votes = True
            # Their old streams stay open: the paused leader's host still takes what is sent.
            old, group.ranks = (
                group.ranks,
                [BoundRank(group, rank) for rank in range(group.shape.num_ranks)],
            )
            for before, after in zip(old, group.ranks, strict=True):
                after.state, after.wave, after.prepare = before.state, before.wave, before.prepare
                after.identity = before.identity
            await until(lambda: _reached(group, two), within_s=30)
            await until(lambda: two.state("ready"), within_s=30)
            took_s = time.monotonic() - stopped
            # The leader stays paused for STOP_S in all; nothing ends the pause earlier.
            await asyncio.sleep(max(0.0, STOP_S - took_s))
        finally:
            os.kill(one.process.pid, signal.SIGCONT)
        second = await two.status()
        assert second["leader"] == "two"
        assert second["term"] > first["term"]
        # The held wave was committed everywhere: ranks and records have the same epoch and map.
        assert {rank.epoch for rank in group.ranks} == {second["epoch"]} == {1}
        assert {rank.placement.digest for rank in group.ranks} == {group.placement.digest}
        plan = (await two.http.get("/v1/deployments/demo/plans/held")).json()
        assert (plan["phase"], plan["waves_committed"]) == ("committed", 1)

        await until(lambda: _follows(one, "two"))
        for rank in old:
            await rank.close()
        await group.serve(8)
        await until(lambda: two.state("ready"))
        assert (await two.status())["term"] == second["term"], (
            "the old leader disturbed the new one"
        )
        for rank in (*old, *group.ranks):
            assert isinstance(rank, BoundRank)
            terms = [leader.term for leader in rank.obeyed]
            assert terms == sorted(terms), "a rank obeyed an older term after a newer one"
        assert not one.failures() and not two.failures()
        print(f"taken over {took_s:.1f} s after the leader was paused")


async def test_a_term_the_ranks_refuse_makes_a_leader_step_down(tmp_path, store):
    """R2 without the store: another replica leads through a store that this one cannot see."""
    one, two = replicas(tmp_path, store)
    async with one, two, bound_group() as group:
        await group.connect(one.address)
        await until(lambda: one.state("ready"))
        term = (await one.status())["term"]
        for rank in range(group.shape.num_ranks):
            group.bound[rank] = m.Leader("two", term + 5)  # type: ignore[attr-defined]

        async def above():
            return (await one.status()).get("term", 0) > term + 5

        # Ranks refuse it, so it stops leading; it leads again only above the term they know.
        await until(above)
        await until(lambda: one.state("ready"))
        # The first refusal ends the term, so the other ranks may not have been asked in it.
        assert any(rank.refused for rank in group.ranks if isinstance(rank, BoundRank))


async def test_a_restarted_leader_reclaims_its_lease_at_once(tmp_path, store):
    # A lease so long that it cannot have run out.
    one, two = replicas(
        tmp_path, store, LEADER__LEASE_S="90", LEADER__RENEW_S="10", INGEST__RANK_LEASE_S="60"
    )
    async with one, two, Group() as group:
        await group.connect(one.address)
        await until(lambda: one.state("ready"))
        term = (await one.status())["term"]
        await group.serve(32)
        await until_stored(store.url, 32)
        await one.stop(signal.SIGKILL)
        # Another identity has to wait.
        stranger = Rank(group, 0)
        assert isinstance(await stranger.connect(two.address), link.NotLeader)
        await stranger.close()

        await one.start()
        began = time.monotonic()
        status = await until(lambda: _led_by(one, "one"))
        took_s = time.monotonic() - began
        assert status["term"] == term + 1
        await group.reconnect(one.address)
        await until(lambda: one.state("ready"))
        assert (await one.status())["term"] == term + 1
        print(f"lease reclaimed {took_s:.2f} s after serving, term {term} -> {term + 1}")


async def _led_by(controller, name):
    status = await controller.status()
    return status if status.get("leader") == name and status["state"] != "follower" else None


async def test_a_leader_no_rank_can_reach_lets_another_lead(tmp_path, store):
    one, two = replicas(tmp_path, store, INGEST__RANK_LEASE_S="3")
    async with one, two, Group() as group:
        await group.connect(one.address)
        await until(lambda: one.state("ready"))
        term = (await one.status())["term"]
        # The network between this replica and the ranks goes; its way to the store does not.
        await until(lambda: _reached(group, two), within_s=30)
        await until(lambda: _leads_after(two, "two", term))
        assert any("no rank was heard" in row["why"] for row in one.events("lease_lost"))
        await until(lambda: _follows(one, "two"))


async def test_decisions_come_back_after_a_restart_and_after_a_leaders_death(tmp_path, store):
    """Prints the times to restart and to fail over; the bounds here are for busy machines."""
    one, two = replicas(tmp_path, store, INGEST__RANK_LEASE_S="10", WINDOW__STEPS="256")
    async with one, two, Group() as group:
        for controller in (one, two):
            await until(lambda c=controller: c.events("planner_ready"), within_s=120)
        await group.connect(one.address)
        await until(lambda: one.state("ready"))
        serving = group.serve_on(every_s=0.1, steps=4)
        await until(lambda: _window(one, 256), within_s=60)
        await until(lambda: _decided(one, 256), within_s=60)
        await until_stored(store.url, 256)

        died = time.monotonic()
        await one.stop(signal.SIGKILL)
        serving.cancel()
        await until(lambda: _reached(group, two), within_s=30)
        serving = group.serve_on(every_s=0.1, steps=4)
        steps = await until(lambda: _decided(two, 243), within_s=30)
        failover_s = time.monotonic() - died

        serving.cancel()
        await two.stop(signal.SIGKILL)
        died = time.monotonic()
        await two.start()
        served_s = time.monotonic() - died
        await until(lambda: _reached(group, two), within_s=30)
        serving = group.serve_on(every_s=0.1, steps=4)
        again = await until(lambda: _decided(two, 243), within_s=60)
        restart_s = time.monotonic() - died - served_s
        serving.cancel()
        print(f"failover: {failover_s:.2f} s after the leader's death, window {steps} of 256")
        print(
            f"restart: {restart_s:.2f} s after serving again (up after {served_s:.2f} s),"
            f" window {again} of 256"
        )
        assert min(steps, again) >= 0.95 * 256
        assert failover_s < deadline(12.5)
        assert restart_s < deadline(12.5)


async def _leads_after(controller, name, term):
    status = await controller.status()
    return status.get("leader") == name and status["state"] == "ready" and status["term"] > term


async def _window(controller, steps):
    return (await controller.status()).get("window_steps", 0) >= steps


async def _decided(controller, steps):
    """Steps in the window once a decision of this life got past the data gate with that many."""
    status = await controller.status()
    decision = status.get("last_decision") or {}
    if status.get("window_steps", 0) < steps or status["state"] == "follower":
        return None
    rows = [
        row
        for row in controller.log
        if row.get("event") == "decision" or row.get("event") == "leading"
    ]
    led = [index for index, row in enumerate(rows) if row["event"] == "leading"]
    past = [
        row for row in rows[led[-1] :] if led and row.get("reason") not in (None, *_BEFORE_DATA)
    ]
    return status["window_steps"] if past and decision.get("reason") not in _BEFORE_DATA else None
