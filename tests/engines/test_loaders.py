"""What the plugins rely on in the engines' sources: how weights are replaced, and into which slots.

The stand-ins of the other tests load as these sources do.
"""

import ast

import pytest

from evenkeel_moe.engines.guest.guards import OR
from evenkeel_moe.engines.sglang.hooks import LOADERS
from evenkeel_moe.engines.vllm.hooks import worker_functions
from tests.engines.sglang import engine as sglang
from tests.engines.vllm import engine as vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def function(root, path, owner, name):
    """Return a function, or a method of a class, in a source file: (parameter names, source)."""
    text = (root / path).read_text()
    methods = ast.parse(text).body
    if owner:
        classes = [node for node in methods if isinstance(node, ast.ClassDef)]
        (methods,) = [node.body for node in classes if node.name == owner]
    (found,) = [node for node in methods if isinstance(node, ast.FunctionDef) and node.name == name]
    taken, others = found.args, (found.args.vararg, found.args.kwarg)
    parameters = [*taken.args, *taken.kwonlyargs, *(other for other in others if other)]
    return [parameter.arg for parameter in parameters], ast.unparse(found)


@pytest.mark.parametrize("name", worker_functions(vllm.VERSION))
def test_vllms_worker_has_the_functions_that_are_wrapped(name):
    found, _ = function(vllm.root_folder(), vllm.LOADERS[0], "Worker", name)
    assert " ".join(found) == worker_functions(vllm.VERSION)[name]


def test_vllms_loaders_follow_the_map_of_the_start():
    """If this changes, the experts need not go back to that map before a reload."""
    name = "build_expert_params_mapping"
    _, source = function(vllm.root_folder(), vllm.LOADERS[1], "RoutedExperts", name)
    assert "EplbState.build_initial_global_physical_to_logical_map(" in source


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        (module, owner, name)
        for module, owners in LOADERS.items()
        for owner, names in owners.items()
        for name in names
    ],
)
def test_sglangs_updaters_have_the_functions_that_are_hooked(module, owner, name):
    path = module.replace(".", "/") + ".py"
    found, _ = function(sglang.root_folder(), path, owner, name)
    assert " ".join(found) in LOADERS[module][owner][name].split(OR)


def test_sglangs_loaders_follow_the_map_in_use():
    _, source = function(sglang.root_folder(), sglang.LOADERS[2], "FusedMoE", "weight_loader")
    assert "global_expert_location_metadata.logical_to_all_physical(" in source
