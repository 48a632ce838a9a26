"""A group loses ranks and gains some, under one controller that keeps what it knows."""

from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.schedule.width_change import holders, stranded
from evenkeel_moe.protocol.messages import Lineage
from evenkeel_moe.wire.link import RegistrationOutcome
from tests.integration.controller_rig import Controller, Group
from tests.waiting import until

pytestmark = pytest.mark.integration
RESIZE = "/v1/deployments/demo/resize"


def successor(group, former, generation):
    """Return the group that follows: of each of its ranks the former number, None for who joins."""
    width = group.shape.slots_per_rank
    rows = group.placement.phy2log.reshape(group.shape.num_layers, group.shape.num_ranks, width)
    joins = np.full((group.shape.num_layers, width), EMPTY, np.int32)
    kept = [joins if rank is None else rows[:, rank] for rank in former]
    shape = replace(group.shape, num_ranks=len(former))
    after = Group(shape=shape, generation=generation)
    after.popularity = group.popularity
    after.placement = Placement(np.concatenate(kept, axis=1), len(former), 8)
    after.epoch, after.step = Epoch(group.epoch + 1), group.step
    for rank, before in zip(after.ranks, former, strict=True):
        rank.epoch, rank.placement = after.epoch, after.placement
        rank.came_from = Lineage(group.generation, None if before is None else EpRank(before))
    return after


async def take_over(before, after, controller):
    """End the streams of a group, and connect the one that follows as soon as it is let in."""
    for rank in before.ranks:
        await rank.close()

    async def let_in():
        for rank in after.ranks:
            await rank.connect(controller.address)
        outcomes = {getattr(rank.answer, "outcome", None) for rank in after.ranks}
        if outcomes == {RegistrationOutcome.ACCEPTED}:
            return True
        for rank in after.ranks:
            await rank.close()
        return False

    await until(let_in, within_s=20)
    await until(lambda: controller.state("ready"))


async def ready(controller):
    return (await controller.http.get(RESIZE)).json()["ready"]


async def test_ranks_retire_and_others_join_and_the_window_goes_on(tmp_path):
    environment = {"PLANNER__MODE": "auto"}
    async with Controller(tmp_path, **environment) as controller, Group() as group:
        http = controller.http
        assert (await http.get(RESIZE)).status_code == 404
        await group.join(controller)
        await group.serve(64)
        asked = {"to_ranks": 3, "from_ranks": 4, "plan_id": "evacuate"}
        wrong = await http.post(RESIZE, json=asked | {"from_ranks": 5})
        assert (wrong.status_code, wrong.json()["reason"]) == (409, Reason.STALE_BASE)
        begun = await http.post(RESIZE, json=asked)
        assert begun.status_code == 202, begun.json()
        (retired,) = begun.json()["retire"]
        again = await http.post(RESIZE, json=asked)
        assert (again.status_code, again.json()["retire"]) == (202, [retired]), again.json()
        await until(lambda: ready(controller), within_s=30)
        as_many = await http.post(RESIZE, json={"to_ranks": 3})
        assert as_many.json()["retire"] == [retired], "another rank may have as few experts now"
        assert len([p for p in await controller.plans() if p["kind"] == "evacuation"]) <= 1
        assert stranded(holders(group.placement), [retired]) == 0
        other = await http.post(RESIZE, json={"retire": [(retired + 1) % 4]})
        assert (other.status_code, other.json()["reason"]) == (409, Reason.RESIZING)
        by_hand = await http.post("/v1/deployments/demo/plans", json={"approve": True})
        assert (by_hand.status_code, by_hand.json()["reason"]) == (409, Reason.RESIZING)
        before = await controller.status()
        assert before["resize"]["words"].startswith(f"Ranks {retired} of 4 are ready to retire")

        former = [rank for rank in range(4) if rank != retired]
        async with successor(group, former, "g-2") as smaller:
            await take_over(group, smaller, controller)
            status = await controller.status()
            assert status["resize"] is None
            assert (status["epoch"], status["shape"]["num_ranks"]) == (smaller.epoch, 3)
            assert status["window_steps"] == before["window_steps"], "loads of experts carry over"
            assert status["balancedness_mean"] is not None
            rows = (await http.get("/v1/deployments/demo/epochs")).json()["items"]
            assert not any(row["replaced"] for row in rows)
            back = await http.post("/v1/deployments/demo/rollback", json={"to_epoch": 0})
            assert (
                back.status_code == 422 and "(3, 12, 4, 8), the group is" in back.json()["detail"]
            )
            await smaller.serve(32)

            async with successor(smaller, [0, 1, 2, None, None], "g-3") as larger:
                await take_over(smaller, larger, controller)
                larger.serve_on()
                await until(lambda: larger.epoch > smaller.epoch + 1, within_s=60)
                held = holders(larger.placement)
                assert held[:, :, 3:].any(axis=1).all(), "who joined holds experts of every layer"
                assert larger.placement.logcnt.min() >= 1
        assert not controller.failures()


REFUSED = (
    ({}, "name the number of ranks that stay, or the ranks that retire"),
    ({"to_ranks": 3, "retire": [1]}, "name the number"),
    ({"to_ranks": 4}, "4 of 4 ranks cannot stay"),
    ({"to_ranks": 9}, "9 of 4 ranks cannot stay"),
    ({"retire": [4]}, "ranks 4 do not exist: the group has the ranks 0 to 3"),
    ({"retire": [1, 1]}, "named twice"),
    ({"retire": [0, 1, 2, 3]}, "one must stay"),
    ({"to_ranks": 2}, "2 ranks x 3 slots = 6 slots cannot hold 8 experts"),
    ({"to_ranks": 3, "whole_nodes": True}, "1 ranks to retire are not whole nodes"),
    ({"retire": [1], "whole_nodes": True}, "node 0 would not retire as a whole: ranks 0 of it"),
)


async def test_what_cannot_be_is_refused_with_the_numbers_and_nothing_moves(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="observe") as controller, Group() as group:
        await group.join(controller)
        await group.serve(16)
        for asked, words in REFUSED:
            answer = await controller.http.post(RESIZE, json=asked)
            assert answer.status_code == 422, answer.json()
            assert words in answer.json()["detail"]
        assert (await controller.http.get(RESIZE)).status_code == 404
        assert group.epoch == 0 and not await controller.plans()


async def test_an_evacuation_is_not_bound_by_the_limits_of_the_policy(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="observe") as controller, Group() as group:
        await group.join(controller)
        await group.serve(16)
        policy = "/v1/deployments/demo/policy"
        answer = await controller.http.patch(policy, json={"limits": {"max_moves": 0}})
        assert answer.status_code == 200, answer.json()
        alone = stranded(holders(group.placement), [0])
        assert alone > 0
        answer = await controller.http.post(RESIZE, json={"retire": [0]})
        assert answer.status_code == 202, answer.json()
        await until(lambda: ready(controller), within_s=30)
        assert stranded(holders(group.placement), [0]) == 0 and group.epoch > 0


async def test_an_evacuation_that_has_ended_is_not_repeated_under_its_id(tmp_path):
    async with Controller(tmp_path, PLANNER__MODE="observe") as controller, Group() as group:
        await group.join(controller)
        await group.serve(16)
        http, asked = controller.http, {"retire": [2], "plan_id": "evacuate"}
        assert (await http.post(RESIZE, json=asked)).status_code == 202
        await until(lambda: ready(controller), within_s=30)
        again = await http.post(RESIZE, json=asked)
        assert (again.status_code, again.json()["ready"]) == (202, True)
        await http.post("/v1/deployments/demo/resume")
        back = await http.post("/v1/deployments/demo/rollback", json={"to_epoch": 0})
        assert back.status_code == 202, back.json()
        await until(lambda: stranded(holders(group.placement), [2]) > 0, within_s=30)
        await until(lambda: controller.state("ready"))
        again = await http.post(RESIZE, json=asked)
        assert (again.status_code, again.json()["reason"]) == (409, Reason.WRONG_PHASE)
        assert "experts live on ranks 2 alone: name another plan_id" in again.json()["detail"]
        assert (await http.post(RESIZE, json={"retire": [2]})).status_code == 202
        await until(lambda: ready(controller), within_s=30)
