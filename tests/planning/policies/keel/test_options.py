import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.planning.policies.keel.options import KeelOptions


@pytest.mark.parametrize("name", ["stickiness", "caution", "origin_trust", "move_share"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_shares_outside_0_to_1_are_refused(name, value):
    with pytest.raises(InvalidInput, match=f"{name} is {value}, must be in"):
        KeelOptions(**{name: value})
