from datetime import UTC, datetime
from typing import Any, cast

import pytest

from evenkeel_moe.api import Role, TokenSet, deployments, health, insight, plans
from evenkeel_moe.errors import InvalidInput
from tests.api.conftest import ADMIN, OPERATE, READ, assert_problem, make_client

OPEN = {"/healthz", "/readyz"}


def every_route(app: Any) -> list[tuple[str, str]]:
    """Return (method, path) of all routes of the app and of its routers."""
    own = [
        (method, route.path)
        for route in app.routes
        if hasattr(route, "path")
        for method in route.methods
    ]
    included = [
        (method, prefix + route.path)
        for prefix, router in (
            ("/v1", deployments.router),
            ("/v1", insight.router),
            ("/v1", plans.router),
            ("", health.router),
        )
        for route in cast("list[Any]", router.routes)
        for method in route.methods
    ]
    return own + included


def test_the_list_of_routes_has_every_documented_route(app):
    documented = {
        (method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item
    }
    assert documented <= set(every_route(app))
    assert len(documented) >= 23


async def test_every_route_except_the_probes_needs_a_token(app, anonymous):
    for method, path in every_route(app):
        response = await anonymous.request(method, concrete(path))
        if path in OPEN:
            assert response.status_code == 200, path
        else:
            assert response.status_code == 401, f"{method} {path}"
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert_problem(response, 401)


@pytest.mark.parametrize("path", sorted(OPEN))
async def test_the_probes_are_open_to_reads_alone(anonymous, path):
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "anything"):
        headers = {"Idempotency-Key": "k-1"}
        assert_problem(await anonymous.request(method, path, headers=headers), 401)
    assert (await anonymous.get(path)).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/healthz/",
        "/healthz/x",
        "http://evenkeel//healthz",
        "/v1/healthz",
        "/healthz%2f..%2fv1",
        "/docs",
        "/console",
        "/console/",
        "/console/app.js/",
        "/console/vendor/vendor.json",
        "/console/..%2fapi/app.py",
    ],
)
async def test_paths_that_only_look_open_are_not(anonymous, path):
    assert (await anonymous.get(path)).status_code == 401


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic abc",
        f"Basic {OPERATE}",
        f"Bearer {OPERATE}x",
        f"Bearer {OPERATE[:-1]}",
        OPERATE,
    ],
)
async def test_a_wrong_token_is_refused(anonymous, header):
    response = await anonymous.get("/v1/deployments", headers={"Authorization": header})
    assert_problem(response, 401)


def concrete(path: str) -> str:
    return path.replace("{deployment}", "demo").replace("{plan_id}", "p-1")


async def test_a_reading_token_changes_nothing(app, reader, operations):
    before = dict(operations.document)
    writes = [route for route in every_route(app) if route[0] not in {"GET", "HEAD"}]
    assert len(writes) >= 9
    for method, path in writes:
        response = await reader.request(method, concrete(path), json={"seconds": 1})
        body = assert_problem(response, 403)
        assert body["type"] == "urn:evenkeel:problem:forbidden"
        assert body["instance"] == concrete(path)
    assert operations.calls == []
    assert operations.document == before


async def test_deleting_needs_an_admin(app, client, admin, operations):
    deletes = [route for route in every_route(app) if route[0] == "DELETE"]
    assert len(deletes) == 2
    for method, path in deletes:
        assert_problem(await client.request(method, concrete(path)), 403)
    assert operations.calls == []
    for method, path in deletes:
        assert (await admin.request(method, concrete(path))).status_code in (204, 409)


@pytest.mark.parametrize("method", ["PUT", "TRACE", "PROPFIND", "anything"])
async def test_an_unknown_method_counts_as_a_change(reader, method):
    assert_problem(await reader.request(method, "/v1/deployments"), 403)


async def test_every_role_includes_the_lower_roles(app):
    freeze, placement = "/v1/deployments/demo/freeze", "/v1/deployments/demo/placement"
    may = {READ: (200, 403), OPERATE: (200, 204), ADMIN: (200, 204)}
    for token, statuses in may.items():
        async with make_client(app, token) as client:
            answers = await client.get(placement), await client.post(freeze, json={"seconds": 0})
            assert tuple(answer.status_code for answer in answers) == statuses


@pytest.mark.parametrize(
    ("name", "value"), [("limits", {"max_moves": 3}), ("separate_approval", False)]
)
async def test_only_an_admin_changes_what_bounds_every_operator(
    client, admin, operations, name, value
):
    policy = "/v1/deployments/demo/policy"
    changes = {name: value}
    assert_problem(await client.patch(policy, json=changes), 403)
    assert name not in operations.document
    assert (await client.patch(policy, json={"mode": "propose"})).status_code == 200
    assert (await admin.patch(policy, json=changes)).json()[name] == value


async def test_only_an_admin_lifts_the_lock_of_observe(client, admin, operations):
    policy = "/v1/deployments/demo/policy"
    operations.document = {"mode": "observe", "policy": "eplb", "observe_lock": True}
    for changes in ({"mode": "auto"}, {"mode": "propose"}, {"observe_lock": False}):
        assert_problem(await client.patch(policy, json=changes), 403)
    assert (await client.patch(policy, json={"mode": "observe"})).status_code == 200
    assert (await client.patch(policy, json={"cycle_s": 5})).status_code == 200
    assert (await admin.patch(policy, json={"observe_lock": False})).status_code == 200
    assert (await client.patch(policy, json={"mode": "auto"})).json()["mode"] == "auto"


def test_token_file_forms():
    tokens = TokenSet.parse(
        "# rotated monthly\n\nabcdefghijklmnop\nci ponmlkjihgfedcba # the pipeline\n"
        "bob read 0123456789abcdef\n"
        "root admin fedcba9876543210\n"
    )
    assert [(token.name, token.role) for token in tokens.tokens] == [
        ("operator", Role.OPERATE),
        ("ci", Role.OPERATE),
        ("bob", Role.READ),
        ("root", Role.ADMIN),
    ]
    found = tokens.find("ponmlkjihgfedcba")
    assert found is not None and found.name == "ci"
    assert tokens.find("ponmlkjihgfedcbA") is None
    assert "ponmlkjihgfedcba" not in repr(tokens)


def test_a_token_may_end():
    tokens = TokenSet.parse(
        "ann read until=2026-12-31T12:00 0123456789abcdef\n"
        "bob admin until=2026-12-31T13:00:00+01:00 fedcba9876543210\n"
        "eve until=2027-01-01 abcdefghijklmnop\n"
        "ends ponmlkjihgfedcba\n"
    ).tokens
    noon = datetime(2026, 12, 31, 12, tzinfo=UTC).timestamp()
    assert [token.until for token in tokens] == [noon, noon, noon + 43_200, None]
    assert [token.role for token in tokens] == [Role.READ, Role.ADMIN, Role.OPERATE, Role.OPERATE]


@pytest.mark.parametrize(
    "text",
    [
        "bob read until=tomorrow 0123456789abcdef\n",
        "a b until=2026-12-31 c d\n",
        "",
        "# nothing\n",
        "short\n",
        "bob root 0123456789abcdef\n",
        "a b c d\n",
    ],
)
def test_an_invalid_token_file_is_refused(text):
    with pytest.raises(InvalidInput):
        TokenSet.parse(text)
