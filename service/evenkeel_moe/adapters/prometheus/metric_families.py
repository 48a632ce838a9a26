"""The gauges of a deployment: a table of the families, and the values read from its newest view.

Labels are closed lists, ranks, and a few layers. The number of series never grows with the number
of experts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from prometheus_client.core import GaugeMetricFamily

from evenkeel_moe.model.finding import LIVE_CODES, doubts
from evenkeel_moe.ports.status import DeploymentStatus

Series = tuple[str, tuple[object, ...], float | None]
"""Family, label values after the deployment, and value; None has no series."""


@dataclass(frozen=True, slots=True)
class View:
    """The gauges of one deployment."""

    status: DeploymentStatus
    more: tuple[Series, ...]
    """The gauges that the status does not hold."""


_FAMILIES: Mapping[tuple[str, ...], Mapping[str, str]] = {
    (): {
        "evenkeel_epoch": "Epoch of the committed placement; absent until the ranks report it.",
        "evenkeel_term": "Leadership number the deployment is led under.",
        "evenkeel_ranks_expected": "Ranks the deployment's shape declares.",
        "evenkeel_ranks_stopped": "Ranks whose engine said that it stops as planned.",
        "evenkeel_group_steps": "Steps that the ranks have run since the group started, dummy steps"
        " included, whether they were reported or not.",
        "evenkeel_window_steps": "Complete steps in the fullest window.",
        "evenkeel_newest_step": "Newest step that every rank reported.",
        "evenkeel_newest_step_timestamp_seconds": "When the newest complete step was assembled.",
        "evenkeel_last_decision_timestamp_seconds": "When the last cycle ended.",
        "evenkeel_held": "1 while automatic plans wait for resume.",
        "evenkeel_frozen_until_timestamp_seconds": "When the freeze in force ends.",
        "evenkeel_time_balance_ratio": "Fluid MoE time over predicted MoE time of the window under"
        " the cost model; absent where the model is by tokens. 1 is perfect.",
        "evenkeel_time_balance_worst_ratio": "Time balance of the worst layer.",
        "evenkeel_cost_model_fit_error_ratio": "Mean error of the fit of the cost model, as a share"
        " of the time; absent where nothing was fitted.",
        "evenkeel_proposal_created_timestamp_seconds": "When the oldest plan that waits for"
        " approval was made.",
        "evenkeel_proposal_expires_timestamp_seconds": "When the first plan that waits for approval"
        " expires; absent if none does.",
        "evenkeel_plan_created_timestamp_seconds": "When the active plan was made; its age is"
        " time() minus this.",
        "evenkeel_plan_changed_timestamp_seconds": "When the active plan last changed its phase"
        " or wave.",
        "evenkeel_plan_waves_committed": "Waves of the active plan that are committed.",
        "evenkeel_plan_waves": "Waves of the active plan.",
        "evenkeel_staging_done_bytes": "Bytes of the current wave staged so far.",
        "evenkeel_staging_planned_bytes": "Bytes the current wave stages in all.",
        "evenkeel_experts_down_to_one_replica": "Experts of all layers placed on several ranks"
        " of which one is alive.",
        "evenkeel_gain_calibration_ratio": "Factor by which the gain of a verdict is multiplied,"
        " by what earlier plans delivered; 1 without measured plans.",
        "evenkeel_plan_promised_gain_ratio": "Saving of MoE time that the verdict promised for the"
        " newest measured plan.",
        "evenkeel_plans_lost_time_in_a_row": "Newest measured plans in a row, rollbacks left out,"
        " that cost MoE time by the seconds that ranks reported, with 95 % certainty; absent before"
        " one was measured.",
        "evenkeel_last_plan_committed_timestamp_seconds": "When the newest committed plan was"
        " done.",
    },
    ("mode", "policy", "leader"): {
        "evenkeel_deployment_info": "Mode, policy and leader of a deployment; always 1.",
    },
    ("domain",): {
        "evenkeel_experts_lost_with_one_domain": "Experts of all layers that the loss of one rank"
        " or node takes at most.",
    },
    ("source",): {
        "evenkeel_cost_model_info": "Origin of the cost model that plans are scored by: tokens,"
        " derived, profiled or measured; always 1, one series at a time.",
    },
    ("state", "reason"): {
        "evenkeel_deployment_state": "State of a deployment and why; always 1, one series at a"
        " time.",
    },
    ("phase", "reason"): {
        "evenkeel_plan_phase": "Phase of the active plan; always 1, one series at a time.",
    },
    ("phase",): {
        "evenkeel_balancedness_mean_ratio": "Mean over max of rank load per step and layer,"
        " averaged over the window; 1 is perfect.",
        "evenkeel_balancedness_worst_ratio": "Balancedness of the worst layer, averaged over the"
        " steps of the window; 1 is perfect.",
    },
    ("rank", "node", "gpu_uuid"): {
        "evenkeel_rank_info": "Where a rank runs; always 1. Join it to put a node on a rank's"
        " series.",
    },
    ("rank",): {
        "evenkeel_rank_load_share_ratio": "Share of the window's tokens a rank carries; one over"
        " the number of ranks is balanced.",
        "evenkeel_rank_epoch": "Epoch of the maps a rank serves with.",
        "evenkeel_rank_fresh": "1 while a rank's heartbeat lease holds, else 0.",
        "evenkeel_rank_last_seen_timestamp_seconds": "When the last message of a rank arrived.",
        "evenkeel_rank_compute_seconds_per_token": "MoE compute per token before the collective,"
        " median over the window.",
        "evenkeel_rank_slowness_ratio": "Seconds of a rank over those of the median rank at the"
        " same tokens.",
        "evenkeel_rank_trouble": "1 while a rank refuses every plan because of a fault, else"
        " absent.",
    },
    ("live_replicas",): {
        "evenkeel_experts": "Experts of all layers by how many live ranks hold a replica.",
    },
    ("statistic",): {
        "evenkeel_redundant_replicas_per_layer": "Filled slots of a layer beyond one for each"
        " expert: least, mean and most over the layers.",
    },
    ("code",): {
        "evenkeel_load_finding": "1 while the counts of the newest steps are in doubt: layers that"
        " routed different numbers of choices, or layers or experts that never count. 0 if they are"
        " not, absent while there are no counts to check.",
    },
    ("layer",): {
        "evenkeel_layer_balancedness_ratio": "Balancedness of a layer, averaged over the steps of"
        " all windows; only the worst layers have a series.",
        "evenkeel_layer_redundant_replicas": "Filled slots beyond one for each expert in the"
        " layers that have a balancedness series.",
    },
    ("layer", "rank"): {
        "evenkeel_layer_rank_load_ratio": "Load of a rank in a layer over the mean of the ranks;"
        " as many of the worst layers as metrics.layer_rank_series allows.",
    },
    ("reason",): {
        "evenkeel_last_decision_reason": "Reason with which the last cycle ended; always 1, one"
        " series at a time.",
        "evenkeel_held_reason": "Why automatic plans wait for resume: held_after_rollback,"
        " held_after_data_loss or gains_not_delivered; always 1, absent while they do not wait.",
        "evenkeel_last_plan_failed_timestamp_seconds": "When the newest aborted plan ended, and"
        " why; one series at a time.",
    },
    ("bound",): {
        "evenkeel_plan_delivered_gain_ratio": "Saving of MoE time that the newest measured plan"
        " delivered by the seconds that ranks reported: estimate, and lower and upper bound of its"
        " 95 % interval.",
    },
    ("basis",): {
        "evenkeel_last_plan_gain_ratio": "Saving of modelled MoE time of the newest committed"
        " plan: as predicted on held-out steps, and on the steps since. Counted loads, not"
        " latency.",
        "evenkeel_last_plan_balancedness_ratio": "Balancedness under the newest committed plan:"
        " as predicted on held-out steps, and on the steps since.",
    },
}
"""Labels after `deployment` -> name -> help text."""


def families(views: Sequence[View]) -> Iterable[GaugeMetricFamily]:
    """Return every gauge family of the deployments this replica leads."""
    found = {
        name: GaugeMetricFamily(name, text, labels=["deployment", *labels])
        for labels, group in _FAMILIES.items()
        for name, text in group.items()
    }
    for view in views:
        status = view.status
        series = (_of_deployment(status), _of_ranks(status), _of_active_plan(status), view.more)
        for name, labels, value in chain.from_iterable(series):
            if value is not None:
                found[name].add_metric([status.deployment, *map(str, labels)], value)
    return found.values()


def _of_deployment(status: DeploymentStatus) -> Iterator[Series]:
    yield "evenkeel_deployment_info", (status.mode, status.policy, status.leader), 1
    yield "evenkeel_deployment_state", (status.state, status.reason), 1
    yield "evenkeel_epoch", (), status.epoch
    yield "evenkeel_term", (), status.term
    yield "evenkeel_ranks_expected", (), status.shape.num_ranks
    yield "evenkeel_ranks_stopped", (), sum(rank.stopped for rank in status.ranks)
    yield "evenkeel_window_steps", (), status.window_steps
    yield "evenkeel_newest_step", (), status.step
    yield "evenkeel_newest_step_timestamp_seconds", (), status.newest_step_unix
    if status.last_decision is not None:
        decided_at = float(status.last_decision["at"])
        yield "evenkeel_last_decision_timestamp_seconds", (), decided_at
        yield "evenkeel_last_decision_reason", (status.last_decision["reason"],), 1
    yield "evenkeel_held", (), status.held
    if status.held_because is not None:
        yield "evenkeel_held_reason", (status.held_because,), 1
    yield "evenkeel_frozen_until_timestamp_seconds", (), status.frozen_until_unix
    yield "evenkeel_time_balance_ratio", (), status.time_balance
    yield "evenkeel_time_balance_worst_ratio", (), status.time_balance_worst
    if status.cost_model is not None:
        yield "evenkeel_cost_model_info", (status.cost_model.source,), 1
        yield "evenkeel_cost_model_fit_error_ratio", (), status.cost_model.fit_error
    if status.findings is not None:
        doubtful = {finding.code for finding in doubts(status.findings)}
        for code in LIVE_CODES:
            yield "evenkeel_load_finding", (code,), code in doubtful
    for phase, mean in status.balancedness_by_phase.items():
        yield "evenkeel_balancedness_mean_ratio", (phase,), mean
    for phase, worst in status.balancedness_worst_by_phase.items():
        yield "evenkeel_balancedness_worst_ratio", (phase,), worst
    for one in status.coverage or ():
        yield "evenkeel_experts_lost_with_one_domain", (one.domain,), one.most_lost
    yield "evenkeel_plans_lost_time_in_a_row", (), status.plans_lost_time


def _of_ranks(status: DeploymentStatus) -> Iterator[Series]:
    for rank in status.ranks:
        label = (rank.rank,)
        yield "evenkeel_rank_info", (*label, rank.node, rank.gpu_uuid), 1
        yield "evenkeel_rank_load_share_ratio", label, rank.load_share
        yield "evenkeel_rank_epoch", label, rank.epoch
        yield "evenkeel_rank_fresh", label, rank.fresh
        yield "evenkeel_rank_last_seen_timestamp_seconds", label, rank.last_seen_unix
        yield "evenkeel_rank_compute_seconds_per_token", label, rank.seconds_per_token
        yield "evenkeel_rank_slowness_ratio", label, rank.slowness
        yield "evenkeel_rank_trouble", label, 1 if rank.trouble else None


def _of_active_plan(status: DeploymentStatus) -> Iterator[Series]:
    active = status.active_plan
    if active is None:
        return
    yield "evenkeel_plan_created_timestamp_seconds", (), active.plan.created_at
    yield "evenkeel_plan_phase", (active.phase, active.reason), 1
    yield "evenkeel_plan_changed_timestamp_seconds", (), active.updated_at
    yield "evenkeel_plan_waves_committed", (), active.waves_committed
    yield "evenkeel_plan_waves", (), len(active.plan.waves)
    yield "evenkeel_staging_done_bytes", (), status.staging_bytes_done
    yield "evenkeel_staging_planned_bytes", (), status.staging_bytes_total
