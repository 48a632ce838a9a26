"""Requests that copy windows or write out maps take turns, or many would fill the memory."""

import asyncio
import threading
import time
import weakref

import pytest

from evenkeel_moe.api import convert, deployments
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from tests.api.fakes import SHAPE, FakeOperations, FakeView, make_status, make_window


class CountedView(FakeView):
    """Gives a new window each time, as the controller does, and counts those that are held."""

    def __init__(self):
        super().__init__(make_status("demo"), {}, Placement.initial(SHAPE))
        self.held = self.most = self.made = 0

    def window(self, phase):
        window = make_window()
        self.made += 1
        self.held += 1
        self.most = max(self.most, self.held)
        weakref.finalize(window, self._freed)
        return window

    def _freed(self):
        self.held -= 1


@pytest.mark.parametrize("path", ["load", "heatmap"])
async def test_of_many_readers_two_hold_windows_at_a_time(app, reader, path):
    view = CountedView()
    app.state.operations = FakeOperations(view)
    answers = await asyncio.gather(*(reader.get(f"/v1/deployments/demo/{path}") for _ in range(12)))
    assert {answer.status_code for answer in answers} == {200}
    assert view.made == 12 * len(Phase)
    assert view.most <= 2 * len(Phase)


async def test_of_many_readers_two_write_out_the_map_at_a_time(app, reader, monkeypatch):
    view = FakeView(make_status("demo"), {}, Placement.initial(SHAPE))
    app.state.operations = FakeOperations(view)
    busy, counts, write_out = threading.BoundedSemaphore(2), [], convert.placement_json

    def counted(placement, epoch):
        counts.append(busy.acquire(blocking=False))
        time.sleep(0.02)
        try:
            return write_out(placement, epoch)
        finally:
            busy.release()

    monkeypatch.setattr(deployments, "placement_json", counted)
    answers = await asyncio.gather(
        *(reader.get("/v1/deployments/demo/placement") for _ in range(12))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert counts == [True] * 12
