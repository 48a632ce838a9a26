"""The GPU report: it runs small on a CPU, and a page keeps what a GPU has measured."""

import numpy as np
import pytest
import torch

from bench.gpu_layers import RaggedLayer, Share, rank_tokens, slowest_ranks
from bench.gpu_page import ON_CPU, Block, merged, read_blocks, written
from bench.gpu_report import PARTS, report
from evenkeel_moe.agent.profile.expert_layer import ExpertShape

PAGE = "# On GPUs\n\nText by hand.\n"


def test_figures_of_a_gpu_are_replaced_by_those_of_a_gpu_only():
    gpu, newer, cpu = Block(True, "12 us"), Block(True, "11 us"), Block(False, "900 us")
    assert merged({"a": gpu}, {"a": cpu}) == {"a": gpu}
    assert merged({"a": gpu}, {"a": newer}) == {"a": newer}
    assert merged({"a": cpu}, {"a": gpu}) == {"a": gpu}
    assert merged({"a": gpu}, {"b": cpu}) == {"a": gpu, "b": cpu}


def test_a_page_keeps_its_text_and_its_blocks_are_read_back():
    blocks = {"a": Block(True, "### A\n\n| x |\n|---|"), "b-c": Block(False, f"{ON_CPU} 3 us")}
    page = written(PAGE, blocks) + "\nText after.\n"
    assert read_blocks(page) == blocks
    again = written(page, blocks)
    assert again == page
    assert again.startswith(PAGE) and again.endswith("Text after.\n")
    only_cpu = written(PAGE, {"b": blocks["b-c"]})
    assert "Nothing has been measured on a GPU yet." in only_cpu
    assert "Nothing has been measured" not in page
    with pytest.raises(ValueError, match="ends"):
        written(page.replace("<!-- gpu-report ends -->", ""), blocks)


def test_each_rank_gets_an_even_part_of_its_experts_tokens():
    row = np.array([0, 1, -1, 1, 2, 1], np.int32)
    shares = rank_tokens(row, np.array([4, 11, 0]), 2)
    assert shares == [(4, 4, 0), (4, 0, 3)]


def test_the_slowest_rank_of_each_layer_counts():
    shares: dict[str, list[list[Share]]] = {"one": [[(1,), (5,)], [(2,), (1,)]]}
    assert slowest_ranks(shares, lambda share: float(share[0])) == {"one": 3.5}


def test_the_ragged_layer_computes_every_slot_with_its_own_weights():
    layer = RaggedLayer(ExpertShape(16, 8, 3, "bfloat16"), torch.device("cpu"), 10)
    for share in ((2, 0, 5), (0, 0, 0), (9, 1, 0), (2, 0, 5)):
        found = layer.compute(share)
        assert found.shape == (sum(share), 16)
        slots = np.repeat(np.arange(3), share)
        for slot, row in zip(slots, found, strict=True):
            gate, value = (layer.row @ layer.up[slot]).chunk(2, dim=-1)
            wanted = torch.nn.functional.silu(gate) * value @ layer.down[slot]
            assert torch.allclose(row.float(), wanted[0].float(), rtol=0.05, atol=1e-5)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.timeout(240)
def test_every_part_runs_small_on_a_cpu_and_says_so(name):
    for _ in range(3):  # On a busy machine the seconds of small layers may not rise with tokens.
        blocks, failed = report(torch.device("cpu"), small=True, seconds=0.5, names=[name])
        if not failed:
            break
    assert not failed, blocks[name].text
    assert not blocks[name].on_gpu and ON_CPU in blocks[name].text
