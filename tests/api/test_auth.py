from typing import Any, cast

import pytest

from evenkeel.api import Role, TokenSet, deployments, health, plans
from evenkeel.errors import InvalidInput
from tests.api.conftest import OPERATE, READ, assert_problem, make_client

OPEN = {"/healthz", "/readyz"}


def every_route(app: Any) -> list[tuple[str, str]]:
    """(method, path) of the whole route table: the app's own routes and those of its routers."""
    own = [(method, route.path) for route in app.routes if hasattr(route, "path") for method in route.methods]
    included = [
        (method, prefix + route.path)
        for prefix, router in (("/v1", deployments.router), ("/v1", plans.router), ("", health.router))
        for route in cast("list[Any]", router.routes)
        for method in route.methods
    ]
    return own + included


def test_the_walk_below_sees_every_documented_route(app):
    documented = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    assert documented <= set(every_route(app))
    assert len(documented) >= 17


async def test_every_route_but_health_wants_a_token(app):
    async with make_client(app, token=None) as client:
        for method, path in every_route(app):
            concrete = path.replace("{deployment}", "demo").replace("{plan_id}", "p-1")
            response = await client.request(method, concrete)
            if path in OPEN:
                assert response.status_code == 200, path
            else:
                assert response.status_code == 401, f"{method} {path}"
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert_problem(response, 401)


@pytest.mark.parametrize(
    "path",
    ["/", "/nothing", "/healthz/", "/healthz/x", "//healthz", "/v1/healthz", "/healthz%2f..%2fv1", "/docs"],
)
async def test_paths_that_only_look_open_are_not(app, path):
    async with make_client(app, token=None) as client:
        assert (await client.get(path)).status_code == 401


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
async def test_a_wrong_token_is_no_token(app, header):
    async with make_client(app, token=None) as client:
        response = await client.get("/v1/deployments", headers={"Authorization": header})
        assert_problem(response, 401)


async def test_any_of_several_tokens_lets_in(app):
    for token in (OPERATE, READ):
        async with make_client(app, token) as client:
            assert (await client.get("/v1/deployments")).status_code == 200


async def test_a_reading_token_changes_nothing(app, operations):
    async with make_client(app, READ) as client:
        for method, path in every_route(app):
            if method in {"GET", "HEAD"}:
                continue
            concrete = path.replace("{deployment}", "demo").replace("{plan_id}", "p-1")
            assert_problem(await client.request(method, concrete, json={"seconds": 1}), 403)
    assert operations.calls == []


def test_token_file_forms():
    tokens = TokenSet.parse(
        "# rotated monthly\n\nabcdefghijklmnop\nci ponmlkjihgfedcba # the pipeline\nbob read 0123456789abcdef\n"
    )
    assert [(token.name, token.role) for token in tokens.tokens] == [
        ("operator", Role.OPERATE),
        ("ci", Role.OPERATE),
        ("bob", Role.READ),
    ]
    found = tokens.find("ponmlkjihgfedcba")
    assert found is not None and found.name == "ci"
    assert tokens.find("ponmlkjihgfedcbA") is None
    assert "ponmlkjihgfedcba" not in repr(tokens)


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "bob root 0123456789abcdef\n", "a b c d\n"])
def test_a_token_file_nobody_meant_is_refused(text):
    with pytest.raises(InvalidInput):
        TokenSet.parse(text)
