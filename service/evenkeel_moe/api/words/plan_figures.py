"""The figures of a plan in words: what it promises, delivers and costs, and what is behind it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from evenkeel_moe.api.words.plans import MAY_COST, speed_texts
from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.plan import Plan, PlanPhase, PlanRecord
from evenkeel_moe.model.quantities import (
    counted,
    duration_text,
    figure,
    figure_name,
    saving,
    saving_range,
    share,
    size_text,
)
from evenkeel_moe.ports.status import DeploymentStatus

_PREDICTED = frozenset(
    {
        *("balancedness_mean", "balancedness_expected", "gain", "gain_lower", "gain_upper"),
        *("gain_modelled", "calibration", "copy_cost_share", "payback_steps", "payback_s"),
        *("expected_stall_s", "held_out_steps", "to_epoch"),
        *("survive_lost", "survive_experts", "survive_price"),
    }
)
"""Figures that `figures` shows."""
_COUNTED = frozenset({"copies", "bytes", "layers", "waves"})
"""Counts that the plan has in fields of its own; `layers` stands beside the waves."""
_DETAILS: Mapping[str, tuple[str, str]] = {
    "net_gain": ("promised gain less the copies", "{} of MoE time"),
    "min_gain": ("least gain to plan for", "{} of MoE time"),
    "max_payback_steps": ("longest payback allowed", "{} steps"),
    "calibrated_on_plans": ("calibrated on", "{}"),
    "window_steps": ("window", "{} complete steps"),
    "planned_on_steps": ("planned on", "{} steps"),
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
    "replication_factor": ("R allowed to craft", "{} extra replicas on a rank, over all layers"),
    "replicas": ("extra replicas placed", "{} over all ranks and layers"),
    "copies_raw": ("copies before matching", "{}, before ranks took over the nearest new slots"),
    "evaluations": ("placements compared", "{}"),
}
"""Name -> words and a form of the value, in order: gain first, then data, then the search."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure in words."""

    name: str
    value: str
    """With its unit."""
    note: str = ""
    """What it is based on, or how it is to be read; may be empty."""


def figures(record: PlanRecord, status: DeploymentStatus | None) -> list[Figure]:
    """Return what a plan promises, what it delivered and what it costs.

    Args:
        record: the plan.
        status: of its deployment now; None if it is not known.
    """
    cost = None if status is None else status.cost_model
    by = " (by tokens)" if is_by_tokens(record.plan) else ""
    # Nothing is predicted for a plan that is made for another reason than time.
    predicted = record.plan.kind.seeks_gain
    return [
        *(_predicted(record.plan.numbers, by) if predicted else _returns(record.plan.numbers)),
        *_delivered(record),
        *_effort(record.plan, record.waves_committed),
        *_survival(record.plan.numbers),
        *(_price(record.plan.numbers, by) if predicted else ()),
        *_stall(record.plan.numbers, predicted),
        _kv_cache(status),
        *([] if cost is None else [Figure("Cost model now", cost.words)]),
    ]


def is_by_tokens(plan: Plan) -> bool:
    """Return True if the gain counts tokens: it must not claim time where none was known."""
    if plan.cost_source is None:  # Nothing scored the plan.
        return "time_balance" not in plan.numbers
    return plan.cost_source is CostSource.TOKENS


def preview_figures(plan: Plan, status: DeploymentStatus) -> list[Figure]:
    """Return what a rollback would move and cost."""
    return [*_effort(plan, None), *_stall(plan.numbers, True), _kv_cache(status)]


def _effort(plan: Plan, committed: int | None) -> Iterator[Figure]:
    """Yield what a plan moves; `committed` are the waves so far, None before it is made."""
    yield Figure("Copies between ranks", f"{plan.moves:,}", size_text(plan.nbytes))
    waves, layers = f"{len(plan.waves)}", len({n for wave in plan.waves for n in wave.layers})
    done = waves if committed is None else f"{committed} of {waves} committed"
    yield Figure("Waves", done, counted(layers, "layer changes", "layers change"))
    replicas = plan.target.replicas_by_layer.tolist()
    most = max(replicas)
    spread = f"{most} in every layer" if min(replicas) == most else f"by layer: {replicas}"
    yield Figure("Extra replicas", f"{sum(replicas):,}", spread)


def _predicted(numbers: Mapping[str, float], by: str) -> Iterator[Figure]:
    before, after = numbers.get("balancedness_mean"), numbers.get("balancedness_expected")
    if before is not None or after is not None:
        shown = f"{figure('balancedness', before)} -> {figure('balancedness', after)}"
        yield Figure("Balancedness", f"{shown} promised", "mean of layers")
    if numbers.get("gain") is None:
        return
    note = f"94 % interval {share(numbers.get('gain_lower'))} to {share(numbers.get('gain_upper'))}"
    modelled, factor = numbers.get("gain_modelled"), numbers.get("calibration")
    if modelled is not None and factor is not None:
        note += (
            f". {share(modelled)} by the cost model, times {factor:.3g} as earlier plans delivered"
        )
    yield Figure(f"Predicted saving of MoE time{by}", share(numbers["gain"]), note)
    if (steps := numbers.get("held_out_steps")) is not None:
        yield Figure("Scored on", f"{steps:,.0f} later steps")


def _returns(numbers: Mapping[str, float]) -> Iterator[Figure]:
    if (epoch := numbers.get("to_epoch")) is not None:
        yield Figure("Returns to", f"epoch {epoch:.0f}")


def _delivered(record: PlanRecord) -> Iterator[Figure]:
    name, found = "Delivered, by the ranks' seconds", record.delivered
    if found is None:
        if record.phase is PlanPhase.COMMITTED:
            note = "It is measured once enough steps have run on the new placement."
            yield Figure(name, "not measured yet", note)
    elif found.gain is None:
        yield Figure(name, "unknown", found.unknown_because)
    else:
        interval = f"95 % interval {saving_range(found.lower, found.upper)}"
        note = f"{interval}, on {counted(found.steps, 'step')}"
        if not record.plan.kind.seeks_gain and found.gain < 0:
            note += f". {MAY_COST[record.plan.kind]}"
        yield Figure(name, saving(found.gain), note)
    if found is not None and (found.before is not None or found.after is not None):
        yield _served(found)


def _served(found: DeliveredGain) -> Figure:
    """Return how fast the engine served before and after a plan."""
    before, after = (
        speed_texts(None, None) if side is None else speed_texts(side.step_s, side.tokens_per_s)
        for side in (found.before, found.after)
    )
    note = f"{before[1]} -> {after[1]} tokens/s; traffic may have changed too"
    return Figure("Step of the engine", f"{before[0]} -> {after[0]}", note)


def _price(numbers: Mapping[str, float], by: str) -> Iterator[Figure]:
    if (cost := numbers.get("copy_cost_share")) is not None:
        note = "of MoE time, over the expected life of the plan"
        yield Figure("Price of the copies", f"{cost:.2%}", note)
    if (steps := numbers.get("payback_steps")) is not None:
        seconds = numbers.get("payback_s")
        after = "less than 1 step" if steps < 1 else f"{steps:,.0f} steps"
        note = "" if seconds is None else duration_text(seconds)
        yield Figure(f"Pays for itself after{by}", after, note)


def _survival(numbers: Mapping[str, float]) -> Iterator[Figure]:
    """Yield what a plan loses with one rank or node, if it was to keep experts through that."""
    lost, experts = numbers.get("survive_lost"), numbers.get("survive_experts")
    if lost is None or experts is None:
        return
    price = numbers.get("survive_price")
    note = f"costs {share(price)} of MoE time" if price is not None else ""
    most = "at most " if lost else ""
    yield Figure("Lost with one failure", f"{most}{lost:,.0f} of {experts:,.0f} experts", note)


def _stall(numbers: Mapping[str, float], predicted: bool) -> Iterator[Figure]:
    stall, beside = numbers.get("expected_stall_s"), "Copies run beside serving."
    if stall is not None:
        note = f"of one step for each wave, by the swaps measured here. {beside}"
        yield Figure("Expected stall", duration_text(stall), note)
    elif predicted:
        note = f"No swap was measured before this plan was made. {beside}"
        yield Figure("Expected stall", "unknown", note)


def _kv_cache(status: DeploymentStatus | None) -> Figure:
    if status is None or status.shape.pool_slots_per_rank is None:
        return Figure("KV cache", "unchanged", "The number of slots stays the same.")
    note = "The ranks have pooled slots: memory can move between layers."
    return Figure("KV cache", "unknown", note)


def details(numbers: Mapping[str, float | None]) -> list[Figure]:
    """Return the figures behind those of `figures`: gain first, then data, then the search."""
    known = {name: value for name, value in numbers.items() if value is not None}
    rows = [
        Figure(words, form.format(_value(name, known[name])))
        for name, (words, form) in _DETAILS.items()
        if name in known
    ]
    others = sorted(known.keys() - _DETAILS.keys() - _PREDICTED - _COUNTED)
    return rows + [Figure(figure_name(name), figure(name, known[name])) for name in others]


def _value(name: str, value: float) -> str:
    return counted(value, "plan") if name == "calibrated_on_plans" else figure(name, value)
