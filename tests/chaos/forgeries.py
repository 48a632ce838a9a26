"""Ways to forge the record of a run, each with the rule of the judge that it breaks."""

import base64
import json

import zstandard

from tests.chaos.judge.case import wave_in, wave_of
from tests.chaos.judge.store import plan_of

__all__ = ["FORGERIES"]


def step_under_the_old_map(forger):
    """Rank 1 computed one step more with the tables from before its first swap."""

    def change(lines):
        first = next(line for line in lines if line["kind"] == "step" and line["epoch"] == 1)
        first |= {"epoch": 0, "states": [0, 0]}

    forger.lines("evidence-1.jsonl", change)


def swapped_epoch(forger):
    """Rank 2 wrote another epoch for one step."""

    def change(lines):
        step = [line for line in lines if line["kind"] == "step"][60]
        step["epoch"] += 1

    forger.lines("evidence-2.jsonl", change)


def tables_changed_within_a_step(forger):
    """The tables of rank 0 were others after a step than before it."""

    def change(lines):
        number = next(n for n, line in enumerate(lines) if line.get("number") == 1)
        step = next(line for line in lines[number:] if line["kind"] == "step")
        step["states"][0] = 0

    forger.lines("evidence-0.jsonl", change)


def changed_checksum(forger):
    """One slot of rank 0 held other bytes."""

    def change(lines):
        state = next(line for line in lines if line.get("number") == 1)
        layer, local, value = state["slots"][3]
        state["slots"][3] = [layer, local, f"{int(value, 16) ^ 1:016x}"]

    forger.lines("evidence-0.jsonl", change)


def experts_exchanged(forger):
    """Two slots of rank 0 held each other's experts."""

    def change(lines):
        (_, _, first), (_, _, second) = lines[0]["slots"][:2]
        lines[0]["slots"][0][2], lines[0]["slots"][1][2] = second, first

    forger.lines("evidence-0.jsonl", change)


def another_table(forger):
    """Rank 1 sent the tokens of two experts to each other's slots after its first swap."""

    def change(lines):
        layer = next(line for line in lines if line.get("number") == 1)["tables"][0]
        layer[0], layer[1] = layer[1], layer[0]

    forger.lines("evidence-1.jsonl", change)


def expert_without_a_slot(forger):
    """Rank 1 sent the tokens of one expert nowhere after its first swap."""

    def change(lines):
        next(line for line in lines if line.get("number") == 1)["tables"][0][2] = []

    forger.lines("evidence-1.jsonl", change)


def slot_without_checksum(forger):
    """Rank 0 left one slot out."""
    forger.lines("evidence-0.jsonl", lambda lines: lines[0]["slots"].pop())


def step_of_an_earlier_epoch(forger):
    """All ranks of a group computed a step with the epoch and the tables of its beginning."""
    group = next(g for g in forger.case.groups if g.last_epoch > g.first.epoch)

    def change(lines):
        _of_group(lines, group, "step")[-1] |= {"epoch": group.first.epoch, "states": [0, 0]}

    for rank in group.starts:
        forger.lines(f"evidence-{rank}.jsonl", change)


def step_computed_again(forger):
    """A rank computed a step twice in one group, which began anew."""
    group = next(g for g in forger.case.groups if g.over is None)

    def change(lines):
        last = _of_group(lines, group, "step")[-1]
        lines.insert(lines.index(last), dict(last))

    forger.lines(f"evidence-{min(group.starts)}.jsonl", change)


def skipped_epoch(forger):
    """No rank logged how it came to the epoch of a wave."""
    epoch = min(forger.case.swapped)

    def change(lines):
        lines[:] = [line for line in lines if line["kind"] != "swap" or line["epoch"] != epoch]

    for facts in forger.case.ranks:
        forger.lines(f"rank-{facts.rank}.jsonl", change)


def fallen_epoch(forger):
    """The group came back from its restart at an earlier epoch than it had named."""
    group = next(g for g in forger.case.groups if g.before is not None and g.over is None)

    def change(lines):
        _of_group(lines, group, "start")[0]["epoch"] -= 1

    forger.lines("rank-0.jsonl", change)


def late_save(forger):
    """Rank 0 had its placement saved long after its Ack."""

    def change(lines):
        saves = (line for line in lines if line["kind"] == "saved")
        next(line for line in saves if line["epoch"] in forger.case.swapped)["changed"] += 60.0

    forger.lines("evidence-0.jsonl", change)


def no_save(forger):
    """Rank 0 never saved the placement of an epoch that it named."""
    epoch = min(forger.case.swapped)

    def change(lines):
        lines[:] = [line for line in lines if (line["kind"], line["epoch"]) != ("saved", epoch)]

    forger.lines("evidence-0.jsonl", change)


def another_wave(forger):
    """Rank 2 came to its first epoch by another wave."""

    def change(lines):
        next(line for line in lines if line["kind"] == "swap")["wave_index"] += 1

    forger.lines("rank-2.jsonl", change)


def late_swap(forger):
    """Rank 2 acknowledged a swap two seconds before it did it."""

    def change(lines):
        next(line for line in lines if line["kind"] == "swap")["unix"] += 2.0

    forger.lines("rank-2.jsonl", change)


def reordered_commit(forger):
    """The Commit was sent before the last vote had arrived."""
    commit, vote = forger.decided_wave()
    forger.delay(vote, commit.read)


def commit_after_a_no(forger):
    """One of the votes before a Commit was a no."""
    _, vote = forger.decided_wave()
    forger.patch(vote, lambda whole: whole[:-1] + b"\0")  # It ends with the value of `yes`.


def commit_without_record(forger):
    """The store had refused the record of the agreement on a Commit's wave."""
    commit, _ = forger.decided_wave()
    wave = wave_of(commit.body.wave)
    for write in forger.case.wire.writes:
        if write.table == "plans" and (plan := plan_of(write.body)).agreed:
            if wave_in(plan, plan.waves_committed) == wave:
                forger.refuse_write(write.connection, write.sent)


def swap_without_commit(forger):
    """A rank swapped a wave for which it had no Commit."""
    commit, _ = forger.decided_wave()
    for stream in forger.case.streams[forger.case.process_of(commit.stream)]:
        for message in stream.messages:
            if message.kind == "commit" and message.body.wave == commit.body.wave:
                forger.hide(message)


def lost_ack(forger):
    """A rank lived on and never sent its Ack."""
    forger.hide(forger.first("ack"))


def silent_rank(forger):
    """A rank never named the epochs that it came to, though it told of steps long after."""
    process = forger.case.process_of(forger.first("ack").stream)
    for message in forger.case.sent_by(process):
        if message.kind in ("ack", "rank_state"):
            forger.hide(message)


def wrong_ack(forger):
    """An Ack names a later epoch than the rank was at."""
    forger.rewrite(forger.first("ack"), lambda body: setattr(body, "epoch", body.epoch + 1))


def wrong_digest(forger):
    """An Ack names another map than that of its epoch."""

    def change(body):
        body.placement_digest = body.placement_digest[::-1]

    forger.rewrite(forger.first("ack"), change)


def fallen_term(forger):
    """A rank named an earlier term than it knew."""
    later = [
        message
        for message in forger.case.messages
        if message.kind == "rank_state" and message.body.highest_term > 1
    ]
    forger.rewrite(later[-1], lambda body: setattr(body, "highest_term", 1))


def fallen_term_of_a_leader(forger):
    """A replica sent an earlier term than before on the same stream."""
    asked, later = set(), []
    for message in forger.case.messages:
        if message.kind == "query_state" and message.body.leader.term > 1:
            later += [message] if id(message.stream) in asked else []
            asked.add(id(message.stream))
    forger.rewrite(later[-1], lambda body: setattr(body.leader, "term", 1))


def two_leaders(forger):
    """A rank acknowledged the Commit of a second leader of its term."""

    def change(body):
        body.leader.leader_id = body.leader.leader_id[:-1] + "9"

    first = forger.first("commit")
    for message in first.stream.messages:  # It may have been sent again.
        if message.kind == "commit" and message.body.wave == first.body.wave:
            forger.rewrite(message, change)


def two_outcomes_on_the_wire(forger):
    """One rank says of a wave that all swapped that it was dropped."""
    state = forger.first("rank_state", lambda body: body.last_outcome == 1)
    forger.rewrite(state, lambda body: setattr(body, "last_outcome", 3))


def uncommitted_wave(forger):
    """The store counts a wave that no rank swapped."""

    forger.last_dump(lambda keys: _change_plans(keys, _count_a_wave_more, most=1))


def _count_a_wave_more(record):
    record["waves_committed"] += 1


def _change_plans(keys, change, most=None):
    """Change the stored records of the first plans; of all if `most` is None."""
    for name, body in list(keys["plans"].items())[:most]:
        record = json.loads(zstandard.decompress(base64.b64decode(body)))
        change(record)
        changed = zstandard.compress(json.dumps(record).encode())
        keys["plans"][name] = base64.b64encode(changed).decode()


def wrong_report(forger):
    """A report names another epoch for a step than the rank computed it with."""

    def change(body):
        table = bytearray(body.step_table)
        table[8] ^= 1
        body.step_table = bytes(table)

    forger.rewrite(forger.first("load_report"), change)


def report_of_no_step(forger):
    """A report names a step that the rank never computed."""

    def change(body):
        body.step_table = (-1).to_bytes(8, "little", signed=True) + body.step_table[8:]

    forger.rewrite(forger.first("load_report"), change)


def another_prepare(forger):
    """One rank was sent other rows of a wave than the others."""

    def change(body):
        rows = body.body.rows
        body.body.rows = rows[4:8] + rows[:4] + rows[8:]

    forger.rewrite(forger.first("prepare"), change)


def wave_for_another_group(forger):
    """A rank was sent a Commit of another generation."""

    def change(body):
        body.wave.generation = body.wave.generation[::-1]

    forger.rewrite(forger.first("commit"), change)


def open_plan(forger):
    """A plan was still open in the store at the end."""
    forger.last_dump(lambda keys: keys["plans_open"].update({"forgotten": "MQ=="}))


def no_last_dump(forger):
    """Nobody dumped the store after the run."""
    forger.drop_last_dump()


def garbled_stream(forger):
    """The bytes of a rank's connection are no HTTP/2 from some place on."""
    vote = forger.first("vote")
    forger.overwrite(vote.read, b"\xff")


def plan_without_an_end(forger):
    """The record of a plan says at the end that the plan is under way."""

    def change(record):
        record["phase"] = "migrating"

    forger.last_dump(lambda keys: _change_plans(keys, change, most=1))


def miscounted_waves(forger):
    """The record of a plan counts one wave more than the ranks swapped."""

    forger.last_dump(lambda keys: _change_plans(keys, _count_a_wave_more))


def wrong_record(forger):
    """The store has the map of one epoch under another."""

    def change(keys):
        epochs = keys["epochs"]
        newest = max(epochs, key=int)
        epochs[newest] = epochs[str(int(newest) - 1)]

    forger.last_dump(change)


def wave_held_at_the_end(forger):
    """The last state that a rank told of is not idle."""
    last = [m for m in forger.case.messages if m.kind == "rank_state"][-1]
    forger.rewrite(last, lambda body: setattr(body, "state", 4))


def _resized(forger, wanted):
    """Return the first group of another size that is wanted."""
    return next(g for g in forger.case.groups if g.over is not None and wanted(g.over))


def _of_group(lines, group, kind):
    return [line for line in lines if (line["group"], line["kind"]) == (group.number, kind)]


def _first_states(forger, group, change):
    """Change the state with which each rank of a group began."""

    def change_one(lines):
        change(_of_group(lines, group, "state")[0])

    for rank in group.starts:
        forger.lines(f"evidence-{rank}.jsonl", change_one)


def step_under_the_map_before_a_resize(forger):
    """Rank 1 computed the first steps of a smaller group with the tables of the larger one."""
    group = _resized(forger, lambda over: len(over.former) == 3 and not over.dead)

    def change(lines):
        states = [line for line in lines if line["kind"] == "state"]
        old = [line for line in states if line["group"] < group.number][-1]
        new = _of_group(lines, group, "state")[0]
        new |= {key: old[key] for key in ("epoch", "tables", "slots")}
        _of_group(lines, group, "step")[0]["epoch"] = old["epoch"]

    forger.lines("evidence-1.jsonl", change)


def expert_lost_with_a_retired_rank(forger):
    """After a retirement no rank had a slot of one expert."""
    group = _resized(forger, lambda over: None not in over.former and not over.dead)

    def change(state):
        state["tables"][0][3] = []

    _first_states(forger, group, change)


def epoch_repeated_by_a_resize(forger):
    """A group of another size began at the last epoch of the group before."""
    group = _resized(forger, lambda over: None in over.former)

    def change(lines):
        _of_group(lines, group, "start")[0]["epoch"] -= 1

    for rank in group.starts:
        forger.lines(f"rank-{rank}.jsonl", change)


def step_repeated_by_a_resize(forger):
    """All ranks of a group of another size computed the last step of the group before again."""
    group = _resized(forger, lambda over: None in over.former)

    def change(lines):
        _of_group(lines, group, "step")[0]["step"] -= 1

    for rank in group.starts:
        forger.lines(f"evidence-{rank}.jsonl", change)


def experts_exchanged_by_a_death(forger):
    """Those who outlived a death began with two experts in each other's slots."""
    group = _resized(forger, lambda over: over.dead)
    kept = forger.case.carried(group, forger.case.maps[group.first.epoch - 1])[0]
    one, other = sorted(set(kept) - {-1})[:2]

    def change(state):
        layer = state["tables"][0]
        layer[one], layer[other] = layer[other], layer[one]

    _first_states(forger, group, change)


def another_former_rank(forger):
    """A rank took itself for another one of the group before."""
    group = _resized(forger, lambda over: over.dead)

    def change(lines):
        _of_group(lines, group, "start")[0]["former_rank"] += 1

    forger.lines("rank-0.jsonl", change)


def lineage_of_another_group(forger):
    """A rank told that it came from a group that never was."""

    def change(body):
        body.lineage.generation = body.lineage.generation[::-1]

    forger.rewrite(forger.first("hello", lambda body: body.lineage.generation), change)


def commit_without_a_rank_that_joined(forger):
    """A Commit was sent without the vote of a rank that joined."""
    group = _resized(forger, lambda over: None in over.former)
    joined = group.over.former.index(None)
    commit = forger.first("commit", lambda body: body.wave.generation == group.generation)
    for message in forger.case.messages:
        if message.kind == "vote" and message.body.wave == commit.body.wave:
            if forger.case.process_of(message.stream).rank == joined:
                forger.hide(message)


FORGERIES = {
    step_under_the_old_map: "one map for each step",
    swapped_epoch: "one map for each step",
    tables_changed_within_a_step: "one map for each step",
    step_of_an_earlier_epoch: "epochs never fall",
    step_computed_again: "epochs never fall",
    changed_checksum: "slots hold the experts of the map",
    experts_exchanged: "slots hold the experts of the map",
    expert_without_a_slot: "slots hold the experts of the map",
    slot_without_checksum: "slots hold the experts of the map",
    another_table: "maps are those of the waves",
    wrong_digest: "maps are those of the waves",
    fallen_epoch: "restarts keep the epoch",
    late_save: "no Ack before the save",
    no_save: "no Ack before the save",
    another_wave: "one wave for each epoch",
    skipped_epoch: "one wave for each epoch",
    another_prepare: "one wave for each epoch",
    late_swap: "no Ack without a swap",
    wrong_ack: "no Ack without a swap",
    reordered_commit: "no Commit before votes and record",
    commit_after_a_no: "no Commit before votes and record",
    commit_without_record: "no Commit before votes and record",
    swap_without_commit: "every swap is acknowledged",
    lost_ack: "every swap is acknowledged",
    silent_rank: "every swap is acknowledged",
    fallen_term: "terms never fall",
    fallen_term_of_a_leader: "terms never fall",
    two_leaders: "one leader in a term",
    two_outcomes_on_the_wire: "one outcome for each wave",
    uncommitted_wave: "records count swapped waves",
    wrong_report: "reports name the epoch of the step",
    report_of_no_step: "reports name the epoch of the step",
    wave_for_another_group: "waves reach their group only",
    wave_held_at_the_end: "every wave ends",
    open_plan: "every plan ends",
    no_last_dump: "every plan ends",
    plan_without_an_end: "every plan ends",
    miscounted_waves: "every plan ends",
    wrong_record: "records name the maps",
    garbled_stream: "the evidence is whole",
    step_under_the_map_before_a_resize: "one map for each step",
    expert_lost_with_a_retired_rank: "slots hold the experts of the map",
    epoch_repeated_by_a_resize: "groups go on at the next epoch",
    step_repeated_by_a_resize: "groups go on at the next epoch",
    experts_exchanged_by_a_death: "maps carry over",
    another_former_rank: "ranks come from the group before",
    lineage_of_another_group: "ranks come from the group before",
    commit_without_a_rank_that_joined: "no Commit before votes and record",
}
"""Forgery -> name of the rule."""
