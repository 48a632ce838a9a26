import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.planning.policies.keel.options import KeelOptions


@pytest.mark.parametrize("name", ["stickiness", "few_share", "optimal_gain", "swap_share"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_shares_outside_0_to_1_are_refused(name, value):
    with pytest.raises(InvalidInput, match=f"{name} is {value}, must be in"):
        KeelOptions(**{name: value})


def test_the_sharp_norm_is_above_the_smooth_one():
    with pytest.raises(InvalidInput, match="smooth_doublings 5 must be positive and below"):
        KeelOptions(smooth_doublings=5)
