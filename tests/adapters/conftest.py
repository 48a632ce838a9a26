"""Fixtures: gRPC servers, certificates for them, and a real store."""

import pytest

from evenkeel_moe.adapters.grpc.server import GrpcServer
from tests.adapters.serving import Authority, Hub, make_options
from tests.contracts.conftest import valkey

__all__ = ["valkey"]


@pytest.fixture
async def serve():
    servers = []

    async def start(**changes):
        server = GrpcServer(make_options(**changes))
        server.bind()
        hub = Hub()
        await server.start(hub)
        servers.append(server)
        return server, hub

    yield start
    for server in servers:
        await server.stop(0.1)
        await server.stop(0.1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    authority.issue("leaf")
    return authority
