"""The entry points by which engines find the plugins."""

import importlib
import inspect
import tomllib
from pathlib import Path


def test_engines_find_the_plugins():
    """Each entry point of the package exists and takes no arguments."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    groups = tomllib.loads(text)["project"]["entry-points"]
    assert set(groups) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for names in groups.values():
        module, _, name = names["evenkeel"].partition(":")
        offered = getattr(importlib.import_module(module), name)
        assert not inspect.signature(offered).parameters
        offered()  # without an address it is off, so it does not look for an engine
