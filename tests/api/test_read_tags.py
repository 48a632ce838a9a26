"""Entity tags of reads, the token's own description, and an approval bound to a target."""

import pytest

from tests.api.conftest import ADMIN, READ, assert_problem, make_client
from tests.api.fakes import make_plan


@pytest.mark.parametrize("path", ["/v1/deployments", "/v1/deployments/demo/policy", "/v1/token"])
async def test_an_unchanged_answer_is_a_304_without_a_body(client, path):
    first = await client.get(path)
    tag = first.headers["etag"]
    assert first.status_code == 200 and tag
    again = await client.get(path, headers={"If-None-Match": f'"other", {tag}'})
    assert again.status_code == 304 and again.content == b""
    assert again.headers["etag"] == tag and again.headers["trace-id"]
    assert "content-length" not in again.headers
    assert (await client.get(path, headers={"If-None-Match": '"other"'})).json() == first.json()


async def test_a_tag_that_a_proxy_made_weak_is_the_same_for_a_read_and_none_for_a_change(client):
    path = "/v1/deployments/demo/policy"
    weak = f"W/{(await client.get(path)).headers['etag']}"
    again = await client.get(path, headers={"If-None-Match": weak})
    assert again.status_code == 304 and again.content == b""
    change = await client.patch(path, json={"mode": "observe"}, headers={"If-Match": weak})
    assert change.status_code == 412


async def test_a_changed_answer_is_sent(client):
    path = "/v1/deployments/demo/policy"
    before = await client.get(path)
    await client.patch(path, json={"mode": "observe"})
    after = await client.get(path, headers={"If-None-Match": before.headers["etag"]})
    assert after.status_code == 200 and after.json()["mode"] == "observe"


async def test_errors_have_no_tag(client):
    answer = await client.get("/v1/deployments/none", headers={"If-None-Match": "*"})
    assert answer.status_code == 404 and "etag" not in answer.headers


@pytest.mark.parametrize("token, name, role", [(READ, "bob", "read"), (ADMIN, "carol", "admin")])
async def test_a_token_can_ask_what_it_may_do(app, token, name, role):
    async with make_client(app, token=token) as client:
        assert (await client.get("/v1/token")).json() == {"name": name, "role": role}


async def test_an_approval_names_the_target_that_was_looked_at(client, operations):
    operations.records["demo"].append(make_plan("p-1"))
    path = "/v1/deployments/demo/plans/p-1"
    digest = (await client.get(path)).json()["target"]["digest"]
    refused = await client.post(f"{path}/approve", headers={"If-Match": '"another"'})
    assert digest in assert_problem(refused, 412, "stale_base")["detail"]
    assert (await client.get(path)).json()["phase"] == "proposed"
    accepted = await client.post(f"{path}/approve", headers={"If-Match": f'"{digest}"'})
    assert accepted.status_code == 202
