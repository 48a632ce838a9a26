"""Support for tests of gRPC servers: options, hubs that accept every rank, a listener, a CA."""

import asyncio
import ssl
import subprocess
from dataclasses import fields
from pathlib import Path

import grpc
import numpy as np

from evenkeel_moe.adapters.grpc.rank_port import ServerOptions
from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
from evenkeel_moe.peer_budget import PeerLimits
from evenkeel_moe.protocol.messages import Leader, Prepare
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.link import (
    FlowControl,
    Heartbeat,
    NotLeader,
    Registration,
    RegistrationOutcome,
    ReportAck,
)
from evenkeel_moe.wire.to_rank import decode_controller_message
from tests.waiting import deadline
from tests.wire.wires import HELLO


def make_prepare(index=0, checksum=0):
    rows = np.array([[0, 1, 2, 0]], np.int32)
    wave = Wave(index, (1,), rows, ((Transfer(1, 0, 0, 3, 1000),),))
    key = WaveKey(Generation("g"), PlanId("p"), index, 1, Epoch(6))
    return Prepare(Leader("a", 1), key, Epoch(0), wave, (checksum,), 5.0)


class Hub:
    """Accepts every rank and answers each heartbeat."""

    def __init__(self):
        self.refused = []
        self.lost = asyncio.Event()
        self.attached = 0

    async def attach(self, hello, stream):
        hub = self
        self.attached += 1

        class Session:
            def received(self, message):
                assert isinstance(message, Heartbeat)
                stream.send(ReportAck(message.step))

            def malformed(self, violation, steps):
                stream.send(ReportAck(max(steps), len(steps), violation.reason))

            def lost(self):
                hub.lost.set()

        return Session()

    def refuse(self, violation, stream):
        self.refused.append(violation)
        stream.close(NotLeader("", "", 1.0))


class RegisteringHub(Hub):
    """Registers ranks too, with a heartbeat and a lease longer than any test."""

    async def attach(self, hello, stream):
        stream.send(Registration(RegistrationOutcome.ACCEPTED, 600.0, 600.0, FlowControl(1.0)))
        return await super().attach(hello, stream)


class Listener:
    """The rank of a link; it records what it receives."""

    def __init__(self, hello=HELLO):
        self.got = []
        self.lost_streams = []
        self.lost_one = asyncio.Event()
        self._hello = hello

    def hello(self):
        return self._hello

    def heartbeat(self):
        return Heartbeat(7, 1, 2)

    def received(self, stream, message):
        self.got.append((stream, message))

    def lost(self, stream):
        self.lost_streams.append(stream)
        self.lost_one.set()

    @property
    def registrations(self):
        """Streams on which the rank was registered."""
        return [stream for stream, message in self.got if isinstance(message, Registration)]


def make_options(**changes) -> ServerOptions:
    """Return options of a server; changes are its fields, and those of its limits."""
    limits = {one.name: changes.pop(one.name) for one in fields(PeerLimits) if one.name in changes}
    values = {
        "host": "127.0.0.1",
        "port": 0,
        "max_message_bytes": 1 << 20,
        "send_queue": 16,
        "keepalive_s": 20.0,
        "keepalive_timeout_s": 10.0,
        "limits": PeerLimits(**limits),
    }
    return ServerOptions(**{**values, **changes})


async def ask(channel, *messages):
    """Return the first answer to some messages on one stream, or EOF."""
    call = agent_pb2_grpc.RankLinkStub(channel).Attach()
    for message in messages:
        await call.write(message)
    answer = await asyncio.wait_for(call.read(), deadline(10))
    call.cancel()
    return answer if answer is grpc.aio.EOF else decode_controller_message(answer)


class Authority:
    """A CA that issues certificates for 127.0.0.1 as files in a folder."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        files = ("-keyout", "ca.key", "-out", "ca.pem")
        self._openssl("req", "-x509", *self._key, "-days", "2", *files, "-subj", "/CN=ca")

    def _openssl(self, *arguments):
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def issue(self, name: str, *uris: str):
        """Write NAME.key and NAME.pem."""
        names = ",".join(["IP:127.0.0.1", *(f"URI:{uri}" for uri in uris)])
        (self.folder / "names").write_text(f"subjectAltName={names}\n")
        request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        self._openssl("req", *self._key, *request)
        authority = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        files = ("-in", f"{name}.csr", "-out", f"{name}.pem")
        self._openssl("x509", "-req", *authority, *files, "-extfile", "names", "-days", "2")

    def read(self, *names: str) -> list[bytes]:
        return [(self.folder / name).read_bytes() for name in names]

    def server(self, name: str, clients: "Authority | None" = None) -> ssl.SSLContext:
        """Return a server's end of TLS with that certificate.

        Args:
            clients: only clients with a certificate of it are served; None serves all.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        if clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(clients.folder / "ca.pem")
        return context

    def channel(self, port: int, name: str):
        """Return a channel with the certificate of that name."""
        credentials = grpc.ssl_channel_credentials(
            *self.read("ca.pem", f"{name}.key", f"{name}.pem")
        )
        # A connection shared with another channel would make no handshake.
        options = (("grpc.use_local_subchannel_pool", 1),)
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options)

    def files(self, name: str, folder: Path | None = None, **changes):
        """Return options of a server with that certificate that requires one of its clients."""
        folder = folder or self.folder
        return {
            "tls_cert_file": folder / f"{name}.pem",
            "tls_key_file": folder / f"{name}.key",
            "tls_client_ca_file": folder / "ca.pem",
            **changes,
        }
