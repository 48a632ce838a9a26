"""Export the placement of a live deployment, and start both engines from it."""

import numpy as np
import pytest

from tests.engines import ranks

pytestmark = [pytest.mark.engines, pytest.mark.integration, pytest.mark.timeout(300)]
VLLM, SGLANG = "tests.engines.vllm.scenarios", "tests.engines.sglang.scenarios"


def test_engines_restart_where_a_live_deployment_stands(controller, tmp_path):
    """The controller's plan moves vLLM's experts; then both engines start from the exported map."""
    moved = ranks.run(VLLM, "controlled", controllers=controller.grpc_address)
    now = moved[0]["map"]
    assert not np.array_equal(now, moved[0]["before"]), "a plan was carried out"

    neutral, sglang = tmp_path / "map.json", tmp_path / "location.json"
    controller.export("toy", neutral, "neutral")
    sizes = ("--first-moe-layer", "2", "--num-hidden-layers", "5")
    controller.export("toy", sglang, "sglang", *sizes)
    for seen in ranks.run(VLLM, "warm_start_map", path=str(neutral)):
        assert np.array_equal(seen["map"], now) and seen["wrong"] == []
    for seen in ranks.run(SGLANG, "starts_with", text=sglang.read_text(), layers=5):
        assert np.array_equal(seen["moe"], now)
