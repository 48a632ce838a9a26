"""Faults of ranks, stores and processes, which must not affect other ranks."""

import asyncio
import os
import signal

import grpc
import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.wire import link
from evenkeel_moe.wire.from_rank import encode_rank_message
from evenkeel_moe.wire.link import Heartbeat
from evenkeel_moe.wire.to_rank import decode_controller_message
from tests.contracts.conftest import connected
from tests.integration.controller_rig import Controller, Group, Rank, damaged
from tests.waiting import deadline, until

pytestmark = pytest.mark.integration


async def test_bad_reports_are_quarantined_and_counted_and_good_ones_still_count(tmp_path):
    async with Controller(tmp_path) as controller, Group() as group:
        await group.join(controller)
        await group.serve(8)
        await until(lambda: controller.counted(8))
        culprit = group.ranks[1]

        async def send_bad(reason, **changes):
            report = group.route(4)[1]
            sent = len(culprit.acks)
            await culprit.send_wire(damaged(report, **changes))
            ack = await culprit.ack(sent + 1)
            assert (ack.reason, ack.rejected_steps, ack.highest_step) == (reason, 4, group.step - 1)

        negative = np.zeros(4 * 3 * 3, "<i4")
        negative[5] = -1
        await send_bad(Reason.BAD_LENGTH, counts=b"\0" * 10)
        await send_bad(Reason.NEGATIVE_COUNT, counts=negative.tobytes())
        report = group.route(4)[1]
        elsewhere = report.steps.copy()
        elsewhere["epoch"] = 77
        sent = len(culprit.acks)
        await culprit.send_wire(damaged(report, step_table=elsewhere.tobytes()))
        assert (await culprit.ack(sent + 1)).reason is Reason.UNKNOWN_EPOCH

        # Counts that do not add up are found when all ranks have reported.
        reports = group.route(2)
        reports[1].counts[0, 0, 0] += 5
        for rank, report in zip(group.ranks, reports, strict=True):
            await rank.send(report)
        await until(lambda: _rejected(controller, Reason.SUM_MISMATCH))

        # Sent again after a reconnect: nothing changes.
        for rank, report in zip(group.ranks, reports, strict=True):
            await rank.send(report)
        await until(lambda: _rejected(controller, Reason.DUPLICATE_STEP))

        await group.serve(16)
        status = await until(lambda: controller.counted(25))
        assert status["window_steps"] == 8 + 1 + 16
        assert status["step"] == group.step - 1
        series = await controller.metrics()
        for reason, steps in (
            (Reason.BAD_LENGTH, 4),
            (Reason.NEGATIVE_COUNT, 4),
            (Reason.UNKNOWN_EPOCH, 4),
            (Reason.SUM_MISMATCH, 4),
            (Reason.DUPLICATE_STEP, 8),
        ):
            assert series[_series(reason)] == steps, reason
        assert all(not rank.call.done() for rank in group.ranks)
        assert not controller.failures()


def _series(reason):
    return f'evenkeel_report_steps_rejected_total{{deployment="demo",reason="{reason}"}}'


async def _rejected(controller, reason):
    return _series(reason) in await controller.metrics()


async def test_ranks_that_cannot_be_right_get_a_reason_and_harm_nothing(tmp_path):
    async with Controller(tmp_path) as controller, Group() as group:
        stranger = Rank(group, 1)
        await group.join(controller)

        # Another shape in the same generation: sizes of experts, and numbers of layers and experts.
        answer = await stranger.connect(controller.address, shape=ModelShape(5, 16, 4, 6, 2, 1024))
        assert answer.reason == Reason.SHAPE_DISAGREES
        await stranger.close()
        other = ModelShape(3, 8, 4, 3, 2, 4096)
        answer = await stranger.connect(controller.address, shape=other)
        assert (answer.outcome, answer.reason) == (
            link.RegistrationOutcome.REFUSED,
            Reason.SHAPE_DISAGREES,
        )
        assert "4096" in answer.detail and "1024" in answer.detail
        await stranger.close()

        # An older life of a rank that is here.
        old = m.RankIdentity(group.deployment, EpRank(stranger.rank), group.generation, 5)
        answer = await stranger.connect(controller.address, identity=old)
        assert answer.reason is Reason.STALE_INCARNATION
        await stranger.close()

        # Other checksums of the same weights.
        answer = await stranger.connect(controller.address, checksums_digest="other")
        assert answer.reason is Reason.CHECKSUM_MISMATCH
        await stranger.close()

        # A shape no deployment can have, a first message that is no Hello, and noise.
        wire = encode_rank_message(group.ranks[0].hello())
        wire.hello.shape.num_layers = 0
        for first, reason in (
            (wire.SerializeToString(), Reason.WRONG_SHAPE),
            (encode_rank_message(link.Heartbeat(1, 2, 3)).SerializeToString(), Reason.MALFORMED),
            (b"\xff" * 40, Reason.MALFORMED),
        ):
            answer = await _say_raw(controller.address, first)
            assert (answer.outcome, answer.reason) == (link.RegistrationOutcome.REFUSED, reason)

        # Noise in the middle of a stream ends that stream only; the rank comes back.
        await group.ranks[3].call.write(agent_pb2.RankMessage(hello=wire.hello))
        await until(lambda: group.ranks[3].call.done())
        await group.ranks[3].close()
        await group.ranks[3].connect(controller.address)
        assert group.ranks[3].answer.outcome is link.RegistrationOutcome.ACCEPTED
        await group.serve(8)
        assert (await until(lambda: controller.counted(8)))["state"] == "ready"
        assert not controller.failures()


async def _say_raw(address, data):
    async with grpc.aio.insecure_channel(address) as channel:
        attach = channel.stream_stream("/evenkeel.v1.RankLink/Attach")
        call = attach()
        await call.write(data)
        answer = await asyncio.wait_for(call.read(), deadline(10))
        assert isinstance(answer, bytes)
        return decode_controller_message(agent_pb2.ControllerMessage.FromString(answer))


async def test_a_leader_takes_a_term_above_what_the_ranks_know(tmp_path):
    async with Controller(tmp_path) as controller, Group() as group:
        group.ranks[2].term = 40
        await group.join(controller)
        assert (await controller.status())["term"] == 41
        # A rank bound to a newer leader refuses ours: the term rises again, and the ranks stay.
        rank = group.ranks[0]
        await rank.send(m.TermRefused(rank.identity, m.Leader("someone", 50)))
        await until(lambda: _term(controller, 51))
        await until(lambda: controller.state("ready"))
        await group.serve(8)
        await until(lambda: controller.counted(8))
        assert all(not rank.call.done() for rank in group.ranks)


async def _term(controller, term):
    return (await controller.status()).get("term") == term


async def test_ranks_without_the_migrate_capability_are_observed(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="auto") as controller, Group() as group:
        for rank in group.ranks:
            await rank.connect(controller.address, capabilities=frozenset())
            assert rank.answer.outcome is link.RegistrationOutcome.OBSERVE_ONLY
        await group.serve(8)
        assert await until(lambda: controller.counted(8))
        await until(lambda: controller.decided(Reason.OBSERVE_ONLY))


# --- the store -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["silent", "gone"])
async def test_the_store_goes_away_and_comes_back(tmp_path, store, how):
    environment = {
        "REDIS__URL": store.url,
        "REDIS__TIMEOUT_S": "0.3",
        "PLANNER__MODE": "auto",
        "PLANNER__THRESHOLDS__COOLDOWN_S": "0",
        "LEADER__LEASE_S": "2",
        "LEADER__RENEW_S": "0.5",
    }
    async with Controller(tmp_path / "data", **environment) as controller, Group() as group:
        await group.join(controller)
        await until(lambda: controller.events("planner_ready"), within_s=60)
        group.popularity = np.full_like(group.popularity, 1 / 8)
        group.serve_on()
        await until(lambda: controller.counted(100))
        epoch = group.epoch

        os.kill(store.pid, how)
        await until(lambda: _health(controller, "degraded"))
        group.popularity = group.draw(seed=3)
        # After more than the lease a single replica must still lead, count and answer, without
        # deciding anything. Nothing may happen in this time, so there is no condition to wait for.
        before = (await controller.status())["step"]
        await asyncio.sleep(3)
        status = await until(lambda: _counted(controller, before + 50))
        assert status["balancedness_mean"] < 0.8
        assert status["state"] == "ready"
        assert status["last_decision"]["reason"] == Reason.STORE_UNAVAILABLE
        assert (await controller.decisions())[0]["reason"] == Reason.STORE_UNAVAILABLE
        assert group.epoch == epoch
        refused = await controller.http.post("/v1/deployments/demo/freeze", json={"seconds": 5})
        assert (refused.status_code, refused.json()["reason"]) == (503, Reason.STORE_UNAVAILABLE)
        assert (await controller.metrics())["evenkeel_store_degraded"] == 1

        if how is signal.SIGSTOP:
            os.kill(store.pid, signal.SIGCONT)
        else:
            await store._spawn()
        await until(lambda: _health(controller, "ok"))
        await until(lambda: group.epoch > epoch, within_s=30)
        assert (await controller.metrics())["evenkeel_store_degraded"] == 0
        assert all(not rank.call.done() for rank in group.ranks)
        assert not controller.failures()


async def _counted(controller, step):
    status = await controller.status()
    return status if (status.get("step") or 0) > step else None


async def _health(controller, status):
    return (await controller.http.get("/readyz")).json()["status"] == status


async def test_a_flushed_store_costs_the_history_and_nothing_else(tmp_path, store):
    async with (
        Controller(tmp_path / "data", REDIS__URL=store.url) as controller,
        Group() as group,
    ):
        await group.join(controller)
        await group.serve(64)
        await until(lambda: controller.counted(64))
        term = (await controller.status())["term"]
        async with connected(store.url) as client:
            await client.flushall()
        await until(lambda: _term(controller, term + 1))
        await until(lambda: controller.state("ready"))
        assert (await controller.status())["window_steps"] == 64
        assert (await controller.http.post("/v1/deployments/demo/rollback")).status_code == 404
        assert all(not rank.call.done() for rank in group.ranks)


# --- processes ---


async def test_a_killed_controller_has_its_window_back_when_it_returns(tmp_path):
    async with Controller(tmp_path) as controller, Group() as group:
        await group.join(controller)
        await group.serve(200)
        await group.serve(100)
        await until(lambda: controller.counted(300))
        # The store interval passes. The test cannot read the embedded store: its socket is private.
        await asyncio.sleep(1.2)
        term = (await controller.status())["term"]
        await controller.stop(signal.SIGKILL)
        await until(lambda: all(rank.call.done() for rank in group.ranks))

        await controller.start()
        began = asyncio.get_running_loop().time()
        status = await until(lambda: controller.counted(285))
        assert status["state"] == "waiting_for_ranks"
        await group.reconnect(controller.address)
        await until(lambda: controller.state("ready"))
        await group.serve(8)
        status = await until(lambda: controller.counted(293))
        assert status["term"] > term
        assert status["generation"] == group.generation
        assert asyncio.get_running_loop().time() - began < deadline(10)

        # The next life of the group counts its steps from zero, and so does the window.
        for rank in group.ranks:
            await rank.send(Heartbeat(group.step, 10_000, 1 << 20, stopping=True))
        async with Group(generation="g-2", seed=1) as restarted:
            await restarted.join(controller)
            await restarted.serve(16)
            status = await until(lambda: _generation(controller, "g-2"))
            await until(lambda: controller.counted(16))
            assert (await controller.status())["window_steps"] == 16


async def _generation(controller, generation):
    status = await controller.status()
    return status if status.get("generation") == generation else None
