"""The reference engine grows and shrinks under a real controller."""

import pytest

from tests.integration.whole import whole

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]
SIZES = {"num_ranks": 4, "layers": 3, "experts": 8, "slots_per_rank": 6, "pool_slots_per_layer": 4}
SETTINGS = {"MIGRATION__MAX_BYTES_PER_S": 10_000_000}


def settled(served, fleet, ranks):
    """Return what the controller says if all ranks of a group of this size are at its epoch."""
    fleet.poll()
    status = served.status()
    if status is None or status["state"] != "ready" or status["shape"]["num_ranks"] != ranks:
        return None
    told = [rank["epoch"] for rank in status["ranks"] if rank["fresh"]]
    return status if told == [status["epoch"]] * ranks else None


def resize(fleet, served, *args):
    fleet.supervisor.resize(*args)

    def ended():
        fleet.poll()
        return fleet.supervisor.resized

    outcome = served.wait(ended, 60, "the new group")
    assert not outcome.failed, outcome
    return outcome


def test_a_fleet_grows_and_shrinks_and_the_controller_fills_and_empties_ranks(tmp_path):
    with whole(tmp_path, SETTINGS, SIZES) as (served, fleet):
        served.wait(lambda: settled(served, fleet, 4), 60, "four ranks")
        served.wait(lambda: fleet.newest_step() > 100, 60, "steps")
        before = served.wait(lambda: settled(served, fleet, 4), 30, "four ranks at rest")
        pids = fleet.supervisor.pids
        resize(fleet, served, 6)
        after = served.wait(lambda: settled(served, fleet, 6), 60, "six ranks")
        assert after["epoch"] > before["epoch"] and after["window_steps"] > 0

        def filled():
            used = fleet.supervisor._placement().used_per_rank()
            return settled(served, fleet, 6) and (used > 0).all()

        served.wait(filled, 60, "experts on the ranks that joined")
        asked = served.post("/resize", {"retire": [4, 5, 1]})
        assert asked.is_success, asked.text
        served.wait(lambda: (fleet.poll(), served.get("/resize")["ready"])[1], 60, "evacuation")
        resize(fleet, served, 3, (1, 4, 5))
        served.wait(lambda: settled(served, fleet, 3), 60, "three ranks")
        assert fleet.supervisor.pids == (pids[0], pids[2], pids[3])
        goal = fleet.newest_step() + 50
        served.wait(lambda: fleet.newest_step() > goal, 60, "steps of three ranks")
        report = fleet.finish()
        assert report.ok and report.restarts == 0 and report.retired == (0, 0, 0), report
        assert fleet.mismatches == 0


def test_a_dead_rank_takes_no_expert_with_it_where_placements_survive(tmp_path):
    settings = {**SETTINGS, "PLANNER__POLICY": "keel"}
    with whole(tmp_path, settings, {**SIZES, "shrinks": True}) as (served, fleet):
        served.wait(lambda: settled(served, fleet, 4), 60, "four ranks")
        served.patch_policy(policy_options={"keel": {"survive": "rank"}})
        served.wait(lambda: fleet.newest_step() > 100, 60, "steps")

        def nothing_alone():
            if settled(served, fleet, 4):
                served.post("/plans", {"start": True})
            return (fleet.supervisor._placement().only_rank == -1).all()

        served.wait(nothing_alone, 90, "two replicas of every expert")
        served.wait(lambda: settled(served, fleet, 4), 60, "the end of the plan")
        fleet.supervisor.kill_rank(1)
        outcome = served.wait(
            lambda: (fleet.poll(), fleet.supervisor.resized)[1], 60, "the group without rank 1"
        )
        assert not outcome.failed and outcome.recovered == 0, outcome
        status = served.wait(lambda: settled(served, fleet, 3), 60, "three ranks")
        assert status["window_steps"] > 0
        report = fleet.finish()
        assert report.ok and report.restarts == 0, report
        assert fleet.mismatches == 0
