"""Figures of a plan in words, for `evenkeel plan show`. Pure functions from JSON to texts."""

from collections.abc import Mapping
from typing import Any

from evenkeel_moe.cli.units import figure, figure_name, is_loss, saving_range, share
from evenkeel_moe.model.quantities import bytes_text, duration_text

ROLLBACK = "rollback: it returns to an earlier placement, so MoE time may rise"

_PREDICTED = frozenset(
    {
        *("balancedness_mean", "balancedness_expected", "gain", "gain_lower", "gain_upper"),
        *("gain_modelled", "calibration", "payback_s", "expected_stall_s", "to_epoch"),
    }
)
"""Figures that the first lines of a plan show, or another figure beside its own."""
_COUNTED = frozenset({"copies", "bytes", "layers", "waves"})
"""Counts that the plan has in fields of its own; `layers` stands beside the waves."""
_DETAILS: Mapping[str, tuple[str, str]] = {
    "net_gain": ("promised gain less the copies", "{} of MoE time"),
    "copy_cost_share": ("price of the copies", "{} of MoE time, over the plan's expected life"),
    "payback_steps": ("paid back after", "{}"),
    "min_gain": ("least gain to plan for", "{} of MoE time"),
    "max_payback_steps": ("longest payback allowed", "{} steps"),
    "calibrated_on_plans": ("calibrated on", "{}"),
    "window_steps": ("window", "{} complete steps"),
    "planned_on_steps": ("planned on", "{} steps"),
    "held_out_steps": ("scored on", "{} later steps"),
    "balancedness_worst": ("worst layer before", "balancedness {}"),
    "time_balance": ("time balance before", "{} mean of layers"),
    "time_balance_worst": ("worst layer before", "time balance {}"),
    "plan_below": ("planning starts below", "balance {}"),
    "starts_below": ("planning started below", "balance {}, because time is less balanced"),
    "stop_above": ("planning stops above", "balance {}"),
    "change_strength": ("change of traffic", "{} times the usual difference between steps"),
    "change_ratio": ("a change counts from", "{} times the usual difference between steps"),
    "changed_steps": ("steps since the change", "{} steps"),
    "balancedness_changed": ("balancedness since then", "{} mean of layers"),
    "time_balance_changed": ("time balance since then", "{} mean of layers"),
    "copies_raw": ("copies before matching", "{}, before ranks took over the nearest new slots"),
    "evaluations": ("placements compared", "{}"),
}
"""Name -> words and a form of the value, in order: gain first, then data, then the search."""


def details(numbers: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return the figures that the first lines of a plan do not show, as words and values."""
    known = {name: value for name, value in numbers.items() if value is not None}
    rows = [
        (words, form.format(_value(name, known)))
        for name, (words, form) in _DETAILS.items()
        if name in known
    ]
    others = known.keys() - _DETAILS.keys() - _PREDICTED - _COUNTED
    return rows + [(figure_name(name), figure(name, known[name])) for name in sorted(others)]


def _value(name: str, numbers: Mapping[str, float]) -> str:
    value = numbers[name]
    if name == "copy_cost_share":
        return f"{value:.2%}"
    if name == "calibrated_on_plans":
        return counted(value, "plan")
    if name != "payback_steps":
        return figure(name, value)
    steps = "less than 1 step" if value < 1 else f"{value:,.0f} steps"
    seconds = numbers.get("payback_s")
    return steps if seconds is None else f"{steps}, {duration_text(seconds)}"


def predicted(
    row: Mapping[str, Any], cost_model: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """Return what a plan promises: balancedness, and gain of time with its interval.

    Args:
        row: the plan.
        cost_model: of the deployment now; None if it is not known.
    """
    numbers = row["numbers"]
    rows = []
    now, expected = numbers.get("balancedness_mean"), numbers.get("balancedness_expected")
    if now is not None or expected is not None:
        before, after = figure("balancedness", now), figure("balancedness", expected)
        rows.append(("balancedness", f"{before} -> {after} promised, mean of layers"))
    if numbers.get("gain") is not None:
        by_tokens = cost_model is not None and cost_model["source"] == "tokens"
        of = "MoE time (by tokens)" if by_tokens else "MoE time"
        interval = f"{share(numbers.get('gain_lower'))} to {share(numbers.get('gain_upper'))}"
        gain = f"{share(numbers['gain'])} of {of}, 94 % interval {interval}"
        rows.append(("promised gain", gain))
        modelled, factor = numbers.get("gain_modelled"), numbers.get("calibration")
        if modelled is not None and factor is not None:
            words = f"{share(modelled)}, times {factor:.3g} as earlier plans delivered"
            rows.append(("by the cost model", words))
    if row["kind"] == "rollback" and numbers.get("to_epoch") is not None:
        rows.append(("returns to", f"epoch {numbers['to_epoch']:.0f}"))
    return rows


def delivered(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a plan delivered, beside its promise; nothing before it was carried out."""
    found = row["delivered"]
    if found is None:
        waits = "not measured yet: enough steps must run on the new placement"
        return [("delivered gain", waits)] if row["phase"] == "committed" else []
    if found["gain"] is None:
        return [("delivered gain", f"unknown: {found['unknown_because']}")]
    interval = f"95 % interval {saving_range(found['lower'], found['upper'])}"
    words = (
        f"slower: MoE time rose by {share(-found['gain'])}"
        if is_loss(found["gain"])
        else f"{share(found['gain'])} of MoE time saved"
    )
    promised = f"; promised {share(found['promised'])}" if found["promised"] else ""
    returned = f"; {ROLLBACK}" if row["kind"] == "rollback" and found["gain"] < 0 else ""
    return [
        ("delivered gain", f"{words}, {interval}, on {found['steps']} steps{promised}{returned}")
    ]


def effort(row: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    """Return what a plan moves, and how long that takes; `now` is in Unix seconds."""
    layers = row["numbers"].get("layers")
    changed = "" if layers is None else f"; {counted(layers, 'layer')} change"
    rows = [
        ("copies", f"{counted(row['moves'], 'expert')} between ranks, {bytes_text(row['nbytes'])}"),
        ("waves", f"{row['waves_committed']} of {row['waves']} committed{changed}"),
        ("ranks", f"{row['target']['num_ranks']:,}"),
    ]
    stall = row["numbers"].get("expected_stall_s")
    if stall is not None:
        rows.append(("expected stall", f"{duration_text(stall)} of one step for each wave"))
    lasted = _duration(row, now)
    return rows if lasted is None else [*rows, ("duration", lasted)]


def counted(number: float, word: str) -> str:
    """Return a number with its word, such as `1 expert` or `3 experts`."""
    return f"{number:,.0f} {word}{'' if number == 1 else 's'}"


def _duration(row: Mapping[str, Any], now: float) -> str | None:
    """Return how long the waves took, by the story; None before the first."""
    begun = [event["at"] for event in row["story"] if event["event"] == "wave_started"]
    if not begun:
        return None
    if row["phase"] in ("approved", "migrating", "paused", "stalled"):
        return f"{duration_text(now - begun[0])} so far"
    ended = [event["at"] for event in row["story"] if event["event"] in ("wave_committed", "ended")]
    done = row["waves_committed"]
    until = f"for {counted(done, 'wave')}" if done else "until it ended"
    return None if not ended else f"{duration_text(ended[-1] - begun[0])} {until}"
