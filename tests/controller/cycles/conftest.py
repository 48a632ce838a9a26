import pytest

from tests.controller.cycles.manual_rig import Rig


@pytest.fixture
async def rig():
    """Return a replica that leads two ranks and whose store can fail."""
    rig = Rig()
    await rig.lead()
    yield rig
    await rig.tasks.end()
    await rig.serving.end()
