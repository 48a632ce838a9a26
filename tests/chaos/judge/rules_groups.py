"""Rules about what a group takes over from the one before it, of another size."""

from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.judge.case import Breach, Case, Group
from tests.chaos.judge.maps import EMPTY

__all__ = ["epochs_go_on", "maps_carry_over", "ranks_come_from_the_group_before"]


def epochs_go_on(case: Case) -> Iterator[Breach]:
    """Another size comes at the next epoch and at a later step; a restart is at the last epoch."""
    rule = "groups go on at the next epoch"
    steps: dict[int, list[int]] = defaultdict(list)
    for facts in case.ranks:
        for step in facts.steps:
            steps[step.group].append(step.step)
    for group in case.groups:
        if group.before is None:
            continue
        last = group.before.last_epoch
        wanted = last if group.over is None else last + 1
        for rank, start in group.starts.items():
            if start.epoch != wanted and (group.over is not None or start.epoch > wanted):
                yield Breach(
                    rule,
                    f"rank {rank} began in group {group.number} at epoch {start.epoch};"
                    f" group {group.before.number} ended at {last}",
                    start.unix,
                    f"rank-{rank}.jsonl",
                )
        first = min(steps[group.number], default=None)
        newest = max(steps[group.before.number], default=-1)
        if group.over is not None and first is not None and first <= newest:
            text = f"group {group.number} computed step {first}, the one before step {newest}"
            yield Breach(rule, text, group.first.unix)


def ranks_come_from_the_group_before(case: Case) -> Iterator[Breach]:
    """Ranks say, in their logs and on the wire, that they were who the engine ordered to stay."""
    rule = "ranks come from the group before"
    for group in case.groups:
        # A group that died while it went over is started anew: its ranks come from none.
        went = group.over is not None and group.over.group == group.number
        former = group.over.former if group.over is not None and went else (None,) * group.num_ranks
        came_from = group.before.generation if group.before is not None and went else ""
        for rank, start in group.starts.items():
            if (start.num_ranks, start.former_rank) != (len(former), former[rank]):
                text = f"rank {rank} of group {group.number} of {start.num_ranks} ranks was rank"
                text += f" {start.former_rank} before, the engine ordered {former}"
                yield Breach(rule, text, start.unix, f"rank-{rank}.jsonl")
        for process in case.streams:
            if process.generation != group.generation:
                continue
            for message in case.sent_by(process):
                if message.kind != "hello":
                    continue
                told = message.body.lineage
                was = told.rank if told.HasField("rank") else None
                if (told.generation, was) != (came_from, former[process.rank]):
                    text = f"{process} says that it came from rank {was} of {told.generation!r},"
                    text += f" the engine ordered {former} from {came_from!r}"
                    yield Breach(rule, text, message.read.unix, message.place)


def maps_carry_over(case: Case) -> Iterator[Breach]:
    """After a death every slot keeps its expert; a lost one may take a slot that has to make room.

    `maps_are_those_of_the_waves` compares the map of any other group of another size.
    """
    for epoch, group in case.overs.items():
        found, before = case.maps.get(epoch), case.maps.get(epoch - 1)
        if found is None or before is None or case.first_map(group) is None:
            continue
        carried = case.carried(group, before)
        for layer, (have, kept) in enumerate(zip(found, carried, strict=True)):
            allowed = (set(range(case.config["experts"])) - set(kept)) | {EMPTY}
            changed = [
                (slot, old, new)
                for slot, (old, new) in enumerate(zip(kept, have, strict=True))
                if new != old and new not in allowed
            ]
            if changed:
                yield _changed(group, epoch, layer, changed)


def _changed(group: Group, epoch: int, layer: int, changed: list[tuple[int, int, int]]) -> Breach:
    return Breach(
        "maps carry over",
        f"group {group.number} began at epoch {epoch} with other experts in slots of layer"
        f" {layer} than those that outlived the death (slot, before, now): {changed[:4]}",
        group.first.unix,
    )
