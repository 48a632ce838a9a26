"""Measures the console at 92 layers x 320 ranks: `python -m tests.console.measure`.

Prints the frames a second of the heat map while the page scrolls and the cursor moves, and the
processor time that one open page costs the server, as a share of one core. The server is the real
REST application with made-up deployments, in a process of its own.
"""

import asyncio
import subprocess
import sys
import time

import numpy as np
import psutil

from evenkeel_moe.adapters.http_servers import RestServer
from evenkeel_moe.api import TokenSet, create_app
from evenkeel_moe.controller.policy_document import policy_document
from evenkeel_moe.controller.process.serve import tune_garbage_collection
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.topology import ModelShape
from tests.api.fakes import FakeOperations, FakeView, make_rank, make_status
from tests.console.browser import Browser, answers, chromium
from tests.console.fleet import ADMIN, TOKENS
from tests.telemetry.reports import load_window
from tests.waiting import wait_until

SHAPE = ModelShape(
    num_layers=92,
    num_logical_experts=320,
    num_ranks=320,
    slots_per_rank=2,
    top_k=8,
    bytes_per_expert=1 << 24,
)
SECONDS = 10
_FRAMES = """const [seconds, done] = arguments, canvas = document.querySelector("canvas.heatmap");
const box = canvas.getBoundingClientRect(), times = [], end = performance.now() + seconds * 1000;
requestAnimationFrame(function frame(now) {
  times.push(now);
  const part = (now / 3000) % 1;
  scrollTo(0, 400 * Math.abs(1 - 2 * part));
  const at = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent("pointermove", {bubbles: true,
    clientX: at.left + 50 + part * (box.width - 60), clientY: at.top + 40 + part * 500}));
  if (performance.now() < end) return requestAnimationFrame(frame);
  const gaps = times.slice(1).map((time, i) => time - times[i]).sort((a, b) => a - b);
  done([gaps.length / seconds, gaps[Math.floor(gaps.length * 0.95)]]);
});"""


def serve(port: int) -> None:
    """Serve one large deployment until the process is ended."""
    random = np.random.default_rng(1)
    layers, experts = SHAPE.num_layers, SHAPE.num_logical_experts
    steps = np.arange(64)
    counts = random.gamma(1.0, 100.0, (len(steps), layers, experts))
    window = load_window(counts, steps, SHAPE.num_ranks, epoch=3)
    ranks = tuple(make_rank(rank) for rank in range(SHAPE.num_ranks))
    status = make_status("large", shape=SHAPE, ranks=ranks)
    view = FakeView(status, {Phase.DECODE: window}, Placement.initial(SHAPE))
    operations = FakeOperations(view)
    operations.document = policy_document(DeploymentPolicy())
    app = create_app(operations, TokenSet.parse(TOKENS))
    tune_garbage_collection()  # As the controller does.
    asyncio.run(RestServer("127.0.0.1", port).run(app))


def open_page(browser: Browser, url: str, view: str, ready: str) -> None:
    browser.open(url)
    browser.script("sessionStorage.setItem('evenkeel-token', arguments[0])", ADMIN)
    browser.open(f"{url}#/{view}")
    browser.call("POST", "refresh", {})
    browser.wait(ready)
    time.sleep(3)  # The first answers are asked for once.


def main() -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/"
    python = [sys.executable, "-m", "tests.console.measure", str(port)]
    server = subprocess.Popen(python)
    try:
        wait_until(lambda: answers(f"{url}healthz"), within_s=60)
        process = psutil.Process(server.pid)
        with chromium() as browser:
            for view, element in (
                ("", ".fleet-row"),
                ("d/large/why", ".gates"),
                ("d/large/load", "canvas.heatmap"),
                ("d/large/ranks", "table"),
            ):
                open_page(browser, url, view, element)
                before = sum(process.cpu_times()[:2])
                if "load" in view:
                    rate, slow = browser.wait_script(_FRAMES, SECONDS)
                    print(
                        f"heat map: {rate:.0f} frames/s, 95 % of frames within {slow:.0f} ms",
                        flush=True,
                    )
                else:
                    time.sleep(SECONDS)
                used = (sum(process.cpu_times()[:2]) - before) / SECONDS
                print(
                    f"open page {view or 'fleet'}: {used:.2%} of a core of the server", flush=True
                )
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]))
    else:
        main()
