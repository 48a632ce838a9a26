"""A minimal gRPC receiver of the same bytes: reads every message of every stream and counts them.

python -m bench.ingest_raw [tuned]; tuned: with the controller's gRPC options and event loop.
"""

import asyncio
import sys

import grpc
import uvloop

METHOD = "/evenkeel.v1.RankLink/Attach"


class Receiver(grpc.GenericRpcHandler):
    """Takes the streams of ranks as raw bytes."""

    def __init__(self) -> None:
        self.messages = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self.attach)

    async def attach(self, requests, context):
        await context.write(b"")
        async for _ in requests:
            self.messages += 1
            if self.messages % 64 == 0:
                await context.write(b"")


async def serve(tuned: bool) -> None:
    options = [("grpc.max_receive_message_length", 64 << 20)]
    if tuned:
        options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 256 * 1024)]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((Receiver(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[1:] == ["tuned"]:
        uvloop.run(serve(tuned=True))
    else:
        asyncio.run(serve(tuned=False))
