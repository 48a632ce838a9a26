"""One chaos run: start, inject faults, heal, check, end."""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from tests.chaos import checks
from tests.chaos.arena import Arena
from tests.chaos.judge.verdict import judge
from tests.chaos.peers import SETTINGS as LIMITS
from tests.chaos.peers import Attack
from tests.chaos.processes import MARK, ControllerProcess, marked
from tests.chaos.resizes import resizes_done
from tests.chaos.schedule import Schedule, make_schedule
from tests.chaos.system import FORGET_AFTER_S
from tests.waiting import until

__all__ = ["Result", "run_chaos"]

_HEALED_S = 90.0
_UNUSED_S = 240.0
"""A peer may leave a connection open. gRPC looks every two minutes, and closes it if it had no use
since the last look: four minutes at most."""
_AFTERMATH_S = 10.0
"""A fault's work goes on after its end: leases run out, ranks come back."""


@dataclass
class Result:
    """The result of a run."""

    broken: list[str] = field(default_factory=list)
    """A sentence for each violation."""
    figures: dict[str, float] = field(default_factory=dict)


async def run_chaos(
    folder: Path,
    seed: int,
    seconds: float,
    *,
    num_ranks: int = 8,
    schedule: Schedule | None = None,
    least_plans: int | None = None,
    least_through: int | None = None,
    least_resizes: int | None = None,
    peers: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Inject faults into a whole system for a period, and check the result.

    Args:
        folder: the folder for all output.
        seconds: the duration of the faults.
        schedule: the faults; None draws them from the seed.
        least_plans: the fewest plans that must be committed during faults; None: 20 per 600 s.
        least_through: the fewest of them that must survive a failover; None: 5 per 600 s.
        least_resizes: how often the group must at least grow, retire ranks, and outlive the death
            of a rank; None: twice each per 600 s.
        peers: let hostile peers attack in place of faults; the honest ranks must lose nothing.
    """
    if peers:
        schedule, least_plans, least_through, least_resizes = ([], [], []), 0, 0, 0
    result, arena = Result(), Arena(folder, seed, num_ranks, settings=LIMITS if peers else {})
    # Peers use gRPC in this process, which keeps descriptors of its own for some time.
    fds_before = None if peers else _own_descriptors()
    end_operator, end_watch = asyncio.Event(), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    plays: list[asyncio.Task[None]] = []
    try:
        await arena.start()
        fds = {c.name: _descriptors(arena, c) for c in arena.controllers}
        began = time.time()
        say(f"started; {num_ranks} ranks, seed {seed}, {seconds:g} s of faults")
        main, noise, resizes = schedule if schedule is not None else make_schedule(seed, seconds)
        tasks = [
            asyncio.create_task(arena.look_after(end_watch), name="ranks"),
            asyncio.create_task(arena.operator.run(end_operator), name="operator"),
            asyncio.create_task(arena.dump_store(end_watch), name="dumps"),
        ]
        plays = [asyncio.create_task(arena.play(faults, began, say)) for faults in (main, noise)]
        others = tuple(plays)

        def others_are_over() -> bool:
            # Drawn resizes are more than a busy machine can do in time; a given list is done whole.
            over = time.time() > began + seconds and all(play.done() for play in others)
            return over and schedule is None

        plays.append(asyncio.create_task(arena.play(resizes, began, say, others_are_over)))
        if peers:
            attack = Attack(await arena.target(), arena.controllers, seed)
            await attack.run(seconds)
            _note_attack(attack, result)
        # A fault waits for a plan and for what it struck, so a busy machine takes longer.
        await _all(plays, tasks, 1.5 * seconds + 240)
        await _check_living(arena, result, fds, end_operator, tasks)
        end_watch.set()
        await _all(tasks, [], 30)
        report = await arena.finish_ranks()
        result.broken += checks.bad_ranks(report)
        result.figures["restarts of the group"] = report.restarts
        result.figures["steps served"] = report.steps
    except Exception as error:
        result.broken.append(f"{type(error).__name__}: {error}"[:3000])
    finally:
        for task in (*plays, *tasks):
            task.cancel()
        await asyncio.gather(*plays, *tasks, return_exceptions=True)
        codes = await arena.stop()
    result.broken += [
        f"{name} ended with code {codes[name]}"
        for name in codes
        if name.startswith("replica") and codes[name]
    ]
    _check_records(arena, result, least_plans, least_through, seconds)
    _check_resizes(arena, result, int(seconds / 300) if least_resizes is None else least_resizes)
    result.broken += await _left_behind(fds_before)
    for name, value in result.figures.items():
        say(f"{name}: {value:g}")
    try:
        verdict = await asyncio.to_thread(judge, folder)
    except OSError as error:
        result.broken.append(f"the judge cannot read the run: {error}")
        return result
    for line in verdict.lines():
        say(line)
    result.broken += [f"the judge found a breach of {breach}" for breach in verdict.breaches]
    return result


def _note_attack(attack: Attack, result: Result) -> None:
    result.broken += dict.fromkeys(attack.broken)
    result.figures["growth of memory, MiB"] = attack.most_growth >> 20
    for (peer, words), count in sorted(attack.met.items()):
        result.figures[f"peer {peer}: {words}"] = count


async def _all(
    work: "list[asyncio.Task[None]]", beside: "list[asyncio.Task[None]]", within_s: float
) -> None:
    """Wait for all of `work`; a failure of anything, `beside` too, is raised at once."""
    waiting, deadline = set(work), time.time() + within_s
    while waiting:
        done, waiting = await asyncio.wait(waiting, timeout=0.5)
        for task in [*done, *(task for task in beside if task.done())]:
            task.result()
        if time.time() > deadline:
            raise AssertionError(f"not over within {within_s:g} s")


def _descriptors(arena: Arena, controller: ControllerProcess) -> Counter[str]:
    """Return the descriptors of a controller by kind, without its pools of connections to the store
    and to Sentinel."""
    process = psutil.Process(controller.pid)
    store = {arena.sentinel.port, *(node.proxy.port for node in arena.nodes)}
    doors = {
        controller.grpc_port: "gRPC",
        controller.rest_port: "REST",
        controller.metrics_port: "metrics",
    }
    found = Counter({"all": process.num_fds()})
    for connection in process.net_connections("tcp"):
        if connection.raddr and connection.raddr.port in store:
            found["all"] -= 1
        elif connection.laddr.port in doors:
            found[doors[connection.laddr.port]] += 1
    return found


async def _descriptors_left(
    arena: Arena, controller: ControllerProcess, before: Counter[str]
) -> list[str]:
    """Return what a controller still holds once its limit for connections without use is over."""

    def too_many() -> list[str]:
        return list(checks.too_many_fds(controller.name, _descriptors(arena, controller), before))

    with contextlib.suppress(AssertionError):
        await until(lambda: not too_many(), within_s=_UNUSED_S, every_s=1.0)
    return too_many()


async def _check_living(
    arena: Arena,
    result: Result,
    fds: dict[str, Counter[str]],
    end_operator: asyncio.Event,
    tasks: "list[asyncio.Task[None]]",
) -> None:
    """All healed: the last plan ends, everybody agrees, what does not belong here is forgotten."""
    await arena.heal()
    healed_at = time.time()
    await until(lambda: not arena.operator.waiting, within_s=_HEALED_S, what="the last plan to end")
    end_operator.set()
    await asyncio.wait((tasks[1],), timeout=_HEALED_S)
    last = arena.operator.plans[-1] if arena.operator.plans else None
    if last is not None and not last.accepted_at:
        arena.operator.plans.pop()
    await until(arena.settled, within_s=_HEALED_S, what="every rank at the epoch of the records")
    result.figures["seconds from healed to settled"] = round(time.time() - healed_at, 1)
    for controller in arena.controllers:
        await until(controller.ready, within_s=_HEALED_S, what=f"{controller.name} to serve")
    if any(node for node in arena.nodes if not node.running):
        raise AssertionError("a store node is gone")
    await asyncio.sleep(FORGET_AFTER_S * 1.5 + 2.0)
    for controller in arena.controllers:
        # A busy controller may answer too late; that says nothing of what it has.
        listed = await until(partial(controller.get, "/v1/deployments"), what="deployments")
        names = {item["deployment"] for item in listed["items"]}
        series = await until(controller.series, what="metrics")
        result.broken += checks.bad_series(controller.name, series, names)
        held = psutil.Process(controller.pid)
        most = max(fds.values(), key=lambda held: held["all"])
        result.broken += await _descriptors_left(arena, controller, most)
        result.figures[f"{controller.name} descriptors"] = _descriptors(arena, controller)["all"]
        result.figures[f"{controller.name} series"] = len(series)
        result.figures[f"{controller.name} MB"] = round(held.memory_info().rss / 1e6)
    if not await arena.dumps.add(await arena.primary(), final=True):
        raise AssertionError("the store cannot be dumped")
    # Asked of the present leader: on a slow machine another replica may have taken the lease.
    await until(arena.settled, within_s=_HEALED_S, what="every rank at the final epoch")


def _check_records(
    arena: Arena, result: Result, least_plans: int | None, least_through: int | None, seconds: float
) -> None:
    """Plans, serving and logs, after the end."""
    if not hasattr(arena, "operator"):
        return
    plans, struck, figures = arena.operator.plans, arena.struck, result.figures
    failures = [s for s in struck if not s.kind.is_ordered]
    result.broken += arena.operator.faults
    result.broken += checks.bad_plans(plans, struck)
    committed = [plan for plan in plans if plan.phase == "committed"]
    under = [
        plan
        for plan in committed
        if any(s.overlaps(plan.accepted_at, plan.ended_at, _AFTERMATH_S) for s in failures)
    ]
    through = [plan for plan in committed if plan.through_failover]
    figures["plans asked for"] = len(plans)
    figures["plans committed"] = len(committed)
    figures["plans committed under fault"] = len(under)
    figures["plans committed through a failover"] = len(through)
    for (phase, reason), count in sorted(
        Counter((p.phase, p.reason) for p in plans if p.ended_at).items()
    ):
        figures[f"plans {phase} {reason}"] = count
    figures["plan records lost and asked for again"] = sum(plan.lost for plan in plans)
    for kind, count in sorted(Counter(s.kind for s in struck).items()):
        figures[f"fault {kind}"] = count
    for kind, count in sorted(Counter(arena.not_done).items()):
        figures[f"fault {kind}, not done"] = count
    for (reason, kinds), count in sorted(checks.excuses(plans, struck).items()):
        figures[f"plans excused, {reason} near {kinds}"] = count
    for answer, count in sorted(arena.operator.answers.items()):
        figures[f"answer {answer}"] = count
    for least, have, what in (
        (int(seconds / 30) if least_plans is None else least_plans, under, "under fault"),
        (
            int(seconds / 120) if least_through is None else least_through,
            through,
            "through a failover",
        ),
    ):
        if len(have) < least:
            result.broken.append(f"{len(have)} plans committed {what}, {least} are wanted")
    pauses = checks.gaps(arena.folder / "ranks", struck)
    if pauses:
        figures["longest pause of serving, seconds"] = round(max(gap.seconds for gap in pauses), 2)
        figures["longest pause no injected stop explains, seconds"] = round(
            pauses[0].unexplained_s, 2
        )
        if pauses[0].unexplained_s > checks.SERVING_BOUND_S:
            near = [
                f"{s.kind} {s.target}"
                for s in struck
                if s.overlaps(pauses[0].began, pauses[0].began + 1)
            ]
            result.broken.append(
                f"serving was blocked for {pauses[0].unexplained_s:.1f} s,"
                f" bound {checks.SERVING_BOUND_S:g} s, during {near}"
            )
    result.broken += checks.bad_logs(arena.controllers)


def _check_resizes(arena: Arena, result: Result, least: int) -> None:
    """The group got other numbers of ranks, in each way often enough."""
    for kind, count in resizes_done(arena.folder / "ranks").items():
        result.figures[f"groups after {kind}"] = count
        if count < least:
            result.broken.append(f"{count} groups of another size after {kind}, {least} are wanted")


def _own_descriptors() -> dict[str, str]:
    """Return what each descriptor of this process leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # That of the listing itself.
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


async def _left_behind(fds_before: dict[str, str] | None) -> list[str]:
    """Report processes and descriptors that outlived the run."""
    deadline = time.time() + 5.0
    left = marked(os.environ.get(MARK, "-"))
    while left and time.time() < deadline:
        await asyncio.sleep(0.2)
        left = [process for process in marked(os.environ.get(MARK, "-")) if process.is_running()]
    found = [f"process {process.pid} was left: {process.cmdline()[:8]}" for process in left]
    await asyncio.sleep(0.1)
    now = _own_descriptors()
    if fds_before is not None and len(now) > len(fds_before):
        new = sorted(target for fd, target in now.items() if fds_before.get(fd) != target)
        found.append(f"descriptors of this process were left open: {new}")
    return found
