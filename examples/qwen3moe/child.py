"""The entry point of a rank's process. A process cannot be started at a function of `__main__`."""

from typing import Any

from evenkeel_moe.adapters.processes.child_process import die_with_parent
from examples.qwen3moe import rank


def run_rank(parent: int, *arguments: Any) -> None:
    """Run a rank in a process that ends with its parent."""
    die_with_parent(parent)
    rank.run(*arguments)
