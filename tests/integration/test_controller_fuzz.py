"""A real controller with ranks answers all requests of any role without a server error."""

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import booleans

from tests.api.conftest import ADMIN, OPERATE, READ
from tests.integration.controller_rig import Controller, Group
from tests.waiting import deadline, until

pytestmark = pytest.mark.integration

IDS = {"deployment": "demo", "plan_id": "p-1"}


def fuzz(url: str, token: str, unavailable: list[str]) -> dict[int, int]:
    """Send requests to every documented operation; return the number of answers by status.

    Appends the whole answers of status 503 to `unavailable`.
    """
    headers = {"Authorization": f"Bearer {token}"}
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    answers: dict[int, int] = {}
    for operation in schema.get_all_operations():
        one_operation(operation.ok(), headers, answers, unavailable)
    return answers


def one_operation(operation, headers, answers, unavailable):
    @given(case=operation.as_strategy(), known=booleans())
    @settings(
        max_examples=6,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case, known):
        if known:
            case.path_parameters |= {key: IDS[key] for key in case.path_parameters}
        answer = case.call(headers=headers, timeout=deadline(10))
        if answer.status_code == 503:
            unavailable.append(f"{case.method} {case.path}: {answer.text}")
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        answers[answer.status_code] = answers.get(answer.status_code, 0) + 1

    ask()


async def test_no_role_can_make_a_real_controller_fail(tmp_path):
    (tmp_path / "tokens").write_text(
        f"carol admin {ADMIN}\nalice operate {OPERATE}\nbob read {READ}\n"
    )
    async with Controller(tmp_path, PLANNER__MODE="propose") as controller, Group() as group:
        await until(lambda: controller.events("planner_ready"), within_s=90)
        await group.connect(controller.address)
        await until(lambda: controller.state("ready"))
        group.serve_on()
        made = await controller.http.post("/v1/deployments/demo/plans", json={"plan_id": "p-1"})
        assert made.status_code in (201, 409), made.text
        url = f"http://127.0.0.1:{controller.ports['rest']}"
        unavailable: list[str] = []
        seen = {
            token: await asyncio.to_thread(fuzz, url, token, unavailable)
            for token in (READ, OPERATE, ADMIN)
        }
        # On a busy machine the controller may briefly lose its store or lease, but no request may
        # be the cause.
        assert (
            not unavailable or controller.events("store_lost") or controller.events("lease_lost")
        ), unavailable
        for answers in seen.values():
            assert answers[200] > 10
            assert sum(answers.values()) > 100
        assert seen[READ][403] > seen[OPERATE][403] > seen[ADMIN].get(403, 0) == 0
        assert controller.process.returncode is None
        await until(lambda: controller.state("ready"), within_s=60)
        rows = (await controller.http.get("/v1/audit", params={"page_size": 1000})).json()["items"]
        assert {row["by"] for row in rows} == {"carol", "alice", "bob"}
        assert [row for row in controller.log if "exception" in row] == []
