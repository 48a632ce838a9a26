"""The system under test in a chaos run, and the injection of faults."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.engines.reference.fleet_report import FleetReport
from evenkeel_moe.engines.reference.supervisor import Supervisor
from tests.chaos.judge.case import DUMPS, WIRE
from tests.chaos.judge.wire_log import WireWriter
from tests.chaos.operator import Operator
from tests.chaos.peers import Target
from tests.chaos.processes import ControllerProcess, Sentinel, StoreNode
from tests.chaos.proxy import Proxy
from tests.chaos.resizes import Resizes
from tests.chaos.schedule import Fault, FaultKind
from tests.chaos.store_dump import StoreDumps
from tests.chaos.system import POOL_PER_LAYER, SETTINGS, rank_config
from tests.waiting import slowness, until

__all__ = ["Arena", "Struck"]

_START_S = 120.0
_AIM_S = 12.0
_RECORDED_BYTES = 64 << 20
"""The most bytes of one connection that the judge gets to see."""
_RECORDED_STRANGER_BYTES = 1 << 16
_DUMP_EVERY_S = 2.0


@dataclass(slots=True)
class Struck:
    """One fault as it was done; Unix seconds."""

    kind: FaultKind
    target: str
    began: float
    ended: float = 0.0

    def overlaps(self, begin: float, end: float, after_s: float = 0.0) -> bool:
        """Return True if the fault, extended by `after_s`, overlaps a time span."""
        return self.began <= end and begin <= (self.ended or float("inf")) + after_s


@dataclass
class Arena:
    """Two controllers, a store with a replica and Sentinel, ranks, an operator.

    Args:
        folder: for logs, data and what the ranks write.
        num_ranks: of the reference engine, at the start.
        settings: of the controllers, beside their usual ones.
    """

    folder: Path
    seed: int
    num_ranks: int = 8
    settings: dict[str, str] = field(default_factory=dict)
    struck: list[Struck] = field(default_factory=list)
    not_done: list[FaultKind] = field(default_factory=list)
    """The faults of the schedule that had nothing to strike: no leader, primary or room."""

    def __post_init__(self) -> None:
        ports = free_ports(9)
        folder = self.folder
        self.nodes = [
            StoreNode("store-a", folder, ports[0]),
            StoreNode("store-b", folder, ports[1]),
        ]
        self.sentinel = Sentinel(folder, ports[2])
        self.controllers = [
            ControllerProcess(
                f"replica-{number}", folder, chosen, self.sentinel.url, SETTINGS | self.settings
            )
            for number, chosen in enumerate((ports[3:6], ports[6:9]))
        ]
        self._proxied: tuple[StoreNode | ControllerProcess, ...] = (*self.nodes, *self.controllers)
        self.wire = WireWriter(folder / WIRE)
        self.dumps = StoreDumps(folder / DUMPS)
        for process in self._proxied:
            door = "store" if isinstance(process, StoreNode) else "ranks"
            process.proxy.record_to(self.wire, process.name, door, _RECORDED_BYTES)
        # Misbehaving clients come by a door of their own: faults of the ranks' network spare them.
        self.strangers = [Proxy(controller.grpc_port) for controller in self.controllers]
        for proxy, controller in zip(self.strangers, self.controllers, strict=True):
            proxy.record_to(self.wire, controller.name, "strangers", _RECORDED_STRANGER_BYTES)
        self.supervisor: Supervisor | None = None
        self.report: FleetReport | None = None
        self._hostile: list[subprocess.Popen[bytes]] = []

    @property
    def _proxies(self) -> list[Proxy]:
        return [*(process.proxy for process in self._proxied), *self.strangers]

    async def start(self) -> None:
        """Start everything and wait until a replica leads the ranks."""
        for proxy in self._proxies:
            await proxy.start()
        first, second = self.nodes
        first.begin(None)
        second.begin(first)
        await until(first.has_replica, within_s=20, what="the replica to follow")
        self.sentinel.begin(first)
        await until(self.sentinel.primary_port, within_s=20, what="Sentinel to answer")
        for controller in self.controllers:
            controller.start()
        config = rank_config(
            self.folder / "ranks",
            self.num_ranks,
            [controller.proxy.address for controller in self.controllers],
        )
        self.supervisor = Supervisor(config, max_restarts=60, module="tests.chaos.rank")
        self.supervisor.start()
        self.operator = Operator(
            self.controllers,
            config.shape,
            POOL_PER_LAYER,
            self.sentinel.primary_port,
            self.seed,
            time.time,
        )
        self.resizes = Resizes(self.supervisor, self.operator, config)
        for controller in self.controllers:
            await until(controller.ready, within_s=_START_S, what=f"{controller.name} to serve")
            await until(controller.plans, within_s=_START_S, what=f"{controller.name} to plan")
        await until(self.settled, within_s=_START_S, what="the ranks to be led")

    async def look_after(self, stop: asyncio.Event) -> None:
        """Restart the group of ranks when one died."""
        assert self.supervisor is not None
        while not stop.is_set():
            report = self.supervisor.poll()
            assert report is None, f"the ranks ended: {report}"
            await asyncio.sleep(0.1)

    async def dump_store(self, stop: asyncio.Event) -> None:
        """Dump the primary of the store every few seconds."""
        while not stop.is_set():
            await self.dumps.add(await self.primary())
            await asyncio.sleep(_DUMP_EVERY_S)

    async def settled(self) -> dict[str, Any] | None:
        """Return what the leader says if all ranks are fresh and at its epoch, else None."""
        leader = await self.leader()
        status = None if leader is None else await leader.status()
        if status is None or status["state"] != "ready":
            return None
        ranks = status["ranks"]
        size = self.supervisor.num_ranks if self.supervisor is not None else 0
        fresh = len(ranks) == size and all(rank["fresh"] for rank in ranks)
        return status if fresh and {rank["epoch"] for rank in ranks} == {status["epoch"]} else None

    async def leader(self) -> ControllerProcess | None:
        for controller in self.controllers:
            if await controller.status_if_leader() is not None:
                return controller
        return None

    async def primary(self) -> StoreNode | None:
        """Return the node that Sentinel names as primary, if it accepts writes."""
        port = await self.sentinel.primary_port()
        node = next((node for node in self.nodes if node.proxy.port == port), None)
        return node if node is not None and await node.role() == "master" else None

    async def target(self) -> Target:
        """Return what hostile peers attack."""
        leader, primary, status = await self.leader(), await self.primary(), await self.settled()
        assert leader is not None and primary is not None and status is not None
        return Target(leader, primary.port, self.operator.shape, status["generation"])

    # --- faults ---

    async def play(
        self,
        faults: list[Fault],
        began: float,
        say: Callable[[str], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Inject the faults of one list in turn, each at its time but after the previous one.

        None begins once it `is_over`.
        """
        for fault in faults:
            await asyncio.sleep(max(0.0, began + fault.at - time.time()))
            if is_over():
                return
            if fault.kind.changes_leader or fault.kind.changes_primary:
                await self._aim()
            struck = await self._strike(fault)
            if struck is None:
                self.not_done.append(fault.kind)
                continue
            say(f"{struck.began - began:6.1f} s  {struck.kind} {struck.target}")
            if fault.kind.resizes:
                await self.resizes.plans_go_on(struck.ended)

    async def _aim(self) -> None:
        """Wait a little for a plan under way, and for a replica that could take over."""
        deadline = time.time() + _AIM_S * max(1.0, slowness())
        while time.time() < deadline:
            primary = await self.primary()
            if self.operator.under_way and primary is not None and await primary.has_replica():
                return
            await asyncio.sleep(0.1)

    async def _strike(self, fault: Fault) -> Struck | None:
        kind = fault.kind
        if kind.changes_leader or kind in (FaultKind.KILL_FOLLOWER, FaultKind.STOP_FOLLOWER):
            return await self._hurt_controller(fault)
        if kind.changes_primary or kind in (FaultKind.FLUSH_STORE, FaultKind.FULL_STORE):
            return await self._hurt_primary(fault)
        if kind.resizes and not self.resizes.can(kind):
            return None
        struck = Struck(kind, "", time.time())
        self.struck.append(struck)
        rng = random.Random(fault.seed)
        match kind:
            case FaultKind.STOP_RANK:
                await self._stop_rank(fault, struck, rng)
            case FaultKind.KILL_MOST:
                struck.target = await self.resizes.kill_most(rng)
            case FaultKind.GROW | FaultKind.RETIRE | FaultKind.KILL_RANK:
                struck.target = await self.resizes.do(kind, rng)
            case FaultKind.CUT_STORE:
                for node in self.nodes:
                    node.proxy.cut()
                await asyncio.sleep(fault.seconds)
                for node in self.nodes:
                    node.proxy.connect()
            case FaultKind.SLOW_STORE | FaultKind.SLOW_LINKS:
                slow_store = kind is FaultKind.SLOW_STORE
                processes: Sequence[StoreNode | ControllerProcess] = (
                    self.nodes if slow_store else self.controllers
                )
                for process in processes:
                    process.proxy.delay_s = rng.uniform(0.02, 0.2 if slow_store else 0.3)
                await asyncio.sleep(fault.seconds)
                for process in processes:
                    process.proxy.delay_s = 0.0
            case FaultKind.HOSTILE_CLIENTS:
                self._start_hostile_clients(fault)
                await asyncio.sleep(fault.seconds)
        struck.ended = time.time()
        return struck

    async def _hurt_controller(self, fault: Fault) -> Struck | None:
        kind, leader = fault.kind, await self.leader()
        if leader is None:
            return None
        target = (
            leader if kind.changes_leader else next(c for c in self.controllers if c is not leader)
        )
        struck = Struck(kind, target.name, time.time())
        self.struck.append(struck)
        match kind:
            case FaultKind.KILL_LEADER | FaultKind.KILL_FOLLOWER:
                target.kill()
                await asyncio.sleep(fault.seconds)
                target.start()
            case FaultKind.STOP_LEADER | FaultKind.STOP_FOLLOWER:
                target.signal(signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                target.signal(signal.SIGCONT)
            case FaultKind.CUT_LEADER:
                target.proxy.cut()
                await asyncio.sleep(fault.seconds)
                target.proxy.connect()
            case _:
                target.proxy.silence()
                await asyncio.sleep(fault.seconds)
                target.proxy.resume()
        struck.ended = time.time()
        return struck

    async def _hurt_primary(self, fault: Fault) -> Struck | None:
        primary = await self.primary()
        if primary is None:
            return None
        struck = Struck(fault.kind, primary.name, time.time())
        self.struck.append(struck)
        match fault.kind:
            case FaultKind.KILL_PRIMARY:
                primary.kill()
                await asyncio.sleep(fault.seconds)
                primary.start()
            case FaultKind.STOP_PRIMARY:
                primary.signal(signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                primary.signal(signal.SIGCONT)
            case FaultKind.SENTINEL_FAILOVER:
                await self.sentinel.ask("SENTINEL", "FAILOVER", "main")
                await asyncio.sleep(fault.seconds)
            case FaultKind.FLUSH_STORE:
                await primary.ask("FLUSHALL")
                await asyncio.sleep(fault.seconds)
            case _:
                await primary.ask("CONFIG", "SET", "maxmemory", "1")
                await asyncio.sleep(fault.seconds)
                for node in self.nodes:
                    await node.ask("CONFIG", "SET", "maxmemory", "0")
        struck.ended = time.time()
        return struck

    async def _stop_rank(self, fault: Fault, struck: Struck, rng: random.Random) -> None:
        assert self.supervisor is not None
        rank = rng.randrange(self.supervisor.num_ranks)
        struck.target = f"rank {rank}"
        pid = self.supervisor.pids[rank]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            os.kill(pid, signal.SIGCONT)

    def _start_hostile_clients(self, fault: Fault) -> None:
        for number, (controller, proxy) in enumerate(
            zip(self.controllers, self.strangers, strict=True)
        ):
            with (self.folder / "hostile.log").open("ab") as log:
                command = [
                    *(sys.executable, "-m", "tests.chaos.hostile"),
                    *(str(proxy.port), str(controller.rest_port)),
                    *(str(fault.seconds), str(fault.seed + number)),
                ]
                self._hostile.append(
                    subprocess.Popen(
                        dying_with_parent(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )

    # --- the end ---

    async def heal(self) -> None:
        """End every fault."""
        for process in self._proxied:
            process.proxy.heal()
            process.signal(signal.SIGCONT)
            if not process.running:
                process.start()
        for node in self.nodes:
            await node.ask("CONFIG", "SET", "maxmemory", "0")
        for client in self._hostile:
            await asyncio.to_thread(client.wait, 60)

    async def finish_ranks(self) -> FleetReport:
        """Let the ranks run their final checks and end."""
        supervisor = self.supervisor
        assert supervisor is not None
        supervisor.request_stop()
        self.report = await until(supervisor.poll, within_s=90, what="the ranks to end")
        assert self.report is not None
        return self.report

    async def stop(self) -> dict[str, int]:
        """End everything that still runs; return exit codes by name."""
        if self.supervisor is not None and self.report is None:
            await asyncio.to_thread(self.supervisor.stop)
        codes = {}
        for client in self._hostile:
            if client.poll() is None:
                client.kill()
                client.wait()
        for process in (*self.controllers, self.sentinel, *self.nodes):
            codes[process.name] = await asyncio.to_thread(process.end)
        for proxy in self._proxies:
            await proxy.stop()
        self.wire.close()
        self.dumps.close()
        for controller in self.controllers:
            await controller.http.aclose()
        return codes
