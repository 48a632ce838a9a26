"""Scenario scripts: named failures step by step, with the expected trace after each step.

A script is a list of blocks: a command, `----`, and its output up to an empty line. Lines that
begin with # are comments. `python -m tests.sim.scenario --rewrite` rewrites the outputs.

Commands:
    fleet                           a group of two ranks, controllers c0 and c1, and c0 leads
    run SECONDS                     let time pass
    submit PLAN WAVE...             begin a plan by hand; a wave is LAYER:SRC>DST, a copy into DST
    cancel PLAN
    drop KIND [rank=N] [times=N]    lose the next messages of a kind, to or from a rank
    delay KIND SECONDS [rank=N]     let the next message of a kind take so long
    slow-copy SECONDS               let the next copy between ranks take so long
    fail-poll rank=N                the next poll a rank uses fails there
    crash NAME | start NAME | pause NAME SECONDS      a controller
    crash rank=N                    a rank
    second-fleet                    another group of the same name starts
    stop-second                     and ends
    corrupt-copy                    the next copy between ranks arrives damaged
    spoil-prepare                   the next Prepare lacks a transfer, the same on all ranks
    lose-write KIND                 the store loses the next write of a kind without an error
    flush                           the store loses everything
    store-down | store-up           the store takes no writes, or takes them again
    idle | steps                    the fleet stops or goes on taking steps
    reload                          load other weights, asking first
    status                          the state of every machine
"""

import random
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind, Transfer, Wave
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.timing import ControlTiming, WaveTiming
from tests.sim.checks import Violation
from tests.sim.fleet import Fleet
from tests.sim.kit import Kit
from tests.sim.network import SimNetwork
from tests.sim.planner import plan_by
from tests.sim.replica import Replica
from tests.sim.run import FleetWorld

SCRIPTS = Path(__file__).parent / "scenarios"
SHAPE = ModelShape(2, 4, 2, 3, 1, 10)
TIMING = ControlTiming(
    heartbeat_s=0.5,
    ask_again_s=0.5,
    rank_lease_s=2.0,
    recovery_deadline_s=4.0,
    batch_deadline_s=0.8,
    wave=WaveTiming(
        resend_s=0.5,
        resend_max_s=2.0,
        prepare_deadline_s=4.0,
        commit_deadline_s=2.0,
        commit_deadline_steps=20,
        stall_after_s=3.0,
        stall_after_steps=20,
        idle_after_s=2.0,
    ),
)
QUIET = ("QueryState", "RankState", "decision", "Hello", "StagingProgress", "Beat")
"""Lines about these are left out."""


class Steady(random.Random):
    """No chance: every delay is the middle of its range, so a trace is always the same."""

    def random(self) -> float:
        return 0.5


class ScriptedNetwork(SimNetwork):
    """A calm network that loses or delays the messages a script names."""

    def __init__(self, world) -> None:
        super().__init__(world)
        self.rules: list[dict] = []

    def send(self, stream, deliver, message) -> None:
        kind = type(message).__name__
        for rule in self.rules:
            if rule["kind"] == kind and rule["rank"] in (None, stream.rank.rank):
                rule["times"] -= 1
                if rule["times"] == 0:
                    self.rules.remove(rule)
                if rule["delay"] is None:
                    self.world.note(f"lost: {kind} of rank {stream.rank.rank}")
                else:
                    self.world.after(rule["delay"], deliver, stream, message)
                return
        super().send(stream, deliver, message)


class ScriptedWorld(FleetWorld):
    """Two ranks and two controllers, without chance."""

    def __init__(self, kit: Kit | None = None) -> None:
        super().__init__(1, kit, trace=True)

    def configure(self, rng) -> None:
        self.rng = Steady()
        self.network = self.scripted = ScriptedNetwork(self)
        self.mode = Mode.OBSERVE
        self.prompt_failures = 1.0
        self.lost_answers = 0.0
        self.flaws = 0.0
        self.probes = False
        self.timing = TIMING
        self.replicas = [Replica(self, name) for name in ("c0", "c1")]
        self.fleet = Fleet(self, SHAPE, poll_every=4, resolve_after=2)
        self.second = None
        self.slow: list[float] = []
        self.corrupt_next = False

    def corrupts(self) -> bool:
        now, self.corrupt_next = self.corrupt_next, False
        return now

    def copy_delay(self, deadline: float) -> float:
        return self.slow.pop(0) if self.slow else 0.02

    @property
    def seat(self):
        seat = self.leading_seat()
        if seat is None:
            raise ValueError("no controller leads")
        return seat


class Script:
    """One script being run."""

    def __init__(self, kit: Kit | None = None) -> None:
        self.world = ScriptedWorld(kit)
        self.seen = 0

    def run(self, command: str) -> list[str]:
        """Carry one command out, and return the trace of it without times."""
        name, *words = command.split()
        options = dict(word.split("=") for word in words if "=" in word and ">" not in word)
        plain = [word for word in words if word not in {f"{k}={v}" for k, v in options.items()}]
        answer: list[str] = []
        try:
            answer = getattr(self, name.replace("-", "_"))(*plain, **options) or []
        except Violation as violation:
            answer = [f"BROKEN: {violation}"]
        except EvenkeelError as error:
            answer = [f"refused: {error.reason}"]
        lines = [line[10:] for line in (self.world.trace_lines or [])[self.seen :]]
        self.seen += len(lines)
        return [line for line in lines if not any(word in line for word in QUIET)] + answer

    # --- commands ---------------------------------------------------------------------------------

    def fleet(self):
        self.world.replicas[0].start()
        self.world.fleet.start()
        self.world.run_until(2.0)
        self.world.replicas[1].start()
        self.world.run_until(2.5)

    def go(self, seconds: str):
        self.world.run_until(self.world.now + float(seconds))

    def submit(self, plan_id: str, *waves: str):
        control = self.world.seat.control
        target = control.placement
        bodies = []
        for index, text in enumerate(waves):
            transfer, rows = copy_of(text, target)
            layers = (transfer.layer,)
            bodies.append(Wave(index, layers, rows, ((transfer,),)))
            target = target.with_rows(layers, rows)
        world = self.world
        view = (control.generation, control.epoch, control.placement, control.group.weights_version)
        kind = PlanKind.MANUAL
        plan = plan_by(
            bodies, view, target, world.deployment, world.now, kind=kind, plan_id=plan_id
        )
        world.seat.ask(ctl.PlanSubmitted(plan, approve=True))

    def cancel(self, plan_id: str):
        self.world.seat.ask(ctl.PlanCancelled(PlanId(plan_id), "script"))

    def drop(self, kind: str, rank: str | None = None, times: str = "1"):
        self._rule(kind, rank, int(times), None)

    def delay(self, kind: str, seconds: str, rank: str | None = None):
        self._rule(kind, rank, 1, float(seconds))

    def _rule(self, kind: str, rank: str | None, times: int, delay: float | None) -> None:
        rule = {"kind": kind, "rank": int(rank) if rank else None, "times": times, "delay": delay}
        self.world.scripted.rules.append(rule)

    def slow_copy(self, seconds: str):
        self.world.slow.append(float(seconds))

    def fail_poll(self, rank: str):
        self.world.fleet.failing_polls.add(int(rank))

    def crash(self, name: str | None = None, rank: str | None = None):
        if rank is not None:
            self.world.note(f"rank {rank} crashes")
            self.world.fleet.ranks[int(rank)].die()
        else:
            self._replica(name).crash()

    def second_fleet(self):
        world = self.world
        world.second = Fleet(world, SHAPE, poll_every=4, resolve_after=2, name="h")
        world.second.start()

    def stop_second(self):
        assert self.world.second is not None
        self.world.second.stop()

    def start(self, name: str):
        self._replica(name).start()

    def pause(self, name: str, seconds: str):
        self._replica(name).pause(float(seconds))

    def _replica(self, name: str | None) -> Replica:
        return next(replica for replica in self.world.replicas if replica.name == name)

    def corrupt_copy(self):
        self.world.corrupt_next = True

    def spoil_prepare(self):
        world = self.world
        world.wrong_prepares, world.prepares_differ = 1.0, 0.0
        world.when("rank sends Vote", lambda _context: setattr(world, "wrong_prepares", 0.0))

    def lose_write(self, kind: str):
        self.world.when(
            f"controller stores {kind}", lambda _context: self.world.store.lose_last_write()
        )

    def flush(self):
        self.world.note("store is flushed")
        self.world.store.flush()

    def store_down(self):
        self.world.note("store is away")
        self.world.store.down = True

    def store_up(self):
        self.world.note("store is back")
        self.world.store.down = False

    def idle(self):
        self.world.fleet.idle = True

    def steps(self):
        self.world.fleet.idle = False

    def reload(self):
        self.world.fleet.begin_reload(announced=True)

    def status(self) -> list[str]:
        world = self.world
        lines = []
        for rank in world.fleet.ranks:
            part = rank.participant
            holds = f" holds {part.wave.plan_id}/{part.wave.wave_index}" if part.wave else ""
            layer = part.placement.phy2log[0].tolist()
            state = f"{part.state}{holds}, epoch {part.epoch}, layer 0 {layer}"
            lines.append(f"rank {rank.rank} {state}")
        seat = world.leading_seat()
        if seat is not None:
            control = seat.control
            plans = ", ".join(
                f"{r.plan.plan_id} {r.phase} {r.reason}" for r in control.records.by_id.values()
            )
            where = f"term {seat.leader.term} epoch {control.epoch}"
            lines.append(f"{seat.replica.name} {control.state} {where}: {plans or 'no plans'}")
        lines.append(f"store: epochs {sorted(world.store.shelf.epochs)}")
        return lines


def copy_of(text: str, before: Placement) -> tuple[Transfer, NDArray[np.int32]]:
    """Return the transfer `LAYER:SRC>DST`, and the layer's (1, S) row after it."""
    layer, slots = text.split(":")
    src, dst = (int(slot) for slot in slots.split(">"))
    rows = before.phy2log[[int(layer)]].copy()
    rows[0, dst] = rows[0, src]
    return Transfer(int(layer), int(rows[0, src]), src, dst, SHAPE.bytes_per_expert), rows


Block = tuple[list[str], str, list[str]]


def parse(text: str) -> list[Block]:
    """Return (comment lines, command, expected lines) of each block."""
    blocks: list[Block] = []
    lines = iter(text.splitlines())
    comments: list[str] = []
    for line in lines:
        if line.startswith("#") or not line.strip():
            comments.append(line)
            continue
        expected: list[str] = []
        assert next(lines) == "----", f"after {line!r} comes ----"
        for output in lines:
            if not output.strip():
                break
            expected.append(output)
        blocks.append((comments, line, expected))
        comments = []
    return blocks


def play(text: str, kit: Kit | None = None) -> str:
    """Return the script with its present outputs."""
    script, parts = Script(kit), []
    for comments, command, _ in parse(text):
        name, *rest = command.split()
        output = script.run(" ".join(["go" if name == "run" else name, *rest]))
        parts.append("\n".join([*comments, command, "----", *output, ""]))
    return "\n".join(parts)


def main() -> int:
    changed = 0
    for path in sorted(SCRIPTS.glob("*.txt")):
        before = path.read_text()
        after = play(before)
        if after != before:
            changed += 1
            print(f"{path.name} differs")
            if "--rewrite" in sys.argv[1:]:
                path.write_text(after)
    return 1 if changed and "--rewrite" not in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
