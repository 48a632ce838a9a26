"""One vLLM server as its users start it, with the plugin, and requests to it."""

import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from evenkeel_moe.engines.demo.processes import ChildProcess, free_ports
from tests.vllm import probe
from tests.vllm.stand_ins import START_METHOD
from tests.waiting import deadline, wait_until

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".cache" / "vllm" / "bin" / "python"
TOKENS = 16
"""Length of every answer."""
RANKS = 2
TENSOR_PARALLEL = ("--tensor-parallel-size", "2")
DATA_PARALLEL = ("--data-parallel-size", "2")

_ENTRY_POINTS = """[vllm.general_plugins]
evenkeel_test_stand_ins = tests.vllm.stand_ins:register
evenkeel_test_probe = tests.vllm.probe:register
"""


@dataclass(frozen=True)
class Answer:
    """One answer of the server."""

    prompt: int
    tokens: tuple[int, ...]
    began: float
    """Unix seconds, as `arrivals`."""
    arrivals: tuple[float, ...]
    """When each part of the answer came."""


@dataclass(frozen=True)
class Slots:
    """The map of all ranks, and the digest of the bytes in each slot."""

    phy2log: list[list[int]]
    digests: list[list[str]]


class VllmServer:
    """`python -m vllm.entrypoints.openai.api_server` with two expert-parallel ranks.

    Args:
        folder: an empty folder for its files.
        checkpoint: the model.
        parallel: `TENSOR_PARALLEL` or `DATA_PARALLEL`.
        rank: settings of the plugin, without their prefix; empty runs without the plugin.
        start_method: of vLLM's processes: "fork" or "spawn".
        eplb: options of vLLM's balancer that differ from those here.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        parallel: Sequence[str],
        rank: dict[str, str],
        *,
        start_method: str = "fork",
        **eplb: object,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        # The path of a socket has at most 107 characters, and that of the test may take them all.
        self._temporary = TemporaryDirectory(prefix="evenkeel-", ignore_cleanup_errors=True)
        (port, data_parallel_port) = free_ports(2)
        options = {
            "num_redundant_experts": 8,
            "window_size": 32,
            "step_interval": 1_000_000,
            "use_async": True,
            "communicator": "torch_gloo",
        }
        self._command = [
            *_environment(folder, self._temporary.name, rank, start_method),
            *[str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"],
            *["--model", str(checkpoint), "--served-model-name", "tiny", "--dtype", "float32"],
            *["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512"],
            *["--max-num-seqs", "32", "--enforce-eager", "--no-enable-prefix-caching"],
            *["--kv-cache-memory-bytes", str(64 << 20)],
            *["--enable-expert-parallel", "--enable-eplb"],
            *["--eplb-config", json.dumps(options | eplb)],
            *["--worker-extension-cls", "tests.vllm.probe.Probe", *parallel],
        ]
        if parallel == DATA_PARALLEL:
            self._command += ["--data-parallel-rpc-port", str(data_parallel_port)]
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=deadline(60),
            trust_env=False,
            limits=httpx.Limits(max_connections=32),
        )
        self._process: ChildProcess | None = None
        self._asked = 0

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self.launch()
        self.wait_until_serving()

    def launch(self) -> None:
        """Start its process, without waiting until it serves."""
        self._process = ChildProcess(self._command, self.folder / "log")

    def wait_until_serving(self) -> None:
        wait_until(self._healthy, within_s=240, every_s=0.5, what="vLLM to serve")

    def _healthy(self) -> bool:
        assert self.running, f"vLLM ended:\n{self.log_tail(60)}"
        with suppress(httpx.TransportError):
            return self.http.get("/health").is_success
        return False

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def log_tail(self, lines: int) -> str:
        assert self._process is not None
        return self._process.log_tail(lines)

    def stop(self) -> None:
        """End it with all its processes, whatever state it is in."""
        self.http.close()
        if self._process is not None:
            self._process.stop(deadline(20))
        self._temporary.cleanup()

    # --- requests ---------------------------------------------------------------------------------

    def answer(self, number: int, prompt: list[int]) -> Answer:
        """Ask for a greedy answer, and note when each part of it comes."""
        body = self._body(prompt) | {"stream": True}
        began, tokens, arrivals = time.time(), [], []
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                text = line.removeprefix("data: ")
                if text in ("", "[DONE]"):
                    continue
                part = json.loads(text)
                assert "choices" in part, part
                new = part["choices"][0].get("token_ids") if part["choices"] else None
                if new:
                    tokens += new
                    arrivals.append(time.time())
        return Answer(number, tuple(tokens), began, tuple(arrivals))

    def greedy(self, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        """Return the answers to prompts that are asked together."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return [found.tokens for found in pool.map(self.answer, range(len(prompts)), prompts)]

    def least_margins(self, prompts: list[list[int]]) -> list[float]:
        """Return how near another answer was to each prompt; they are asked together.

        That is the least distance in log probability between the first two tokens of a step.
        """
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self._least_margin, prompts))

    def _least_margin(self, prompt: list[int]) -> float:
        answer = self.http.post("/v1/completions", json=self._body(prompt) | {"logprobs": 2})
        answer.raise_for_status()
        rows = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
        best = [sorted(row.values(), reverse=True) for row in rows]
        return min(first - second for first, second, *_ in best)

    @staticmethod
    def _body(prompt: list[int]) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def call(self, method: str, **kwargs: object) -> None:
        """Call a method of vLLM's workers, or of the probe, on every rank."""
        body = {"method": method, "kwargs": kwargs}
        self.http.post("/collective_rpc", json=body).raise_for_status()

    def replace_weights(self, checkpoint: Path) -> tuple[float, float]:
        """Pause, load other weights, and go on; return when loading began and ended."""
        self.http.post("/pause", params={"mode": "wait"}).raise_for_status()
        began = time.time()
        self.call("reload_weights", weights_path=str(checkpoint))
        ended = time.time()
        self.http.post("/resume").raise_for_status()
        return began, ended

    # --- what is inside ---------------------------------------------------------------------------

    def slots(self) -> Slots:
        """Return the slots of all ranks; every rank must have the same map."""
        self._asked += 1
        name = f"slots-{self._asked}"
        self.call("write_slots", name=name)
        found = [json.loads((self.folder / f"{name}.{rank}").read_text()) for rank in range(RANKS)]
        assert found[0]["map"] == found[1]["map"], "the ranks have different maps"
        parts = [rank["digests"] for rank in found]
        return Slots(found[0]["map"], [a + b for a, b in zip(*parts, strict=True)])

    def trace(self) -> list[list[list[int]]]:
        """Return for each rank a fingerprint of each layer's map, after each step."""
        return [[line["maps"] for line in lines] for lines in self.steps()]

    def steps(self) -> list[list[dict[str, Any]]]:
        """Return for each rank what the probe wrote after each step."""
        found = []
        for rank in range(RANKS):
            (path,) = self.folder.glob(f"trace.{rank}.*")
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            found.append([json.loads(line) for line in lines if line.endswith("\n")])
        return found

    def layers_changed(self, since: list[int]) -> int:
        """Return how many layers have another map than `since`, which is a line of a trace."""
        return sum(a != b for a, b in zip(self.trace()[0][-1], since, strict=True))

    def rank_process(self, rank: int) -> psutil.Process:
        """Return the worker process of a rank."""
        (path,) = self.folder.glob(f"trace.{rank}.*")
        return psutil.Process(int(path.suffix[1:]))


def _environment(
    folder: Path, temporary: str, rank: dict[str, str], start_method: str
) -> list[str]:
    """Return the start of a command that runs the rest of it with the environment of vLLM."""
    # An entry point needs no installation: a folder on the path that describes it is enough.
    about = folder / "path" / "evenkeel_test_plugins-0.dist-info"
    about.mkdir(parents=True)
    (about / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    (about / "METADATA").write_text("Name: evenkeel-test-plugins\nVersion: 0\n", encoding="utf-8")
    values = {
        "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(about.parent), str(ROOT)]),
        "TMPDIR": temporary,
        "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm" / "state"),
        # Two versions of numba would overwrite each other's kernels.
        "NUMBA_CACHE_DIR": str(ROOT / ".cache" / "vllm" / "kernels"),
        "VLLM_CONFIG_ROOT": str(folder),
        START_METHOD: start_method,
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Without it the first forward pass compiles C++ for minutes.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        probe.FOLDER: str(folder),
        # A CPU needs milliseconds for each expert; with the default a plan's take a thousand steps.
        "EVENKEEL_RANK__CANARY_STEP_S": "0.01",
        **{f"EVENKEEL_RANK__{name}": value for name, value in rank.items()},
    }
    return ["/usr/bin/env", *[f"{name}={value}" for name, value in values.items()]]


class Traffic:
    """Requests from several clients at once, until the end of the block; every one must succeed."""

    def __init__(self, server: VllmServer, prompts: list[list[int]], clients: int = 6) -> None:
        self._server = server
        self._prompts = prompts
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]
        self._errors: list[Exception] = []
        self.answers: list[Answer] = []

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if kind is None:
            assert not self._errors, self._errors[0]
            assert self.answers, "no request was answered"

    def _ask(self, number: int) -> None:
        while not self._stop.is_set():
            number = (number + 5) % len(self._prompts)
            try:
                self.answers.append(self._server.answer(number, self._prompts[number]))
            except Exception as error:
                self._errors.append(error)
                return

    def wait_for(self, count: int) -> None:
        """Wait for more answers."""
        enough = len(self.answers) + count
        wait_until(
            lambda: self._errors or len(self.answers) >= enough, within_s=120, what="answers"
        )
        assert not self._errors, self._errors[0]

    def gaps(self, spans: list[tuple[float, float]]) -> list[float]:
        """Return the seconds between two parts of an answer, of parts that came in the spans."""
        return [
            later - earlier
            for answer in self.answers
            for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
            if any(begin <= later <= end for begin, end in spans)
        ]
