"""A link tells whether it is connected to a controller, and why not."""

import structlog

from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink
from evenkeel_moe.errors import Reason
from evenkeel_moe.wire.link import FlowControl, Registration, RegistrationOutcome
from tests.adapters.grpc.test_rank_link import ACCEPTED, FAST, running, serving
from tests.waiting import until

REFUSED = Registration(
    RegistrationOutcome.REFUSED, 1.0, 5.0, FlowControl(0.1), Reason.DEPLOYMENT_IN_USE, "a group"
)


async def test_a_refusal_is_told_with_its_reason_and_so_is_the_end_of_it():
    told: list[str] = []
    async with serving([REFUSED], [REFUSED], [ACCEPTED]) as (_, address):
        async with running(GrpcRankLink([address], timing=FAST, on_change=told.append)) as rank:
            await until(lambda: rank.got)
    assert told == [f"the controller at {address} refuses: a group (deployment_in_use)", ""]


async def test_that_no_controller_answers_is_told_once():
    told: list[str] = []
    with structlog.testing.capture_logs() as logs:
        link = GrpcRankLink(["127.0.0.1:1"], timing=FAST, on_change=told.append)
        async with running(link):
            await until(lambda: sum(line["event"] == "link_lost" for line in logs) >= 3)
    assert len(told) == 1
    assert told[0].startswith("no controller answers at 127.0.0.1:1 (UNAVAILABLE: ")
