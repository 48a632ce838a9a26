"""Every response to random requests is one that the OpenAPI document describes."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans
from schemathesis.checks import positive_data_acceptance

from evenkeel_moe.api import create_app
from tests.api.conftest import ADMIN, OPERATE, READ, TOKENS
from tests.api.fakes import make_operations, make_plan

ROLES = {"read": READ, "operate": OPERATE, "admin": ADMIN}
IDS = {"deployment": "demo", "plan_id": "p-1"}
# A well-formed page token, mode or target may still be unknown.
SEMANTICS = positive_data_acceptance
# One for all tests, because to make it and its document takes longer than the requests of a test.
APP = create_app(make_operations(), TOKENS)
APP.openapi_schema = APP.openapi()
OPERATIONS = [
    (method, path) for path, item in APP.openapi_schema["paths"].items() for method in item
]


def with_a_plan():
    operations = make_operations()
    operations.records["demo"] = [make_plan("p-1")]
    return operations


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda part: str(part))
def test_no_request_gets_an_undocumented_answer(method, path, role):
    APP.state.operations = with_a_plan()
    headers = {"Authorization": f"Bearer {ROLES[role]}"}
    schema = schemathesis.openapi.from_asgi("/openapi.json", APP, headers=headers)

    @given(case=schema[path][method].as_strategy(), known=booleans())
    @settings(
        max_examples=15, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    def fuzz(case, known):
        # So that half of the requests reach a deployment.
        if known:
            case.path_parameters |= {key: IDS[key] for key in case.path_parameters}
        case.call_and_validate(headers=headers, excluded_checks=[SEMANTICS])

    fuzz()
