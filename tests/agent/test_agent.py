"""The agent on real Gloo groups: ranks are threads, and the test is the controller."""

import asyncio
import contextlib
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.agent import AgentConfig, LoraOnExperts, network_thread
from evenkeel_moe.agent.checksums import checksums_digest
from evenkeel_moe.agent.network_thread import watch_clock
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase
from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Ack,
    Commit,
    QueryState,
    RankState,
    StagingProgress,
    Vote,
    WaveOutcome,
)
from evenkeel_moe.wire.link import DeviceClock, FlowControl, Heartbeat
from tests.adapters.serving import Listener
from tests.agent.fleet import Fleet, PortLink
from tests.agent.ranks import (
    EXPERT_BYTES,
    LEADER,
    ToyMaps,
    ToyWeights,
    expert_tensors,
    identity_of,
    prepare_for,
    run_ranks,
    shape_of,
    two_rank_placements,
)
from tests.waiting import deadline, wait_until

OLD, NEW = two_rank_placements()


def abort(fleet, prepare):
    fleet.say(Abort(LEADER, prepare.wave))
    return [link.expect(AbortAnswer, where=lambda answer: answer.drained) for link in fleet.links]


@pytest.mark.parametrize("planned", [True, False])
def test_a_rank_says_that_it_stops_only_if_that_was_planned(planned):
    with Fleet(OLD) as fleet:
        for link in fleet.links:
            assert link.ready.wait(deadline(10))
        fleet.agents[0].close(planned=planned)
    said = [m for _, m in list(fleet.links[0].sent.queue) if isinstance(m, Heartbeat)]
    assert any(beat.stopping for beat in said) is planned
    transfers = [agent._worker._thread for agent in fleet.agents]
    wait_until(lambda: not any(thread.is_alive() for thread in transfers))


def test_a_committed_wave_changes_every_rank_on_the_same_step():
    """Gate (step 4) and R11; on exit the fleet checks that epochs were equal at every step."""
    prepare, began = prepare_for(OLD, NEW), time.monotonic()
    with Fleet(OLD) as fleet:
        acks = fleet.commit(prepare)
        assert {int(ack.epoch) for ack in acks} == {1}
        assert {ack.placement_digest for ack in acks} == {NEW.digest}
        for rank in range(2):
            assert fleet.weights[rank].holds(NEW)
            assert (fleet.maps[rank].rows == NEW.phy2log).all()
            # What is acknowledged was saved before.
            [(record, placement)] = fleet.swaps[rank]
            assert placement == NEW and record.epoch == 1 and record.received_bytes > 0
            assert record.layers == prepare.body.layers
            assert 0 <= record.seconds < time.monotonic() - began
    # Slot 2 of rank 0 was empty: its memory was set aside before the vote; nothing was emptied.
    assert fleet.weights[0].reserved == [(0, 2), (1, 2)] and fleet.weights[0].released == []


def test_emptied_slots_are_given_back_after_the_swap_only():
    """R11: memory a wave frees cannot serve that wave."""
    with Fleet(OLD) as fleet:
        fleet.commit(prepare_for(OLD, NEW))
        back = prepare_for(NEW, OLD, plan="back", epoch=1)
        fleet.prepare(back)
        assert fleet.weights[0].released == []
        fleet.say(Commit(LEADER, back.wave))
        for link in fleet.links:
            assert int(link.expect(Ack).epoch) == 2
        assert fleet.weights[0].released == [(0, 2), (1, 2)]
        assert all(weights.holds(OLD) for weights in fleet.weights)


def test_commit_only_arms_and_one_unarmed_rank_holds_all():
    """R5: nothing changes until the gate shows every rank armed."""
    prepare = prepare_for(OLD, NEW)
    with Fleet(OLD) as fleet:
        fleet.prepare(prepare)
        fleet.say(Commit(LEADER, prepare.wave), ranks=[0])
        fleet.wait_steps(15)
        assert fleet.links[0].nothing(Ack)
        assert all(weights.holds(OLD) for weights in fleet.weights)
        fleet.say(Commit(LEADER, prepare.wave), ranks=[1])
        for link in fleet.links:
            assert int(link.expect(Ack).epoch) == 1
        assert all(weights.holds(NEW) for weights in fleet.weights)


def test_abort_leaves_everything_as_it_was_and_the_next_wave_runs():
    """R7: the answer reports the drain, and staging serves the next wave."""
    prepare = prepare_for(OLD, NEW)
    with Fleet(OLD) as fleet:
        fleet.prepare(prepare)
        answers = abort(fleet, prepare)
        assert {answer.outcome for answer in answers} == {WaveOutcome.DROPPED}
        assert all(weights.holds(OLD) for weights in fleet.weights)
        assert fleet.weights[0].released == fleet.weights[0].reserved == [(0, 2), (1, 2)]
        fleet.commit(prepare_for(OLD, NEW, plan="again"))
        assert all(weights.holds(NEW) for weights in fleet.weights)


def test_wrong_bytes_make_the_receiver_vote_no_and_name_the_expert():
    """R4: the receiver detects weights that changed on the sender after loading."""
    prepare = prepare_for(OLD, NEW)
    with Fleet(OLD) as fleet:
        # Expert 2 of layer 1 lives on rank 1 in local slot 0 and goes to rank 0.
        fleet.weights[1].slots[1, 0][0].view(torch.uint8)[3, 5] ^= 1
        fleet.say(prepare)
        vote = fleet.links[0].expect(Vote)
        assert not vote.yes and vote.reason is Reason.CHECKSUM_MISMATCH
        assert "layer 1 expert 2" in vote.detail
        assert fleet.links[1].expect(Vote).yes
        answers = abort(fleet, prepare)
        assert {answer.epoch for answer in answers} == {0}
        assert fleet.weights[0].holds(OLD)


def test_a_rank_that_cannot_reserve_votes_no_and_the_group_rebuilds_its_transfers():
    """R10: the peer's batch ends at its deadline; the gate agrees on a new communicator."""
    prepare = prepare_for(OLD, NEW, batch_deadline_s=0.5)
    with Fleet(OLD) as fleet:
        fleet.weights[0].refuse = True
        fleet.say(prepare)
        first = fleet.links[0].expect(Vote)
        assert not first.yes and first.reason is Reason.POOL_EXCEEDED
        second = fleet.links[1].expect(Vote)
        assert not second.yes and second.reason in (Reason.TRANSFER_TIMEOUT, Reason.TRANSFER_FAILED)
        abort(fleet, prepare)
        fleet.weights[0].refuse = False
        fleet.commit(prepare_for(OLD, NEW, plan="again"))
        assert all(weights.holds(NEW) for weights in fleet.weights)


def test_engine_hooks_that_raise_cost_a_no_vote_and_nothing_else():
    prepare = prepare_for(OLD, NEW, batch_deadline_s=0.5)
    with Fleet(OLD) as fleet:
        fleet.maps[1].fail_build = True
        fleet.say(prepare)
        vote = fleet.links[1].expect(Vote)
        assert not vote.yes and "no memory for tables" in vote.detail
        fleet.links[0].expect(Vote)
        abort(fleet, prepare)
        fleet.maps[1].fail_build = False
        fleet.commit(prepare_for(OLD, NEW, plan="again"))


class TornMaps(ToyMaps):
    def install(self, built):
        raise RuntimeError("half way")


def test_a_swap_that_fails_takes_the_rank_out_of_the_group():
    """R8: after the commit point a rank swaps or leaves. Its peers see the gate fail and leave."""
    prepare = prepare_for(OLD, NEW)
    fleet = Fleet(OLD, steps=False)
    fleet.agents[1]._worker._maps = TornMaps(OLD)
    with fleet:
        for thread in fleet._threads:
            thread.start()
        fleet.arm(prepare)
        fleet.wait_left()
        assert fleet.left[1] is not None and "RuntimeError('half way')" in str(fleet.left[1])
        assert fleet.left[0] is not None
        assert fleet.left[0].reason is Reason.GATE_FAILED
        with pytest.raises(type(fleet.left[1])):
            fleet.agents[1].step_boundary()


def test_new_weights_need_a_permit_and_raise_the_version():
    """R4: a reload ends waves of the old version; checksums follow the new weights."""
    prepare = prepare_for(OLD, NEW)
    with Fleet(OLD) as fleet:
        fleet.say(QueryState(LEADER))
        fleet.prepare(prepare)
        permits = [agent.request_reload() for agent in fleet.agents]
        assert all(permit.wait(deadline(20)) for permit in permits)
        fleet.wait_steps(6)
        fleet.say(Commit(LEADER, prepare.wave))
        fleet.wait_steps(9)
        assert all(weights.holds(OLD) for weights in fleet.weights)
    # The ranks stand at the same boundary: the collective part of the reload.
    reload(fleet, versions=(1, 1))
    hello = fleet.agents[0].hello()
    assert hello.weights_version == 2 and "migrate" in hello.capabilities
    assert hello.checksums_digest == fleet.agents[1].hello().checksums_digest
    experts = [(layer, expert) for layer in range(2) for expert in range(4)]
    loaded = [checksum(expert_tensors(*key, version=1)) for key in experts]
    assert hello.checksums_digest == checksums_digest(loaded)


def reload(fleet, versions):
    """Load new bytes into every slot between two boundaries; `versions` by rank."""
    for rank, version in enumerate(versions):
        fleet.weights[rank].slots = ToyWeights(fleet.old, rank, version=version).slots
    run_ranks(fleet.size, lambda rank: fleet.agents[rank].finish_reload(2))


def test_a_reload_without_checksums_is_reported_with_every_heartbeat():
    """R4: no copies of replicas that differ, though the Hello of the open stream offers them."""
    with Fleet(NEW, steps=False) as fleet:  # Expert 3 lies on both ranks.
        assert [agent.heartbeat().trouble for agent in fleet.agents] == ["", ""]
        reload(fleet, versions=(1, 2))
        for agent in fleet.agents:
            assert agent.observe_only and agent.trouble == agent.heartbeat().trouble
            assert agent.trouble == (
                "after loading weights 2: replicas of 2 experts differ in their bytes, first:"
                " layer 0 expert 3 on rank 1"
            )
            assert agent.hello().checksums_digest == checksums_digest(())
        reload(fleet, versions=(3, 3))  # Version 2 again, and sound now.
        assert not any(agent.trouble or agent.observe_only for agent in fleet.agents)
        assert all(agent._participant.checksums for agent in fleet.agents)


def test_an_error_of_the_agent_is_reported_with_every_heartbeat():
    """R9: the rank keeps polling and refuses waves, and it must report why."""
    with Fleet(OLD) as fleet:
        fleet.agents[0].feed("no event at all")
        fleet.agents[1]._participant.snapshot = None
        fleet.wait_steps(10)
        first, second = (agent.heartbeat().trouble for agent in fleet.agents)
        assert first.startswith("the agent failed at str: IllegalEvent(")
        assert second.startswith("the agent failed at the gate: snapshot of toy: TypeError(")
        assert len(fleet.agents[1]._gate.faults) <= 1, "each is told once"
        assert fleet.agents[0].observe_only and fleet.agents[1].observe_only


def test_heartbeats_go_on_when_the_free_memory_is_unknown(monkeypatch):
    """Without heartbeats the rank would count as lost, so they repeat the last known value."""

    def silent(device):
        raise RuntimeError("the driver does not answer")

    with Fleet(OLD, steps=False) as fleet:
        agent = fleet.agents[0]
        before = agent.heartbeat().free_bytes
        monkeypatch.setattr("evenkeel_moe.agent.memory.free_bytes", silent)
        assert agent.heartbeat().free_bytes == before > 0
        assert agent.trouble == ""


def test_recorded_steps_and_progress_reach_the_controller():
    with Fleet(OLD) as fleet:
        fleet.register()
        counts = np.arange(6, dtype=np.int64).reshape(2, 3)
        for step in range(5):
            fleet.agents[0].record(step, counts * step, epoch=0, tokens=step, phase=Phase.DECODE)
        got: list[tuple[int, int]] = []
        while len(got) < 5:
            report = fleet.links[0].expect(LoadReport)
            got += [
                (int(meta["step"]), int(row.sum()))
                for meta, row in zip(report.steps, report.counts, strict=True)
            ]
        assert got == [(step, 15 * step) for step in range(5)]
        commit_later = prepare_for(OLD, NEW)
        fleet.say(commit_later)
        progress = fleet.links[0].expect(
            StagingProgress, where=lambda p: p.bytes_done == p.bytes_total
        )
        assert progress.bytes_total > 0


def test_ranks_that_disagree_on_the_gate_only_observe():
    """R9: the ranks agree on a digest of K and D at the start."""

    def make(fleet, rank):
        return fleet.config(rank, poll_every=3 + rank)

    with Fleet(OLD, make_config=make) as fleet:
        assert all(agent.observe_only for agent in fleet.agents)
        assert fleet.agents[0].hello().capabilities == frozenset()
        fleet.say(prepare_for(OLD, NEW))
        vote = fleet.links[0].expect(Vote)
        assert not vote.yes and vote.reason is Reason.OBSERVE_ONLY
        fleet.wait_steps(10)


# --- Experts that an agent cannot move as a whole are refused by name, before anything starts -----


def test_a_name_that_no_controller_accepts_is_refused():
    identity = identity_of(0, "My Model!")
    with pytest.raises(InvalidInput, match=r"deployment 'My Model!' is not \[a-z0-9\]"):
        AgentConfig(identity, shape_of(OLD), "node")


def test_experts_divided_by_tensor_parallelism_are_refused_with_the_number():
    with pytest.raises(InvalidInput, match=r"toy: .*over 4 ranks \(expert_shards=4\)"):
        Fleet(OLD, make_config=lambda fleet, rank: fleet.config(rank, expert_shards=4))


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (2, "2 times as many"),
        (0.5, f"have {EXPERT_BYTES} bytes"),
        (0, "bytes_per_expert is 0$"),
    ],
)
def test_tensors_that_are_not_a_whole_expert_are_refused(times, said):
    """An engine that forgot to say it, or the limits of a wave would be wrong."""

    def make(fleet, rank):
        shape = replace(shape_of(OLD), bytes_per_expert=int(EXPERT_BYTES * times))
        return fleet.config(rank, shape=shape)

    with pytest.raises(InvalidInput, match=said):
        Fleet(OLD, make_config=make)


def test_adapters_on_experts_are_refused_unless_their_tensors_are_declared():
    def make(lora):
        return lambda fleet, rank: fleet.config(rank, lora=lora)

    with pytest.raises(InvalidInput, match=r"lora=not_declared"):
        Fleet(OLD, make_config=make(LoraOnExperts.NOT_DECLARED))
    with Fleet(OLD, make_config=make(LoraOnExperts.DECLARED), steps=False) as fleet:
        assert not any(agent.observe_only for agent in fleet.agents)


# --- The controller is told of a swap only once its placement is saved, whatever it asks ----------


class SlowDisk(Fleet):
    """Ranks whose disk takes a placement only after `free` is set."""

    def __init__(self, *args, **kwargs):
        self.free = threading.Event()
        super().__init__(*args, **kwargs)

    def save(self, rank, record, placement):
        assert self.free.wait(deadline(30))
        super().save(rank, record, placement)


def test_no_answer_names_the_new_epoch_before_its_placement_is_saved():
    """A group that restarts now comes back on the old placement."""
    prepare = prepare_for(OLD, NEW)
    with SlowDisk(OLD) as fleet:
        try:
            fleet.arm(prepare)
            wait_until(lambda: all(agent.epoch == 1 for agent in fleet.agents), what="the swap")
            fleet.say(Commit(LEADER, prepare.wave))
            fleet.say(QueryState(LEADER, want_placement=True, query=7))
            fleet.say(Abort(LEADER, prepare.wave))
            fleet.say(prepare)
            fleet.wait_steps(10)
            for rank, link in enumerate(fleet.links):
                assert link.nothing((Ack, RankState, AbortAnswer))
                hello = fleet.agents[rank].hello()
                assert (hello.epoch, hello.placement_digest) == (0, OLD.digest)
                assert not fleet.swaps[rank]
        finally:
            fleet.free.set()
        for rank, link in enumerate(fleet.links):
            assert link.expect(Ack).epoch == 1
            assert link.expect(RankState).epoch == 1
            assert fleet.swaps[rank], "saved before"
            hello = fleet.agents[rank].hello()
            assert (hello.epoch, hello.placement_digest) == (1, NEW.digest)


class FullDisk(Fleet):
    """Ranks of which the second cannot save a placement."""

    def save(self, rank, record, placement):
        if rank == 1:
            raise OSError("no space left")


def test_a_placement_that_could_not_be_saved_is_a_trouble():
    """R3: a restart would lead back over the epoch that the rank names."""
    with FullDisk(OLD) as fleet:
        assert [ack.epoch for ack in fleet.commit(prepare_for(OLD, NEW))] == [1, 1]
        assert fleet.agents[0].trouble == ""
        assert "the placement of epoch 1 was not saved" in fleet.agents[1].trouble
        assert "no space left" in fleet.agents[1].trouble


# --- network thread -------------------------------------------------------------------------------


class OnceUnreadable(Recorder):
    """Its first take fails."""

    failed = False

    def take(self, *arguments):
        if self.waiting and not self.failed:
            self.failed = True
            raise RuntimeError("a step like no other")
        return super().take(*arguments)


def test_a_last_message_that_nobody_takes_does_not_hold_the_engine_up(monkeypatch):
    class Stuck(PortLink):
        async def finish(self, message):
            await asyncio.Event().wait()

    monkeypatch.setattr(network_thread, "_LAST_MESSAGE_S", 0.01)
    link, side = Stuck(), CountingSide.DESTINATION
    thread = network_thread.NetworkThread(link, Recorder(8, 1, 1), identity_of(0), side)
    thread.start(Listener(None))
    assert link.ready.wait(deadline(10))
    thread.close(planned=True, timeout_s=deadline(10))
    assert not any(one.name == "evenkeel-link" for one in threading.enumerate())


def test_a_report_that_fails_does_not_end_the_reporter(monkeypatch):
    monkeypatch.setattr(network_thread, "_RESTART_AFTER_S", 0.01)
    recorder, link = OnceUnreadable(8, 1, 1), PortLink()
    thread = network_thread.NetworkThread(link, recorder, identity_of(0), CountingSide.DESTINATION)
    listener: Any = None
    with structlog.testing.capture_logs() as logs:
        thread.start(listener)
        try:
            assert link.ready.wait(deadline(10))
            recorder.record(0, np.array([[1]]), 0, 1, Phase.DECODE)
            thread._loop.call_soon_threadsafe(thread.reporter.registered, FlowControl(0.01), None)
            assert link.expect(LoadReport).steps["step"].tolist() == [0]
        finally:
            thread.close()
    assert [log["event"] for log in logs] == ["reporter_failed"]


# --- The clock of the device is told at first and whenever it has changed -------------------------


class Readings:
    """Gives one reading after the other, then none."""

    def __init__(self, *readings):
        self.left, self.ended = list(readings), asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def read(self):
        if self.left:
            return self.left.pop(0)
        self.loop.call_soon_threadsafe(self.ended.set)
        return None


async def told_of(*readings):
    told: list[DeviceClock] = []
    reader = Readings(*readings)
    task = asyncio.create_task(watch_clock(reader, told.append, every_s=0.0))
    await asyncio.wait_for(reader.ended.wait(), 20)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return told


FALLING = [DeviceClock(0.95 - 0.01 * step) for step in range(5)]
USUAL, RIPPLE, LOWER = DeviceClock(0.95), DeviceClock(0.96), DeviceClock(0.80, "heat")


@pytest.mark.parametrize(
    ("readings", "told"),
    [
        ([USUAL, RIPPLE, USUAL, LOWER, LOWER], [USUAL, LOWER]),
        (FALLING, FALLING[::2]),
        (
            [DeviceClock(0.9), DeviceClock(0.9, "power")],
            [DeviceClock(0.9), DeviceClock(0.9, "power")],
        ),
        ([None, None], []),
    ],
    ids=["only changes", "a slow fall in steps", "what limits the same clock", "an idle device"],
)
async def test_the_clock_is_told_when_it_has_changed(readings, told):
    assert await told_of(*readings) == told
