import numpy as np
import pytest

from evenkeel_moe.api.insight import heat_map
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import metrics
from tests.api.conftest import assert_problem
from tests.api.fakes import NOW, SHAPE, FakeView, make_rank, make_status, make_window
from tests.telemetry.reports import load_window

HEAT = "/v1/deployments/demo/heatmap"


async def test_heat_map_shows_shares_of_each_layers_mean(client):
    body = (await client.get(HEAT, params={"phase": "decode"})).json()
    assert (body["steps"], body["newest_step"], body["phase"]) == (5, 4, "decode")
    assert (body["num_layers"], body["first_layer"], body["next_layer"]) == (2, 0, None)
    assert body["tokens_per_layer"] == [16, 16]
    assert body["experts"] == [[2, 1, 0.5, 0.5], [1, 1, 1, 1]]
    carried = metrics.rank_load(
        np.array([[[8, 4, 2, 2], [4, 4, 4, 4.0]]]), Placement.initial(SHAPE)
    )[0]
    assert np.allclose(body["ranks"], carried / carried.mean(axis=1, keepdims=True))


async def test_a_heat_map_without_steps_is_null(client):
    for path, phase in ((HEAT, "prefill"), ("/v1/deployments/fresh/heatmap", None)):
        body = (await client.get(path, params={} if phase is None else {"phase": phase})).json()
        assert body["steps"] == 0
        unknown = "newest_step num_layers next_layer tokens_per_layer experts ranks"
        assert [body[name] for name in unknown.split()] == [None] * 6


async def test_a_heat_map_tells_when_its_load_was_reported_and_by_how_many(client, operations):
    gone = tuple(make_rank(rank, fresh=False) for rank in range(2))
    operations.show(newest_step_unix=NOW - 240, ranks=gone)
    body = (await client.get(HEAT)).json()
    assert (body["newest_step_unix"], body["ranks_connected"]) == (NOW - 240, 0)


async def test_layers_without_load_are_null_and_ranks_before_a_placement(client, operations):
    window = make_window()
    window.counts[:, 1] = 0
    operations.views["demo"] = FakeView(make_status(), {Phase.PREFILL: window})
    body = (await client.get(HEAT)).json()
    assert body["experts"] == [[2, 1, 0.5, 0.5], [None] * 4]
    assert body["tokens_per_layer"] == [16, 0]
    assert body["ranks"] is None


def test_phases_are_joined_step_by_step():
    one, other = make_window(3), make_window(1)
    other.counts[:] = [[0, 0, 0, 16], [16, 0, 0, 0]]
    joined = heat_map([one, other], None, 0)
    # Three steps of 8, 4, 2, 2 and one of 0, 0, 0, 16, over a mean of 4.
    assert joined["steps"] == 4
    assert joined["experts"][0] == [1.5, 0.75, 0.375, 1.375]


def test_a_heat_map_too_large_comes_in_parts_that_join_to_the_whole():
    rng = np.random.default_rng(3)
    window = load_window(rng.integers(1, 9, (2, 7, 4)), range(2), 2)
    placement = Placement(np.tile(np.array([0, 1, 2, 3], np.int32), (7, 1)), 2, 4)
    whole = heat_map([window], placement, 0)
    assert whole["next_layer"] is None
    for most in (1, 6, 12, 13, 30):
        parts, at = {"experts": [], "ranks": [], "tokens_per_layer": []}, 0
        while at is not None:
            part = heat_map([window], placement, at, most)
            cells = sum(len(row) for name in ("experts", "ranks") for row in part[name])
            assert cells <= max(most, 6)
            for name, rows in parts.items():
                rows += part[name]
            at = part["next_layer"]
        assert parts == {name: whole[name] for name in parts}
    assert heat_map([window], placement, 99)["experts"] == []


async def test_quarantine_has_reasons_and_samples_until_an_admin_clears_it(
    client, admin, operations
):
    path = "/v1/deployments/demo/quarantine"
    want = {
        "reason": "sum_mismatch",
        "reason_text": "The counts of a report do not add up.",
        "rank_steps": 12,
        "samples": [{"rank": 1, "detail": "rank 1: 7 tokens, counts sum to 9"}],
    }
    assert (await client.get(path)).json() == {"deployment": "demo", "items": [want]}
    assert (await admin.delete(path)).status_code == 204
    assert (await client.get(path)).json()["items"] == []
    assert operations.calls == [("clear_quarantine", "demo", "carol")]


async def test_a_deployment_is_forgotten_once_its_ranks_are_gone(admin, operations):
    operations.show("gone", ranks=(make_rank(0, fresh=False),))
    assert_problem(await admin.delete("/v1/deployments/demo"), 409, "busy")
    assert (await admin.delete("/v1/deployments/gone")).status_code == 204
    assert_problem(await admin.get("/v1/deployments/gone"), 404, "not_found")
    assert_problem(await admin.delete("/v1/deployments/gone"), 404)


@pytest.mark.parametrize("phase", ["DECODE", "", "x"])
async def test_an_unknown_phase_is_refused(client, phase):
    assert_problem(await client.get(HEAT, params={"phase": phase}), 422)
