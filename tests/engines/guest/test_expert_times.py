"""The seconds of the experts: which steps have them, and when they are unknown."""

from types import SimpleNamespace

import pytest
import structlog
import torch

from evenkeel_moe.engines.guest.expert_times import (
    ExpertCall,
    ExpertTimes,
    HostClock,
    StreamClock,
    make_clock,
)
from evenkeel_moe.engines.guest.guards import Unsupported


class Layer:
    """A layer whose experts take some nanoseconds of a clock that stands still otherwise."""

    def __init__(self, device: "Device", takes: int):
        self.device, self.takes = device, takes

    def experts(self, tokens: int, *, error: Exception | None = None) -> int:
        self.device.now += self.takes * tokens
        if error is not None:
            raise error
        return 2 * tokens


class Device:
    """A clock, and layers that it times."""

    def __init__(self, takes=(100, 50, 7)):
        self.now = 10**18
        self.records = False
        self.recorded: list[tuple[torch.Tensor, int]] = []
        self.layers = [Layer(self, one) for one in takes]

    def calls(self):
        return [ExpertCall(layer, "experts") for layer in self.layers]

    def add_time(self, total: torch.Tensor, sign: int) -> None:
        """Do what the kernel does, or record it for the replays."""
        if self.records:
            self.recorded.append((total, sign))
            return
        total[0] += sign * self.now
        total[1] += int(sign > 0)

    def forward(self, tokens: int = 3) -> None:
        for layer in self.layers:
            self.now += 1000  # Attention, dispatch and combine.
            assert layer.experts(tokens) == 2 * tokens


def host(device: Device) -> HostClock:
    return HostClock(lambda: device.now)


def on_device(device: Device) -> StreamClock:
    return StreamClock(torch.device("cpu"), device.add_time, lambda: device.records)


@pytest.fixture(params=[host, on_device])
def times(request):
    def make(device: Device, every: int = 1) -> ExpertTimes:
        return ExpertTimes(every, request.param(device), device.calls)

    return make


def step(times, device, number, *, passes=1, tokens=3):
    """Run one step as a guest does; return its seconds."""
    times.begin_step(number)
    for _ in range(passes):
        device.forward(tokens)
    return times.end_step()


def test_one_step_in_so_many_has_the_seconds_of_its_experts_alone(times):
    device = Device()
    measured = times(device, every=4)
    seconds = [step(measured, device, number, tokens=number + 1) for number in range(9)]
    # Read at the end, as counts that arrive some steps later.
    found = [one() for one in seconds]
    want = [157e-9 * (number + 1) if number % 4 == 0 else None for number in range(9)]
    assert found == [pytest.approx(one) if one else None for one in want]


def test_two_micro_batches_are_added_up(times):
    device = Device()
    measured = times(device)
    assert step(measured, device, 0, passes=2)() == pytest.approx(2 * 471e-9)


def test_what_runs_between_two_steps_is_not_measured(times):
    device = Device()
    measured = times(device)
    step(measured, device, 0)
    device.forward(1000)
    assert step(measured, device, 1)() == pytest.approx(471e-9)


def test_what_is_forgotten_is_no_part_of_the_next_step(times):
    device = Device()
    measured = times(device)
    step(measured, device, 0)
    measured.begin_step(1)
    device.forward(1000)
    measured.forget()
    assert step(measured, device, 2)() == pytest.approx(471e-9)


def test_a_step_in_which_a_layer_was_not_measured_is_unknown(times):
    device = Device()
    measured = times(device)
    measured.begin_step(0)
    device.layers[0].experts(3)
    assert measured.end_step()() is None
    measured.begin_step(1)
    assert measured.end_step()() is None, "nothing ran"
    assert step(measured, device, 2)() == pytest.approx(471e-9)


def test_experts_that_a_reload_made_anew_are_found_again(times):
    device = Device()
    measured = times(device)
    device.layers[1] = Layer(device, 60)
    with structlog.testing.capture_logs() as said:
        assert step(measured, device, 0)() is None
    assert [(line["event"], line["intervals"], line["layers"]) for line in said] == [
        ("seconds_lost", 2, 3)
    ]
    for number in (1, 2):
        assert step(measured, device, number)() == pytest.approx(501e-9), "none is wrapped twice"


def test_a_loss_of_every_step_does_not_fill_the_log(times):
    device = Device()
    measured = times(device)
    with structlog.testing.capture_logs() as said:
        for number in range(100):
            measured.begin_step(number)
            assert measured.end_step()() is None
    assert [line["times"] for line in said] == [1, 2, 4, 8, 16, 32, 64]


def test_an_error_of_the_engine_passes_and_leaves_the_clock_right(times):
    device = Device()
    measured = times(device)
    measured.begin_step(0)
    with pytest.raises(ValueError, match="out of tokens"):
        device.layers[0].experts(1, error=ValueError("out of tokens"))
    measured.end_step()
    assert step(measured, device, 1)() == pytest.approx(471e-9)


@pytest.mark.parametrize("fails_at", ["begin", "end", "take"])
def test_an_error_of_the_clock_costs_the_seconds_and_no_step(fails_at):
    device = Device()
    clock = host(device)

    def fails():
        raise RuntimeError("an illegal address")

    measured = ExpertTimes(1, clock, device.calls)
    setattr(clock, fails_at, fails)
    with structlog.testing.capture_logs() as said:
        assert [step(measured, device, number)() for number in range(3)] == [None] * 3
    assert [line["event"] for line in said] == ["seconds_failed"]


def test_steps_that_are_not_measured_run_the_engines_own_functions():
    device = Device()
    own = Layer(device, 50).experts
    vars(device.layers[1])["experts"] = own
    measured = ExpertTimes(4, host(device), device.calls)
    assert step(measured, device, 0)() == pytest.approx(471e-9)
    for number in range(1, 4):
        measured.begin_step(number)
        assert "experts" not in vars(device.layers[0])
        assert device.layers[1].experts is own
        measured.end_step()
    device.layers[0].takes = 200
    assert step(measured, device, 4)() == pytest.approx(771e-9)


def test_what_an_engine_replaces_in_a_measured_step_stays():
    device = Device()
    measured = ExpertTimes(1, host(device), device.calls)
    measured.begin_step(0)
    device.forward()
    new = vars(device.layers[0])["experts"] = Layer(device, 9).experts
    measured.end_step()
    assert device.layers[0].experts is new
    assert step(measured, device, 1)() == pytest.approx((9 + 50 + 7) * 3e-9)


@pytest.mark.parametrize("measured_before", [False, True])
def test_a_model_that_is_traced_has_no_seconds_and_is_not_compiled_again(measured_before):
    layers = [SimpleNamespace(experts=torch.sin), SimpleNamespace(experts=torch.cos)]
    measured = ExpertTimes(
        2, HostClock(), lambda: [ExpertCall(layer, "experts") for layer in layers]
    )
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    def forward(tokens):
        for layer in layers:
            tokens = layer.experts(tokens)
        return tokens

    compiled = torch.compile(forward, backend=keep, fullgraph=True)
    tokens = torch.ones(3)
    if measured_before:
        measured.begin_step(0)
        forward(tokens)
        assert measured.end_step()() is not None
        compiled(tokens)
        graphs.clear()
    seconds = []
    for number in range(8):
        measured.begin_step(number)
        assert torch.equal(compiled(tokens), torch.cos(torch.sin(tokens)))
        seconds.append(measured.end_step()())
    assert seconds == [None] * 8
    assert len(graphs) == 1


def test_replayed_graphs_have_seconds_in_every_step():
    """What a graph records runs at each replay, where no Python runs."""
    device = Device()
    measured = ExpertTimes(1000, on_device(device), device.calls)
    device.records = True
    device.forward()
    device.records = False

    def replay():
        for (total, sign), layer in zip(device.recorded, [0, 0, 1, 1, 2, 2], strict=True):
            device.now += device.layers[layer].takes * 3 if sign > 0 else 1000
            device.add_time(total, sign)

    found = []
    for number in range(1, 4):
        measured.begin_step(number)
        replay()
        found.append(measured.end_step())
    assert [one() for one in found] == [pytest.approx(471e-9)] * 3
    measured.begin_step(4)
    with structlog.testing.capture_logs() as said:
        assert measured.end_step()() is None, "this step was not replayed, and not its turn"
    assert said == []


def test_without_layers_there_is_no_measurement():
    device = Device(takes=())
    with pytest.raises(Unsupported):
        ExpertTimes(1, host(device), device.calls)


@pytest.mark.parametrize("kind", ["meta", "xpu"])
def test_a_device_whose_clock_cannot_be_read_is_named(kind):
    device: torch.device = SimpleNamespace(type=kind)  # type: ignore[assignment]
    with pytest.raises(Unsupported, match=kind):
        make_clock(device)


def test_the_clock_of_the_host_runs():
    clock = make_clock(torch.device("cpu"))
    clock.begin()
    clock.end()
    total = clock.take()()
    assert (total.nanoseconds > 0, total.intervals) == (True, 1)
    assert clock.take()().intervals == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_clock_of_a_cuda_device_agrees_with_its_events_in_graphs_and_outside():
    device = torch.device("cuda")
    weights = torch.randn(4096, 4096, device=device)
    layer = SimpleNamespace(experts=lambda: weights @ weights)
    measured = ExpertTimes(1, make_clock(device), lambda: [ExpertCall(layer, "experts")])
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

    def run():
        begin.record()
        layer.experts()
        end.record()

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for number, one in enumerate((run, graph.replay) * 3):
        measured.begin_step(number)
        one()
        seconds = measured.end_step()
        torch.cuda.synchronize()
        by_events = begin.elapsed_time(end) * 1e-3
        assert seconds() == pytest.approx(by_events, rel=0.1, abs=2e-5)
