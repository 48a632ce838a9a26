import pytest

from evenkeel_moe.adapters.processes.planner_pool import PlannerPool
from evenkeel_moe.controller.operations.operator_service import OperatorService
from tests.controller.replicas import ONE, TWO, GatedStore, SetClock, Spawned, make_registry


@pytest.fixture
async def leading_two():
    """Return a registry that leads ONE and TWO, its operator service, and its clock."""
    clock, tasks = SetClock(), Spawned()
    planner = PlannerPool(1, deadline_s=10)
    registry = make_registry(GatedStore(clock), tasks.spawn, clock=clock, planner=planner)
    for name in (ONE, TWO):
        keeper = registry.add(name).keeper
        await keeper.decided(10)
        assert keeper.leading
    yield registry, OperatorService(registry), clock
    await tasks.end()
    planner.close()
