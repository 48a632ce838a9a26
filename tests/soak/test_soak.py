"""A minute of the soak; `make soak` is the long run."""

import asyncio

import pytest

from tests.soak.peers import PEERS, Target
from tests.soak.run import run_soak

SHORT_S = 60.0


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_hostile_peers_take_nothing_from_an_honest_fleet(tmp_path):
    lines: list[str] = []
    assert await run_soak(tmp_path, SHORT_S, 1, least_plans=1, say=lines.append) == []
    told = {line.partition(":")[0] for line in lines}
    assert {"memory", "plans", "an operator's answer"} < told
    assert len(told & {peer.__name__ for peer in PEERS}) == len(PEERS)


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_a_controller_that_ends_and_a_peer_that_is_taken_are_told(tmp_path):
    async def kills(target: Target, _rng) -> str:
        target.controller.process.kill()
        await asyncio.sleep(10)
        return "killed it"

    async def is_taken(_target: Target, _rng) -> str:
        await asyncio.sleep(0.1)
        return "taken"

    broken = await run_soak(
        tmp_path, 30.0, 1, peers={kills: ("killed it",), is_taken: ("refused",)}, say=print
    )
    assert "is_taken: taken" in broken
    assert any(words.startswith("the controller ended") for words in broken)
