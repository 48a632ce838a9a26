"""A server over a socket, a hub that takes every rank, a rank's link that notes what it hears, and a CA of the test's own."""

import asyncio
import subprocess
from pathlib import Path

import grpc

from evenkeel_moe.adapters.grpc.server import ServerOptions
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.codec import decode_controller_message
from evenkeel_moe.wire.link import (
    FlowControl,
    Heartbeat,
    NotLeader,
    Registration,
    RegistrationOutcome,
    ReportAck,
)
from tests.wire.wires import HELLO


class Hub:
    """Takes every rank and answers each heartbeat."""

    def __init__(self):
        self.refused = []
        self.lost = asyncio.Event()

    async def attach(self, hello, stream):
        hub = self

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
    """Registers ranks too, with no heartbeat and no lease within a test."""

    async def attach(self, hello, stream):
        stream.send(Registration(RegistrationOutcome.ACCEPTED, 600.0, 600.0, FlowControl(1.0)))
        return await super().attach(hello, stream)


class Listener:
    """A rank beside its link."""

    def __init__(self, hello=HELLO):
        self.got = []
        self.lost_streams = []
        self._hello = hello

    def hello(self):
        return self._hello

    def heartbeat(self):
        return Heartbeat(7, 1, 2)

    def received(self, stream, message):
        self.got.append((stream, message))

    def lost(self, stream):
        self.lost_streams.append(stream)

    @property
    def registrations(self):
        """Streams on which the rank was taken."""
        return [stream for stream, message in self.got if isinstance(message, Registration)]


def make_options(**changes) -> ServerOptions:
    values = {
        "host": "127.0.0.1",
        "port": 0,
        "max_message_bytes": 1 << 20,
        "send_queue": 16,
        "keepalive_s": 20.0,
        "keepalive_timeout_s": 10.0,
    }
    return ServerOptions(**{**values, **changes})


async def ask(channel, *messages):
    """The answers to some messages on one stream, until the server ends it or all are answered."""
    call = agent_pb2_grpc.RankLinkStub(channel).Attach()
    for message in messages:
        await call.write(message)
    answer = await asyncio.wait_for(call.read(), 10)
    call.cancel()
    return answer if answer is grpc.aio.EOF else decode_controller_message(answer)


class Authority:
    """A CA, and certificates of it for 127.0.0.1, as files of a folder."""

    def __init__(self, folder: Path):
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
        signed = (
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-extfile",
            "names",
            "-days",
            "2",
        )
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")

    def read(self, *names: str) -> list[bytes]:
        return [(self.folder / name).read_bytes() for name in names]

    def channel(self, port: int, name: str):
        """A channel with a certificate of that name."""
        credentials = grpc.ssl_channel_credentials(
            *self.read("ca.pem", f"{name}.key", f"{name}.pem")
        )
        # Of its own: a connection shared with another channel would show no handshake.
        options = (("grpc.use_local_subchannel_pool", 1),)
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options)

    def files(self, name: str, folder: Path | None = None, **changes):
        """Options of a server with that certificate that wants one of its clients."""
        folder = folder or self.folder
        return {
            "tls_cert_file": folder / f"{name}.pem",
            "tls_key_file": folder / f"{name}.key",
            "tls_client_ca_file": folder / "ca.pem",
            **changes,
        }
