"""`EVENKEEL_RANK__RECORD`: vLLM's ranks record their loads without a controller."""

import numpy as np
import pytest

from evenkeel_moe.formats import read_trace
from tests.engines import ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def test_the_folder_holds_the_tokens_that_vllm_routed(tmp_path):
    scenario = "tests.engines.vllm.records", "records"
    first, second = ranks.run(*scenario, folder=str(tmp_path), steps=1200)
    assert first["trouble"] == second["trouble"] == ""
    trace = read_trace(tmp_path)
    want = first["routed"] + second["routed"]
    assert trace.top_k == 2
    # Step 3 is a dummy, and the last steps, at most 512, wait for the next file.
    busy = want[want.any(axis=1)]
    assert 500 <= trace.num_steps <= len(busy)
    for layer in range(trace.num_layers):
        assert np.array_equal(trace.counts[:, layer], busy[: trace.num_steps])
