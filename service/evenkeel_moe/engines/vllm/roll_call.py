"""Checks over a store that all ranks of a group that vLLM may change run the plugin."""

from typing import Any

from evenkeel_moe.engines.guest.collective_start import (
    announce_plugin,
    decline_start,
    require_announced,
    require_plugin_on_all,
)
from evenkeel_moe.errors import Unavailable

_NAME = "evenkeel/roll-call"


def announce(group: Any) -> None:
    """Tell the ranks that serve that this one, which joins their group, runs the plugin."""
    announce_plugin(_store_of(group), _NAME, int(group.rank_in_group))


def call_roll(group: Any, timeout_s: float) -> None:
    """Check that every rank of a group runs the plugin; collective.

    Raises:
        Unavailable: one does not. Every rank gets the same error.
    """
    rank, size = int(group.rank_in_group), int(group.world_size)
    require_plugin_on_all(_store_of(group), _NAME, rank, size, timeout_s)


def call_roll_again(group: Any, timeout_s: float, former_ranks: int | None) -> None:
    """Call the roll of a group that took the place of another; collective.

    Ranks that join have announced themselves before vLLM made the group, so that nobody waits for
    one without the plugin.

    Args:
        group: the new group.
        timeout_s: seconds to wait for the other ranks.
        former_ranks: ranks of the group that this rank was in; 0 if it had no agent there; None if
            it joins.

    Raises:
        Unavailable: not all ranks run the plugin, or this one had no agent.
    """
    if former_ranks == 0:
        decline_start(_store_of(group), _NAME)
        raise Unavailable("this rank had no agent before the resize")
    if former_ranks is not None:
        require_announced(_store_of(group), _NAME, range(former_ranks, int(group.world_size)))
    call_roll(group, timeout_s)


def _store_of(group: Any) -> Any:
    return group.tcp_store_group.store
