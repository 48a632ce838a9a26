"""Conditions: each sets what the world, the group or the deadlines of a seed are like."""

from dataclasses import replace


def like(**attributes):
    """Set attributes of the world: `copy_s`, `corruption`, `slow_swaps` and others."""

    def arrange(world) -> None:
        for name, value in attributes.items():
            setattr(world, name, value)

    return arrange


def fleet_like(**attributes):
    """Set attributes of the group: `drop_after_s` and others."""

    def arrange(world) -> None:
        for name, value in attributes.items():
            setattr(world.fleet, name, value)

    return arrange


def quick(**times):
    """Ask ranks often and miss them soon; `times` are deadlines of waves, in seconds or steps."""

    def arrange(world) -> None:
        wave = replace(world.timing.wave, **times)
        world.timing = replace(
            world.timing, heartbeat_s=0.25, ask_again_s=0.25, rank_lease_s=0.7, wave=wave
        )

    return arrange
