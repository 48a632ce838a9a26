"""Transition tables of the three machines: (state, event type) -> method name or verdict.

Only this file decides which event may change which state of a machine. A cell names the method that
handles the event. A test walks every pair. `deploy/machines_page.py` has the moves that they lead to.
"""

from collections.abc import Mapping
from enum import StrEnum

from evenkeel_moe.protocol.control_messages import (
    AutomaticPlansResumed,
    CancelWave,
    ClockStepped,
    CycleDecided,
    GroupProgress,
    LeaseAcquired,
    LeaseLost,
    PersistFailed,
    PlanApproved,
    PlanCancelled,
    PlanMeasured,
    PlansFrozen,
    PlanSubmitted,
    PolicySet,
    RankConnected,
    RankHeard,
    RankLost,
    RanksRetired,
    RankStopped,
    RankTroubled,
    RequestRepeated,
    StreamClosed,
)
from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Ack,
    Commit,
    EngineRebalanced,
    Hello,
    MovedAnswers,
    ParticipantState,
    PollDropped,
    PollNotPassed,
    PollPassed,
    Prepare,
    QueryState,
    RankState,
    ReloadRequested,
    StagingFailed,
    StagingFinished,
    StagingProgress,
    SwapFailed,
    SwapFinished,
    TermRefused,
    Tick,
    TransportDrained,
    Vote,
    WeightsReloaded,
)

IGNORED = "ignored"
"""The event can occur in this state and changes nothing."""
ILLEGAL = "illegal"
"""A local event that only a bug of ours can cause here: it raises IllegalEvent."""
VIOLATION = "violation"
"""A message that no correct peer sends in this state: raises an Alert, changes nothing."""

NOT_READY = "not ready"
"""A request of an operator that waits for a leader or its ranks: it raises Unavailable."""


class CoordinatorState(StrEnum):
    """The state of a wave, as its leader knows it."""

    PREPARING = "preparing"
    COMMITTING = "committing"
    """All ranks voted yes and Commit was sent: the gate decides."""
    ABORTING = "aborting"
    """Abort was sent: every rank must answer that it dropped the wave and has drained."""
    RECOVERING = "recovering"
    """The wave was found on a rank by a new leader: all ranks are asked how it ended (R12)."""
    COMMITTED = "committed"
    """At least one rank is at the new epoch; the other ranks' answers are awaited."""
    ABORTED = "aborted"


class ControlState(StrEnum):
    """The state of one deployment on one controller replica."""

    FOLLOWER = "follower"
    WAITING_FOR_RANKS = "waiting_for_ranks"
    RECOVERING = "recovering"
    """All ranks are asked for their state, and waves found on them are ended."""
    READY = "ready"
    MIGRATING = "migrating"
    """A plan is being carried out."""


_P = ParticipantState
_Q = CoordinatorState
_C = ControlState


def _table(
    columns: tuple[StrEnum, ...], rows: Mapping[type, tuple[str, ...]]
) -> Mapping[tuple[StrEnum, type], str]:
    return {
        (state, event): cell
        for event, row in rows.items()
        for state, cell in zip(columns, row, strict=True)
    }


# fmt: off
PARTICIPANT = _table((_P.IDLE, _P.STAGING, _P.PREPARED, _P.ARMED, _P.SWAPPING, _P.ABORTED), {
    # A Commit follows this rank's yes, so a Commit in STAGING is a stray; a real one is sent again.
    #                   IDLE              STAGING            PREPARED           ARMED              SWAPPING          ABORTED
    Prepare:           ("_begin",         "_vote_later",     "_vote_again",     "_vote_again",     "_vote_again",    "_refuse_again"),
    Commit:            ("_not_held",          IGNORED,           "_arm",            "_arm_again",      "_arm_again",     "_not_held"),
    Abort:             ("_not_held",          "_abort",          "_abort",          "_abort_armed",    "_abort_later",   "_abort_again"),
    QueryState:        ("_answer",        "_answer",         "_answer",         "_answer",         "_answer",        "_answer"),
    StagingFinished:   (IGNORED,          "_vote_yes",       IGNORED,           IGNORED,           IGNORED,          IGNORED),
    StagingFailed:     (IGNORED,          "_vote_no",        IGNORED,           IGNORED,           IGNORED,          IGNORED),
    TransportDrained:  (IGNORED,          IGNORED,           IGNORED,           IGNORED,           IGNORED,          "_drained"),
    PollPassed:        (ILLEGAL,          ILLEGAL,           ILLEGAL,           "_pass",           ILLEGAL,          ILLEGAL),
    PollNotPassed:     ("_resolve",       "_resolve",        "_resolve",        "_resolve_armed",  ILLEGAL,          "_resolve"),
    PollDropped:       ("_resolve",       "_drop_together",  "_drop_together",  "_drop_together",  ILLEGAL,          "_resolve"),
    SwapFinished:      (ILLEGAL,          ILLEGAL,           ILLEGAL,           ILLEGAL,           "_swapped",       ILLEGAL),
    SwapFailed:        (ILLEGAL,          ILLEGAL,           ILLEGAL,           ILLEGAL,           "_swap_failed",   ILLEGAL),
    ReloadRequested:   ("_permit",        "_reload_drops",   "_reload_drops",   "_reload_armed",   "_reload_later",  "_permit"),
    WeightsReloaded:   ("_reloaded",      "_reloaded_drops", "_reloaded_drops", "_reloaded_armed", "_reloaded_torn", "_reloaded"),
    EngineRebalanced:  ("_follow_engine", ILLEGAL,           ILLEGAL,           ILLEGAL,           "_swap_elsewhere", ILLEGAL),
})

PARTICIPANT_OTHER_WAVE: Mapping[type, str] = {
    # Replaces the cell in every state but IDLE if the event names another wave than the one held.
    Prepare:          "_busy",
    Commit:           "_not_held",
    Abort:            "_not_held",
    StagingFinished:  IGNORED,
    StagingFailed:    IGNORED,
    TransportDrained: IGNORED,
}

COORDINATOR = _table((_Q.PREPARING, _Q.COMMITTING, _Q.ABORTING, _Q.RECOVERING, _Q.COMMITTED, _Q.ABORTED), {
    #               PREPARING          COMMITTING         ABORTING         RECOVERING     COMMITTED             ABORTED
    # A rank takes its yes back for a reload (R4). In RECOVERING, what answers a leader of before may
    # still arrive; the RankState of the same rank follows.
    Vote:          ("_vote",           "_vote",           IGNORED,         IGNORED,       IGNORED,              IGNORED),
    Ack:           (VIOLATION,         "_ack",            "_ack",          IGNORED,       "_ack",               VIOLATION),
    AbortAnswer:   (VIOLATION,         "_commit_refused", "_abort_answer", IGNORED,       "_late_abort_answer", IGNORED),
    RankState:     (IGNORED,           IGNORED,           IGNORED,         "_rank_state", IGNORED,              IGNORED),
    RankConnected: ("_connected",      "_connected",      "_connected",    "_connected",  "_connected",         IGNORED),
    RankLost:      ("_lost_preparing", "_lost",           "_lost",         "_lost",       "_lost",              IGNORED),
    GroupProgress: ("_progress",       "_progress",       "_progress",     "_progress",   "_progress",          IGNORED),
    CancelWave:    ("_cancel",         IGNORED,           IGNORED,         ILLEGAL,       IGNORED,              ILLEGAL),
    Tick:          ("_tick",           "_tick",           "_tick",         "_tick",       "_tick",              IGNORED),
})

CONTROL = _table((_C.FOLLOWER, _C.WAITING_FOR_RANKS, _C.RECOVERING, _C.READY, _C.MIGRATING), {
    #                       FOLLOWER         WAITING_FOR_RANKS   RECOVERING          READY              MIGRATING
    LeaseAcquired:         ("_lead",         ILLEGAL,            ILLEGAL,            ILLEGAL,           ILLEGAL),
    LeaseLost:             (IGNORED,         "_follow",          "_follow",          "_follow",         "_follow"),
    Hello:                 ("_refuse_hello", "_hello",           "_hello",           "_hello",          "_hello"),
    # While ranks are awaited, these answer a leader of before; the recovery asks how its wave ended.
    Vote:                  (IGNORED,         IGNORED,            "_to_wave",         "_to_wave",        "_to_wave"),
    Ack:                   (IGNORED,         IGNORED,            "_to_wave",         "_to_wave",        "_to_wave"),
    AbortAnswer:           (IGNORED,         IGNORED,            "_to_wave",         "_to_wave",        "_to_wave"),
    RankState:             (IGNORED,         "_note_state",      "_query_answer",    "_check_state",    "_check_state"),
    TermRefused:           (IGNORED,         "_term_refused",    "_term_refused",    "_term_refused",   "_term_refused"),
    StagingProgress:       (IGNORED,         IGNORED,            IGNORED,            IGNORED,           "_staged"),
    MovedAnswers:          (IGNORED,         "_answered",        "_answered",        "_answered",       "_answered"),
    RankHeard:             (IGNORED,         "_heard",           "_heard",           "_heard",          "_heard"),
    RankTroubled:          (IGNORED,         "_troubled",        "_troubled",        "_troubled",       "_troubled"),
    RankStopped:           (IGNORED,         "_stopped",         "_stopped",         "_stopped",        "_stopped"),
    StreamClosed:          (IGNORED,         "_closed",          "_closed",          "_closed",         "_closed"),
    CycleDecided:          (IGNORED,         "_cycle_overtaken", "_cycle_overtaken", "_cycle_decided",  "_cycle_overtaken"),
    PlanMeasured:          (IGNORED,         "_plan_measured",   "_plan_measured",   "_plan_measured",  "_plan_measured"),
    PersistFailed:         (IGNORED,         "_persist_failed",  "_persist_failed",  "_persist_failed", "_persist_failed"),
    PlanSubmitted:         (NOT_READY,       NOT_READY,           NOT_READY,           "_submit",         "_submit"),
    RequestRepeated:       (NOT_READY,       "_repeat",          "_repeat",          "_repeat",         "_repeat"),
    PlanApproved:          (NOT_READY,       NOT_READY,           NOT_READY,           "_approve",        "_approve"),
    PlanCancelled:         (NOT_READY,      "_cancel",          "_cancel",          "_cancel",         "_cancel"),
    RanksRetired:          (NOT_READY,       NOT_READY,           NOT_READY,           "_retire",         "_retire"),
    PolicySet:             (NOT_READY,      "_set_policy",      "_set_policy",      "_set_policy",     "_set_policy"),
    PlansFrozen:           (NOT_READY,      "_freeze",          "_freeze",          "_freeze",         "_freeze"),
    AutomaticPlansResumed: (NOT_READY,      "_resume",          "_resume",          "_resume",         "_resume"),
    ClockStepped:          ("_step_clock",   "_step_clock",      "_step_clock",      "_step_clock",     "_step_clock"),
    Tick:                  (IGNORED,         "_tick_waiting",    "_tick_recovering", "_tick_recovered", "_tick_recovered"),
})
# fmt: on
