"""The row Plans of the dashboard of a deployment: promises, results, and how to go back."""

from typing import Any

from deploy.dashboards.parts import ONE, line_panel, state_panel

__all__ = ["plan_panels"]

_ROLLBACK = (
    " If the result stays below zero, `evenkeel plan rollback` goes back to the placement before"
    " the newest plan. A rollback is a plan of its own: it copies the weights back wave by wave,"
    " raises the epoch, and automatic plans wait for `evenkeel resume` after it."
)


def plan_panels() -> list[Any]:
    """Return the panels."""
    return [*_gains(), *_progress()]


def _gains() -> list[Any]:
    return [
        line_panel(
            "Predicted against realised gain",
            "Saving of modelled MoE time by the newest committed plan: predicted on held-out steps,"
            f" and realised on the steps since. Not latency.{_ROLLBACK}",
            [(f"max by (basis) (evenkeel_last_plan_gain_ratio{{{ONE}}})", "{{basis}}")],
            unit="percentunit",
            least=None,
        ),
        line_panel(
            "Promised against delivered gain",
            "Saving of MoE time of the newest measured plan: promised by its verdict, and delivered"
            f" by the seconds that ranks reported before and after it, with its 95 %"
            f" interval.{_ROLLBACK}",
            [
                (f"max(evenkeel_plan_promised_gain_ratio{{{ONE}}})", "promised"),
                (
                    f"max by (bound) (evenkeel_plan_delivered_gain_ratio{{{ONE}}})",
                    "delivered, {{bound}}",
                ),
            ],
            unit="percentunit",
            least=None,
        ),
        line_panel(
            "Calibration of gains",
            "The factor by which the next promise is multiplied, by what earlier plans delivered;"
            " 1 without measured plans.",
            [(f"max(evenkeel_gain_calibration_ratio{{{ONE}}})", "calibration")],
        ),
        line_panel(
            "Predicted against realised balancedness",
            "Under the newest committed plan: predicted on held-out steps, and realised on the"
            " steps since.",
            [(f"max by (basis) (evenkeel_last_plan_balancedness_ratio{{{ONE}}})", "{{basis}}")],
            unit="percentunit",
            most=1,
        ),
    ]


def _progress() -> list[Any]:
    return [
        state_panel(
            "State and phase of the plan",
            "The state of the controller for this deployment, and the phase of its plan.",
            [
                (f"max by (state) (evenkeel_deployment_state{{{ONE}}})", "{{state}}"),
                (f"max by (phase) (evenkeel_plan_phase{{{ONE}}})", "plan {{phase}}"),
            ],
        ),
        line_panel(
            "Waves of the active plan",
            "The ranks switch to a new placement at the end of each wave.",
            [
                (f"max(evenkeel_plan_waves_committed{{{ONE}}})", "committed"),
                (f"max(evenkeel_plan_waves{{{ONE}}})", "all"),
            ],
            span=6,
        ),
        line_panel(
            "Epoch",
            "It rises by one with each committed wave, also with those of a rollback.",
            [(f"max(evenkeel_epoch{{{ONE}}})", "epoch")],
            span=6,
        ),
    ]
