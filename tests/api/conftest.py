import httpx
import pytest

from evenkeel_moe.api import TokenSet, create_app
from tests.api.fakes import make_operations

OPERATE = "operate-token-0123456789"
READ = "read-token-0123456789"
ADMIN = "admin-token-0123456789"
TOKENS = TokenSet.parse(f"alice operate {OPERATE}\nbob read {READ}\ncarol admin {ADMIN}\n")


@pytest.fixture
def operations():
    return make_operations()


@pytest.fixture
def app(operations):
    return create_app(operations, TOKENS)


def make_client(app, token: str | None = OPERATE) -> httpx.AsyncClient:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    # Tests see the response 500 that a server would send, not the exception.
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://evenkeel", headers=headers)


@pytest.fixture
async def client(app):
    async with make_client(app) as client:
        yield client


@pytest.fixture
async def reader(app):
    async with make_client(app, READ) as client:
        yield client


@pytest.fixture
async def admin(app):
    async with make_client(app, ADMIN) as client:
        yield client


@pytest.fixture
async def anonymous(app):
    async with make_client(app, token=None) as client:
        yield client


def assert_problem(response: httpx.Response, status: int, reason: str | None = None):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == status
    assert {"type", "title", "detail", "instance"} <= body.keys()
    assert body["type"].startswith("urn:evenkeel:problem:")
    assert "Traceback" not in response.text
    if reason is not None:
        assert body["reason"] == reason
    return body
