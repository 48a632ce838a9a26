"""Large messages are decoded on a thread, one after another over all streams."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from evenkeel_moe.adapters.grpc import server as server_module
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.v1 import agent_pb2_grpc
from evenkeel_moe.wire.codec import encode_rank_message
from evenkeel_moe.wire.link import Heartbeat, ReportAck
from tests.adapters.serving import Hub, ask
from tests.protocol.machines import state_of
from tests.waiting import until
from tests.wire.wires import HELLO

HELLO_OF_LARGE = replace(HELLO, shape=ModelShape(48, 512, 2, 512, 1, 10))


class Noting(Hub):
    """Keeps the streams, and counts the messages that are no heartbeats."""

    def __init__(self):
        super().__init__()
        self.streams, self.states = [], 0

    async def attach(self, hello, stream):
        session, hub = await super().attach(hello, stream), self
        self.streams.append(stream)

        class Noted:
            malformed, lost = session.malformed, session.lost

            def received(self, message):
                if isinstance(message, Heartbeat):
                    session.received(message)
                else:
                    hub.states += 1

        return Noted()


@pytest.mark.integration
async def test_large_messages_are_decoded_one_at_a_time_and_small_ones_meanwhile(
    serve, monkeypatch
):
    server, _ = await serve(max_message_bytes=64 << 20)
    server._hub = hub = Noting()
    shape = HELLO_OF_LARGE.shape
    checksums = (5,) * (shape.num_layers * shape.num_logical_experts)
    placement = Placement.initial(shape)
    state = encode_rank_message(
        state_of(identity=HELLO.identity, placement=placement, checksums=checksums)
    )
    assert state.ByteSize() > server_module._LARGE_BYTES
    begun, first_may_end = [], threading.Event()
    decode = server_module._decode

    def held(data, hello):
        if threading.current_thread() is not threading.main_thread():
            begun.append(len(data))
            if len(begun) == 1:
                first_may_end.wait()
        return decode(data, hello)

    monkeypatch.setattr(server_module, "_decode", held)
    # Two threads: the first message keeps one, and the other takes what is given to it in order.
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        try:
            calls = [agent_pb2_grpc.RankLinkStub(channel).Attach() for _ in range(3)]
            for call in calls:
                await call.write(encode_rank_message(HELLO_OF_LARGE))
                await call.write(state)
            size = state.ByteSize()
            await until(lambda: [s.message_bytes for s in hub.streams] == [size] * 3)
            await asyncio.to_thread(lambda: None)
            assert len(begun) == 1, "a second large message was decoded beside the first"
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as other:
                beat = encode_rank_message(Heartbeat(7, 1, 2))
                assert await ask(other, encode_rank_message(HELLO), beat) == ReportAck(7)
            assert hub.states == 0
        finally:
            first_may_end.set()
        await until(lambda: hub.states == 3)
        for call in calls:
            call.cancel()
