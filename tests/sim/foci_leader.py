"""Foci about the machines of a wave and of a controller."""

from tests.sim.causes import (
    again,
    cut,
    lapse,
    late,
    measure,
    reload,
    set_clock,
    silent,
    split,
    stop,
    store_away,
    twice,
    wish,
)
from tests.sim.conditions import like, quick
from tests.sim.foci_ranks import BUSY, CANCELLED, COMMIT, INTENT
from tests.sim.focus import focus
from tests.sim.network import GOODBYE

ORDERS = ("policy", "thaw", "resume", "cancel")

LEADER_FOCI = (
    # --- a wave: ranks that are lost and come back ------------------------------------------------
    focus(
        "coordinator preparing RankLost, RankConnected",
        22,
        quick(prepare_deadline_s=4.0),
        BUSY,
        silent("wave is preparing", 0.2, 0.5),
        cut("wave is preparing", 0.5, 0.7),
    ),
    focus(
        "coordinator committing RankLost, RankConnected",
        19,
        quick(),
        silent("wave is committing", 1.0, 0.4),
        cut("wave is committing", 1.0, 0.4),
    ),
    focus(
        "coordinator aborting RankLost, RankConnected",
        4,
        quick(),
        wish("cancel", "wave is preparing"),
        silent("wave is aborting", 0.5, 0.4),
        cut("wave is aborting", 0.5, 0.4),
    ),
    focus(
        "coordinator committed RankLost, RankConnected",
        4,
        quick(),
        silent("wave is committing", 0.2, 0.6),
        cut("wave is committed", 0.5, 0.4),
    ),
    focus(
        "coordinator aborted RankLost, RankConnected",
        20,
        quick(),
        wish("cancel", "wave is preparing"),
        like(cycle_s=0.9),
        silent("wave is aborted", 0.9, 0.6),
        cut("wave is aborted", 0.5, 0.3),
    ),
    focus(
        "coordinator recovering RankLost, RankConnected",
        42,
        quick(),
        late(COMMIT, INTENT, "wave is recovering", 3.0),
        lapse(INTENT, same=0.7),
        silent("wave is recovering", 0.4, 0.9),
        cut("wave is recovering", 0.5, 0.7),
    ),
    # --- a wave: late answers ---------------------------------------------------------------------
    focus(
        "coordinator aborting Ack; coordinator committed AbortAnswer",
        19,
        late(frozenset({"Ack"}), "wave is committing", "wave is aborting", 2.5),
        quick(commit_deadline_s=0.3, commit_deadline_steps=10),
    ),
    # --- a controller: ranks that stop as planned -------------------------------------------------
    focus(
        "control ready RankStopped; control follower RankStopped;"
        " control waiting_for_ranks RankStopped; control recovering RankStopped",
        6,
        late(frozenset({"Hello"}), "controller is waiting_for_ranks", None, 0.4, 0.9, one=True),
        late(frozenset({"RankState"}), "controller is recovering", None, 0.4, 0.9, one=True),
        stop("controller is ready", chance=0.2),
        stop("controller is recovering", chance=0.2),
        stop("controller follower has a rank", chance=0.2),
        stop("controller waiting_for_ranks has a rank", chance=0.1),
        *(
            again(GOODBYE, f"controller is {state}", 10)
            for state in ("ready", "follower", "waiting_for_ranks", "recovering")
        ),
        lapse("controller is ready", 0.9, same=1.0, within=0.3),
    ),
    # --- a wave: cancels --------------------------------------------------------------------------
    focus("coordinator committing CancelWave", 4, wish("cancel", "wave is committing")),
    focus("coordinator committed CancelWave", 11, wish("cancel", "wave is committed")),
    focus(
        # R16: proposals are approved after the epoch moved.
        "control ready CycleDecided; control migrating Tick",
        8,
        wish("propose", "controller is migrating"),
        wish("approve", "controller is ready"),
    ),
    focus(
        "coordinator aborting CancelWave",
        4,
        wish("cancel", "wave is aborting"),
        like(corruption=0.5),
    ),
    # --- a controller: terms ----------------------------------------------------------------------
    focus(
        "control waiting_for_ranks TermRefused; control follower LeaseLost",
        25,
        quick(),
        late(frozenset({"Hello"}), "controller is waiting_for_ranks", None, 2.5, 0.9, one=True),
        split("controller waiting_for_ranks has a rank", 0.6, 0.9),
        lapse("controller is ready", 0.9, within=0.1),
        like(cycle_s=3.0),
    ),
    focus(
        "control recovering TermRefused; control follower LeaseLost",
        23,
        quick(),
        late(frozenset({"RankState"}), "controller is recovering", None, 1.8, 0.9),
        split("controller is recovering", 0.5, 0.9),
        lapse("controller is ready", 0.9, within=0.1),
        like(cycle_s=3.0),
    ),
    focus(
        "control ready TermRefused; control follower LeaseLost",
        4,
        quick(),
        split("controller is ready", 0.3, 0.8),
        split("controller plans", 0.3, 0.8),
        like(eagerness=0.2, cycle_s=1.5),
    ),
    focus(
        "control migrating TermRefused; control follower LeaseLost",
        31,
        quick(),
        like(cycle_s=1.0),
        late(frozenset({"Vote"}), "controller is migrating", None, 1.2),
        split("controller is migrating", 0.1, 0.9),
    ),
    focus(
        "control recovering LeaseLost, StreamClosed, Hello",
        31,
        late(frozenset({"RankState"}), "controller is recovering", None, 0.8, 0.9, one=True),
        lapse("controller is recovering", 0.5, same=1.0, within=0.4),
        cut("controller is recovering", 0.5, 0.5),
        lapse("controller is ready", 0.5, within=0.1),
    ),
    focus(
        "control waiting_for_ranks LeaseLost",
        6,
        late(frozenset({"Hello"}), "controller is waiting_for_ranks", None, 1.0, 0.9, one=True),
        lapse("controller is waiting_for_ranks", 0.6, same=1.0, within=0.4),
        lapse("controller is ready", 0.5, within=0.1),
    ),
    # --- a controller: late answers of planner, store and ranks -----------------------------------
    focus(
        "control follower CycleDecided",
        16,
        late(frozenset({"CycleDecided"}), "controller plans", "controller is follower", 2.5),
        lapse("controller plans"),
    ),
    focus(
        "control waiting_for_ranks CycleDecided",
        30,
        late(
            frozenset({"CycleDecided"}), "controller plans", "controller is waiting_for_ranks", 2.5
        ),
        lapse("controller plans", same=1.0),
    ),
    focus(
        "control recovering CycleDecided",
        42,
        late(frozenset({"CycleDecided"}), "controller plans", "controller is recovering", 2.5),
        reload("controller plans", False),
    ),
    focus(
        "control migrating CycleDecided",
        6,
        late(frozenset({"CycleDecided"}), "controller plans", "controller is migrating", 2.5),
        wish("submit", "controller plans"),
    ),
    focus(
        "control follower PersistFailed",
        12,
        like(prompt_failures=0.0, cycle_s=0.1),
        store_away("controller is migrating", 0.4, 0.9),
        lapse("controller is migrating", 0.9, same=1.0, within=0.15),
    ),
    focus(
        "control waiting_for_ranks PersistFailed",
        10,
        lapse("controller is ready", 0.5, within=0.3),
        late(frozenset({"Hello"}), "controller is waiting_for_ranks", None, 0.8, 0.9, one=True),
        store_away("controller is waiting_for_ranks", 0.8),
    ),
    focus(
        "control recovering PersistFailed",
        12,
        lapse("controller is ready", 0.5, within=0.3),
        late(frozenset({"RankState"}), "controller is recovering", None, 0.8, 0.9),
        store_away("controller is recovering", 0.8),
    ),
    focus(
        "control waiting_for_ranks StagingProgress",
        16,
        like(copy_s=(0.4, 0.75)),
        lapse("wave is preparing", same=0.7),
        late(frozenset({"Hello"}), "controller is waiting_for_ranks", None, 1.2, 0.9, one=True),
        twice("StagingProgress", 6),
    ),
    focus(
        "control recovering StagingProgress",
        9,
        like(copy_s=(0.4, 0.75)),
        lapse("wave is preparing", same=0.7),
        late(frozenset({"RankState"}), "controller is recovering", None, 0.8, 0.9, one=True),
        twice("StagingProgress", 6),
    ),
    focus(
        "control waiting_for_ranks PolicySet, PlansFrozen, AutomaticPlansResumed, ClockStepped;"
        " control waiting_for_ranks PlanMeasured, PlanCancelled;"
        " control waiting_for_ranks RankHeard, RankTroubled;"
        " control recovering PolicySet, PlansFrozen, AutomaticPlansResumed, ClockStepped;"
        " control recovering PlanMeasured, PlanCancelled",
        14,
        late(frozenset({"Hello"}), "controller is waiting_for_ranks", None, 0.4, 0.9, one=True),
        late(frozenset({"RankState"}), "controller is recovering", None, 0.4, 0.9, one=True),
        again("Beat", "controller is waiting_for_ranks", 6),
        *(
            order
            for state in ("waiting_for_ranks", "recovering")
            for order in (
                *(wish(what, f"controller is {state}") for what in 2 * ORDERS),
                set_clock(f"controller is {state}", 2),
                measure(f"controller is {state}", 2),
            )
        ),
        lapse("controller is ready", 0.9, same=1.0, within=0.3),
    ),
    focus(
        "control migrating PolicySet, PlansFrozen, AutomaticPlansResumed, ClockStepped;"
        " control ready PolicySet, PlansFrozen, AutomaticPlansResumed, ClockStepped;"
        " control migrating PlanMeasured, PlanApproved; control ready PlanMeasured, PlanCancelled",
        15,
        *(
            order
            for state in ("migrating", "ready")
            for order in (
                *(wish(what, f"controller is {state}") for what in (*ORDERS, "approve")),
                set_clock(f"controller is {state}"),
                measure(f"controller is {state}"),
            )
        ),
    ),
    focus(
        "control recovering Vote, AbortAnswer",
        18,
        reload("wave is committed", False, 0.4),
        again("Vote", "controller is recovering", 3),
        again("AbortAnswer", "controller is recovering", 3),
        CANCELLED,
    ),
)
