"""Every dispatch rule between ranks: exact outputs, every token once, also after a swap."""

import threading
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from evenkeel_moe.engines.reference.config import DispatchRule, RankConfig
from evenkeel_moe.engines.reference.dispatch import make_dispatch
from evenkeel_moe.engines.reference.exchange import EpochMismatch
from evenkeel_moe.engines.reference.forward import Forward, Witness
from evenkeel_moe.engines.reference.libra import TwoStageDispatch
from evenkeel_moe.engines.reference.parts import ProcessParts, RankParts
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem.metrics import rank_load
from evenkeel_moe.planning.problem.token_split import SplitModel
from tests.agent.ranks import Group, run_ranks
from tests.planning import twins
from tests.waiting import deadline

RANKS, LAYERS, EXPERTS, TOKENS = 4, 3, 16, 96
STEPS = 3


def config_of(rank, rule, **changes):
    values = {
        "run_folder": "",
        "rank": rank,
        "num_ranks": RANKS,
        "nodes": (0, 0, 1, 1),
        "layers": LAYERS,
        "experts": EXPERTS,
        "tokens_per_step": TOKENS,
        "dispatch": rule,
        "pool_slots_per_layer": 8,
        "slots_per_rank": 8,
        "d_model": 32,
        "d_ffn": 32,
    }
    return RankConfig(**{**values, **changes})


def placements():
    """Return two random maps of 16 experts with 8 replicas per layer and some empty slots."""
    rng = np.random.default_rng(8)
    found = []
    for _ in range(2):
        rows = []
        for _ in range(LAYERS):
            while True:
                spare = rng.choice(EXPERTS, 8, replace=False)
                row = rng.permutation(np.concatenate([np.arange(EXPERTS), spare, np.full(8, -1)]))
                placement = Placement(row[None].astype(np.int32), RANKS, EXPERTS)
                if placement.first_duplicate() is None:
                    break
            rows.append(row)
        found.append(Placement(np.array(rows, np.int32), RANKS, EXPERTS))
    return found


class OneRank:
    """The state of a rank process, without the process."""

    def __init__(self, group, config, placement):
        engine = group.connect(config.rank, "engine")
        process = ProcessParts.build(config, torch.device("cpu"))
        process.begin(config, placement)
        parts = RankParts.build(config, process, placement, 1, engine)
        self.config, self.model, self.traffic = config, parts.model, parts.traffic
        self.weights, self.router = parts.weights, parts.router
        self.dispatch = make_dispatch(parts, lambda name: group.connect(config.rank, name))
        self.forward = Forward(parts, self.dispatch)
        self.witness = Witness(parts)

    def move_to(self, placement):
        for layer in range(LAYERS):
            filled = np.flatnonzero(
                self.router.phy2log[layer].reshape(RANKS, -1)[self.config.rank] >= 0
            )
            self.weights.release([(layer, int(local)) for local in filled])
        self.weights.load(placement, self.config.rank, 3)
        self.router.install(self.router.build(range(LAYERS), placement.phy2log, 2))


def run_rule(rule, **changes):
    """Run steps under one map, then another; return each rank's (results, rank), and the maps."""
    group = Group(RANKS, timeout_s=deadline(20))
    first, second = placements()

    def work(rank):
        one = OneRank(group, config_of(rank, rule, **changes), first)
        try:
            results = []
            for step in range(2 * STEPS):
                if step == STEPS:
                    one.move_to(second)
                result = one.forward.step(step, False)
                results.append((result, one.witness.mismatches(step, result)))
            return results, one
        finally:
            one.dispatch.close()

    torch.set_num_threads(1)
    return run_ranks(RANKS, work), (first, second)


CASES = [
    (DispatchRule.EVEN, {}),
    (DispatchRule.NEAREST, {}),
    (DispatchRule.LPLB, {}),
    (DispatchRule.FEWEST, {}),
    (DispatchRule.WATERFILL, {}),
    (DispatchRule.WATERFILL_STATIC, {}),
    (DispatchRule.WATERFILL_ALL_RANKS, {}),
    (DispatchRule.LIBRA, {}),
    (DispatchRule.LIBRA, {"overlap": False}),
    (DispatchRule.LIBRA, {"transient_experts": 0}),
    (DispatchRule.LIBRA, {"transient_experts": 5}),
    (DispatchRule.LIBRA_REFINED, {}),
    (DispatchRule.LIBRA_REFINED, {"transient_experts": 5}),
]


@pytest.mark.parametrize(("rule", "changes"), CASES)
def test_outputs_are_the_undistributed_models_and_every_token_is_computed_once(rule, changes):
    ranks, maps = run_rule(rule, **changes)
    for step in range(2 * STEPS):
        results = [results[step][0] for results, _ in ranks]
        assert [results[step][1] for results, _ in ranks] == [0] * RANKS
        served = np.sum([result.served for result in results], axis=0)
        # Every routed choice and every shared expert is computed once.
        assert served.tolist() == [RANKS * TOKENS * (2 + 1)] * LAYERS
        recorded = np.stack([result.counts for result in results], axis=1)
        assert (recorded.sum(axis=(1, 2)) == RANKS * TOKENS * 2).all()
        # Tokens are recorded for filled slots only, and add up to the demand of each expert.
        phy2log = maps[step >= STEPS].phy2log
        flat = recorded.reshape(LAYERS, -1)
        assert (flat[phy2log < 0] == 0).all()
        want = np.zeros((LAYERS, EXPERTS), np.int64)
        for _, one in ranks:
            x = one.model.embed(one.traffic.tokens(step, one.config.rank))
            for layer, plain in enumerate(one.model.undistributed(x)):
                np.add.at(want[layer], plain.chosen.numpy().reshape(-1), 1)
        for layer in range(LAYERS):
            have = np.zeros(EXPERTS, np.int64)
            held = phy2log[layer] >= 0
            np.add.at(have, phy2log[layer][held], flat[layer][held])
            assert np.array_equal(have, want[layer])


def test_lplb_realises_the_best_peak_whole_tokens_allow():
    ranks, maps = run_rule(DispatchRule.LPLB)
    for step in range(2 * STEPS):
        recorded = np.stack([results[step][0].counts for results, _ in ranks], axis=1)
        placement = maps[step >= STEPS]
        load = np.zeros((LAYERS, EXPERTS))
        for layer in range(LAYERS):
            row, flat = placement.phy2log[layer], recorded[layer].reshape(-1)
            np.add.at(load[layer], row[row >= 0], flat[row >= 0])
        best = rank_load(load[None], placement, SplitModel(DispatchModel.OPTIMAL))[0].max(axis=1)
        assert recorded.sum(axis=2).max(axis=1) == pytest.approx(np.ceil(best - 1e-6))


def test_fewest_activates_one_replica_of_each_expert_and_the_fewest_on_the_worst_rank():
    # Six tokens a rank leave some experts without tokens, so that batches differ in what is active.
    ranks, maps = run_rule(DispatchRule.FEWEST, tokens_per_step=6)
    for step in range(2 * STEPS):
        recorded = np.stack([results[step][0].counts for results, _ in ranks], axis=1)
        for layer, row in enumerate(maps[step >= STEPS].phy2log):
            flat = recorded[layer].reshape(-1)
            served = row[flat > 0]
            assert len(set(served.tolist())) == len(served)
            load = np.bincount(served, flat[flat > 0], EXPERTS)
            worst = (recorded[layer] > 0).sum(axis=1).max()
            assert worst == twins.fewest_active(load, row, RANKS)


def test_every_form_of_waterfill_lowers_the_peak_and_most_with_any_rank_to_choose():
    peaks = {}
    for rule in (
        DispatchRule.EVEN,
        DispatchRule.WATERFILL_STATIC,
        DispatchRule.WATERFILL,
        DispatchRule.WATERFILL_ALL_RANKS,
    ):
        ranks, _ = run_rule(rule)
        peaks[rule] = sum(
            np.max([results[step][0].served for results, _ in ranks], axis=0).sum()
            for step in range(2 * STEPS)
        )
    assert max(peaks, key=peaks.__getitem__) is DispatchRule.EVEN
    assert min(peaks, key=peaks.__getitem__) is DispatchRule.WATERFILL_ALL_RANKS
    assert len(set(peaks.values())) == len(peaks)


@pytest.mark.parametrize("rule", [DispatchRule.LIBRA, DispatchRule.LIBRA_REFINED])
def test_fetched_experts_even_out_the_load_and_are_dropped_afterwards(rule):
    peaks = {}
    for transient in (0, 5):
        ranks, _ = run_rule(rule, transient_experts=transient)
        peaks[transient] = sum(
            np.max([results[step][0].served for results, _ in ranks], axis=0).sum()
            for step in range(2 * STEPS)
        )
        for _, one in ranks:
            assert isinstance(one.dispatch, TwoStageDispatch)
            # They are in no map and in no buffer of the pool.
            assert one.router.phy2log.shape == (LAYERS, RANKS * one.config.slots_per_rank)
            assert one.weights.free_buffers == 8 * LAYERS - int(
                (one.router.phy2log.reshape(LAYERS, RANKS, -1)[:, one.config.rank] >= 0).sum()
            )
    assert peaks[5] < peaks[0]


def test_a_rank_computes_its_local_tokens_before_it_knows_what_the_others_have():
    group = Group(RANKS, timeout_s=deadline(20))
    first, _ = placements()
    computed = threading.Event()

    def work(rank):
        one = OneRank(group, config_of(rank, DispatchRule.LIBRA, timeline=True), first)
        assert isinstance(one.dispatch, TwoStageDispatch)
        note, counts = one.dispatch._note, one.dispatch._counts_of_gates

        def noted(layer, stage, began):
            if rank == 0 and stage == "local":
                computed.set()
            return note(layer, stage, began)

        def counted(*given):
            if rank == 1:  # The last of the four to say what its tokens want.
                assert computed.wait(deadline(10))
            return counts(*given)

        vars(one.dispatch).update(_note=noted, _counts_of_gates=counted)
        try:
            result = one.forward.step(0, False)
            return result.spans, one.witness.mismatches(0, result)
        finally:
            one.dispatch.close()

    ranks = run_ranks(RANKS, work)
    assert [wrong for _, wrong in ranks] == [0] * RANKS
    for spans, _ in ranks:
        stages = Counter((span.layer, span.stage) for span in spans)
        each = ("demand", "shard", "local", "remote", "combine")
        fetched = {(layer, stage) for layer in range(1, LAYERS) for stage in ("plan", "fetch")}
        assert stages == Counter({*product(range(LAYERS), each), *fetched})
        at = {(span.layer, span.stage): span for span in spans}
        for layer in range(1, LAYERS):
            assert at[layer, "fetch"].ended <= at[layer, "local"].began


@pytest.mark.parametrize("rule", DispatchRule)
def test_ranks_under_different_epochs_never_compute_together(rule):
    group = Group(RANKS, timeout_s=deadline(20))
    first, _ = placements()

    def work(rank):
        one = OneRank(group, config_of(rank, rule), first)
        one.router.epoch = 1 + (rank == 2)
        try:
            with pytest.raises(EpochMismatch, match="rank 2 at 2"):
                one.forward.step(0, False)
        finally:
            one.dispatch.close()
        return True

    assert all(run_ranks(RANKS, work))


def test_the_rule_survives_the_configuration_file():
    config = config_of(1, DispatchRule.LPLB)
    assert RankConfig.from_json(config.to_json()) == config
    with pytest.raises(InvalidInput):
        config_of(0, DispatchRule.LIBRA, transient_experts=-1)


def test_each_rule_names_the_model_that_the_planner_should_use():
    assert {rule.value: rule.model.value for rule in DispatchRule} == {
        "even": "even",
        "nearest": "nearest",
        "lplb": "optimal",
        "fewest": "fewest",
        "waterfill": "waterfill",
        "waterfill-static": "waterfill",
        "waterfill-all-ranks": "waterfill",
        "libra": "optimal",
        "libra-refined": "optimal",
    }
