"""The gauges: from the newest view of each deployment to families of series.

A value that is None has no series. Labels are closed lists, ranks, and layers as far as `DeploymentGauges`
carries them; nothing here grows with experts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily

from evenkeel_moe.model.load import Phase
from evenkeel_moe.ports import DeploymentStatus, RankStatus

__all__ = ["DeploymentGauges", "LayerGauges", "PhaseBalance", "PlanGauges", "View", "families"]

PhaseBalance = Mapping[Phase, tuple[float | None, float | None]]
"""Balancedness (mean, worst layer) of each phase's window; None where the window holds no load."""


@dataclass(frozen=True, slots=True)
class LayerGauges:
    """One MoE layer that gets series of its own."""

    layer: int
    balancedness: float | None
    redundant: int
    """Filled slots beyond one for each expert."""
    rank_load: tuple[float, ...] = ()
    """(R,) load of each rank over the mean of the ranks; empty: no series by rank."""


@dataclass(frozen=True, slots=True)
class PlanGauges:
    """The newest committed plan: what it promised, and what the steps since then say."""

    committed_at_unix: float
    predicted_gain: float | None
    """Saving of MoE time on held-out steps, as a fraction; None for plans that promised nothing."""
    realised_gain: float | None
    """The same saving on the steps run since; None before the first."""
    expected_balancedness: float | None
    realised_balancedness: float | None


@dataclass(frozen=True, slots=True)
class DeploymentGauges:
    """What gauges tell beyond a `DeploymentStatus`."""

    newest_step_at_unix: float | None = None
    """When the newest complete step was put together."""
    live_replicas: tuple[int, int, int] | None = None
    """(layer, expert) pairs with no, one, and more than one rank that is alive and holds a copy."""
    down_to_one: int | None = None
    """(layer, expert) pairs placed on several ranks of which one is alive."""
    redundant: tuple[int, float, int] | None = None
    """Least, mean and most filled slots a layer has beyond one for each expert."""
    layers: tuple[LayerGauges, ...] = ()
    """The worst layers, worst first."""
    last_plan: PlanGauges | None = None
    last_failure: tuple[float, str] | None = None
    """When the newest aborted plan ended [Unix s], and its Reason."""


@dataclass(frozen=True, slots=True)
class View:
    """All that the gauges of one deployment are made of."""

    status: DeploymentStatus
    per_phase: PhaseBalance
    figures: DeploymentGauges


def families(views: list[View]) -> Iterable[GaugeMetricFamily]:
    """Every gauge of the deployments this replica leads."""
    yield from _balance_families(views)
    yield from _rank_families(views)
    yield from _deployment_families(views)
    yield from _plan_families(views)
    yield from _replica_families(views)
    yield from _layer_families(views)
    yield from _outcome_families(views)


def _family(name: str, help_text: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, labels=labels)


def _balance_families(views: list[View]) -> Iterable[GaugeMetricFamily]:
    mean = _family(
        "evenkeel_balancedness_mean_ratio",
        "Mean over max of rank load per step and layer, averaged over the window; 1 is perfect.",
        ["deployment", "phase"],
    )
    worst = _family(
        "evenkeel_balancedness_worst_ratio",
        "Balancedness of the worst layer, averaged over the steps of the window; 1 is perfect.",
        ["deployment", "phase"],
    )
    for view in views:
        for phase, (mean_value, worst_value) in view.per_phase.items():
            labels = [view.status.deployment, str(phase)]
            if mean_value is not None:
                mean.add_metric(labels, mean_value)
            if worst_value is not None:
                worst.add_metric(labels, worst_value)
    return [mean, worst]


def _rank_families(views: list[View]) -> Iterable[GaugeMetricFamily]:
    by_rank = ["deployment", "rank"]
    info = _family(
        "evenkeel_rank_info",
        "Where a rank runs; always 1. Join it to put a node on a rank's series.",
        [*by_rank, "node", "gpu_uuid"],
    )
    share = _family(
        "evenkeel_rank_load_share_ratio",
        "Share of the window's tokens a rank carries; one over the number of ranks is balanced.",
        by_rank,
    )
    epoch = _family("evenkeel_rank_epoch", "Epoch of the maps a rank serves with.", by_rank)
    fresh = _family(
        "evenkeel_rank_fresh", "1 while a rank's heartbeat lease holds, else 0.", by_rank
    )
    seen = _family(
        "evenkeel_rank_last_seen_timestamp_seconds", "When a rank was last heard.", by_rank
    )
    pace = _family(
        "evenkeel_rank_compute_seconds_per_token",
        "MoE compute per token before the collective, median over the window.",
        by_rank,
    )
    slow = _family(
        "evenkeel_rank_slowness_ratio",
        "Seconds of a rank over those of the median rank at the same tokens.",
        by_rank,
    )
    trouble = _family(
        "evenkeel_rank_trouble",
        "1 while a rank says that it takes no plan any more, else absent.",
        by_rank,
    )
    for view in views:
        for rank in view.status.ranks:
            labels = [view.status.deployment, str(rank.rank)]
            if rank.trouble:
                trouble.add_metric(labels, 1)
            if rank.slowness is not None:
                slow.add_metric(labels, rank.slowness)
            info.add_metric([*labels, rank.node, rank.gpu_uuid], 1)
            _add_rank(rank, labels, share, epoch, fresh, seen, pace)
    return [info, share, epoch, fresh, seen, pace, slow, trouble]


def _add_rank(
    rank: RankStatus,
    labels: list[str],
    share: GaugeMetricFamily,
    epoch: GaugeMetricFamily,
    fresh: GaugeMetricFamily,
    seen: GaugeMetricFamily,
    pace: GaugeMetricFamily,
) -> None:
    epoch.add_metric(labels, rank.epoch)
    fresh.add_metric(labels, 1 if rank.fresh else 0)
    seen.add_metric(labels, rank.last_seen_unix)
    if rank.load_share is not None:
        share.add_metric(labels, rank.load_share)
    if rank.seconds_per_token is not None:
        pace.add_metric(labels, rank.seconds_per_token)


def _deployment_families(views: list[View]) -> Iterable[GaugeMetricFamily]:
    one = ["deployment"]
    info = _family(
        "evenkeel_deployment_info",
        "Mode, policy and leader of a deployment; always 1.",
        [*one, "mode", "policy", "leader"],
    )
    state = _family(
        "evenkeel_deployment_state",
        "State of a deployment and why; always 1, one series at a time.",
        [*one, "state", "reason"],
    )
    epoch = _family(
        "evenkeel_epoch", "Epoch of the committed placement; absent until the ranks told it.", one
    )
    term = _family("evenkeel_term", "Leadership number the deployment is led under.", one)
    expected = _family("evenkeel_ranks_expected", "Ranks the deployment's shape declares.", one)
    window = _family("evenkeel_window_steps", "Complete steps in the fullest window.", one)
    step = _family("evenkeel_newest_step", "Newest step that every rank reported.", one)
    completed = _family(
        "evenkeel_newest_step_timestamp_seconds",
        "When the newest complete step was put together.",
        one,
    )
    decided = _family("evenkeel_last_decision_timestamp_seconds", "When the last cycle ended.", one)
    held = _family(
        "evenkeel_held", "1 while automatic plans wait for resume after a rollback.", one
    )
    frozen = _family(
        "evenkeel_frozen_until_timestamp_seconds", "When the freeze in force ends.", one
    )
    for view in views:
        status = view.status
        labels = [str(status.deployment)]
        info.add_metric([*labels, status.mode, status.policy, status.leader], 1)
        state.add_metric([*labels, status.state, status.reason], 1)
        if status.epoch is not None:
            epoch.add_metric(labels, status.epoch)
        term.add_metric(labels, status.term)
        expected.add_metric(labels, status.shape.num_ranks)
        window.add_metric(labels, status.window_steps)
        held.add_metric(labels, 1 if status.held else 0)
        if status.step is not None:
            step.add_metric(labels, status.step)
        if view.figures.newest_step_at_unix is not None:
            completed.add_metric(labels, view.figures.newest_step_at_unix)
        if status.last_decision is not None:
            decided.add_metric(labels, float(status.last_decision["at"]))
        if status.frozen_until_unix is not None:
            frozen.add_metric(labels, status.frozen_until_unix)
    return [info, state, epoch, term, expected, window, step, completed, decided, held, frozen]


def _plan_families(views: list[View]) -> Iterable[GaugeMetricFamily]:
    one = ["deployment"]
    created = _family(
        "evenkeel_plan_created_timestamp_seconds",
        "When the active plan was made; its age is time() minus this.",
        one,
    )
    phase = _family(
        "evenkeel_plan_phase",
        "Phase of the active plan; always 1, one series at a time.",
        [*one, "phase", "reason"],
    )
    changed = _family(
        "evenkeel_plan_changed_timestamp_seconds",
        "When the active plan last changed its phase or wave.",
        one,
    )
    committed = _family(
        "evenkeel_plan_waves_committed", "Waves of the active plan that are committed.", one
    )
    waves = _family("evenkeel_plan_waves", "Waves of the active plan.", one)
    done = _family("evenkeel_staging_done_bytes", "Bytes of the current wave staged so far.", one)
    planned = _family(
        "evenkeel_staging_planned_bytes", "Bytes the current wave stages in all.", one
    )
    for status in (view.status for view in views):
        if status.active_plan is None:
            continue
        labels = [str(status.deployment)]
        created.add_metric(labels, status.active_plan.plan.created_at)
        phase.add_metric(
            [*labels, str(status.active_plan.phase), str(status.active_plan.reason)], 1
        )
        changed.add_metric(labels, status.active_plan.updated_at)
        committed.add_metric(labels, status.active_plan.waves_committed)
        waves.add_metric(labels, len(status.active_plan.plan.waves))
        done.add_metric(labels, status.staging_bytes_done)
        planned.add_metric(labels, status.staging_bytes_total)
    return [created, phase, changed, committed, waves, done, planned]


def _replica_families(views: list[View]) -> Iterable[GaugeMetricFamily]:
    live = _family(
        "evenkeel_experts",
        "Experts of all layers by how many live ranks hold a copy.",
        ["deployment", "live_replicas"],
    )
    down = _family(
        "evenkeel_experts_down_to_one_replica",
        "Experts of all layers placed on several ranks of which one is alive.",
        ["deployment"],
    )
    redundant = _family(
        "evenkeel_redundant_replicas_per_layer",
        "Filled slots of a layer beyond one for each expert: least, mean and most over the layers.",
        ["deployment", "statistic"],
    )
    for view in views:
        name, figures = str(view.status.deployment), view.figures
        if figures.live_replicas is not None:
            for which, count in zip(("none", "one", "more"), figures.live_replicas, strict=True):
                live.add_metric([name, which], count)
        if figures.down_to_one is not None:
            down.add_metric([name], figures.down_to_one)
        if figures.redundant is not None:
            for statistic, value in zip(("min", "mean", "max"), figures.redundant, strict=True):
                redundant.add_metric([name, statistic], value)
    return [live, down, redundant]


def _layer_families(views: list[View]) -> Iterable[GaugeMetricFamily]:
    by_layer = ["deployment", "layer"]
    balance = _family(
        "evenkeel_layer_balancedness_ratio",
        "Balancedness of a layer, averaged over the steps of all windows; only the worst layers have a series.",
        by_layer,
    )
    redundant = _family(
        "evenkeel_layer_redundant_replicas",
        "Filled slots beyond one for each expert in the layers that have a balancedness series.",
        by_layer,
    )
    load = _family(
        "evenkeel_layer_rank_load_ratio",
        "Load of a rank in a layer over the mean of the ranks; only with metrics.layer_rank_series.",
        [*by_layer, "rank"],
    )
    for view in views:
        for figures in view.figures.layers:
            labels = [str(view.status.deployment), str(figures.layer)]
            redundant.add_metric(labels, figures.redundant)
            if figures.balancedness is not None:
                balance.add_metric(labels, figures.balancedness)
            for rank, ratio in enumerate(figures.rank_load):
                load.add_metric([*labels, str(rank)], ratio)
    return [balance, redundant, load]


def _outcome_families(views: list[View]) -> Iterable[GaugeMetricFamily]:
    one = ["deployment"]
    committed = _family(
        "evenkeel_last_plan_committed_timestamp_seconds",
        "When the newest committed plan was done.",
        one,
    )
    failed = _family(
        "evenkeel_last_plan_failed_timestamp_seconds",
        "When the newest aborted plan ended, and why; one series at a time.",
        [*one, "reason"],
    )
    gain = _family(
        "evenkeel_last_plan_gain_ratio",
        "Saving of modelled MoE time of the newest committed plan: as predicted on held-out steps, and on the"
        " steps since. Counted loads, not latency.",
        [*one, "basis"],
    )
    balance = _family(
        "evenkeel_last_plan_balancedness_ratio",
        "Balancedness under the newest committed plan: as predicted on held-out steps, and on the steps since.",
        [*one, "basis"],
    )
    for view in views:
        name, plan, failure = (
            str(view.status.deployment),
            view.figures.last_plan,
            view.figures.last_failure,
        )
        if failure is not None:
            failed.add_metric([name, failure[1]], failure[0])
        if plan is None:
            continue
        committed.add_metric([name], plan.committed_at_unix)
        for family, basis, value in (
            (gain, "predicted", plan.predicted_gain),
            (gain, "realised", plan.realised_gain),
            (balance, "predicted", plan.expected_balancedness),
            (balance, "realised", plan.realised_balancedness),
        ):
            if value is not None:
                family.add_metric([name, basis], value)
    return [committed, failed, gain, balance]
