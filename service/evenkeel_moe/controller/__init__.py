"""The controller process."""

import os

# gRPC reads this once, as it is loaded, which the import below does. With its event engine a rank's message passes
# from thread to thread; its older loop reads it in the thread that waits for it, at half the cost
# (docs/performance.md). What an operator set holds.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")  # noqa: TID251 - written for gRPC, not read

from evenkeel_moe.controller.process.serve import run, serve

__all__ = ["run", "serve"]
