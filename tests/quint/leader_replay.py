"""The leaders of a run of the model, as real coordinators: one for each wave that a leader ends.

The model's leader may wait before it acts on the last answer; the coordinator acts at once. So that
answer is held back, as a slow network would, until the model acts.
"""

from dataclasses import dataclass, field
from typing import Any

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.messages import ParticipantState, WaveOutcome
from evenkeel_moe.protocol.timing import WaveTiming
from evenkeel_moe.protocol.transitions import CoordinatorState
from tests.quint.rank_replay import DifferenceError, RankReplay
from tests.quint.terms import envelope
from tests.quint.values import Record
from tests.quint.walks import Step

_DEADLINE_S = 1e6
_STALL_S = 1.0
_TIMING = WaveTiming(
    prepare_deadline_s=2 * _DEADLINE_S,
    commit_deadline_s=_DEADLINE_S,
    stall_after_s=_STALL_S,
    stall_after_steps=1,
)
_RANK_STATES = {
    "Nothing": ParticipantState.IDLE,
    "Prepared": ParticipantState.PREPARED,
    "Armed": ParticipantState.ARMED,
    "Swapping": ParticipantState.SWAPPING,
}


@dataclass
class Led:
    """The wave of one leader."""

    coordinator: Coordinator
    generation: int
    held_back: list[tuple[int, msg.RankMessage]] = field(default_factory=list)
    """The ranks' answers that the coordinator has not got yet."""
    actions: list = field(default_factory=list)
    """What the coordinator did in this event."""
    now: float = 0.0
    """The leader's clock in seconds."""
    step: int = 0
    """The group's steps that the leader knows."""


class LeaderReplay:
    """The leaders of one run of the model.

    Args:
        ranks: the same run's ranks; they know the real waves.
    """

    def __init__(self, ranks: RankReplay) -> None:
        self._ranks = ranks
        self._led: dict[int, Led] = {}

    def take(self, before: Record, step: Step) -> None:
        """Take one event of the run, after the ranks took it. Raises: DifferenceError."""
        label, value = step.event
        if label not in _EVENTS:
            return
        number = value if isinstance(value, int) else _leader_of(value)
        earlier, leader = before["leaders"][number], step.state["leaders"][number]
        for led in self._led.values():
            led.actions.clear()
            led.now += 0.001
        getattr(self, _EVENTS[label])(number, value, earlier, leader)
        if leader["phase"][0] not in _STATES:
            self._led.pop(number, None)
        elif number in self._led:
            self._check(number, step.state, leader)

    # --- events -----------------------------------------------------------------------------------

    def _begun(self, number: int, _value: Any, _earlier: Record, leader: Record) -> None:
        name = leader["wave"]["id"]
        known = msg.Leader(f"c{number}", leader["term"])
        self._start(number, leader, self._ranks.waves.prepare(name, known))

    def _start(self, number: int, leader: Record, prepare: msg.Prepare | None) -> None:
        peers = {EpRank(rank): (leader["gen"], 0) for rank in self._ranks.ranks}
        wave = self._ranks.waves.key(leader["wave"]["id"])
        coordinator = self._ranks.kit.coordinator(
            wave, msg.Leader(f"c{number}", leader["term"]), peers, _TIMING, prepare=prepare, query=1
        )
        led = self._led[number] = Led(coordinator, leader["gen"])
        led.actions += coordinator.start(led.now, led.step)

    def _got(self, number: int, value: Any, earlier: Record, leader: Record) -> None:
        message, led = value["message"], self._led.get(number)
        label, content = message["body"]
        current = message["term"] == earlier["term"] and message["gen"] == earlier["gen"]
        if led is None or not current or label == "RankState":
            return
        if content["wave"] != earlier["wave"]["id"]:
            return
        rank, phase = message["rank"], earlier["phase"][0]
        answer = _answer(label, led.coordinator.wave, content, preparing=phase == "Preparing")
        if label == "Ack" and not self._may_store(number):
            return  # Its lease is gone: it drops its machine (R13).
        decides = {
            "Vote": phase == "Preparing" and leader["yes"] == self._all,
            "Ack": False,
            "Dropped": phase == "Preparing"
            or (phase == "Committing" and not earlier["committed"])
            or (phase == "Aborting" and leader["drained"] & leader["done"] == self._all),
        }
        if decides[label]:
            led.held_back.append((rank, answer))
        else:
            self._feed(led, rank, answer)

    def _committed(self, number: int, _value: Any, _earlier: Record, _leader: Record) -> None:
        led = self._led[number]
        self._release(led, msg.Vote)
        intents = [each for each in led.actions if isinstance(each, ctl.PersistIntent)]
        self._equal("stores the intent", len(intents), 1)

    def _aborted(self, number: int, _value: Any, earlier: Record, _leader: Record) -> None:
        led = self._led[number]
        preparing = earlier["phase"][0] == "Preparing"
        refusals = [each for each in led.held_back if _refuses(each[1], preparing)]
        led.held_back = []
        if refusals:
            self._feed(led, *refusals[0])
        elif preparing:
            self._handle(led, ctl.CancelWave(Reason.CANCELLED))
        else:
            led.now += _DEADLINE_S
            led.step += _TIMING.commit_deadline_steps
            self._handle(led, ctl.GroupProgress(led.step))
            self._handle(led, msg.Tick())

    def _ended(self, number: int, _value: Any, earlier: Record, _leader: Record) -> None:
        led = self._led.pop(number)
        if earlier["phase"][0] == "Aborting":
            self._release(led, msg.AbortAnswer)
        self._equal("has ended its wave", led.coordinator.done, True)
        outcomes = [each for each in led.actions if isinstance(each, ctl.PersistOutcome)]
        aborted = [] if earlier["phase"][0] == "Committing" else [False]
        self._equal("records", [each.committed for each in outcomes], aborted)

    def _asked(self, number: int, _value: Any, _earlier: Record, _leader: Record) -> None:
        led = self._led.get(number)
        if led is None:
            return
        led.now += _TIMING.resend_max_s
        led.step += 1
        self._handle(led, ctl.GroupProgress(led.step))
        pending = led.coordinator.peers.pending
        self._handle(led, msg.Tick())
        asked = [each.rank for each in led.actions if isinstance(each, ctl.SendToRank)]
        self._equal("asks again", asked, list(pending))

    def _recovered(self, number: int, _value: Any, earlier: Record, leader: Record) -> None:
        """R12: the coordinator of a found wave decides from the same answers."""
        if leader["phase"][0] not in _STATES:
            return
        self._start(number, leader, None)
        led = self._led[number]
        for rank, answer in sorted(earlier["answers"].items()):
            self._feed(led, rank, self._rank_state(rank, leader, answer))
        # The model counts the ranks at the new epoch as asked already; the coordinator asks again.
        for rank in sorted(leader["done"]):
            self._feed(led, rank, msg.Ack(led.coordinator.wave, Epoch(leader["epoch"]), ""))

    def _down(self, number: int, _value: Any, _earlier: Record, _leader: Record) -> None:
        self._led.pop(number, None)

    # --- answers ----------------------------------------------------------------------------------

    def _rank_state(self, rank: int, leader: Record, answer: Record) -> msg.RankState:
        waves, generation = self._ranks.waves, Generation(f"g{leader['gen']}")
        identity = msg.RankIdentity(DeploymentId("d"), EpRank(rank), generation, leader["gen"])
        hold, place = answer["hold"][0], answer["place"]
        last = waves.key(place) if place else None
        if last is not None and last.generation != generation:
            last = None
        return msg.RankState(
            identity=identity,
            state=_RANK_STATES[hold],
            wave=None if hold == "Nothing" else waves.key(answer["wave"]["id"]),
            epoch=Epoch(answer["epoch"]),
            placement_digest=waves.placements[place].digest,
            weights_version=answer["version"],
            drained=answer["drained"],
            last_wave=last,
            last_outcome=None if last is None else WaveOutcome.SWAPPED,
            query=1,
        )

    def _release(self, led: Led, kind: type) -> None:
        """Let the coordinator have the answers of a kind that were held back; no vote is a no."""
        released = [each for each in led.held_back if isinstance(each[1], kind)]
        for rank, answer in released:
            if not _refuses(answer, preparing=True):
                self._feed(led, rank, answer)
        led.held_back = []

    def _feed(self, led: Led, rank: int, answer: msg.RankMessage) -> None:
        self._handle(led, ctl.FromRank(EpRank(rank), led.generation, 0, answer))

    def _handle(self, led: Led, event: object) -> None:
        led.actions += led.coordinator.handle(event, led.now)

    # --- comparison -------------------------------------------------------------------------------

    def _check(self, number: int, state: Record, leader: Record) -> None:
        led = self._led[number]
        phase, committed = leader["phase"][0], leader["committed"]
        expected = CoordinatorState.COMMITTED if committed else _STATES[phase]
        self._equal("is", led.coordinator.state, expected)
        counted = {
            CoordinatorState.PREPARING: leader["yes"],
            CoordinatorState.COMMITTED: leader["done"],
            CoordinatorState.ABORTING: leader["done"] & leader["drained"],
        }
        if expected in counted:
            answered = self._all - set(led.coordinator.peers.pending)
            waiting = {
                rank
                for rank, answer in led.held_back
                if not committed and not _refuses(answer, preparing=True)
            }
            self._equal("counts the answers of", answered | waiting, counted[expected])
        for action in led.actions:
            if isinstance(action, ctl.Alert):
                raise DifferenceError(f"leader {number}: {action}")
            if isinstance(action, ctl.SendToRank):
                self._check_message(number, state, leader, action)

    def _check_message(
        self, number: int, state: Record, leader: Record, action: ctl.SendToRank
    ) -> None:
        """Refuse a message that the model's leader could not send in this state."""
        rank = self._ranks.ranks[action.rank]
        body = (type(action.message).__name__, leader["wave"])
        if body[0] == "QueryState":
            return  # Recoveries ask every rank.
        identity = msg.RankIdentity(
            DeploymentId("d"), EpRank(rank.number), Generation(f"g{leader['gen']}"), 0
        )
        message = envelope(identity, action.message.leader, body)
        allowed = self._ranks.model.asked(state, number)
        if not allowed["ok"] or message not in allowed["state"]["net"]:
            raise DifferenceError(f"leader {number} sends {message}")

    @property
    def _all(self) -> frozenset[int]:
        return frozenset(self._ranks.ranks)

    def _may_store(self, number: int) -> bool:
        return bool(self._ranks.model.mayStore(self._ranks.state, number))

    def _equal(self, what: str, machine: Any, model: Any) -> None:
        if machine != model:
            raise DifferenceError(f"leader {what}: the machine {machine}, the model {model}")


def _answer(label: str, wave: WaveKey, content: Record, *, preparing: bool) -> msg.RankMessage:
    """Return a rank's real answer; the model calls a refused Prepare dropped, too."""
    match label:
        case "Vote":
            return msg.Vote(wave, content["yes"])
        case "Ack":
            return msg.Ack(wave, Epoch(content["epoch"]), "")
    if preparing:
        return msg.Vote(wave, False, Reason.RANK_VOTED_NO)
    dropped = WaveOutcome.DROPPED
    return msg.AbortAnswer(wave, Epoch(content["epoch"]), dropped, content["drained"])


def _refuses(answer: msg.RankMessage, preparing: bool) -> bool:
    """Return True for an answer after which a leader must end the wave."""
    if preparing:
        return isinstance(answer, msg.Vote) and not answer.yes
    return isinstance(answer, msg.AbortAnswer)


def _leader_of(value: Record) -> int:
    return int(value["leader"] if "leader" in value else value["message"]["leader"])


_STATES = {
    "Preparing": CoordinatorState.PREPARING,
    "Committing": CoordinatorState.COMMITTING,
    "Aborting": CoordinatorState.ABORTING,
}
_EVENTS = {
    "WaveBegun": "_begun",
    "LeaderGot": "_got",
    "CommitDecided": "_committed",
    "AbortDecided": "_aborted",
    "WaveEnded": "_ended",
    "Asked": "_asked",
    "RecoveryDecided": "_recovered",
    "SteppedDown": "_down",
    "LeaseTaken": "_down",
}
"""Events of the model at a leader, and the methods that take them."""
