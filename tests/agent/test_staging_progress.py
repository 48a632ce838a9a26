"""Progress of staging reaches its receivers at the ends of each wave, and now and then between."""

from evenkeel_moe.agent.staging_progress import StagingReports
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import WaveKey
from tests.agent.ranks import GENERATION

ONE, TWO = (WaveKey(GENERATION, PlanId("plan"), index, 1) for index in range(2))


def test_the_first_and_the_last_progress_of_each_wave_are_passed_on_and_some_between():
    times, heard, also = iter([0.0, 0.125, 0.2, 0.3, 0.375, 0.375, 0.5, 0.6, 0.7]), [], []
    reports = StagingReports(
        lambda: next(times), lambda *one: heard.append(one), None, lambda *one: also.append(one)
    )
    for done in (1, 2, 3, 4, 9):
        reports.report(ONE, done, 9)
    for done in (1, 2, 3, 9):
        reports.report(TWO, done, 9)
    assert heard == [
        *((ONE, done, 9) for done in (1, 3, 9)),
        *((TWO, done, 9) for done in (1, 3, 9)),
    ]
    assert also == heard


def test_the_same_progress_is_passed_on_once_however_many_batches_follow():
    """A rank that receives nothing would otherwise send one message for each batch of the wave."""
    heard = []
    reports = StagingReports(lambda: 0.0, lambda *one: heard.append(one))
    for wave in (ONE, TWO):
        for _ in range(3):
            reports.report(wave, 0, 0)
    assert heard == [(ONE, 0, 0), (TWO, 0, 0)]
