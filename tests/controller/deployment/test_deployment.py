"""The parts of a deployment follow its machine and its clock."""

import pytest

from tests.controller.replicas import ONE
from tests.waiting import until


@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
async def test_records_go_by_the_clock_as_it_is_set(leading_two, step_s):
    registry, operations, clock = leading_two
    member = registry.deployments[ONE]
    # The machine leads from its next event on. Then its executor has an offset of its own.
    await until(lambda: member.control.leading is not None)
    before = member.control.unix_offset_s
    clock.ahead_s = step_s
    await until(lambda: member.control.unix_offset_s != before)
    for offset in (member.control.unix_offset_s, member.control.as_leader.executor.unix_offset_s):
        assert offset == pytest.approx(clock.unix() - clock.monotonic(), abs=1.0)
