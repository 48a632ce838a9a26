"""Ranks as threads of one process, over real Gloo sockets, with toy experts."""

import threading
from typing import Any

import numpy as np
import torch
import torch.distributed

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.groups import make_communicator
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Leader, Prepare, RankIdentity
from tests.waiting import deadline

_distributed: Any = torch.distributed
CPU = torch.device("cpu")
LEADER = Leader("tester", 1)
GENERATION = Generation("11111111-2222-3333-4444-555555555555")


def run_ranks(count, work):
    """Run work(rank) on a thread per rank; return the results by rank, or raise the first error."""
    results, errors = [None] * count, []

    def one(rank):
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(60))
        assert not thread.is_alive(), f"a rank hangs; errors so far: {errors}"
    if errors:
        raise errors[0]
    return results


class Group:
    """The store of one generation; each rank connects by name."""

    def __init__(self, size, timeout_s=20.0):
        self.size = size
        self.timeout_s = timeout_s
        self.store = _distributed.HashStore()

    def connect(self, rank, name, device=CPU):
        return make_communicator(
            self.store, name, rank, self.size, device=device, timeout_s=self.timeout_s
        )


def expert_tensors(layer, expert, version=0):
    """Return tensors like those of a checkpoint: a matrix, a narrow one, a scalar scale."""
    rng = np.random.default_rng((layer, expert, version))
    return (
        torch.from_numpy(rng.standard_normal((16, 8)).astype(np.float32)),
        torch.from_numpy(rng.integers(-128, 128, (8, 4)).astype(np.int8)),
        torch.tensor(float(rng.standard_normal()), dtype=torch.bfloat16),
    )


EXPERT_BYTES = 16 * 8 * 4 + 8 * 4 + 2


class ToyWeights:
    """Fixed slots that own their tensors; reserved and released slots are recorded."""

    def __init__(self, placement, rank, version=0):
        self.rank = rank
        self.slots = {}
        self.reserved = []
        self.released = []
        self.refuse = False
        per_rank = placement.slots_per_rank
        for layer in range(placement.num_layers):
            for local in range(per_rank):
                expert = int(placement.phy2log[layer, rank * per_rank + local])
                source = expert_tensors(layer, max(expert, 0), version)
                self.slots[layer, local] = tuple(
                    t.clone() if expert != EMPTY else torch.zeros_like(t) for t in source
                )

    def tensors(self, layer, local_slot):
        return self.slots[layer, local_slot]

    def reserve(self, slots):
        if self.refuse:
            return False
        self.reserved += list(slots)
        return True

    def release(self, slots):
        self.released += list(slots)

    def holds(self, placement, version=0):
        """Return True if every filled slot of this rank has the bytes of the map's expert."""
        per_rank = placement.slots_per_rank
        for (layer, local), tensors in self.slots.items():
            expert = int(placement.phy2log[layer, self.rank * per_rank + local])
            if expert == EMPTY:
                continue
            want = expert_tensors(layer, expert, version)
            if not all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True)):
                return False
        return True


class ToyMaps:
    """Routing tables that are just rows."""

    def __init__(self, placement, epoch=0):
        self.rows = placement.phy2log.copy()
        self.epoch = epoch
        self.fail_build = False

    def build(self, layers, rows, epoch):
        if self.fail_build:
            raise RuntimeError("no memory for tables")
        return layers, rows.copy(), epoch

    def install(self, built):
        layers, rows, self.epoch = built
        self.rows[list(layers)] = rows


def shape_of(placement, **changes):
    values = {
        "num_layers": placement.num_layers,
        "num_logical_experts": placement.num_logical_experts,
        "num_ranks": placement.num_ranks,
        "slots_per_rank": placement.slots_per_rank,
        "top_k": 1,
        "bytes_per_expert": EXPERT_BYTES,
    }
    return ModelShape(**{**values, **changes})


def identity_of(rank, name="toy"):
    return RankIdentity(DeploymentId(name), EpRank(rank), GENERATION, 1000 + rank)


def prepare_for(
    old,
    new,
    *,
    plan="plan",
    index=0,
    epoch=0,
    weights=1,
    one_batch=False,
    generation=GENERATION,
    nbytes=EXPERT_BYTES,
    registered=None,
    **changes,
):
    """Return a Prepare from one placement to the other, with one transfer per batch by default.

    `registered` are the checksums of all experts, by default those of `expert_tensors`.
    """
    transfers = []
    for layer, slot in np.argwhere((old.phy2log != new.phy2log) & (new.phy2log != EMPTY)).tolist():
        expert = int(new.phy2log[layer, slot])
        src = int(np.flatnonzero(old.phy2log[layer] == expert)[0])
        transfers.append(Transfer(layer, expert, src, slot, nbytes))
    layers = tuple(np.flatnonzero((old.phy2log != new.phy2log).any(axis=1)).tolist())
    batches = (tuple(transfers),) if one_batch else tuple((t,) for t in transfers)
    values = {
        "leader": LEADER,
        "wave": WaveKey(generation, PlanId(plan), index, weights),
        "base_epoch": Epoch(epoch),
        "body": Wave(index, layers, new.phy2log[list(layers)], batches),
        "checksums": tuple(
            checksum(expert_tensors(t.layer, t.logical_expert))
            if registered is None
            else registered[t.layer * old.num_logical_experts + t.logical_expert]
            for t in transfers
        ),
        "batch_deadline_s": 20.0,
    }
    return Prepare(**{**values, **changes})


def registered_prepare(agent, new, plan, **changes):
    """Return a Prepare from what an agent holds to another placement."""
    participant = agent._participant
    return prepare_for(
        agent.placement,
        new,
        plan=plan,
        epoch=agent.epoch,
        weights=participant.weights_version,
        generation=participant.identity.generation,
        nbytes=agent._config.shape.bytes_per_expert,
        registered=participant.checksums,
        **changes,
    )


def two_rank_placements(layers=2):
    """Return two maps of experts 0 to 3 on two ranks of three slots.

    Expert 3 gains a replica on rank 0; experts 0 and 2 change places.
    """
    old = Placement(np.tile(np.array([0, 1, EMPTY, 2, 3, EMPTY], np.int32), (layers, 1)), 2, 4)
    new = Placement(np.tile(np.array([2, 1, 3, 0, 3, EMPTY], np.int32), (layers, 1)), 2, 4)
    return old, new
