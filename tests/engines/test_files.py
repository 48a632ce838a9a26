"""The files of `evenkeel offline`, read back by the engines' own code."""

import numpy as np
import pytest

from evenkeel_moe.formats import Trace, read_placement, write_trace
from tests.engines import ranks
from tests.engines.sglang.engine import DENSE, EXPERTS, LAYERS, MOE_LAYERS, REDUNDANT
from tests.integration.whole import evenkeel

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
SLOTS = EXPERTS + REDUNDANT


@pytest.fixture
def recording(tmp_path):
    """Return a trace of the toy engine's MoE layers, in which two experts are hot."""
    even = [1 / EXPERTS] * EXPERTS
    counts = np.random.default_rng(5).multinomial(40 * EXPERTS, even, (60, len(MOE_LAYERS)))
    counts[:, :, 2:4] += 150
    write_trace(tmp_path / "trace.npz", Trace(counts, MOE_LAYERS))
    return tmp_path / "trace.npz"


def offline(recording, out, form, *options):
    """Run `evenkeel offline` as a user does; return the placement."""
    fleet = ("--ranks", 2, "--slots", SLOTS)
    said = evenkeel("offline", recording, "--out", out, "-f", form, *fleet, *options)
    assert "It pays" in said
    return read_placement(
        out, num_ranks=2, num_logical_experts=EXPERTS, layer_ids=MOE_LAYERS
    ).placement


def test_sglang_starts_with_the_file(recording, tmp_path):
    out = tmp_path / "map.json"
    more = tmp_path / "options.yaml"
    more.write_text(f"num_hidden_layers: {LAYERS}")
    placement = offline(recording, out, "sglang", "--config", more)
    for seen in ranks.run("tests.engines.sglang.scenarios", "starts_with", text=out.read_text()):
        assert np.array_equal(seen["moe"], placement.phy2log)
    assert placement.num_layers == LAYERS - DENSE


def test_vllm_ascend_starts_with_the_file(recording, tmp_path):
    out = tmp_path / "map.json"
    placement = offline(recording, out, "ascend")
    options = {"path": str(out), "layers": len(MOE_LAYERS), "experts": EXPERTS, "ranks": 2}
    (found,) = ranks.run("tests.engines.ascend", "expert_maps", size=1, **options)
    per_rank = SLOTS // 2
    for layer, seen in enumerate(found):
        assert seen["redundant"] == REDUNDANT
        for rank in range(2):
            row = placement.phy2log[layer, rank * per_rank : (rank + 1) * per_rank]
            local = np.full(EXPERTS, -1)
            local[row] = np.arange(per_rank)
            assert seen["maps"][rank] == local.tolist()
            for expert, slot in enumerate(seen["log2phy"][rank]):
                assert placement.phy2log[layer, slot] == expert
