"""The deployment on one controller replica: its machine, lease, store access and planner."""

import dataclasses

from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.model.hold import Retirement
from evenkeel_moe.model.ids import EpRank, PlanId
from evenkeel_moe.model.plan import PlanKind
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.planning.schedule.width_change import evacuate
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.messages import Commit, Prepare
from evenkeel_moe.protocol.timing import ControlTiming, WaveTiming
from tests.sim.checks import RECORDS_DISAGREE, WAVE_REFUSED
from tests.sim.planner import fits_pool, for_one_rank, problem_of, spoiled
from tests.sim.store import StoreDown

LEASE_S = 2.0


def random_timing(rng, gate_steps: int) -> ControlTiming:
    """Return deadlines in proportion to the group's steps, some as short as answers take."""
    return ControlTiming(
        heartbeat_s=0.5,
        ask_again_s=0.5,
        rank_lease_s=rng.choice((1.2, 2.0)),
        recovery_deadline_s=4.0,
        cycle_deadline_s=3.0,
        batch_deadline_s=0.8,
        wave=WaveTiming(
            resend_s=0.3,
            resend_max_s=1.0,
            prepare_deadline_s=rng.choice((1.0, 4.0)),
            commit_deadline_s=rng.choice((0.3, 0.6, 2.0)),
            commit_deadline_steps=gate_steps + rng.choice((0, 4, 20)),
            stall_after_s=rng.choice((1.5, 3.0)),
            stall_after_steps=20,
            idle_after_s=rng.choice((1.0, 2.0)),
        ),
    )


class Seat:
    """The deployment on one replica."""

    def __init__(self, replica) -> None:
        world = replica.world
        self.replica = replica
        self.world = world
        self.control = world.kit.control(
            world.deployment,
            timing=world.timing,
            policy=DeploymentPolicy(mode=world.mode, cycle_s=world.cycle_s),
        )
        self.leader = None
        self.at_least = 0
        self.renewed_at = 0.0
        self.try_at = 0.0
        self.streams: dict = {}
        self.troubled: dict = {}
        """Stream number -> stream whose rank reported that it refuses every wave."""
        self.newest_beat: dict = {}
        """Stream number -> when its newest heartbeat was sent."""
        self.waves: set = set()
        """Waves begun under this term."""
        self.agreed: set = set()
        """Waves on which all ranks agreed, as this process stored it."""
        self.untold = 0
        """Failed writes that the machine is told of late; until then it may send too early."""
        self.spoiled: dict = {}
        """Wave -> a Prepare that replaces the right one, and for which ranks (None: all)."""

    # --- lease ------------------------------------------------------------------------------------

    def keep_lease(self) -> None:
        now, store = self.replica.now, self.world.store
        if self.leader is None:
            if now >= self.try_at:
                self.try_at = now + 0.3 + 0.3 * self.world.rng.random()
                self.try_acquire()
            return
        if now - self.renewed_at < LEASE_S / 3:
            return
        try:
            if store.renew(self.leader, LEASE_S):
                self.renewed_at = now
            else:
                self.lose_lease()
        except StoreDown:
            if now - self.renewed_at >= LEASE_S:
                self.lose_lease()

    def try_acquire(self) -> None:
        store = self.world.store
        try:
            leader = store.acquire(self.replica.name, LEASE_S, self.at_least)
            if leader is None:
                return
            stored = store.load()
        except StoreDown:
            return
        self.leader, self.renewed_at = leader, self.replica.now
        self.world.note(f"{self.replica.name} leads {self.world.deployment} in term {leader.term}")
        self.feed(ctl.LeaseAcquired(leader, stored))

    def lose_lease(self) -> None:
        self.world.note(f"{self.replica.name} lost the lease of {self.world.deployment}")
        self.leader = None
        self.feed(ctl.LeaseLost())
        self.close_streams()

    def release(self) -> None:
        """Give the lease up, if the store answers."""
        if self.leader is None:
            return
        try:
            self.world.store.release(self.leader)
        except StoreDown:
            self.world.note("the lease must run out")

    def close_streams(self) -> None:
        for stream in list(self.streams.values()):
            self.world.network.cut(stream)
        self.streams.clear()

    # --- events and actions -----------------------------------------------------------------------

    def feed(self, event) -> None:
        before = self.standing()
        self.carry(self.control.handle(event, self.replica.now))
        self.tell_moves(before)

    def standing(self) -> tuple:
        """Return the states of the controller and of its newest wave."""
        coordinator = self.control.coordinator
        return self.control.state, coordinator.state if coordinator is not None else None

    def tell_moves(self, before: tuple) -> None:
        """Report the moments of the states entered since `before`."""
        after = self.standing()
        if after != before and self.replica.alive:
            who = f"{self.replica.name} {self.world.deployment}"
            self.world.note(f"{who} is {after[0]}, wave {after[1]}")
            if after[0] != before[0]:
                self.world.moment(f"controller is {after[0]}", replica=self.replica, seat=self)
            if after[1] is not None and after[1] != before[1]:
                self.world.moment(f"wave is {after[1]}", replica=self.replica, seat=self)

    def on_beat(self, stream, beat) -> None:
        """Tell the machine of a rank's telemetry: that it is alive, and its trouble."""
        rank = stream.rank
        self.feed(ctl.RankHeard(rank.rank, rank.incarnation, stream.number))
        # A stream keeps the order of heartbeats. This network does not, so an old one is skipped.
        if beat.sent_at < self.newest_beat.get(stream.number, 0.0):
            return
        self.newest_beat[stream.number] = beat.sent_at
        if not beat.trouble:
            self.troubled.pop(stream.number, None)
        elif stream.number in self.streams:
            self.troubled[stream.number] = stream
        self.feed(ctl.RankTroubled(rank.rank, stream.number, beat.trouble))
        if beat.stopping:
            self.feed(ctl.RankStopped(rank.rank, stream.number))

    def repeat_troubles(self) -> None:
        """Repeat what ranks reported: a machine that leads again knows only their Hellos."""
        for number, stream in self.troubled.items():
            self.feed(ctl.RankTroubled(stream.rank.rank, number, "injected"))

    def note_waves(self, actions) -> None:
        """Check that no wave begins while a rank refuses every wave, or that is wrong in itself."""
        for action in actions:
            message = getattr(action, "message", None)
            if not isinstance(message, Prepare) or message.wave in self.waves:
                continue
            self.waves.add(message.wave)
            self.check_prepare(message)
            active = self.control.records.active
            kind = active.plan.kind if active is not None else PlanKind.ROLLBACK
            allowed = kind in (PlanKind.ROLLBACK, PlanKind.EVACUATION)
            if self.control.hold.retiring is not None and not allowed:
                self.world.checks.fail(WAVE_REFUSED, f"{message.wave} begins while ranks retire")
            for number, stream in self.troubled.items():
                if stream.rank.alive and number in self.streams:
                    self.world.checks.fail(
                        WAVE_REFUSED, f"{message.wave} begins, rank {stream.rank.rank} refuses it"
                    )

    def check_prepare(self, prepare) -> None:
        """Check a Prepare by itself (R17); some seeds spoil it afterwards.

        Either it has the same flaw for all ranks, or one rank gets another right one.
        """
        world = self.world
        before = world.checks.truth.get((prepare.wave.generation, prepare.base_epoch))
        problem = problem_of(prepare, before) if before is not None else ""
        if before is not None and not fits_pool(
            prepare.body,
            before.phy2log,
            dataclasses.replace(world.fleet.shape, num_ranks=before.num_ranks),
        ):
            problem = "it fills memory that it frees itself"
        if problem:
            world.checks.fail(WAVE_REFUSED, f"{prepare.wave} begins: {problem}")
        if not world.calm and world.rng.random() < world.wrong_prepares:
            if world.rng.random() < world.prepares_differ:
                ranks = {world.rng.randrange(before.num_ranks)} if before is not None else set()
                self.spoiled[prepare.wave] = for_one_rank(world.rng, prepare), ranks
            else:
                self.spoiled[prepare.wave] = spoiled(world.rng, prepare), None

    def check_commit(self, wave) -> None:
        """Check that Commit of a wave that this leader began follows the stored agreement."""
        coordinator = self.control.coordinator
        assert coordinator is not None
        own = coordinator.wave == wave and coordinator.prepare is not None
        if own and not self.untold and wave not in self.agreed:
            self.world.checks.fail(
                RECORDS_DISAGREE, f"Commit of {wave} is sent, and no agreement on it was stored"
            )

    def carry(self, actions) -> None:
        """Carry out writes, then sends; after a failed write only questions are sent."""
        self.note_waves(actions)
        self.carry_on(actions, [])

    def carry_on(self, actions, failed: list) -> None:
        """Carry out what is left of a batch; a process that is paused does it when it goes on."""
        world = self.world
        for position, action in enumerate(actions):
            if not self.replica.alive:
                return
            if self.replica.paused:
                self.replica.halted.append((self.carry_on, (actions[position:], failed)))
                return
            if isinstance(action, ctl.PersistAction):
                self.persist(action, failed)
                world.moment(
                    f"controller stores {name_of(action)}", replica=self.replica, seat=self
                )
            elif isinstance(action, ctl.SendToRank):
                if not (failed and action.needs_store):
                    self.send(action)
            else:
                self.other(action)
        if failed and self.replica.alive:
            event = ctl.PersistFailed(tuple(failed))
            if world.rng.random() < world.prompt_failures:
                self.feed(event)
            else:
                self.untold += 1
                delay = 0.3 * world.rng.random()
                term = self.leader.term if self.leader is not None else 0
                world.after(delay, self.tell_failure, event, term, self.replica.life)

    def tell_failure(self, event, term: int, life: int) -> None:
        """Report a failed write a little late, but never under a later term."""
        self.untold -= 1
        if self.leader is None or self.leader.term == term:
            self.feed_late(event, life)

    def feed_late(self, event, life: int) -> None:
        """Give the machine a late result, if this process still lives."""
        if not self.replica.alive or life != self.replica.life:
            return
        if self.replica.paused:
            self.replica.inbox.append((self.feed_late, (event, life)))
        else:
            self.feed(event)

    def persist(self, action, failed: list) -> None:
        if failed:
            failed.append(action)
            return
        try:
            self.world.store.write(action, self.leader)
            if isinstance(action, ctl.PersistPlan) and action.record.wave_agreed:
                self.agreed.add(action.record.plan.key(action.record.waves_committed))
            self.world.note(f"{self.replica.name} stores {describe_persist(action)}")
        except StoreDown:
            failed.append(action)

    def send(self, action) -> None:
        stream, message = self.streams.get(action.stream), action.message
        kind = type(message).__name__
        if isinstance(message, Commit):
            self.check_commit(message.wave)
        if isinstance(message, Prepare) and stream is not None:
            other, ranks = self.spoiled.get(message.wave, (message, None))
            if ranks is None or stream.rank.rank in ranks:
                message = other
        self.world.moment(f"controller sends {kind}", replica=self.replica, seat=self)
        if stream is not None and self.replica.alive:
            self.world.network.to_rank(stream, message)

    def other(self, action) -> None:
        world = self.world
        match action:
            case ctl.CloseStream(stream=number, reason=reason):
                stream = self.streams.pop(number, None)
                if stream is not None:
                    world.network.turn_away(stream, reason)
            case ctl.RaiseTerm(at_least=at_least):
                self.at_least = at_least
                self.release()
                world.note(f"{self.replica.name} steps down below term {at_least}")
                self.leader = None
                self.try_at = self.replica.now + 0.05
                self.close_streams()
                if world.rng.random() < world.prepares_differ:
                    self.feed(ctl.LeaseLost())  # a renewal that was under way failed, of course
            case ctl.RunCycle(closed_by=reason) if reason is not None:
                # Later, as from the planner: the machine takes a failed write first.
                decided = ctl.CycleDecided(action.cycle, reason)
                world.after(0.05, self.feed_late, decided, self.replica.life)
            case ctl.RunCycle():
                world.moment("controller plans", replica=self.replica, seat=self)
                delay = 2.5 if world.rng.random() < world.slow_planning else 0.2
                delay = 0.05 + delay * world.rng.random()
                world.post(delay, "CycleDecided", self, self.plan, action, self.replica.life)
            case ctl.WaveBegins():
                pass
            case ctl.WaveEnded(wave=wave, committed=committed, reason=reason):
                how = f"{wave.plan_id}/{wave.wave_index} ended: committed={committed} {reason}"
                world.note(f"{self.replica.name}: {how}")
                world.checks.outcome(wave, committed)
                world.moment("controller ends a wave", replica=self.replica, seat=self)
            case ctl.WaveHealth():
                world.note(
                    f"{self.replica.name} wave health: {action.reason} stalled={action.stalled}"
                )
            case ctl.Alert(reason=Reason.MALFORMED):
                raise AssertionError(action.detail)
            case ctl.Alert():
                world.note(f"{self.replica.name} alerts: {action.reason} {action.detail}")
            case _:
                raise AssertionError(action)

    # --- planner ----------------------------------------------------------------------------------

    def plan(self, cycle, life) -> None:
        """Answer a planning cycle, as the planner's process does."""
        world = self.world
        if not self.replica.alive or life != self.replica.life:
            return
        plan = None
        if world.rng.random() < world.eagerness:
            view = (cycle.generation, cycle.epoch, cycle.placement, cycle.weights_version)
            for _ in range(world.attempts):
                plan = plan or world.make_plan(view, PlanKind.AUTOMATIC)
        reason = Reason.BALANCE_ABOVE_THRESHOLD if plan is None else Reason.PLAN_STARTED
        self.feed_late(ctl.CycleDecided(cycle.cycle, reason, plan), life)

    def ask(self, request) -> None:
        """Make an operator's request; it may be refused."""
        self.carry(self.control.handle(request, self.replica.now))

    def by_hand(self, wish: str) -> None:
        """Carry out an operator's request; it may be refused."""
        world, control = self.world, self.control
        open_plans = [record.plan.plan_id for record in control.records.open]
        plan_id = world.rng.choice(open_plans) if open_plans else PlanId("none")
        before = self.standing()
        try:
            # Callers that chose the id of a plan ask for it before they ask for a plan.
            self.ask(ctl.RequestRepeated(plan_id, None))
            match wish:
                case "submit" | "propose":
                    self.submit(PlanKind.MANUAL, wish == "submit")
                case "rollback":
                    _, target = control.rollback_target(None)
                    self.submit(PlanKind.ROLLBACK, True, target)
                case "approve":
                    self.ask(ctl.PlanApproved(plan_id, "someone"))
                case "cancel":
                    self.ask(ctl.PlanCancelled(plan_id, "someone"))
                case "resume":
                    self.ask(ctl.AutomaticPlansResumed())
                case "retire":
                    self.retire()
                case "freeze":
                    self.ask(ctl.PlansFrozen(world.rng.choice((0, 1))))
                case "mode":
                    mode = world.rng.choice((Mode.AUTO, Mode.PROPOSE, Mode.OBSERVE))
                    policy = DeploymentPolicy(mode=mode, cycle_s=world.cycle_s)
                    self.ask(ctl.PolicySet(policy, {}))
            world.note(f"operator: {wish} {plan_id}")
        except EvenkeelError as error:
            world.note(f"operator: {wish} refused, {error.reason}")
        self.tell_moves(before)

    def retire(self) -> None:
        """Let one rank retire; once it is evacuated, the engine goes on without it."""
        control, world = self.control, self.world
        if control.group is None or control.generation is None or not world.fleet.may_resize:
            return
        placement, ranks = control.group.placement, control.group.placement.num_ranks
        if ranks == 2:
            return
        shape = dataclasses.replace(world.fleet.shape, num_ranks=ranks)
        rank = EpRank(world.rng.randrange(ranks))
        target = evacuate(placement, shape, (rank,))
        request = None
        if target != placement:
            group = control.group
            view = control.generation, group.epoch, placement, group.weights_version
            plan = world.make_plan(view, PlanKind.EVACUATION, target)
            if plan is None:
                return
            request = ctl.PlanSubmitted(plan, True, "someone")
        self.ask(ctl.RanksRetired(Retirement((rank,), ranks), placement, request))
        world.fleet.resize(ranks - 1, (rank,))

    def submit(self, kind, approve: bool, target=None, sound: bool = False):
        control, world = self.control, self.world
        if control.group is None or control.generation is None:
            return None
        fleet = control.group
        view = (control.generation, fleet.epoch, fleet.placement, fleet.weights_version)
        plan = world.make_plan(view, kind, target, sound)
        for _ in range(30 if sound else 0):
            plan = plan or world.make_plan(view, kind, target, sound)
        if plan is None:
            return None
        self.ask(ctl.PlanSubmitted(plan, approve, "someone"))
        return control.records.get(plan.plan_id)


def name_of(action) -> str:
    """Return the name of one write for moments: a Commit rests on the record of an agreement."""
    match action:
        case ctl.PersistPlan(record=record) if record.story[-1]["event"] == "wave_agreed":
            return "agreement"
        case _:
            return type(action).__name__


def describe_persist(action) -> str:
    """Return one write in a few words."""
    match action:
        case ctl.PersistEpoch(epoch=epoch):
            return f"epoch {epoch}"
        case ctl.PersistPlan(record=record) if name_of(action) == "agreement":
            return f"agreement of {record.plan.plan_id}/{record.waves_committed}"
        case ctl.PersistPlan(record=record):
            detail = record.story[-1].get("detail", "")
            return f"plan {record.plan.plan_id} {record.phase} {record.reason} {detail}"
        case ctl.PersistDecision(row=row):
            return f"decision {row['reason']}"
        case _:
            return type(action).__name__
