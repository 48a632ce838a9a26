"""The model, and an engine that never moves an expert, for all tests of the real vLLM."""

from functools import cache

import pytest

from tests.vllm.checkpoint import write_checkpoint
from tests.vllm.rig import FRESH, Reference
from tests.vllm.server import PYTHON, TENSOR_PARALLEL, VllmServer

PROMPTS = 16
LEAST_MARGIN = 2e-4
"""In log probability. Prompts with a smaller one are left out, because rounding could decide their
tokens: sums have another order on other maps."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep the tests of a file in its order: they share one server, which the last one ends."""
    items.sort(key=lambda item: (str(item.path), item.location[1] or 0))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Return two checkpoints of the same model with different weights, by name."""
    assert PYTHON.exists(), "there is no vLLM: run make test-vllm"
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(folder / name, seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="session")
def ask_reference(tmp_path_factory, checkpoints):
    """Return a function that returns what an engine answers that never moves an expert."""

    @cache
    def ask():
        return read_reference(tmp_path_factory.mktemp("reference") / "engine", checkpoints)

    return ask


def read_reference(folder, checkpoints):
    """Run vLLM without the plugin, with the same updates of weights as in the tests."""
    server = VllmServer(folder, checkpoints["a"], TENSOR_PARALLEL, {})
    try:
        server.start()
        found = Reference([_prompt(number) for number in range(PROMPTS)])
        found.read(server, FRESH)
        margins = server.least_margins(found.prompts)
        for name in "ba":
            server.replace_weights(checkpoints[name])
            found.read(server, name)
            margins = list(map(min, margins, server.least_margins(found.prompts)))
        assert found.tokens["a"] != found.tokens["b"], "the checkpoints answer differently"
    finally:
        server.stop()
    clear = [number for number, margin in enumerate(margins) if margin > LEAST_MARGIN]
    assert len(clear) >= PROMPTS // 2, f"rounding decides too many answers: {margins}"
    found.prompts = [found.prompts[number] for number in clear]
    for name, tokens in found.tokens.items():
        found.tokens[name] = [tokens[number] for number in clear]
    return found


def _prompt(number: int) -> list[int]:
    return [2 + (number * 37 + place * 11) % 510 for place in range(8 + number % 5)]
