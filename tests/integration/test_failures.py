"""A real fleet keeps serving when a process dies, and the records are correct in the end."""

import json

import psutil
import pytest

from tests.integration.whole import plans, whole

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def epochs(status) -> set[int]:
    return {rank["epoch"] for rank in status["ranks"]}


def committed(served, count=1):
    return lambda: (
        (status := served.status()) is not None
        and len(plans(served, "committed")) >= count
        and status
    )


def checked(fleet, report):
    assert report.problems == ()
    assert fleet.mismatches == 0
    assert report.codes == (0,) * fleet.config.num_ranks
    assert len(report.checks) == fleet.config.num_ranks


def test_controller_killed_in_the_middle_of_a_wave(tmp_path):
    # Throttled so that copies take seconds.
    with whole(tmp_path, {"MIGRATION__MAX_BYTES_PER_S": 150_000}) as (served, fleet):

        def copying():
            fleet.poll()
            status = served.status()
            return (
                status is not None
                and 0 < status["staging_bytes_done"] < status["staging_bytes_total"]
                and status
            )

        before = served.wait(copying, 90, "copies to be under way")
        plan_id = before["active_plan"]["plan_id"]
        window_steps = before["window_steps"]
        step = fleet.newest_step()
        served.kill()
        served.wait(
            lambda: fleet.newest_step() >= step + 40, 30, "ranks to serve on without a controller"
        )
        served.start()

        def over():
            fleet.poll()
            status = served.status()
            return status is not None and status["state"] == "ready" and status

        after = served.wait(over, 60, "recovery")
        record = served.get(f"/plans/{plan_id}")
        # The wave ended whole or not at all: every rank is at the epoch the record says.
        assert epochs(after) == {after["epoch"]}
        assert after["epoch"] == before["epoch"] + record["waves_committed"]
        assert record["phase"] in {"committed", "aborted", "migrating", "approved", "refused"}
        assert after["window_steps"] >= 0.5 * window_steps
        assert after["term"] > before["term"]
        served.wait(committed(served), 120, "a plan to commit after all")
        checked(fleet, fleet.finish())


def test_rank_killed_while_a_plan_moves(tmp_path):
    with whole(tmp_path, {"MIGRATION__MAX_BYTES_PER_S": 150_000}) as (served, fleet):

        def moving():
            fleet.poll()
            status = served.status()
            return (
                status is not None
                and status["staging_bytes_done"] > 0
                and status["active_plan"]
                and status
            )

        before = served.wait(moving, 90, "a plan to move")
        plan_id = before["active_plan"]["plan_id"]
        fleet.supervisor.kill_rank(2)

        def back():
            fleet.poll()
            status = served.status()
            return (
                status is not None
                and status["state"] == "ready"
                and status["generation"] != before["generation"]
                and status
            )

        after = served.wait(back, 90, "the restarted group")
        record = served.get(f"/plans/{plan_id}")
        assert (record["phase"], record["reason"]) == ("aborted", "generation_changed")
        assert fleet.supervisor.restarts == 1
        assert epochs(after) == {after["epoch"]}
        assert after["epoch"] == before["epoch"] + record["waves_committed"]
        assert any(
            "generation" in json.dumps(row) for row in served.get(f"/plans/{plan_id}/story")["rows"]
        )
        step = fleet.newest_step()
        served.wait(lambda: fleet.newest_step() > step + 20, 30, "the group to serve")
        fleet.supervisor.request_stop()


def test_store_goes_away_and_comes_back(tmp_path):
    with whole(tmp_path) as (served, fleet):
        served.wait(committed(served), 90, "a first plan")
        store = embedded_store(served.pid)
        store.suspend()
        try:
            step = fleet.newest_step()
            served.wait(lambda: fleet.newest_step() > step + 60, 60, "ranks to serve on")
            assert served.http.get("/healthz").is_success
            status = served.status()
            assert status is not None
            assert status["balancedness_mean"] is not None
        finally:
            store.resume()

        def deciding():
            fleet.poll()
            status = served.status()
            return status is not None and status["state"] == "ready"

        served.wait(deciding, 60, "the store's return")
        count = len(plans(served, "committed"))

        def asked():
            """As a client does it: under one id, again while the answer is to come again."""
            answer = served.post("/plans", {"plan_id": "after-the-outage", "approve": True})
            assert answer.is_success or answer.status_code == 503, answer.text
            return answer.is_success

        served.wait(asked, 60, "the plan to be taken")
        served.wait(committed(served, count + 1), 60, "a plan after the store's return")
        checked(fleet, fleet.finish())


def embedded_store(controller_pid: int) -> psutil.Process:
    children = psutil.Process(controller_pid).children(recursive=True)
    found = [child for child in children if "valkey" in child.name()]
    assert len(found) == 1, [child.cmdline() for child in children]
    return found[0]
