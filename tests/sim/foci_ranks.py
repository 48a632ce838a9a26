"""Foci about old messages and about the machine of a rank."""

from tests.sim.causes import (
    again,
    disable,
    lapse,
    late,
    leaderless,
    measure,
    news,
    rebalance,
    reload,
    set_clock,
    wish,
)
from tests.sim.conditions import fleet_like, like, quick
from tests.sim.focus import focus

BUSY = like(copy_s=(0.1, 0.5))
"""Slow copies: staging takes long, and so does draining after an abort."""
COMMIT = frozenset({"Commit"})
INTENT = "controller stores PersistIntent"
"""The moment before the first Commit is sent."""
RANK_STATES = ("is idle", "is staging", "is prepared", "is armed", "swaps", "is aborted")
WAVE_STATES = ("preparing", "committing", "aborting", "committed", "aborted")
ANSWERS = ("Vote", "Ack", "AbortAnswer", "StagingProgress")
CANCELLED = wish("cancel", "rank is staging", 0.15)

RANK_FOCI = (
    # --- old messages and old news, in every state ------------------------------------------------
    focus(
        "participant staging Commit; participant armed Prepare, Abort;"
        " participant swapping Prepare, Commit, Abort; participant aborted Prepare, Commit",
        11,
        *(
            again(kind, f"rank {state}", 1)
            for state in RANK_STATES
            for kind in ("Prepare", "Commit", "Abort")
        ),
        again("Prepare", "rank is aborted", 1),
        like(slow_swaps=0.2),
        CANCELLED,
    ),
    focus(
        "participant idle StagingFinished, StagingFailed, TransportDrained;"
        " participant staging TransportDrained;"
        " participant prepared StagingFinished, StagingFailed, TransportDrained;"
        " participant armed StagingFinished, StagingFailed, TransportDrained;"
        " participant swapping StagingFinished, StagingFailed, TransportDrained;"
        " participant aborted StagingFinished, StagingFailed",
        8,
        *(news(f"rank {state}") for state in RANK_STATES),
        like(slow_swaps=0.2),
        CANCELLED,
    ),
    focus(
        "coordinator committing Vote; coordinator aborted Vote; coordinator committed Vote;"
        " control ready Vote, StagingProgress",
        21,
        *(again(kind, f"wave is {state}", 1) for state in WAVE_STATES for kind in ANSWERS),
        *(again(kind, "controller is ready", 1) for kind in ANSWERS),
        *(again("Vote", f"wave is {state}", 1) for state in ("aborted", "committed")),
        CANCELLED,
    ),
    focus(
        "control follower Vote, Ack, AbortAnswer, StagingProgress;"
        " control follower RankHeard, RankTroubled, RankStopped, ClockStepped, PlanMeasured",
        16,
        *(again(kind, "controller is follower", 2) for kind in (*ANSWERS, "Beat")),
        set_clock("controller is follower", 2),
        measure("controller is follower", 2),
        lapse("controller is ready", 0.5, same=1.0, within=0.3),
        CANCELLED,
    ),
    focus(
        "participant armed Abort; participant aborted Commit",
        4,
        late(COMMIT, INTENT, "rank is aborted", 2.0, 0.6, one=True),
        quick(commit_deadline_s=0.3),
    ),
    # --- a rank: no leader is heard ---------------------------------------------------------------
    focus(
        "participant staging PollDropped",
        15,
        like(copy_s=(0.5, 0.75)),
        fleet_like(drop_after_s=0.4),
        leaderless("wave is preparing"),
    ),
    focus(
        "participant prepared PollDropped",
        4,
        fleet_like(drop_after_s=0.5),
        leaderless("rank is prepared"),
    ),
    focus(
        "participant armed PollDropped; coordinator committing AbortAnswer",
        16,
        fleet_like(drop_after_s=0.5, poll_every=2, resolve_after=2),
        leaderless(INTENT, COMMIT),
    ),
    focus(
        # R6: an armed rank waits, however long it hears no leader.
        "participant armed PollNotPassed, PollPassed",
        8,
        quick(commit_deadline_s=2.0),
        fleet_like(drop_after_s=0.4),
        late(COMMIT, INTENT, None, 0.8, one=True),
        leaderless("rank is armed"),
    ),
    focus(
        "participant aborted PollDropped",
        4,
        quick(),
        like(copy_s=(0.6, 0.75)),
        fleet_like(drop_after_s=0.4, poll_every=1, resolve_after=1),
        wish("cancel", "rank is staging", 0.4),
        leaderless("rank is aborted"),
    ),
    # --- a rank: reloads, failing swaps -----------------------------------------------------------
    focus("participant staging ReloadRequested", 10, BUSY, reload("rank is staging", True)),
    focus("participant staging WeightsReloaded", 7, BUSY, reload("rank is staging", False)),
    focus(
        "participant prepared ReloadRequested; coordinator committing AbortAnswer",
        14,
        reload("rank is prepared", True),
    ),
    focus(
        "participant prepared WeightsReloaded; coordinator committing AbortAnswer",
        8,
        reload("rank is prepared", False),
    ),
    focus("participant armed ReloadRequested", 4, reload("rank is armed", True)),
    focus("participant armed WeightsReloaded", 12, reload("rank is armed", False)),
    focus(
        "participant swapping ReloadRequested",
        12,
        reload("rank swaps", True, 0.9),
        like(slow_swaps=0.6),
    ),
    focus(
        "participant swapping WeightsReloaded",
        18,
        reload("rank swaps", False, 0.8, within=0.05),
        like(slow_swaps=0.5),
    ),
    focus(
        "participant aborted ReloadRequested",
        8,
        wish("cancel", "rank is staging", 0.4),
        BUSY,
        reload("rank is aborted", True, 0.8),
    ),
    focus(
        "participant aborted WeightsReloaded",
        3,
        wish("cancel", "rank is staging", 0.4),
        BUSY,
        reload("rank is aborted", False),
    ),
    # --- a rank: errors of its agent, an engine with a mind of its own ----------------------------
    focus(
        "participant idle MigrationDisabled; participant staging MigrationDisabled;"
        " participant prepared MigrationDisabled; participant armed MigrationDisabled;"
        " participant swapping MigrationDisabled; participant aborted MigrationDisabled;"
        " participant idle MigrationEnabled; participant staging MigrationEnabled;"
        " participant prepared MigrationEnabled; participant armed MigrationEnabled;"
        " participant swapping MigrationEnabled; participant aborted MigrationEnabled",
        21,
        BUSY,
        like(slow_swaps=0.2),
        disable("rank is staging", restart_s=1.5),
        *(disable(f"rank {state}", 5) for state in RANK_STATES),
        disable("rank is aborted", 4, 1.0),
        wish("cancel", "rank is prepared", 0.15),
        lapse("controller is ready", 0.2, same=1.0, within=0.3),
    ),
    focus("participant idle EngineRebalanced", 7, rebalance("rank is staging", 0.3)),
    focus("participant swapping EngineRebalanced", 6, like(stray_swaps=0.5, slow_swaps=0.2)),
    focus("participant swapping SwapFailed", 10, like(failing_swaps=0.5, slow_swaps=0.2)),
)
