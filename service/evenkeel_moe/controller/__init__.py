"""The controller process."""

import os

# gRPC reads this variable once, when the import below loads it. With its event engine, a message of
# a rank passes from thread to thread. Its older loop reads the message in the thread that waits for
# it, at half the cost (docs/performance.md). A value that an operator set is kept.
os.environ.setdefault(  # noqa: TID251 - written for gRPC, not read
    "GRPC_EXPERIMENTS", "-event_engine_listener"
)

from evenkeel_moe.controller.process.serve import run, serve

__all__ = ["run", "serve"]
