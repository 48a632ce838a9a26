"""Requests and their KV cache in the memory that experts leave."""

import zlib
from itertools import islice

import numpy as np
import pytest
import torch

from evenkeel_moe.engines.reference.config import DispatchRule, RankConfig
from evenkeel_moe.engines.reference.model import Model
from evenkeel_moe.engines.reference.requests import Lengths, RequestTraffic, draw_requests
from evenkeel_moe.engines.reference.slots import PooledWeights
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.placement import Placement
from tests.engines.reference.test_run import lines, run

CPU = torch.device("cpu")
SIZES = {"layers": 2, "experts": 4, "top_k": 2, "d_model": 16, "d_ffn": 16}
MODEL = Model.build(seed=5, device=CPU, **SIZES)
BLOCK_TOKENS = 8
LENGTHS = Lengths(12, 6)
REQUESTS = list(islice(draw_requests((1,), 100.0, LENGTHS), 6))


def serve(buffers, tokens_per_step=64, steps=200):
    """Serve on one rank without a fleet; return the ended requests and the states of the steps."""
    weights = PooledWeights(2, 4, buffers, 16, 16, CPU)
    weights.load(Placement(np.tile(np.arange(4), (2, 1)), 1, 4), 0, 5)
    ticks = iter(np.arange(10_000) * 0.01)
    asked = iter(REQUESTS)
    traffic = RequestTraffic(
        MODEL, weights, asked, LENGTHS.most, tokens_per_step, lambda: next(ticks)
    )
    ended, states = [], []
    for step in range(steps):
        tokens = traffic.tokens(step, 0)
        assert torch.equal(traffic.tokens(step, 0), tokens)
        assert len(tokens) <= tokens_per_step
        states.append(traffic.state())
        x = MODEL.embed(tokens, traffic.before(step, 0))
        *_, last = MODEL.undistributed(x, traffic.attend)
        ended += traffic.end_step(last.after)
    for layer in range(2):  # No request wrote into the memory of an expert.
        for expert in range(4):
            pairs = zip(weights.tensors(layer, expert), MODEL.experts[layer][expert], strict=True)
            assert all(torch.equal(have, want) for have, want in pairs)
    return ended, states


def attend(layer, x):
    """Do what the traffic does, for one request alone and without blocks."""
    rows = []
    for at, row in enumerate(x):
        scores = (x[: at + 1] @ row).tolist()
        like = scores.index(max(scores))
        rows.append(torch.floor((row + x[like].flip(0)) / 2))
    return torch.stack(rows)


def plain_digests():
    """The same activations, each request alone: a second implementation."""
    found = []
    for request in REQUESTS:
        ids = torch.from_numpy(request.ids)
        x = MODEL.embed(ids, torch.cat([ids[:1], ids[:-1]]))
        *_, last = MODEL.undistributed(x, attend)
        found.append(zlib.crc32(last.after.numpy().tobytes()))
    return found


@pytest.mark.parametrize(("blocks", "tokens_per_step"), [(4, 64), (9, 64), (18, 7)])
def test_a_request_has_the_same_bits_whatever_runs_beside_it(blocks, tokens_per_step):
    ended, _ = serve(8 + blocks, tokens_per_step=tokens_per_step)
    digests = plain_digests()
    assert sorted(one["digest"] for one in ended) == sorted(digests)
    assert len(set(digests)) == len(REQUESTS)


def test_free_blocks_bound_the_batch_and_all_come_back():
    most = []
    for blocks in (-(-LENGTHS.most // BLOCK_TOKENS), 9, 40):
        ended, states = serve(8 + blocks)
        assert len(ended) == len(REQUESTS)
        assert min(state["free_blocks"] for state in states) >= 0
        assert states[-1] == {"running": 0, "free_blocks": blocks}
        for one in ended:
            assert one["arrived_s"] <= one["admitted_s"] < one["first_s"] <= one["ended_s"]
        most.append(max(state["running"] for state in states))
    assert most[0] < most[1] < most[2]


def test_a_rank_that_retires_ends_what_has_come_or_names_it():
    weights = PooledWeights(2, 4, 8 + 4, 16, 16, CPU)
    weights.load(Placement(np.tile(np.arange(4), (2, 1)), 1, 4), 0, 5)
    now = [0.0]
    traffic = RequestTraffic(MODEL, weights, iter(REQUESTS), LENGTHS.most, 64, lambda: now[0])

    def serve_until_drained():
        ended = []
        for step in range(100):
            rows = len(traffic.tokens(now_step[0] + step, 0))
            if traffic.drained():
                break
            ended += traffic.end_step(torch.zeros(rows, 16))
        now_step[0] += 100
        return ended

    now_step = [0]
    traffic.tokens(0, 0)
    now[0] = REQUESTS[3].arrives_s
    assert not traffic.drained()
    traffic.stop_arrivals()
    now[0] = REQUESTS[-1].arrives_s
    assert len(serve_until_drained()) == 4  # also those that waited for blocks
    assert traffic.drained() and traffic.state() == {"running": 0, "free_blocks": 4}
    traffic.resume_arrivals()
    assert not traffic.drained()
    traffic.tokens(500, 0)
    left = traffic.give_up()
    assert [one["prompt"] for one in left] == [request.prompt for request in REQUESTS[4:]]
    assert traffic.drained() and traffic.state() == {"running": 0, "free_blocks": 4}


def test_a_request_that_can_never_be_admitted_is_refused_with_the_numbers():
    with pytest.raises(InvalidInput, match=r"needs \d blocks of 8 tokens, the experts leave 1"):
        serve(9)


def test_the_same_seed_draws_the_same_requests():
    one, two, other = (
        list(islice(draw_requests((seed,), 10.0, LENGTHS), 50)) for seed in (1, 1, 2)
    )
    for a, b in zip(one, two, strict=True):
        assert a.arrives_s == b.arrives_s and np.array_equal(a.ids, b.ids) and a.prompt == b.prompt
    assert [request.arrives_s for request in one] != [request.arrives_s for request in other]
    assert {6 <= request.prompt <= 18 for request in one} == {True}
    assert {3 <= len(request.ids) - request.prompt <= 9 for request in one} == {True}


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_a_fleet_serves_requests_bit_for_bit_also_where_a_rank_has_none(tmp_path):
    """Every output is compared with the undistributed model, which reads the same cache."""
    asked = {"requests_per_s": 20.0, "prompt_tokens": 8, "output_tokens": 4}
    report = run(tmp_path, None, steps=120, min_step_s=0.02, pool_slots_per_layer=10, **asked)
    assert report.ok, report
    ended = [line for rank in range(2) for line in lines(tmp_path, rank, "request")]
    steps = [line for rank in range(2) for line in lines(tmp_path, rank, "step")]
    assert len(ended) > 5
    assert min(step["tokens"] for step in steps) == 0 < max(step["tokens"] for step in steps)
    assert {step["free_blocks"] for step in steps if not step["running"]} == {3 * 10 - 3 * 4}


@pytest.mark.fault("a fleet with requests and Libra", "every rank died with signal 6, three times")
@pytest.mark.parametrize("rule", [rule for rule in DispatchRule if rule.fetches])
def test_requests_are_refused_for_a_dispatch_that_needs_equal_batches(rule):
    with pytest.raises(InvalidInput, match=f"dispatch {rule} gathers equally large batches"):
        RankConfig("", dispatch=rule, requests_per_s=1.0)
