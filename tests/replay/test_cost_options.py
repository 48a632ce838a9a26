import json
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.cost import CostModel, CostSource
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.derived_cost import derived_cost
from evenkeel_moe.replay.from_options import replay_cost
from evenkeel_moe.replay.options import CostKind, CostOptions, read_options

SHAPE = ModelShape(2, 8, 2, 5, 2, 44_040_192)
CURVE = {"tile_tokens": 4, "tile_seconds": [1e-4, 3e-4], "slope_s_per_token": 2e-5}

BY_REPLICAS = {
    "fixed_s": 5e-6,
    "s_per_token": 2e-7,
    "s_per_replica": 2e-6,
    "read_s": 3e-5,
    "fit_error": 0.03,
    "measured_unix_s": 1.7e9,
}


def cost(
    rank_speeds: tuple[float, ...] | None = None, cost: str = "tokens", **options
) -> CostModel:
    asked = CostOptions(cost=CostKind(cost), **options)
    return replay_cost(asked, SHAPE, rank_speeds, DispatchModel.EVEN)


@pytest.fixture
def profile(tmp_path):
    def write(**changes):
        path = tmp_path / "curve-GPU-1.json"
        told = changes.pop("replica_cost", None)
        content = {"gpu_uuid": "GPU-1", "curve": CURVE | changes}
        path.write_text(json.dumps(content | ({} if told is None else {"replica_cost": told})))
        return path

    return write


def test_without_options_times_are_tokens():
    assert cost().by_tokens
    assert cost().basis.words == "by tokens, because nothing is known of time"


def test_a_device_gives_the_derived_model():
    model, derived = cost(cost="roofline", device="h100"), derived_cost(SHAPE, "h100", "fp8")
    assert model.replica == derived.replica
    assert model.replica.read_tokens > 100
    assert model.source is CostSource.DERIVED
    assert "H100" in model.basis.words
    # Two bytes for each weight, which are computed half as fast.
    wide = cost(cost="roofline", device="h100", weight_format="bf16")
    assert wide.replica.read_tokens == pytest.approx(model.replica.read_tokens, rel=1e-3)
    assert wide.detail != model.detail


def test_the_tokens_of_reading_can_be_given():
    model = cost(cost="roofline", read_tokens=148.0)
    assert (model.replica.read_tokens, model.unit) == (148.0, "tokens")
    assert "an expert is read in the time of 148 tokens" in model.basis.words


def test_a_profile_gives_its_curve_for_every_rank(profile):
    model = cost(cost="curve", curve=profile())
    assert (model.source, model.unit) == (CostSource.PROFILED, "s")
    work = np.array([[3.0, 5.0], [0.0, 12.0]])
    np.testing.assert_allclose(
        moe_time.rank_times(work, model), [[1e-4, 3e-4], [0.0, 3e-4 + 4 * 2e-5]]
    )
    assert "curve-GPU-1.json" in model.basis.words


def test_a_profile_by_replicas_is_used_where_it_fits(profile):
    model = cost(cost="curve", curve=profile(replica_cost=BY_REPLICAS))
    assert (model.replica.read_tokens, model.replica.start_tokens) == pytest.approx((150.0, 10.0))
    assert model.fit_error == 0.03
    # 5e-6 s of fixed time, then 2e-7 s for each token.
    np.testing.assert_allclose(
        moe_time.rank_times(np.array([[100.0, 0.0]]), model), [[2.5e-5, 0.0]]
    )
    assert "tokens and replicas of curve-GPU-1.json" in model.basis.words
    poor = cost(cost="curve", curve=profile(replica_cost=BY_REPLICAS | {"fit_error": 0.4}))
    assert poor.replica.proportional
    assert "curve of curve-GPU-1.json" in poor.basis.words


def test_speeds_of_ranks_scale_every_model(profile):
    work = np.array([[6.0, 6.0]])
    for options in (
        {},
        {"cost": "curve", "curve": profile()},
        {"cost": "roofline", "device": "b200"},
        {"cost": "roofline", "read_tokens": 2.0},
    ):
        even, slow = cost(**options), cost((1.0, 0.5), **options)
        np.testing.assert_allclose(
            moe_time.rank_times(work, slow), moe_time.rank_times(work, even) * [[1.0, 2.0]]
        )
        assert slow.replica == even.replica
        assert slow.unit == even.unit
        assert "relative speeds of the ranks as given" in slow.basis.words


def test_work_of_shared_experts_counts_where_time_is_known():
    shape = ModelShape(2, 8, 2, 5, 2, 44_040_192, shared_experts=1.0)
    for dispatch in (DispatchModel.EVEN, DispatchModel.WATERFILL):
        options = CostOptions(cost=CostKind.ROOFLINE, read_tokens=9.0)
        assert replay_cost(options, shape, None, dispatch).shared_tokens == 0.5


def test_tokens_include_the_shared_experts_that_waterfill_pours():
    shape = ModelShape(2, 8, 2, 5, 2, 44_040_192, shared_experts=1.0)
    tokens = CostOptions()
    for speeds in (None, (1.0, 0.5)):
        poured = replay_cost(tokens, shape, speeds, DispatchModel.WATERFILL)
        assert (poured.shared_tokens, poured.source) == (0.5, CostSource.TOKENS)
    assert replay_cost(tokens, shape, None, DispatchModel.EVEN).by_tokens
    none = replace(shape, shared_experts=0.0)
    assert replay_cost(tokens, none, None, DispatchModel.WATERFILL).by_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "h100"}, "device belongs to cost: roofline, not to cost: tokens"),
        ({"read_tokens": 3.0}, "read_tokens belongs to cost: roofline"),
        ({"cost": "curve", "weight_format": "fp8"}, "weight_format belongs to cost: roofline"),
        ({"cost": "roofline"}, "needs either device or read_tokens"),
        (
            {"cost": "roofline", "device": "h100", "read_tokens": 3.0},
            "needs either device or read_tokens",
        ),
        (
            {"cost": "roofline", "read_tokens": 3.0, "weight_format": "fp8"},
            "weight_format belongs to device",
        ),
        ({"cost": "roofline", "device": "abacus"}, "'abacus' is not in the table of devices"),
        (
            {"cost": "roofline", "device": "h100", "weight_format": "fp7"},
            "number type 'fp7' is not one of",
        ),
        ({"cost": "curve"}, "cost: curve needs curve"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        cost(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_seconds": [3e-4, 1e-4]}, "tile_seconds fall with the number of tokens"),
        ({"tile_seconds": ["x"]}, "is no curve"),
        ({"tile_seconds": [0.0, 0.0]}, "0 seconds at any tokens"),
        ({"replica_cost": BY_REPLICAS | {"read_s": -1.0}}, "read_s is -1.0"),
    ],
)
def test_a_file_that_holds_no_curve_is_refused(profile, changes, message):
    with pytest.raises(InvalidInput, match=message):
        cost(cost="curve", curve=profile(**changes))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        cost(cost="curve", curve=tmp_path / "none.json")
    for text in ("", "[]", '{"curve": 3}', "\x00"):
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(InvalidInput, match="is no curve"):
            cost(cost="curve", curve=path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_number_that_no_time_can_have_is_refused_with_its_name(value):
    with pytest.raises(InvalidInput, match=f"--read-tokens: {value}: Input should be"):
        read_options(CostOptions, None, read_tokens=value)
