from evenkeel_moe.engines.reference.fleet_watch import PATIENCE_S, FleetWatch


def link(rank, detail=""):
    return {"kind": "link", "rank": rank, "connected": not detail, "detail": detail}


def test_the_newest_step_of_any_rank_is_known():
    watch = FleetWatch(print)
    assert watch.step is None
    watch.feed([{"kind": "step", "rank": rank, "step": step} for rank, step in ((0, 0), (1, 3))], 0)
    watch.feed([{"kind": "step", "rank": 0, "step": 2}], 1)
    assert watch.step == 3


def test_a_fleet_without_a_controller_is_told_of_after_some_seconds_and_once():
    told: list[str] = []
    watch = FleetWatch(told.append)
    watch.feed([link(0, "nobody"), link(1, "nobody")], 100)
    watch.feed([], 99.9 + PATIENCE_S)
    assert not told
    watch.feed([], 100 + PATIENCE_S)
    watch.feed([], 200)
    assert told == ["nobody; the ranks serve without a controller and keep trying"]
    watch.feed([link(1, "in use")], 201)  # It changed, and the rank has long been unconnected.
    assert told[1:] == ["in use; the ranks serve without a controller and keep trying"]
    watch.feed([link(0)], 202)
    assert len(told) == 2
    watch.feed([link(1)], 203)
    assert told[2:] == ["the ranks are connected to a controller"]
    watch.feed([link(0, "nobody")], 204)
    watch.feed([link(0)], 205)
    assert len(told) == 3
