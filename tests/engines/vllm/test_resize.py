"""vLLM changes the number of its ranks by its own modules, and the experts go where plans say."""

import threading

import numpy as np
import pytest

from tests.engines import ranks
from tests.waiting import deadline

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
RESIZES = "tests.engines.vllm.resizes"
SLOTS = 4


@pytest.mark.parametrize("use_async", [True, False], ids=["async", "sync"])
def test_two_ranks_become_four_and_three_with_every_byte_in_its_place(use_async):
    found = ranks.once(RESIZES, "two_four_three", size=4, use_async=use_async)
    two, four, three = (found[:n] for n in (2, 4, 3))
    for step, those in (
        ("two", two),
        ("grown", four),
        ("four", four),
        ("shrunk", three),
        ("three", three),
    ):
        for seen in (rank[step] for rank in those):
            assert seen["wrong"] == [], f"{step}: right after the step, byte for byte"
            assert seen["replicas"].min() >= 1, f"{step}: no expert is lost"
            assert np.array_equal(seen["map"], seen["placement"])
            assert (seen["trouble"], seen["step"]) == ("", those[0][step]["step"])
            assert seen["map"].shape == (3, SLOTS * len(those))
    for step, those in (("two", two), ("four", four), ("three", three)):
        for seen in (rank[step] for rank in those):
            assert seen["vote"].yes and np.array_equal(seen["map"], seen["target"])


@pytest.mark.parametrize("use_async", [True, False], ids=["async", "sync"])
def test_ranks_that_join_stay_empty_until_a_plan_fills_them(use_async):
    found = ranks.once(RESIZES, "two_four_three", size=4, use_async=use_async)
    before = found[0]["two"]
    for rank, seen in enumerate(found):
        grown = seen["grown"]
        assert np.array_equal(grown["map"][:, : 2 * SLOTS], before["map"]), "who stays moves none"
        assert (grown["map"][:, 2 * SLOTS :] == -1).all()
        assert (grown["map"][:, 2 * SLOTS :] != seen["four"]["map"][:, 2 * SLOTS :]).all()
        lineage = grown["lineage"]
        assert lineage.generation == before["generation"] != grown["generation"]
        assert lineage.rank == (rank if rank < 2 else None)
        assert grown["epoch"] == before["epoch"] + 1
        assert grown["step"] >= before["step"] > 0, "the numbers of steps go on"


@pytest.mark.parametrize("use_async", [True, False], ids=["async", "sync"])
def test_an_expert_of_a_rank_that_leaves_goes_to_one_that_stays_and_nothing_else_moves(use_async):
    found = ranks.once(RESIZES, "two_four_three", size=4, use_async=use_async)
    assert not found[3]["shrunk"]["agent"]
    before = found[0]["four"]
    kept = before["map"][:, : 3 * SLOTS]
    assert not (kept == 5).any(), "expert 5 lives on the rank that leaves alone"
    for rank, seen in enumerate(found[:3]):
        shrunk = seen["shrunk"]
        changed = shrunk["map"] != kept
        assert changed.sum(axis=1).tolist() == [1, 1, 1]
        assert (shrunk["map"][changed] == 5).all()
        assert shrunk["lineage"].generation == before["generation"]
        assert shrunk["lineage"].rank == rank
        assert shrunk["epoch"] == before["epoch"] + 1


def test_a_rank_that_joins_without_the_plugin_leaves_vllm_to_itself_on_all():
    found = ranks.once(RESIZES, "uninvited", size=3)
    for seen in found:
        assert not seen["agent"]
        assert np.array_equal(seen["map"], found[0]["map"])
        assert seen["map"].shape == (3, 3 * SLOTS) and (seen["map"] >= 0).all()
        assert seen["wrong"] == []


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "agreed"])
def test_a_move_under_way_ends_before_ranks_join_and_weights_are_not_loaded_after(begun):
    """To end one that was only agreed, vLLM rearranges, and not yet because its ranks change."""
    found = ranks.once(RESIZES, "cut_short", size=3, begun=begun)
    target = found[0]["target"]
    for seen in found[:2]:
        assert seen["vote"]
        assert seen["moved"] < 3 if begun else seen["moved"] is None, "layers were still to come"
    for seen in found:
        assert seen["agent"]
        assert np.array_equal(seen["map"][:, : 2 * SLOTS], target)
        assert (seen["map"][:, 2 * SLOTS :] == -1).all()
        assert (seen["wrong"], seen["trouble"], seen["epoch"]) == ([], "", 2)
        assert "restart this group with the new weights" in seen["refused"]


def test_in_observe_mode_vllm_places_by_itself_and_the_counts_go_on():
    found = ranks.once(RESIZES, "observed", size=3)
    for seen in found:
        assert (seen["map"] >= 0).all() and seen["map"].shape == (3, 3 * SLOTS)
        assert np.array_equal(seen["map"], seen["placement"])
        assert (seen["wrong"], seen["trouble"]) == ([], "")
        assert seen["first"] == 5
        assert [step for step in seen["steps"] if step >= 5][:4] == [5, 6, 7, 8]


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_controller_fills_ranks_that_join_and_empties_one_before_it_leaves(controller, tmp_path):
    client, found = controller.http, []
    options = {"controllers": controller.grpc_address, "folder": tmp_path}
    fleet = threading.Thread(
        target=lambda: found.extend(ranks.run(RESIZES, "followed", size=4, **options))
    )
    fleet.start()

    def status():
        return client.get("/v1/deployments/toy").json()

    try:
        here = [tmp_path / f"four-{rank}" for rank in range(4)]
        controller.wait(lambda: all(one.exists() for one in here), 200, "a plan for 4 ranks")
        wide = status()
        resize = "/v1/deployments/toy/resize"

        def asked():
            answer = client.post(resize, json={"retire": [3]})
            # Another plan may run, which the controller made by itself.
            assert answer.is_success or answer.json()["reason"] == "plan_in_progress", answer.text
            return answer.is_success

        controller.wait(asked, 100, "the evacuation to begin")
        controller.wait(lambda: client.get(resize).json().get("ready"), 100, "the evacuation")
        (tmp_path / "evacuated").touch()
        narrow = controller.wait(lambda: settled(status(), 3), 100, "a group of 3 ranks")
    finally:
        for name in ("evacuated", "end"):
            (tmp_path / name).touch()
        fleet.join(deadline(200))
    for rank, seen in enumerate(found):
        for step in seen.values():
            assert (step["wrong"], step["trouble"]) == ([], "")
            assert np.array_equal(step["map"], step["placement"])
        assert (seen["grown"]["map"][:, 2 * SLOTS :] == -1).all()
        assert (seen["four"]["map"][:, 2 * SLOTS :] >= 0).any(), "the plan filled who joined"
        if rank < 3:
            kept = seen["evacuated"]["map"][:, : 3 * SLOTS]
            assert np.array_equal(seen["shrunk"]["map"], kept), "nothing was left to move"
    assert wide["shape"]["num_ranks"] == 4 and wide["window_steps"] > 0
    assert narrow["resize"] is None and narrow["epoch"] > wide["epoch"]


def settled(status, num_ranks):
    """Return a status once it is that of a whole group of so many ranks, of which none retires."""
    known = status["shape"] is not None and status["epoch"] is not None
    known = known and status["resize"] is None
    return status if known and status["shape"]["num_ranks"] == num_ranks else None
