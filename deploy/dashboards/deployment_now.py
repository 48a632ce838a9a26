"""The row Now of the dashboard of a deployment: what it does, and why."""

from typing import Any

from deploy.chart_values import bound
from deploy.dashboards.alerts import firing_alerts
from deploy.dashboards.parts import (
    BLUE,
    GREEN,
    ONE,
    RED,
    YELLOW,
    better_above,
    number_panel,
    state_panel,
    thresholds,
    words,
)

__all__ = ["now_panels"]

_HELD = (
    f"max(evenkeel_held{{{ONE}}})"
    f" + 2 * (max(evenkeel_frozen_until_timestamp_seconds{{{ONE}}} > bool time()) or vector(0))"
)
_BALANCE = f"min(max by (phase) (evenkeel_balancedness_mean_ratio{{{ONE}}}))"


def now_panels() -> list[Any]:
    """Return the panels."""
    return [
        *_state(),
        *_figures(),
        firing_alerts(span=12),
        state_panel(
            "Decisions",
            "The reason with which the newest cycle of the control loop ended, over time.",
            [(f"max by (reason) (evenkeel_last_decision_reason{{{ONE}}})", "{{reason}}")],
        ),
    ]


def _state() -> list[Any]:
    held = number_panel(
        "Automatic plans",
        "Held: after a rollback, or after plans that did not deliver, automatic plans wait for"
        " `evenkeel resume`. Paused: an operator paused the deployment, until the pause ends or"
        " `evenkeel resume`."
        " In the modes observe and propose no plan starts by itself anyway.",
        _HELD,
        nothing="unknown",
    )
    held = held.mappings(
        words(
            {
                0: ("not held", GREEN),
                1: ("held", YELLOW),
                2: ("paused", YELLOW),
                3: ("held and paused", YELLOW),
            }
        )
    )
    return [
        number_panel(
            "Mode",
            "observe: nothing is carried out. propose: plans wait for approval. auto: plans start"
            " by themselves.",
            f"max by (mode) (evenkeel_deployment_info{{{ONE}}})",
            legend="{{mode}}",
            names=True,
            nothing="no leader",
        ),
        number_panel(
            "State",
            "The state of the controller for this deployment, and why.",
            f"max by (state, reason) (evenkeel_deployment_state{{{ONE}}})",
            legend="{{state}} {{reason}}",
            names=True,
            nothing="no leader",
        ),
        number_panel(
            "Newest reason",
            "The reason with which the newest cycle ended; docs/api.md lists all of them.",
            f"max by (reason) (evenkeel_last_decision_reason{{{ONE}}})",
            legend="{{reason}}",
            names=True,
            nothing="no decision yet",
        ),
        held,
        number_panel(
            "Age of the last plan",
            "Since the newest plan was committed.",
            f"time() - max(evenkeel_last_plan_committed_timestamp_seconds{{{ONE}}})",
            unit="s",
            nothing="no plan yet",
        ),
        number_panel(
            "Age of the last decision",
            "Since the newest cycle ended; red above the threshold of EvenkeelNoDecisions.",
            f"time() - max(evenkeel_last_decision_timestamp_seconds{{{ONE}}})",
            unit="s",
            colors=thresholds((None, GREEN), (bound("noDecisionsSeconds"), RED)),
            nothing="no decision yet",
        ),
    ]


def _figures() -> list[Any]:
    return [
        number_panel(
            "Lowest balancedness",
            "Mean balancedness of the worst phase; red below the threshold of"
            " EvenkeelBalancednessLow.",
            _BALANCE,
            unit="percentunit",
            colors=better_above(bound("balancednessMin")),
            nothing="unknown",
        ),
        number_panel(
            "Time balance",
            "Red below the threshold of EvenkeelTimeBalanceLow; unknown while only tokens are"
            " known.",
            f"max(evenkeel_time_balance_ratio{{{ONE}}})",
            unit="percentunit",
            colors=better_above(bound("timeBalanceMin")),
            nothing="unknown",
        ),
        number_panel(
            "Ranks missing",
            "Ranks that are declared but not heard, without those that stopped as planned.",
            f"max(evenkeel_ranks_expected{{{ONE}}})"
            f" - max(sum without (rank) (evenkeel_rank_fresh{{{ONE}}}))"
            f" - max(evenkeel_ranks_stopped{{{ONE}}})",
            colors=thresholds((None, GREEN), (1, RED)),
            nothing="unknown",
        ),
        number_panel(
            "Phase of the active plan",
            "Empty while no plan is active.",
            f"max by (phase) (evenkeel_plan_phase{{{ONE}}})",
            legend="{{phase}}",
            names=True,
            nothing="no active plan",
        ),
        number_panel(
            "Gain of the last plan",
            "Saving of modelled MoE time on the steps since the newest committed plan. If it stays"
            " below zero, `evenkeel plan rollback` goes back to the placement before it; automatic"
            " plans then wait for `evenkeel resume`.",
            f'max(evenkeel_last_plan_gain_ratio{{{ONE},basis="realised"}})',
            unit="percentunit",
            colors=thresholds((None, RED), (0, GREEN)),
            nothing="not measured",
        ),
        number_panel(
            "Proposal waits for",
            "Since the newest proposal that waits for approval was made; yellow above the threshold"
            " of EvenkeelProposalWaiting.",
            f"time() - max(evenkeel_proposal_created_timestamp_seconds{{{ONE}}})",
            unit="s",
            colors=thresholds((None, BLUE), (bound("proposalWaitingSeconds"), YELLOW)),
            nothing="none waits",
        ),
    ]
