"""Scenarios of a toy SGLang whose weights are replaced between and during plans."""

from types import SimpleNamespace

import structlog
import torch

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import Vote
from tests.engines.sglang import engine
from tests.engines.sglang.scenarios import Rank

ALL = SimpleNamespace(tags=None, selector="all")
"""A request about all weights."""


def replace(one, way, version):
    """Load new weights in one of SGLang's ways; the answers of SGLang's functions."""
    updater, scheduler = engine.WeightUpdater(one.runner), engine.SchedulerUpdater(one.runner)
    weights = list(one.model.checkpoint(version))
    half = len(weights) // 2
    match way:
        case "disk":
            return [updater.update_weights_from_disk(weights, "auto")[0]]
        case "ipc":
            return [updater.update_weights_from_ipc(weights)[0]]
        case "tensor":
            return [
                scheduler.begin_weight_update(ALL).success,
                updater.update_weights_from_tensor(weights[:half])[0],
                updater.update_weights_from_tensor(weights[half:])[0],
                scheduler.end_weight_update(ALL).success,
            ]
        case "distributed":
            return [
                scheduler.begin_weight_update(ALL).success,
                updater.load_weights_from_distributed(weights)[0],
                scheduler.end_weight_update(ALL).success,
            ]
        case "new tensors":
            one.model.makes_anew = True
            return [updater.update_weights_from_disk(weights, "auto")[0]]
        case "release":
            scheduler.release_memory_occupation(ALL)
            return [updater.update_weights_from_disk(weights, "auto")[0]]
    raise AssertionError(way)


def replaced(rank, size, *, way):
    """A plan; weights replaced during a second one, and after it; a third plan."""
    one = Rank(rank, size, chunk=1, stall_after_s=60.0)
    one.steps(4)
    one.order(one.target(seed=1), "plan-1")
    one.steps(20)
    first = one.seen()
    held, new = one.agent.placement, one.target(seed=2)
    rows = new.phy2log.copy()
    # SGLang also goes through the layers between, which the plan leaves as they are.
    rows[1:-1] = held.phy2log[1:-1]
    one.order(Placement(rows, held.num_ranks, held.num_logical_experts), "plan-2")
    for _ in range(12):
        one.step()
        if one.guest.moves.move is not None and one.guest.moves.move.done:
            break
    moving = one.guest.moves.move is not None
    answers = replace(one, way, version=1)
    one.step()
    during = one.seen()
    answers += replace(one, way, version=2)
    one.step()
    after = one.seen()
    new = one.target(seed=3)
    vote = one.order(new, "plan-3")
    one.steps(20)
    return {
        "first": first,
        "moving": moving,
        "during": during,
        "after": after,
        "vote": vote.yes,
        "target": new.phy2log,
        "answers": answers,
        **one.seen(),
    }


def other_sessions(rank, size):
    """Other weights of the draft model; then tensors that are replaced; then a release in vain."""
    one = Rank(rank, size)
    one.steps(2)
    before = one.agent.hello().weights_version
    scheduler = engine.SchedulerUpdater(one.runner)
    scheduler.begin_weight_update(SimpleNamespace(selector="draft"))
    scheduler.end_weight_update(ALL)
    one.steps(2)
    after = one.agent.hello().weights_version
    one.model.replace_parameters(torch.clone)
    scheduler.begin_weight_update(ALL)
    scheduler.end_weight_update(ALL)
    trouble = one.agent.trouble
    one.guest.moves.meeting.abort()
    with structlog.testing.capture_logs() as said:
        scheduler.release_memory_occupation(ALL)
    return {
        "versions": (before, after),
        "trouble": trouble,
        "said": [line["event"] for line in said],
    }


def observed(rank, size):
    """In observe mode the plugin leaves SGLang's loading as it is."""
    one = Rank(rank, size, mode="observe")
    one.steps(3)
    replace(one, "disk", version=1)
    one.steps(3)
    one.link.nothing(Vote)
    return one.seen()
