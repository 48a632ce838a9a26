"""The two-stage order against the figures of Libra's Table 2 (milliseconds, Qwen3MoE)."""

import pytest

from bench.libra_schedule import LibraStage, Resource, Task, layer_tasks, timeline
from evenkeel_moe.dispatch import PrefetchBuffers
from evenkeel_moe.errors import InvalidInput

TABLE_2 = {
    LibraStage.GATE: 0.39,  # "others"
    LibraStage.PREDICT: 0.03,
    LibraStage.DISPATCH: 0.99,
    LibraStage.EXCHANGE_DEMAND: 0.24 + 0.10,
    LibraStage.SHARD: 0.57,
    LibraStage.RETURN_PLAN: 0.09,
    LibraStage.LOCAL: 2.77,
    LibraStage.PLAN: 0.26,
    LibraStage.REMOTE: 4.55,
    LibraStage.COMBINE: 1.33,
}


def end_of(tasks, seconds=TABLE_2):
    return max(span.end_s for span in timeline(tasks, seconds))


def test_a_layer_takes_what_the_table_says():
    layer = layer_tasks(0, 2)
    assert end_of(layer) == pytest.approx(9.07)


def test_everything_about_remote_tokens_hides_behind_the_local_stage():
    spans = timeline(layer_tasks(0, 2), TABLE_2)
    at = {span.task.stage: span for span in spans}
    for stage in (
        LibraStage.DISPATCH,
        LibraStage.EXCHANGE_DEMAND,
        LibraStage.SHARD,
        LibraStage.RETURN_PLAN,
    ):
        assert at[stage].end_s <= at[LibraStage.LOCAL].end_s
    assert at[LibraStage.REMOTE].start_s == pytest.approx(at[LibraStage.LOCAL].end_s)
    assert at[LibraStage.PLAN].end_s <= at[LibraStage.REMOTE].end_s
    assert at[LibraStage.SHARD].start_s >= at[LibraStage.LOCAL].start_s


def test_short_local_stages_cannot_hide_it():
    # As the source states for sequences of 1K tokens.
    short = TABLE_2 | {LibraStage.LOCAL: 0.3}
    at = {span.task.stage: span for span in timeline(layer_tasks(0, 2), short)}
    assert at[LibraStage.REMOTE].start_s > at[LibraStage.LOCAL].end_s
    # Sharding on the critical path would cost its full duration.
    assert end_of(layer_tasks(0, 2), short) < 9.07 - 2.77 + 0.3 + 0.99 + 0.34 + 0.57 + 0.09


@pytest.mark.parametrize(
    "stage", [LibraStage.LOCAL, LibraStage.DISPATCH, LibraStage.SHARD, LibraStage.RETURN_PLAN]
)
def test_the_remote_stage_waits_for_tokens_and_for_the_decision(stage):
    at = {span.task.stage: span for span in timeline(layer_tasks(0, 2), TABLE_2 | {stage: 50.0})}
    assert at[LibraStage.REMOTE].start_s >= at[stage].end_s
    assert at[LibraStage.REMOTE].start_s >= 50.0


def test_fetching_the_next_layers_experts_never_delays_when_it_fits_the_remote_stage():
    two = layer_tasks(0, 2) + layer_tasks(1, 2)
    fits, too_slow = TABLE_2 | {LibraStage.PREFETCH: 4.0}, TABLE_2 | {LibraStage.PREFETCH: 9.0}
    assert end_of(two, fits) == pytest.approx(end_of(two, TABLE_2))
    assert end_of(two, too_slow) > end_of(two, fits)
    at = {(s.task.layer, s.task.stage): s for s in timeline(two, too_slow)}
    assert at[1, LibraStage.LOCAL].start_s >= at[0, LibraStage.PREFETCH].end_s


def test_tasks_of_one_resource_never_overlap_and_wait_for_what_they_need():
    tasks = layer_tasks(0, 3) + layer_tasks(1, 3) + layer_tasks(2, 3)
    spans = timeline(tasks, TABLE_2 | {LibraStage.PREFETCH: 3.0})
    ended = {(s.task.layer, s.task.stage): s.end_s for s in spans}
    for resource in Resource:
        row = sorted((s.start_s, s.end_s) for s in spans if s.task.resource is resource)
        assert all(first[1] <= second[0] for first, second in zip(row, row[1:], strict=False))
    for span in spans:
        assert all(ended[wanted] <= span.start_s for wanted in span.task.after)


def test_the_last_layer_plans_nothing_and_bad_schedules_are_refused():
    stages = {task.stage for task in layer_tasks(1, 2)}
    assert not stages & {LibraStage.PREDICT, LibraStage.PLAN, LibraStage.PREFETCH}
    with pytest.raises(InvalidInput):
        layer_tasks(2, 2)
    with pytest.raises(InvalidInput, match="not issued"):
        timeline((Task(0, LibraStage.REMOTE, Resource.COMPUTE, ((0, LibraStage.LOCAL),)),), {})
    with pytest.raises(InvalidInput, match="negative"):
        timeline((), {LibraStage.LOCAL: -1.0})


def test_transient_experts_live_in_the_buffer_of_their_parity():
    buffers = PrefetchBuffers(2)
    assert buffers.begin(0) == ()
    assert buffers.prefetch(1, (5, 7)) == 1
    with pytest.raises(InvalidInput, match="overwrite"):
        buffers.prefetch(2, (1,))
    buffers.end(0)
    assert buffers.begin(1) == (5, 7)
    assert buffers.prefetch(2, (3,)) == 0
    buffers.end(1)
    assert buffers.begin(2) == (3,)
    buffers.end(2)
    assert buffers.begin(3) == ()
    with pytest.raises(InvalidInput, match="2 places"):
        buffers.prefetch(4, (1, 2, 3))
