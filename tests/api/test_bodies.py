"""The limits of request bodies."""

import asyncio
import json

import pytest

from evenkeel_moe.api import TokenSet, create_app
from evenkeel_moe.peer_budget import PeerLimits
from tests.api.conftest import OPERATE, READ, TOKENS, assert_problem, make_client
from tests.waiting import until

PLANS = "/v1/deployments/demo/plans"
ROLLBACK = "/v1/deployments/demo/rollback"


async def test_a_body_over_the_limit_is_413_with_and_without_content_length(operations):
    app = create_app(operations, TOKENS, limits=PeerLimits(body_bytes=1000))

    async def drip():
        for _ in range(11):
            yield b" " * 100

    async with make_client(app) as client:
        body = assert_problem(await client.post(PLANS, content=b" " * 1001), 413, "limit_exceeded")
        assert "1000 bytes" in body["detail"]
        assert_problem(await client.post(PLANS, content=drip()), 413)
        json_type = {"Content-Type": "application/json"}
        fits = json.dumps({"plan_id": "p"}).encode().ljust(1000)
        assert (await client.post(PLANS, content=fits, headers=json_type)).status_code == 201
        for length in ("1001", "9" * 4301):
            assert_problem(
                await client.post(PLANS, content=b"{}", headers={"Content-Length": length}), 413
            )
        padded = {**json_type, "Content-Length": "2".rjust(4301, "0")}
        assert (await client.post(PLANS, content=b"{}", headers=padded)).status_code == 201
    async with make_client(app, None) as client:
        assert_problem(await client.post(PLANS, content=b" " * 1001), 401)
    assert len(operations.calls) == 2


@pytest.mark.parametrize("key", [None, "k-1"])
async def test_a_request_with_an_incomplete_body_is_ignored(app, operations, key):
    """A rollback without its body would be another rollback."""
    messages = [
        {"type": "http.request", "body": b"", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", f"Bearer {OPERATE}".encode()), (b"content-length", b"14")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": ROLLBACK,
        "raw_path": ROLLBACK.encode(),
        "query_string": b"",
        "headers": headers if key is None else [*headers, (b"idempotency-key", key.encode())],
    }
    await app(scope, receive, send)
    assert operations.calls == []
    assert sent == []


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("GET", "/healthz", None, 200),
        ("POST", "/healthz", None, 401),
        ("POST", "/readyz", None, 401),
        ("GET", "/v1/deployments", READ, 200),
        ("POST", "/v1/deployments", READ, 403),
        ("HEAD", "/v1/deployments", READ, 405),
        ("OPTIONS", "/v1/deployments", READ, 405),
    ],
)
async def test_a_read_or_a_refused_request_is_answered_without_its_body(
    app, method, path, token, status
):
    arrived = []

    async def all_but_one_byte():
        for _ in range(80):
            arrived.append(100_000)
            yield b"x" * 100_000

    headers = {"Content-Length": "8000001"}
    async with make_client(app, token) as client:
        answer = await client.request(method, path, content=all_but_one_byte(), headers=headers)
    assert (answer.status_code, sum(arrived)) == (status, 0)


KEYS = [f"token-of-client-{number}-0123456789" for number in range(4)]
CLIENTS = TokenSet.parse("".join(f"client-{n} operate {key}\n" for n, key in enumerate(KEYS)))
JSON = {"Content-Type": "application/json"}


def limited(operations, body_bytes):
    limits = PeerLimits(body_bytes=body_bytes, bodies_bytes=100_000)
    return create_app(operations, CLIENTS, limits=limits)


class SlowRequests:
    """Requests of which a part has arrived, and the rest arrives when they may go on."""

    def __init__(self, app):
        self.app = app
        self.go_on = asyncio.Event()
        self.arrived = 0
        self.tasks = []

    async def send(self, token, size):
        """Send the first bytes of a body, and wait until they have arrived."""
        wanted = len(self.tasks) + 1
        self.tasks.append(asyncio.create_task(self._post(token, size, f"slow-{wanted}")))
        await until(lambda: self.arrived == wanted)

    async def _post(self, token, size, name):
        async def part():
            yield json.dumps({"plan_id": name}).encode().ljust(size)
            self.arrived += 1
            await self.go_on.wait()

        async with make_client(self.app, token) as client:
            return (await client.post(PLANS, content=part(), headers=JSON)).status_code

    async def end(self):
        """Return the statuses of all answers."""
        self.go_on.set()
        return await asyncio.gather(*self.tasks)


async def test_bodies_beyond_what_may_be_held_at_a_time_are_refused(operations):
    app = limited(operations, 50_000)
    slow = SlowRequests(app)
    for token in KEYS[:2]:
        await slow.send(token, 45_000)
    async with make_client(app, KEYS[2]) as client:
        refused = await client.post(PLANS, content=b" " * 10_001)
        problem = assert_problem(refused, 503, "busy")
        assert "100000 bytes of bodies are held" in problem["detail"]
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        small = {"plan_id": "small"}
        assert (await client.post(PLANS, json=small)).status_code == 201
        assert (await client.get("/v1/deployments")).status_code == 200
        assert await slow.end() == [201, 201]
        # What was answered is not held any more, whatever the answer was.
        for number in range(4):
            assert_problem(await client.post(PLANS, content=b" " * 50_001), 413)
            body = json.dumps({"plan_id": f"later-{number}"}).encode().ljust(50_000)
            assert (await client.post(PLANS, content=body, headers=JSON)).status_code == 201


async def test_a_token_that_sends_slowly_keeps_no_other_token_out(operations):
    app = limited(operations, 20_000)
    slow = SlowRequests(app)
    await slow.send(KEYS[0], 18_000)
    await slow.send(KEYS[0], 7_000)
    async with make_client(app, KEYS[0]) as client:
        problem = assert_problem(await client.post(PLANS, content=b" "), 503, "busy")
        assert "25000 bytes of bodies of token client-0 are held" in problem["detail"]
    async with make_client(app, KEYS[1]) as client:
        body = json.dumps({"plan_id": "large"}).encode().ljust(20_000)
        assert (await client.post(PLANS, content=body, headers=JSON)).status_code == 201
    assert await slow.end() == [201, 201]


async def test_tokens_that_hold_everything_keep_no_small_request_of_another_out(operations):
    app = limited(operations, 34_000)
    slow = SlowRequests(app)
    for token, size in zip(KEYS, (33_000, 33_000, 33_990), strict=False):
        await slow.send(token, size)
    async with make_client(app, KEYS[3]) as client:
        small = json.dumps({"plan_id": "small"}).encode()
        answer = await client.post(PLANS, content=small.ljust(97), headers=JSON)
        assert answer.status_code == 201
        assert_problem(await client.post(PLANS, content=small.ljust(98)), 503, "busy")
    assert await slow.end() == [201, 201, 201]


def test_the_largest_target_fits():
    rows = [[-1] * (320 * 9)] * 61
    assert len(json.dumps({"target": {"physical_to_logical": rows}})) < PeerLimits().body_bytes / 4


@pytest.mark.parametrize(
    "body",
    [
        {"target": {"physical_to_logical": [["x"] * 1000] * 1000}},
        {"target": {"physical_to_logical": ["x"] * 500_000}},
        {"phases": ["dawn"] * 500_000},
        {f"field{number}": 1 for number in range(200_000)},
        {"limits": {f"field{number}": 1 for number in range(200_000)}},
        {"limits": {"x" * 4_000_000: 1}},
    ],
    ids=["slots", "rows", "phases", "fields", "fields inside", "a long name"],
)
async def test_megabytes_of_wrong_types_get_a_short_answer(client, body):
    answer = await client.post(PLANS, json=body)
    problem = assert_problem(answer, 422, "invalid_input")
    assert len(answer.content) < 20_000
    assert 1 <= len(problem["errors"]) <= 20


async def test_at_most_twenty_errors_are_listed(client):
    body = {"limits": {f"x{n}": 1 for n in range(14)}, **{f"y{n}": 1 for n in range(14)}}
    problem = assert_problem(await client.post(PLANS, json=body), 422)
    assert len(problem["errors"]) == 20
    assert problem["detail"].endswith("and 27 more")


@pytest.mark.parametrize("depth", [17, 300, 900, 5000, 30_000])
@pytest.mark.parametrize(
    ("opened", "closed"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"]
)
async def test_a_change_that_is_nested_deeply_is_refused_whatever_its_depth(
    client, depth, opened, closed
):
    """Depths that can be parsed, and not be walked through, were a fault of the server."""
    body = '{"options":' + opened * depth + "1" + closed * depth + "}"
    headers = {"Content-Type": "application/json"}
    answer = await client.patch("/v1/deployments/demo/policy", content=body, headers=headers)
    assert answer.status_code in (400, 422), answer.text
    assert_problem(answer, answer.status_code)
