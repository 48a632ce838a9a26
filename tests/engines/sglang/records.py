"""SGLang's own recorder behind the HTTP routes of its server, for `evenkeel record`."""

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
import torch.distributed as dist

from tests.engines.sglang import engine
from tests.engines.sglang.scenarios import Rank

ROUTES = ("start", "stop", "dump")


class Server(ThreadingHTTPServer):
    """Answers each route once all ranks have carried it out, as SGLang's server does."""

    def __init__(self, port):
        super().__init__(("127.0.0.1", port), _Handler)
        self.asked: queue.Queue = queue.Queue()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        mode = engine.EXEC.moe.expert_distribution_recorder_mode
        started = {"expert_distribution_recorder_mode": mode, "enable_eplb": False, "pp_size": 1}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(started).encode())

    def do_POST(self):
        name = self.path.strip("/").removesuffix("_expert_distribution_record")
        done = threading.Event()
        self.server.asked.put((ROUTES.index(name), done))  # type: ignore[attr-defined]
        done.wait(60)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def serves(rank, size, *, folder, port):
    """Run passes until a dump was asked for; return the routed tokens of the recorded passes."""
    engine.ENVIRONMENT["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"] = folder
    one = Rank(rank, size, mode="observe")
    server = Server(port) if rank == 0 else None
    if server is not None:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    recorded: list[np.ndarray] = []
    on, last = False, -1
    while last != ROUTES.index("dump"):
        done = None
        order = torch.tensor([-1])
        if server is not None:
            try:
                code, done = server.asked.get_nowait()
                order[0] = code
            except queue.Empty:
                pass
        dist.broadcast(order, src=0, group=one.lockstep)
        last = int(order)
        if last >= 0:
            getattr(one.recorder, f"{ROUTES[last]}_record")()
            on = last == 0
        if done is not None:
            done.set()
        if last != ROUTES.index("dump"):
            one.step()
            if on:
                routed = np.bincount(one.chosen.reshape(-1).numpy(), minlength=engine.EXPERTS)
                recorded.append(routed)
    if server is not None:
        server.shutdown()
    return recorded
