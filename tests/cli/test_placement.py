import json

import numpy as np
import pytest

from evenkeel_moe.cli.exits import Exit
from evenkeel_moe.formats import PlacementFormat, parse_placement
from tests.api.fakes import SHAPE


def test_every_format_reads_back_as_the_live_placement(run, operations, tmp_path):
    _, out, _ = run("placement", "export", "-d", "demo")
    live = parse_placement(out)
    assert live.info["deployment"] == "demo"
    assert live.placement.num_ranks == SHAPE.num_ranks
    for format_ in PlacementFormat:
        path = tmp_path / format_.value
        options = f"-d demo --format {format_} --first-moe-layer 1".split()
        code, said, told = run("placement", "export", "--out", str(path), *options)
        if format_ is PlacementFormat.VLLM_RANKS:
            # It has one row for all layers and no replicas, so it cannot hold this placement.
            assert code == Exit.REFUSED and "hold no replicas" in told and not path.exists()
            continue
        assert code == 0
        assert str(path) in said
        back = parse_placement(
            path.read_text(),
            num_ranks=SHAPE.num_ranks,
            num_logical_experts=SHAPE.num_logical_experts,
            layer_ids=range(1, 1 + SHAPE.num_layers),
        )
        assert np.array_equal(back.placement.phy2log, live.placement.phy2log)
        assert back.layer_ids == tuple(range(1, 1 + SHAPE.num_layers))


def test_an_sglang_file_has_a_row_for_every_hidden_layer(run, tmp_path):
    path = tmp_path / "map.json"
    options = "-d demo -f sglang --first-moe-layer 1 --num-hidden-layers 9".split()
    run("placement", "export", "--out", str(path), *options)
    content = json.loads(path.read_text())
    assert list(content) == ["physical_to_logical_map"]
    assert len(content["physical_to_logical_map"]) == 9


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--format", "swift"], 2, "unknown placement format 'swift'; known: neutral, sglang"),
        (["--layer-ids", "1,x"], 2, "numbers separated by commas"),
        (["--layer-ids", "1,1"], 1, "must rise"),
        (
            ["-f", "sglang", "--first-moe-layer", "5", "--num-hidden-layers", "2"],
            1,
            "hidden layers",
        ),
        (["--out", "/nowhere/at/all"], 2, "cannot write"),
    ],
)
def test_a_file_that_cannot_be_written_is_reported(run, options, code, words):
    found, _, err = run("placement", "export", "-d", "demo", *options)
    assert found == code
    assert words in err
