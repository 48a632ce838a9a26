"""Measures the seconds of a rank's own routed experts, step by step; no step waits for it.

The function by which the engine computes the experts of a layer is wrapped on the layer's object:
it runs after the dispatch and before the combine. Where it begins, the time is subtracted from a
total, and where it ends, the time is added. The total of a step is read once the step has ended.

On a CPU the clock of the thread counts, which stands still while other processes have its core. The
functions are wrapped only while a step is measured, so other steps run the engine's own. On a CUDA
device a kernel of one thread adds the device's own clock to a total on the device, in the
stream that computes the experts, and the total comes to the host like the step's counts. A CUDA
graph records the kernel with the rest of the step, so replayed steps are measured too. Events could
not be read there: the next replay records the same events again, and an engine starts it before the
step before has ended.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor

from evenkeel_moe.engines.guest.guards import Unsupported

_log = structlog.get_logger(__name__)
_MOST_UNREAD = 32
"""Totals on their way to the host; `StepCounts` waits for the oldest of nine steps."""
_WRAPPED = "_evenkeel_expert_times"
_ABSENT = object()
Seconds = Callable[[], float | None]
"""Returns the seconds of a step once its counts have arrived; None if they are not known."""


def unknown() -> None:
    """The `Seconds` of a step that was not measured."""


class Total(NamedTuple):
    """The sum of some intervals."""

    nanoseconds: int
    intervals: int


class HostClock:
    """A clock of the host, for experts whose function returns when they are computed.

    Args:
        now: returns nanoseconds.
    """

    is_recorded: Callable[[], bool] | None = None
    """Returns True while a graph is recorded, whose replays begin and end the same intervals; None
    if the device has no graphs."""

    def __init__(self, now: Callable[[], int] = time.thread_time_ns) -> None:
        self._now = now
        self._nanoseconds = self._intervals = self._began = 0

    def begin(self) -> None:
        """Begin an interval."""
        self._began = self._now()

    def end(self) -> None:
        """End an interval."""
        self._nanoseconds += self._now() - self._began
        self._intervals += 1

    def take(self) -> Callable[[], Total]:
        """Set the total to zero; return a function that returns what it was."""
        total = Total(self._nanoseconds, self._intervals)
        self._nanoseconds = self._intervals = 0
        return lambda: total


class StreamClock:
    """The clock of a device, added up there in the order of its stream.

    Args:
        device: computes the experts.
        add_time: see `time_kernel.add_time`.
        is_recorded: returns True while the current stream is captured.
    """

    def __init__(
        self,
        device: torch.device,
        add_time: Callable[[Tensor, int], None],
        is_recorded: Callable[[], bool],
    ) -> None:
        self._add_time = add_time
        self.is_recorded: Callable[[], bool] | None = is_recorded
        self._total = torch.zeros(2, dtype=torch.int64, device=device)
        pinned = device.type != "cpu"
        self._arrived = torch.zeros((_MOST_UNREAD, 2), dtype=torch.int64, pin_memory=pinned)
        self._taken = 0
        # The first calls compile the kernel, which is not possible while a graph is recorded.
        self.begin()
        self.end()
        self._total.zero_()

    def begin(self) -> None:
        """Begin an interval."""
        self._add_time(self._total, -1)

    def end(self) -> None:
        """End an interval."""
        self._add_time(self._total, 1)

    def take(self) -> Callable[[], Total]:
        """Set the total to zero; return a function that returns what it was.

        It may be called once all that was queued on the device before has ended. At most 32 totals
        may be unread.
        """
        arrived = self._arrived[self._taken % _MOST_UNREAD]
        self._taken += 1
        arrived.copy_(self._total, non_blocking=True)
        self._total.zero_()
        return lambda: Total(*arrived.tolist())


ExpertClock = HostClock | StreamClock
"""Adds up intervals on the device that computes the experts."""


def make_clock(device: torch.device) -> ExpertClock:
    """Return the clock of the device that computes the experts.

    Raises:
        Unsupported: the device has none that this module can read.
    """
    if device.type == "cpu":
        return HostClock()
    if device.type != "cuda" or torch.version.hip is not None:
        raise Unsupported(f"the clock of a device of type {device.type} cannot be read on it")
    if find_spec("triton") is None:
        raise Unsupported("Triton is not installed, which reads the clock of a CUDA device")
    from evenkeel_moe.engines.guest.time_kernel import add_time

    with torch.cuda.device(device):
        return StreamClock(device, add_time, torch.cuda.is_current_stream_capturing)


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """The function by which an engine computes the experts of one layer."""

    owner: Any
    """The object on which the engine looks the function up at every call."""
    name: str


class ExpertTimes:
    """Measures one step in so many, and every step that is replayed from a graph.

    Args:
        every: number of steps, of which one is measured; the same steps on all ranks.
        clock: of the device.
        find_calls: returns the call of each layer; it may raise Unsupported.

    Raises:
        Unsupported: `find_calls` raised it.
    """

    def __init__(
        self, every: int, clock: ExpertClock, find_calls: Callable[[], Sequence[ExpertCall]]
    ) -> None:
        self._every = every
        self._clock = clock
        self._find_calls = find_calls
        self._is_on = False
        self._stays_wrapped = clock.is_recorded is not None
        self._in_graphs = False
        self._has_failed = False
        self._lost = 0
        self._calls = self._found_calls()
        self._wrap()

    def begin_step(self, step: int) -> None:
        """Measure this step if its turn has come. What runs between steps is never measured."""
        if step % self._every or self._has_failed:
            return
        try:
            self._wrap()
        except Exception:
            self._fail()
        else:
            self._is_on = True

    def end_step(self) -> Seconds:
        """Return the seconds of the step that has just been queued on the current stream."""
        was_on, self._is_on = self._is_on, False
        if self._has_failed or not (was_on or self._in_graphs):
            return unknown
        try:
            read = self._clock.take()
            # Without intervals the model is compiled, and would be again after a change.
            if not self._stays_wrapped and read().intervals:
                self._unwrap()
        except Exception:
            self._fail()
            return unknown
        return lambda: self._seconds(read(), expected=was_on)

    def forget(self) -> None:
        """Leave out what was measured since the last step: its memory was discarded."""
        self._is_on = True
        self.end_step()

    def _seconds(self, total: Total, *, expected: bool) -> float | None:
        """Return the seconds of a step, if all layers were measured equally often.

        Args:
            total: of the step.
            expected: False if nothing was measured unless the step was replayed from a graph.
        """
        whole = total.intervals and total.intervals % len(self._calls) == 0
        if whole and total.nanoseconds > 0:
            return total.nanoseconds * 1e-9
        if expected:
            self._lose(total)
        return None

    def _lose(self, total: Total) -> None:
        """Look the calls up again: a reload of weights may have made other objects.

        Done and logged the 1st, 2nd, 4th, ... time.
        """
        self._lost += 1
        if self._lost & (self._lost - 1):
            return
        _log.warning(
            "seconds_lost", intervals=total.intervals, layers=len(self._calls), times=self._lost
        )
        try:
            self._calls = self._found_calls()
            if self._is_on or self._stays_wrapped:
                self._wrap()
        except Unsupported as error:
            _log.warning("seconds_not_measured", detail=str(error))
        except Exception:
            self._fail()

    def _found_calls(self) -> Sequence[ExpertCall]:
        calls = self._find_calls()
        if not calls:
            raise Unsupported("the engine has no layer with routed experts")
        return calls

    def _wrap(self) -> None:
        """Wrap all calls that are not wrapped."""
        for call in self._calls:
            own = vars(call.owner).get(call.name, _ABSENT)
            if not self._is_wrapper(own):
                wrapper = self._measured(getattr(call.owner, call.name))
                setattr(wrapper, _WRAPPED, (self, own))
                setattr(call.owner, call.name, wrapper)

    def _unwrap(self) -> None:
        """Leave the engine's objects as they were, but for what the engine replaced itself."""
        for call in self._calls:
            wrapper = vars(call.owner).get(call.name)
            if not self._is_wrapper(wrapper):
                continue
            _, own = getattr(wrapper, _WRAPPED)
            if own is _ABSENT:
                delattr(call.owner, call.name)
            else:
                setattr(call.owner, call.name, own)

    def _is_wrapper(self, function: object) -> bool:
        return getattr(function, _WRAPPED, (None,))[0] is self

    def _measured(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # After a layer the caches hold weights, so each line here that is not needed costs a miss.
        clock, is_recorded = self._clock, self._clock.is_recorded
        is_compiling = torch.compiler.is_compiling

        def measured(*args: Any, **kwargs: Any) -> Any:
            # What a compiler traces cannot read a clock.
            if is_compiling():
                return original(*args, **kwargs)
            if is_recorded is not None and is_recorded():
                self._in_graphs = True
            elif not self._is_on:
                return original(*args, **kwargs)
            try:
                clock.begin()
            except Exception:
                self._fail()
            try:
                return original(*args, **kwargs)
            finally:
                try:
                    clock.end()
                except Exception:
                    self._fail()

        return measured

    def _fail(self) -> None:
        """Measure no more after an error: it costs the seconds, never a step."""
        self._is_on = False
        if not self._has_failed:
            self._has_failed = True
            _log.exception("seconds_failed")
