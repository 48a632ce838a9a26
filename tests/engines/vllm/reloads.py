"""Scenarios of a toy vLLM whose weights are replaced between and during plans."""

import torch

from evenkeel_moe.protocol.messages import Vote
from tests.engines.vllm.scenarios import Rank


def replace(one, way, version):
    """Load new weights in one of vLLM's ways; RPCs reach all ranks between the same two steps."""
    worker, model = one.worker, one.model
    weights = list(model.checkpoint(version))
    half = len(weights) // 2
    match way:
        case "reload_weights":
            worker.reload_weights(weights)
        case "session":
            worker.start_weight_update()
            worker.update_weights(weights[:half])
            worker.update_weights(weights[half:])
            worker.finish_weight_update()
        case "load_weights":  # Extensions of veRL and others call the model itself, in buckets.
            model.load_weights(weights[:half])
            model.load_weights(weights[half:])
        case "sleep" | "load_weights, sleep":
            if way != "sleep":  # No step comes between, so the buckets are not registered yet.
                model.load_weights(weights[:half])
            worker.sleep(level=2)
            worker.wake_up(tags=["weights"])
            worker.reload_weights(weights)
            worker.wake_up(tags=["kv_cache"])


def routed_right(one):
    """Return True if all routers have the tables of the maps in use, and counting is on."""
    states = one.state.model_states.values()
    return all(map(tables_fit, states)) and bool(one.state.should_record_tensor)


def tables_fit(state):
    """Return True if the tables of a model's router are those of its map."""
    counts = state.logical_replica_count
    for layer, row in enumerate(state.physical_to_logical_map.tolist()):
        for expert in range(state.model.num_logical_experts):
            slots = {slot for slot, held in enumerate(row) if held == expert}
            told = state.logical_to_physical_map[layer, expert].tolist()
            if {slot for slot in told if slot >= 0} != slots or counts[layer, expert] != len(slots):
                return False
    return True


def between_plans(rank, size, *, use_async, way):
    """A plan, then other weights, then a second plan. vLLM also has a drafter with experts."""
    one = Rank(rank, size, use_async=use_async, drafter=True)
    one.steps(3)
    one.carry_out(one.target(seed=1))
    replace(one, way, version=1)
    one.step()
    loaded = {**one.seen(), "routed": routed_right(one)}
    return {"loaded": loaded, **one.carry_out(one.target(seed=2))}


def during_a_move(rank, size, *, way):
    """Other weights arrive after vLLM's asynchronous worker has moved the first layer."""
    one = Rank(rank, size, use_async=True)
    one.steps(3)
    new = one.target(seed=1)
    one.order(new, "plan-1")
    one.until(lambda: one.guest.moves.move is not None and one.guest.moves.move.done, every=1)
    moving = one.guest.moves.move is not None
    replace(one, way, version=1)
    one.until(lambda: one.agent.epoch == 1)
    first = {"moving": moving, "target": new.phy2log, **one.seen()}
    return {"first": first, **one.carry_out(one.target(seed=2))}


def ten_updates(rank, size):
    """Ten updates, every second one while a plan is carried out."""
    one = Rank(rank, size, use_async=True)
    one.steps(3)
    found = []
    for version in range(1, 11):
        one.order(one.target(seed=version), f"plan-{version}")
        if version % 2:
            one.until(lambda version=version: one.agent.epoch == version)
        else:
            one.until(lambda: one.guest.moves.move is not None, every=1)
        replace(one, ("session", "reload_weights", "load_weights")[version % 3], version)
        one.until(lambda version=version: one.agent.epoch == version)
        found.append(one.seen())
    return found


def discarded_memory(rank, size):
    """vLLM sleeps at level 2, which leaves nothing of the plugin's memory on the device."""
    one = Rank(rank, size, use_async=False, seconds_every=1)
    one.steps(3)
    one.worker.sleep(level=2)
    probe, clock = one.guest._probe, one.guest._times._clock
    probe._inputs = torch.full((1, 8), 77.0), torch.full((1, 1), 77.0)
    clock._nanoseconds, clock._intervals = 77 * 10**9, 77 * one.model.num_moe_layers
    one.worker.wake_up()
    one.worker.reload_weights(one.model.checkpoint(1))
    one.steps(3)
    metas, _ = one.reported(6)
    seconds = metas["compute_s"][3:].tolist()
    return {**one.seen(), "seconds": seconds, "inputs": probe._inputs}


def light_sleep(rank, size):
    """vLLM sleeps at level 1 during a move: nothing is in flight while it sleeps."""
    one = Rank(rank, size, use_async=True)
    one.steps(3)
    one.order(one.target(seed=1), "plan-1")
    one.until(lambda: one.guest.moves.move is not None, every=1)
    one.worker.sleep(level=1)
    moving = one.guest.moves.move is not None or one.model_state.rebalanced
    one.worker.wake_up()
    return {**one.carry_out(one.target(seed=2)), "moving": moving}


def at_different_steps(rank, size):
    """An update reaches one rank one step later than the other: it is refused on both."""
    one = Rank(rank, size, use_async=False)
    one.carry_out(one.target(seed=1))
    if rank == 1:
        one.agent._gate.rest()
    try:
        replace(one, "reload_weights", version=1)
        refused = ""
    except Exception as error:
        refused = str(error)
    one.model.version = 0
    return {**one.seen(), "refused": refused}


def observed(rank, size):
    """In observe mode the plugin leaves vLLM's loading as it is."""
    one = Rank(rank, size, use_async=False, mode="observe")
    one.steps(3)
    replace(one, "reload_weights", version=1)
    one.steps(3)
    one.link.nothing(Vote)
    return one.seen()
