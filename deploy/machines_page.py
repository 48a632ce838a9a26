"""The page docs/machines.md: the moves of the three machines as diagrams.

`python -m deploy.generate` writes it. A test walks every pair of the tables in
`evenkeel_moe.protocol.transitions` and compares what happens with the moves here.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState as _P
from evenkeel_moe.protocol.transitions import ControlState as _C
from evenkeel_moe.protocol.transitions import CoordinatorState as _Q

__all__ = ["CONTROL_MOVES", "COORDINATOR_MOVES", "PARTICIPANT_MOVES", "machines_page"]

PARTICIPANT_MOVES: Mapping[_P, Mapping[type, tuple[_P, ...]]] = {
    _P.IDLE: {msg.Prepare: (_P.STAGING,)},
    _P.STAGING: {
        msg.StagingFinished: (_P.PREPARED,),
        msg.StagingFailed: (_P.ABORTED,),
        msg.Abort: (_P.ABORTED,),
        msg.PollDropped: (_P.ABORTED,),
        msg.ReloadRequested: (_P.ABORTED,),
        msg.WeightsReloaded: (_P.ABORTED,),
    },
    _P.PREPARED: {
        msg.Commit: (_P.ARMED,),
        msg.Abort: (_P.ABORTED,),
        msg.PollDropped: (_P.ABORTED,),
        msg.ReloadRequested: (_P.ABORTED,),
        msg.WeightsReloaded: (_P.ABORTED,),
    },
    _P.ARMED: {
        msg.PollPassed: (_P.SWAPPING,),
        msg.PollNotPassed: (_P.ABORTED,),
        msg.PollDropped: (_P.ABORTED,),
        msg.Abort: (_P.ABORTED,),
        msg.ReloadRequested: (_P.ABORTED,),
        msg.WeightsReloaded: (_P.ABORTED,),
    },
    _P.SWAPPING: {msg.SwapFinished: (_P.IDLE,), msg.EngineRebalanced: (_P.IDLE,)},
    _P.ABORTED: {msg.TransportDrained: (_P.IDLE,)},
}
"""The states each event may lead to, besides the present one. The diagrams show these."""

COORDINATOR_MOVES: Mapping[_Q, Mapping[type, tuple[_Q, ...]]] = {
    _Q.PREPARING: {
        msg.Vote: (_Q.COMMITTING, _Q.ABORTING),
        ctl.RankConnected: (_Q.ABORTING,),
        ctl.RankLost: (_Q.ABORTING,),
        ctl.CancelWave: (_Q.ABORTING,),
        msg.Tick: (_Q.ABORTING,),
    },
    _Q.COMMITTING: {
        msg.Vote: (_Q.ABORTING,),
        msg.Ack: (_Q.COMMITTED, _Q.ABORTING),
        msg.AbortAnswer: (_Q.ABORTING, _Q.COMMITTED),
        msg.Tick: (_Q.ABORTING,),
    },
    _Q.ABORTING: {msg.Ack: (_Q.COMMITTED,), msg.AbortAnswer: (_Q.ABORTED, _Q.COMMITTED)},
    _Q.RECOVERING: {msg.RankState: (_Q.COMMITTED, _Q.COMMITTING, _Q.ABORTING)},
    _Q.COMMITTED: {},
    _Q.ABORTED: {},
}

CONTROL_MOVES: Mapping[_C, Mapping[type, tuple[_C, ...]]] = {
    _C.FOLLOWER: {ctl.LeaseAcquired: (_C.WAITING_FOR_RANKS,)},
    _C.WAITING_FOR_RANKS: {
        ctl.LeaseLost: (_C.FOLLOWER,),
        msg.TermRefused: (_C.FOLLOWER,),
        msg.Hello: (_C.RECOVERING, _C.FOLLOWER),
    },
    _C.RECOVERING: {
        ctl.LeaseLost: (_C.FOLLOWER,),
        msg.TermRefused: (_C.FOLLOWER,),
        msg.Hello: (_C.FOLLOWER,),
        msg.RankState: (_C.READY, _C.MIGRATING),
    },
    _C.READY: {
        ctl.LeaseLost: (_C.FOLLOWER,),
        msg.TermRefused: (_C.FOLLOWER,),
        msg.Hello: (_C.RECOVERING, _C.FOLLOWER),
        msg.RankState: (_C.RECOVERING,),
        ctl.CycleDecided: (_C.MIGRATING,),
        ctl.PlanSubmitted: (_C.MIGRATING,),
        ctl.PlanApproved: (_C.MIGRATING,),
    },
    _C.MIGRATING: {
        ctl.LeaseLost: (_C.FOLLOWER,),
        msg.TermRefused: (_C.FOLLOWER,),
        msg.Hello: (_C.RECOVERING, _C.FOLLOWER),
        msg.RankState: (_C.RECOVERING,),
        msg.Ack: (_C.READY,),
        msg.AbortAnswer: (_C.READY, _C.RECOVERING),
        ctl.PlanCancelled: (_C.READY,),
        ctl.PolicySet: (_C.READY,),
        msg.Tick: (_C.READY,),
    },
}

_MACHINES: tuple[tuple[str, str, Mapping[Any, Mapping[type, Any]]], ...] = (
    ("Participant", "one deployment on one rank", PARTICIPANT_MOVES),
    ("Coordinator", "one wave, on the leader", COORDINATOR_MOVES),
    ("Control", "one deployment on one controller replica", CONTROL_MOVES),
)


def machines_page() -> str:
    """Return the Markdown page: for each machine a diagram of its moves."""
    parts = [
        "# The state machines",
        "",
        "Written by `make deploy-files`; a test checks that it agrees with the code. An arrow",
        "shows which events may lead from one state to another. The tables in",
        "`service/evenkeel_moe/protocol/transitions.py` name the method for every state and event.",
    ]
    for name, subject, moves in _MACHINES:
        parts += ["", f"## {name}: {subject}", "", *_diagram(moves)]
    return "\n".join(parts) + "\n"


def _diagram(moves: Mapping[StrEnum, Mapping[type, tuple[StrEnum, ...]]]) -> list[str]:
    labels: dict[tuple[str, str], list[str]] = {}
    for state, events in moves.items():
        for event, targets in events.items():
            for target in targets:
                labels.setdefault((state, target), []).append(event.__name__)
    arrows = [
        f"    {start} --> {end}: {', '.join(events)}" for (start, end), events in labels.items()
    ]
    return ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(moves))}", *arrows, "```"]
