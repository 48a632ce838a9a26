"""Reports wait, are stored, and start again with a new generation of the group."""

import asyncio
import dataclasses
from collections import Counter

import numpy as np
import pytest

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.controller.ingest.waiting_reports import IncompleteGroups
from evenkeel_moe.errors import PeerViolation, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.load import CountingSide, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from tests.contracts.memory_store import MemoryStore
from tests.controller.replicas import make_ingest
from tests.telemetry.reports import EPOCH, PLACEMENT, SHAPE, Fleet

DEMO, GENERATION = DeploymentId("demo"), Generation("g")


class Rig:
    """An Ingest over a store in memory that can be made to fail."""

    def __init__(self, store=None, incomplete=None):
        self.store = store or MemoryStore(SystemClock(), capacity=50)
        self.rejected: Counter[Reason] = Counter()
        self.dropped: Counter[int] = Counter()
        self.accepted = 0
        self.answers = []
        self.ingest = make_ingest(
            self,
            accepted=self._accept,
            rejected=lambda reason, steps: self.rejected.update({reason: steps}),
            dropped=lambda rank, steps: self.dropped.update({rank: steps}),
            incomplete=incomplete or IncompleteGroups(),
        )
        self.down = False
        self.appended = []

    def _accept(self, steps):
        self.accepted += steps

    async def append(self, deployment, phase, *parts):
        if self.down:
            raise Unavailable("down")
        self.appended.append(sum(map(len, parts)))
        await self.store.append(deployment, phase, *parts)

    async def fetch(self, *arguments):
        return await self.store.fetch(*arguments)

    async def forget(self, deployment):
        await self.store.forget(deployment)

    def begin(self, generation=GENERATION):
        self.ingest.begin_generation(generation, SHAPE)
        self.ingest.settle(EPOCH, PLACEMENT)

    def report(self, run, **options):
        for rank in range(3):
            self.ingest.take(run.report(rank, **options), self.answers.append)

    def steps(self):
        window = self.ingest.windows(50).get(Phase.DECODE)
        return [] if window is None else window.steps.tolist()


@pytest.fixture
def rig():
    return Rig()


def test_complete_steps_enter_the_window(rig):
    rig.begin()
    rig.report(Fleet().run(range(5)))
    assert rig.steps() == list(range(5))
    assert rig.accepted == 15
    assert rig.ingest.newest_step == 4
    assert rig.ingest.newest_at is not None
    assert [ack.highest_step for ack in rig.answers] == [4, 4, 4]
    assert rig.ingest.highest_step(EpRank(1), GENERATION) == 4
    assert rig.ingest.highest_step(EpRank(1), Generation("other")) is None


def test_reports_wait_until_the_map_is_known(rig):
    rig.report(Fleet().run(range(5)))
    rig.ingest.begin_generation(GENERATION, SHAPE)
    assert rig.answers == []
    rig.ingest.settle(EPOCH, PLACEMENT)
    assert len(rig.answers) == 3
    assert rig.steps() == list(range(5))
    rig.ingest.unsettle()
    rig.report(Fleet().run(range(5, 8)))
    assert rig.steps() == list(range(5))
    rig.ingest.settle(EPOCH, PLACEMENT)
    assert rig.steps() == list(range(8))


def test_what_waits_is_bounded(rig):
    fleet = Fleet()
    for step in range(70):
        rig.ingest.take(fleet.run([step]).report(0), rig.answers.append)
    assert rig.rejected == {Reason.UNKNOWN_EPOCH: 6}
    assert [ack.highest_step for ack in rig.answers] == list(range(6))


def test_steps_of_another_generation_are_refused(rig):
    rig.begin(Generation("g-2"))
    rig.report(Fleet().run(range(4)))
    assert rig.rejected == {Reason.UNKNOWN_GENERATION: 12}
    assert rig.steps() == []
    assert rig.answers[0].highest_step == 3


def test_reports_that_waited_for_an_earlier_generation_are_not_counted_for_the_next(rig):
    rig.report(Fleet().run(range(4)))
    rig.begin(Generation("g-2"))
    assert rig.steps() == []
    assert {ack.reason for ack in rig.answers} == {Reason.UNKNOWN_GENERATION}
    assert rig.rejected == {Reason.UNKNOWN_GENERATION: 12}


def test_malformed_reports_are_counted_and_dropped(rig):
    ack = rig.ingest.malformed(EpRank(1), PeerViolation("x", Reason.BAD_LENGTH), (4, 5, 1 << 63))
    assert (ack.highest_step, ack.rejected_steps, ack.reason) == (5, 3, Reason.BAD_LENGTH)
    for nothing in ((), (-5,)):
        assert rig.ingest.malformed(EpRank(1), PeerViolation("x"), nothing).highest_step is None
    assert rig.rejected == {Reason.BAD_LENGTH: 3, Reason.MALFORMED: 2}
    assert rig.ingest.quarantine.samples(Reason.BAD_LENGTH) == ((1, "x"),)


@pytest.mark.parametrize("settled", [True, False])
def test_dropped_steps_of_a_report_that_is_sent_again_are_counted_once(rig, settled):
    """After a reconnect a rank repeats its unacknowledged reports, which may then wait twice."""
    if settled:
        rig.begin()
    run = Fleet().run(range(2))
    for _ in range(3):
        rig.ingest.take(dataclasses.replace(run.report(2), dropped_steps=500), rig.answers.append)
    rig.begin()
    assert rig.dropped == {2: 500}
    later = dataclasses.replace(Fleet().run(range(2, 4)).report(2), dropped_steps=30)
    nothing_left = dataclasses.replace(Fleet().run([]).report(2), dropped_steps=1)
    for report in (later, nothing_left):
        rig.ingest.take(report, rig.answers.append)
    assert rig.dropped == {2: 531}, "a report without steps is sent once"


def test_dropped_steps_of_reports_that_are_not_used_are_counted_too(rig):
    def lost(generation, steps):
        report = Fleet().run(steps).report(1)
        return dataclasses.replace(report, generation=generation, dropped_steps=1)

    for step in range(70):  # Six more than may wait.
        rig.ingest.take(lost(GENERATION, [step]), rig.answers.append)
    rig.begin(Generation("g-2"))
    assert rig.dropped == {1: 70}
    rig.ingest.take(lost(GENERATION, [70]), rig.answers.append)
    assert rig.dropped == {1: 71}


@pytest.mark.parametrize("settled_before", [True, False])
async def test_source_sums_taken_back_are_not_added_up_again_from_reports_sent_again(
    rig, settled_before
):
    """A new leader does not know which reports were taken: the stored window has their sums."""
    runs = [Fleet(seed).run(range(5 * seed, 5 * seed + 5)) for seed in range(3)]
    rig.begin()
    for run in runs[:2]:
        rig.report(run, side=CountingSide.SOURCE)
    await rig.ingest.store()
    leader = Rig(rig.store)
    if settled_before:  # It led this generation before the other replica did.
        leader.begin()
    await leader.ingest.restore(GENERATION, SHAPE)
    leader.begin()
    for run in runs[1:]:
        leader.report(run, side=CountingSide.SOURCE)
    want = sum(run.routed.sum(axis=0) for run in runs)
    assert leader.steps() == list(range(15))
    assert (leader.ingest.windows(50)[Phase.DECODE].source == want).all()


async def test_steps_are_stored_once_and_kept_while_the_store_is_away(rig):
    rig.begin()
    rig.report(Fleet().run(range(5)))
    await rig.ingest.store()
    await rig.ingest.store()
    assert rig.appended == [5]
    rig.down = True
    for first in range(5, 205, 10):
        rig.report(Fleet().run(range(first, first + 10)))
        with pytest.raises(Unavailable):
            await rig.ingest.store()
    rig.down = False
    await rig.ingest.store()
    stored = await rig.store.fetch(DEMO, Phase.DECODE, SHAPE, 50)
    assert stored.steps.tolist() == rig.steps() == list(range(155, 205))
    assert rig.appended[1] <= 60, "no more is kept for the store than a window holds"


async def test_a_write_that_is_cancelled_loses_no_steps(rig):
    rig.begin()
    rig.report(Fleet().run(range(5)))
    append = rig.append

    async def silent(deployment, phase, steps):
        await asyncio.Event().wait()

    rig.append = silent
    writing = asyncio.create_task(rig.ingest.store())
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    rig.append = append
    await rig.ingest.store()
    assert (await rig.store.fetch(DEMO, Phase.DECODE, SHAPE, 50)).steps.tolist() == list(range(5))


async def test_a_window_comes_back_for_the_same_generation_only(rig):
    rig.begin()
    rig.report(Fleet().run(range(20)))
    rig.report(Fleet(1).run(range(20, 30)), side=CountingSide.SOURCE)
    await rig.ingest.store()
    same, other = Rig(rig.store), Rig(rig.store)
    assert await same.ingest.restore(GENERATION, SHAPE) == 30
    assert same.ingest.newest_step == 29
    same.begin()
    same.report(Fleet().run(range(25, 33)))
    assert same.steps() == list(range(33))
    window = same.ingest.windows(50)[Phase.DECODE]
    assert window.source is not None
    assert window.source.sum() > 0

    assert await other.ingest.restore(Generation("g-0"), SHAPE) == 30
    other.begin()
    assert other.steps() == []
    other.report(Fleet().run(range(3)))
    await other.ingest.store()
    stored = await rig.store.fetch(DEMO, Phase.DECODE, SHAPE, 50)
    assert stored.steps.tolist() == [0, 1, 2]


async def test_a_window_taken_back_is_not_dropped_for_a_generation_left_before(rig):
    rig.begin()
    rig.report(Fleet().run(range(20)))
    await rig.ingest.store()
    standby = Rig(rig.store)
    standby.begin(
        Generation("g-0")
    )  # Another replica led, and the group restarted, before this one stored it.
    assert await standby.ingest.restore(GENERATION, SHAPE) == 20
    standby.begin()
    standby.report(Fleet().run(range(20, 25)))
    await standby.ingest.store()
    assert (await rig.store.fetch(DEMO, Phase.DECODE, SHAPE, 50)).steps.tolist() == list(range(25))


@pytest.mark.parametrize("fails", [False, True])
async def test_a_generation_that_begins_while_steps_are_stored_is_stored_itself(rig, fails):
    rig.begin()
    for phase in (Phase.PREFILL, Phase.DECODE):
        first = 100 if phase is Phase.PREFILL else 1000
        rig.report(Fleet().run(range(first, first + 5), phase=phase))
    append, began = rig.append, []

    async def slow(deployment, phase, steps):
        if not began:
            began.append(phase)
            rig.begin(Generation("g-2"))
            if fails:
                raise Unavailable("down")
        await append(deployment, phase, steps)

    rig.append = slow
    if fails:
        with pytest.raises(Unavailable):
            await rig.ingest.store()
    else:
        await rig.ingest.store()
    for phase in (Phase.PREFILL, Phase.DECODE):
        run = Fleet().run(range(7) if phase is Phase.PREFILL else range(7, 14), phase=phase)
        for rank in range(3):
            report = dataclasses.replace(run.report(rank), generation=Generation("g-2"))
            rig.ingest.take(report, rig.answers.append)
    await rig.ingest.store()
    assert (await rig.store.fetch(DEMO, Phase.PREFILL, SHAPE, 50)).steps.tolist() == list(range(7))
    assert (await rig.store.fetch(DEMO, Phase.DECODE, SHAPE, 50)).steps.tolist() == list(
        range(7, 14)
    )


async def test_a_stored_window_of_another_shape_is_left_alone(rig):
    rig.begin()
    rig.report(Fleet().run(range(4)))
    await rig.ingest.store()
    wider = dataclasses.replace(SHAPE, num_layers=3)
    assert await Rig(rig.store).ingest.restore(GENERATION, wider) == 0


def test_a_new_generation_begins_with_an_empty_window(rig):
    rig.begin()
    rig.report(Fleet().run(range(9)))
    rig.ingest.begin_generation(GENERATION, SHAPE)
    assert len(rig.steps()) == 9
    rig.begin(Generation("g-2"))
    assert rig.steps() == []
    assert rig.ingest.newest_step is None


LARGER = dataclasses.replace(SHAPE, num_ranks=4)
LARGER_MAP = Placement(np.pad(PLACEMENT.phy2log, ((0, 0), (0, 2)), constant_values=-1), 4, 4)


async def test_a_group_that_came_from_this_one_keeps_the_loads_of_experts_and_not_those_of_ranks(
    rig,
):
    fleet = Fleet()
    rig.begin()
    before = fleet.run(range(9))
    rig.report(before)
    await rig.ingest.store()
    rig.ingest.begin_generation(Generation("g-2"), LARGER, carries=True)
    rig.ingest.settle(EPOCH + 1, LARGER_MAP)
    assert rig.ingest.newest_step == 8

    after = Fleet(1, LARGER_MAP, LARGER).run(range(7, 12), epoch=EPOCH + 1)
    for rank in range(4):
        report = dataclasses.replace(after.report(rank), generation=Generation("g-2"))
        rig.ingest.take(report, rig.answers.append)
    assert rig.steps() == list(range(12))
    assert rig.rejected == {Reason.LATE_STEP: 8}, "steps 7 and 8 were those of the earlier group"
    window = rig.ingest.windows(50)[Phase.DECODE]
    assert (window.counts[:9] == before.load).all() and (window.counts[9:] == after.load[2:]).all()
    assert (window.tokens[:9] == -1).all() and np.isnan(window.compute_s[:9]).all()
    assert (window.tokens[9:] == after.tokens[2:]).all()

    await rig.ingest.store()
    stored = await rig.store.fetch(DEMO, Phase.DECODE, LARGER, 50)
    assert stored.steps.tolist() == list(range(12)) and stored.tokens.shape == (12, 4)


@pytest.mark.parametrize("changes", [{"num_logical_experts": 3}, {"num_layers": 1}, {"top_k": 1}])
def test_a_group_that_serves_another_model_begins_with_an_empty_window(rig, changes):
    rig.begin()
    rig.report(Fleet().run(range(9)))
    rig.ingest.begin_generation(
        Generation("g-2"), dataclasses.replace(LARGER, **changes), carries=True
    )
    assert rig.steps() == [] and rig.ingest.newest_step is None


def test_a_map_a_wave_leads_to_is_expected(rig):
    from evenkeel_moe.model.ids import Epoch

    rig.begin()
    rig.ingest.expect(Epoch(EPOCH + 1), PLACEMENT)
    run = Fleet().run(range(3), epoch=EPOCH + 1)
    rig.report(run)
    assert np.array_equal(rig.ingest.windows(50)[Phase.DECODE].counts, run.load)


def test_reports_of_all_ranks_that_wait_are_bounded_together(rig, monkeypatch):
    run = Fleet().run(range(4))
    size = run.report(0).counts.nbytes + run.report(0).steps.nbytes
    monkeypatch.setattr(
        "evenkeel_moe.controller.ingest.waiting_reports._MAX_BYTES", int(3.5 * size)
    )
    rig.ingest.begin_generation(GENERATION, SHAPE)
    for rank in (0, 0, 1, 2):
        rig.ingest.take(run.report(rank), rig.answers.append)
    # The oldest report of the rank with the most gave way. It was answered, so the rank drops it.
    assert [answer.reason for answer in rig.answers] == [Reason.UNKNOWN_EPOCH]
    assert [rank for rank, _ in rig.ingest.quarantine.samples(Reason.UNKNOWN_EPOCH)] == [0]
    rig.ingest.settle(EPOCH, PLACEMENT)
    assert rig.steps() == list(range(4)), "no other rank lost anything"


def test_reports_of_groups_without_all_ranks_are_bounded_together(monkeypatch):
    incomplete = IncompleteGroups()
    flood, honest, complete = (Rig(incomplete=incomplete) for _ in range(3))
    run = Fleet().run(range(4))
    size = run.report(0).counts.nbytes + run.report(0).steps.nbytes
    monkeypatch.setattr(
        "evenkeel_moe.controller.ingest.waiting_reports._MAX_BYTES", int(5.5 * size)
    )
    complete.ingest.begin_generation(GENERATION, SHAPE)
    for rig in (complete, complete, honest, *[flood] * 20):
        rig.ingest.take(run.report(0), rig.answers.append)
    assert len(flood.answers) == 20 - 4, "five reports wait, one of them of the honest group"
    assert not honest.answers and not complete.answers
    flood.ingest.close()
    for _ in range(4):
        honest.ingest.take(run.report(0), honest.answers.append)
    assert not honest.answers, "the reports of a deployment that ended do not count"
    honest.ingest.begin_generation(GENERATION, SHAPE)
    honest.ingest.settle(EPOCH, PLACEMENT)
    assert honest.steps() == [] and len(honest.answers) == 5, "one rank of all has reported"


def test_one_report_larger_than_the_bound_still_waits(rig, monkeypatch):
    monkeypatch.setattr("evenkeel_moe.controller.ingest.waiting_reports._MAX_BYTES", 1)
    rig.ingest.begin_generation(GENERATION, SHAPE)
    rig.ingest.take(Fleet().run(range(4)).report(0), rig.answers.append)
    assert rig.answers == []


@pytest.mark.parametrize(("layers", "kept"), [(92, 50), (1 << 16, 3)])
def test_window_of_a_large_shape_keeps_fewer_steps(rig, layers, kept):
    """Otherwise a single rank fills the memory with a shape that it alone declares."""
    rig.ingest.begin_generation(GENERATION, ModelShape(layers, 256, 1, 256, 8, 64))
    assert {ring.capacity for ring in rig.ingest.rings.values()} == {kept}
    most = 4 * layers * 256 * max(ring.capacity for ring in rig.ingest.rings.values())
    assert most <= 1 << 28
