"""The least a gRPC receiver can do with the same bytes: read every message of every stream, and count."""

import asyncio

import grpc

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


async def serve() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    server.add_generic_rpc_handlers((Receiver(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve())
