"""A real controller process, and simulated ranks that speak its wire protocol."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Self

import grpc
import httpx
import numpy as np

from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.v1 import agent_pb2, agent_pb2_grpc
from evenkeel_moe.wire import link
from evenkeel_moe.wire.from_rank import encode_rank_message
from evenkeel_moe.wire.to_rank import decode_controller_message
from tests.forked.controller import ForkedController, start_forked, start_new
from tests.waiting import deadline, until

SHAPE = ModelShape(
    num_layers=3,
    num_logical_experts=8,
    num_ranks=4,
    slots_per_rank=3,
    top_k=2,
    bytes_per_expert=1024,
)


class Controller:
    """`serve` in a process of its own on free ports, forked from one that has loaded it."""

    def __init__(self, data_dir: Path, **environment: str) -> None:
        self.data_dir = data_dir
        self.environment = {
            "EVENKEEL_DATA_DIR": str(data_dir),
            "EVENKEEL_GRPC__PORT": "0",
            "EVENKEEL_REST__PORT": "0",
            "EVENKEEL_METRICS__PORT": "0",
            "EVENKEEL_LEADER__REPLICA_ID": "replica-0",
            "EVENKEEL_PLANNER__POLICY": "eplb",
            "EVENKEEL_PLANNER__CYCLE_S": "0.2",
            "EVENKEEL_PLANNER__THRESHOLDS__COOLDOWN_S": "0.5",
            "EVENKEEL_METRICS__REFRESH_S": "0.2",
            **{f"EVENKEEL_{name}": value for name, value in environment.items()},
        }
        self.ports: dict[str, int] = {}
        self.log: list[dict[str, Any]] = []
        self.noise: list[str] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, failure: object, *_: object) -> None:
        await self.stop()
        if failure is not None:
            for row in self.log[-40:]:
                print(str(row)[:1000])
            print("\n".join(self.noise[-40:]))

    async def start(self) -> None:
        self.log.clear()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENKEEL_")}
        self.process = await self._start_process(inherited | self.environment)
        self._reader = asyncio.create_task(self._read())
        # Importing the controller alone takes seconds on a busy machine.
        serving = await until(
            lambda: self.events("serving") or self.process.returncode is not None, within_s=60.0
        )
        assert serving is not True, self.noise
        self.ports = {name: serving[-1][name] for name in ("grpc", "rest", "metrics")}
        # The first line is the admin's; the token is the last word of a line.
        token = (self.data_dir / "tokens").read_text().splitlines()[0].split()[-1]
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.ports['rest']}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=deadline(20),
            # A server may close an idle connection just as the next request is sent.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    async def _start_process(
        self, environment: dict[str, str]
    ) -> ForkedController | asyncio.subprocess.Process:
        return await start_forked(environment)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.noise.append(line.decode().rstrip())

    def failures(self) -> list[dict[str, Any]]:
        """The logged errors that are bugs of the controller."""
        names = ("task_failed", "deployment_failed", "ended_deployment_failed")
        return [row for row in self.log if row.get("event") in names]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.log if row.get("event") == name]

    async def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        try:
            code = await asyncio.wait_for(self.process.wait(), deadline(20))
        except TimeoutError:
            self.process.kill()
            raise
        await self._reader
        await self.http.aclose()
        return code

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['grpc']}"

    async def status(self, deployment="demo") -> dict[str, Any]:
        answer = await self.http.get(f"/v1/deployments/{deployment}")
        return answer.json() if answer.status_code == 200 else {}

    async def state(self, name: str, deployment="demo") -> bool:
        return (await self.status(deployment)).get("state") == name

    async def counted(self, steps: int, deployment="demo") -> dict[str, Any] | None:
        """The status once the window has as many steps; None before."""
        status = await self.status(deployment)
        return status if (status.get("window_steps") or 0) >= steps else None

    async def decisions(self, deployment="demo") -> list[dict[str, Any]]:
        return (await self.http.get(f"/v1/deployments/{deployment}/decisions")).json()["items"]

    async def decided(self, reason: str) -> bool:
        """True if the newest cycle ended with a reason."""
        rows = await self.decisions()
        return bool(rows) and rows[0]["reason"] == reason

    async def plans(self, deployment="demo") -> list[dict[str, Any]]:
        return (await self.http.get(f"/v1/deployments/{deployment}/plans")).json()["items"]

    async def metrics(self) -> dict[str, float]:
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://127.0.0.1:{self.ports['metrics']}/metrics")).text
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in rows}


class NewController(Controller):
    """`serve` as operators start it: it loads everything, and its planner is its child."""

    async def _start_process(self, environment: dict[str, str]) -> asyncio.subprocess.Process:
        return await start_new(environment)


class Rank:
    """One stream to a controller; answers like a rank whose copies never fail."""

    def __init__(self, group: "Group", rank: int) -> None:
        self.group, self.rank = group, rank
        self.identity = m.RankIdentity(
            group.deployment, EpRank(rank), group.generation, time.time_ns()
        )
        self.state = m.ParticipantState.IDLE
        self.wave: Any = None
        self.prepare: Any = None
        self.last: tuple[Any, Any] = (None, None)
        self.term = 0
        self.acks: list[link.ReportAck] = []
        self.answer: Any = None
        self.votes = True
        self.ended: Exception | None = None
        self._writing = asyncio.Lock()
        self.came_from: m.Lineage | None = None
        self.epoch, self.placement = group.epoch, group.placement

    def hello(self, **changes) -> m.Hello:
        values: dict[str, Any] = {
            "identity": self.identity,
            "shape": self.group.shape,
            "node": f"node-{self.rank // 2}",
            "gpu_uuid": "",
            "epoch": self.epoch,
            "placement_digest": self.placement.digest,
            "weights_version": 1,
            "checksums_digest": "same",
            "free_bytes": 10_000,
            "staging_bytes": 1 << 20,
            "gate_digest": "gate",
            "highest_term": self.term,
            "lineage": self.came_from,
        }
        return m.Hello(**{**values, **changes})

    async def connect(self, address: str, **changes) -> Any:
        """Open the stream and register; the controller's answer."""
        self.channel = grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.call: Any = agent_pb2_grpc.RankLinkStub(self.channel).Attach()
        await self.call.write(encode_rank_message(self.hello(**changes)))
        self.answer = await self.read()
        self.reader = asyncio.create_task(self._listen())
        if getattr(self.answer, "outcome", None) is link.RegistrationOutcome.ACCEPTED:
            await self.send_wire(encode_rank_message(link.KvCache(16, 64_000)))
        return self.answer

    async def send_wire(self, wire: agent_pb2.RankMessage) -> None:
        async with self._writing:
            await self.call.write(wire)

    async def ack(self, count: int) -> link.ReportAck:
        """The answer to the `count`-th report of this rank."""
        return await until(lambda: len(self.acks) >= count and self.acks[count - 1])

    async def read(self) -> Any:
        message = await asyncio.wait_for(self.call.read(), deadline(20))
        return None if message is grpc.aio.EOF else decode_controller_message(message)

    async def send(self, message) -> None:
        await self.send_wire(encode_rank_message(message))

    async def _listen(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                await self._hear(decode_controller_message(message))
        except grpc.aio.AioRpcError as error:
            self.ended = error
        except Exception as error:
            self.ended = error
            raise

    async def _hear(self, message) -> None:
        match message:
            case link.ReportAck():
                self.acks.append(message)
            case m.QueryState():
                self.term = max(self.term, message.leader.term)
                await self.send(self._told(message))
            case m.Prepare():
                if self.wave != message.wave:
                    self.state, self.wave = m.ParticipantState.PREPARED, message.wave
                    self.prepare = message
                if self.votes:
                    await self.send(m.Vote(message.wave, True))
            case m.Commit() if message.wave == self.wave:
                self.state = m.ParticipantState.ARMED
                self.group.poll()
            case m.Commit() if self.last == (message.wave, m.WaveOutcome.SWAPPED):
                await self.send(m.Ack(message.wave, self.epoch, self.placement.digest, 0.001))
            case m.Abort():
                self.state, self.last = (
                    m.ParticipantState.IDLE,
                    (message.wave, m.WaveOutcome.DROPPED),
                )
                self.wave = None
                await self.send(
                    m.AbortAnswer(message.wave, self.epoch, m.WaveOutcome.DROPPED, True)
                )

    def _told(self, query: m.QueryState) -> m.RankState:
        cells = self.group.shape.num_layers * self.group.shape.num_logical_experts
        return m.RankState(
            self.identity,
            self.state,
            self.wave,
            self.epoch,
            self.placement.digest,
            1,
            True,
            *self.last,
            placement=self.placement if query.want_placement else None,
            checksums=tuple(range(1, cells + 1)) if query.want_checksums else None,
            highest_term=self.term,
            step=self.group.step,
            query=query.query,
        )

    def swap(self) -> m.Ack:
        assert self.prepare is not None and self.wave is not None
        body = self.prepare.body
        self.placement = self.placement.with_rows(body.layers, body.rows)
        self.epoch = Epoch(self.epoch + 1)
        self.state, self.last = m.ParticipantState.IDLE, (self.wave, m.WaveOutcome.SWAPPED)
        wave, self.wave = self.wave, None
        return m.Ack(wave, self.epoch, self.placement.digest, 0.001)

    async def close(self) -> None:
        if not hasattr(self, "channel"):
            return
        # A rank that was cancelled while it connected has no reader.
        if hasattr(self, "reader"):
            self.call.cancel()
            self.reader.cancel()
            await asyncio.gather(self.reader, return_exceptions=True)
        await self.channel.close()


class Group:
    """An EP group: ranks, the map they share, and the traffic they serve."""

    def __init__(self, deployment="demo", shape=SHAPE, *, seed=0, generation="g-1") -> None:
        self.deployment, self.shape = DeploymentId(deployment), shape
        self.generation = Generation(generation)
        self.epoch, self.placement = Epoch(0), Placement.initial(shape)
        self.step = 0
        self.rng = np.random.default_rng(seed)
        self.popularity = self.draw(seed)
        self.half_counted: list[int] = []
        """Layers whose counter misses every second token."""
        self.ranks = [Rank(self, rank) for rank in range(shape.num_ranks)]
        self._tasks: set[asyncio.Task[None]] = set()

    def draw(self, seed: int):
        """(L, E) popularity with a few hot experts."""
        weights = np.random.default_rng(seed).pareto(0.8, (self.shape.num_layers, 8)) + 0.05
        return weights / weights.sum(axis=1, keepdims=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank in self.ranks:
            await rank.close()

    async def connect(self, address: str) -> None:
        await asyncio.gather(*(rank.connect(address) for rank in self.ranks))
        for rank in self.ranks:
            assert rank.answer.outcome is link.RegistrationOutcome.ACCEPTED, rank.answer

    async def join(self, controller: Controller) -> None:
        """Connect, and wait until the controller is ready to plan for the group."""
        await self.connect(controller.address)
        await until(lambda: controller.state("ready", self.deployment))

    async def reconnect(self, address: str) -> None:
        for rank in self.ranks:
            await rank.close()
        await self.connect(address)

    def poll(self) -> None:
        """The gate: all armed, all swap."""
        if all(rank.state is m.ParticipantState.ARMED for rank in self.ranks):
            acks = [rank.swap() for rank in self.ranks]
            self.epoch, self.placement = self.ranks[0].epoch, self.ranks[0].placement
            for rank, ack in zip(self.ranks, acks, strict=True):
                task = asyncio.create_task(rank.send(ack))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def route(self, num_steps: int, tokens: int = 64) -> list[LoadReport]:
        """Return the report of every rank for a number of steps."""
        shape = self.shape
        slots = np.zeros((num_steps, shape.num_layers, shape.num_slots), np.int64)
        for step, layer in np.ndindex(num_steps, shape.num_layers):
            # Gumbel top-k: k different experts for each token.
            noise = self.rng.gumbel(size=(tokens * shape.num_ranks, shape.num_logical_experts))
            keys = np.log(self.popularity[layer]) + noise
            chosen = np.argpartition(-keys, shape.top_k, axis=1)[:, : shape.top_k]
            for expert, count in enumerate(
                np.bincount(chosen.ravel(), minlength=shape.num_logical_experts)
            ):
                copies = np.flatnonzero(self.placement.phy2log[layer] == expert)
                base, extra = divmod(int(count), len(copies))
                slots[step, layer, copies] += base
                slots[step, layer, copies[:extra]] += 1
        slots[:, self.half_counted] //= 2
        first, self.step = self.step, self.step + num_steps
        metas = step_table(
            StepMeta(step, self.epoch, Phase.DECODE, tokens)
            for step in range(first, first + num_steps)
        )
        width = shape.slots_per_rank
        return [
            LoadReport(
                self.deployment,
                self.generation,
                EpRank(rank),
                1,
                CountingSide.DESTINATION,
                metas,
                slots[:, :, rank * width : (rank + 1) * width],
            )
            for rank in range(shape.num_ranks)
        ]

    async def serve(self, num_steps: int = 16) -> None:
        """Run some steps and report them."""
        for rank, report in zip(self.ranks, self.route(num_steps), strict=True):
            await rank.send(report)

    def serve_on(self, every_s: float = 0.05, steps: int = 8) -> asyncio.Task[None]:
        """Keep serving in the background."""

        async def serve() -> None:
            while True:
                await self.serve(steps)
                await asyncio.sleep(every_s)  # The pace of serving.

        task = asyncio.create_task(serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def damaged(report: LoadReport, **changes) -> agent_pb2.RankMessage:
    """Return a report as sent, with some fields replaced."""
    wire = encode_rank_message(report)
    for name, value in changes.items():
        setattr(wire.load_report, name, value)
    return wire
