"""What the agent of an engine's rank tells the controller first."""

import numpy as np
import pytest
import torch

from evenkeel_moe.agent import EngineMoves
from evenkeel_moe.engines.guest.bootstrap import EngineFacts, make_guest
from evenkeel_moe.engines.guest.slot_weights import SlotWeights
from evenkeel_moe.model.placement import Placement
from tests.agent.fleet import PortLink
from tests.agent.guests import ToyEngine
from tests.agent.ranks import CPU, shape_of
from tests.engines.driving import toy_settings
from tests.waiting import deadline

FP8 = [torch.zeros((4, *size), dtype=torch.float8_e4m3fn) for size in ((16, 24), (24, 8))]
"""The matrices of the experts in four slots."""


class HelloLink(PortLink):
    """Keeps the first message of its stream, as a controller does."""

    async def run(self, listener):
        self.hello = listener.hello()
        await super().run(listener)


@pytest.mark.fault(
    "a vLLM whose ranks only observe",
    "the controller began a plan that the ranks refused",
)
@pytest.mark.parametrize(("mode", "offers"), [("observe", set()), ("place", {"migrate"})])
def test_the_first_message_of_a_rank_tells_whether_it_takes_plans(mode, offers):
    placement = Placement(np.array([[0, 1, 1, 0]], np.int32), 1, 2)
    engine, link = ToyEngine(placement, 0), HelloLink()
    agent = make_guest(
        toy_settings(mode=mode),
        0,
        shape_of(placement),
        EngineFacts(placement, SlotWeights(lambda layer: FP8), CPU, dispatch=""),
        EngineMoves(engine),
        gather=lambda row: row[None],
        link=link,
    )
    try:
        assert link.ready.wait(deadline(20))
        assert link.hello.capabilities == offers
        assert agent.observe_only is (mode == "observe")
        assert link.hello.weight_format == "fp8"
        assert agent.trouble == "", "what was asked for is no fault"
    finally:
        agent.close()
