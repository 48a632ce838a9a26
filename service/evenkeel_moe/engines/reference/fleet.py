"""Runs a fleet to its end, for an operator who may stop or resize it."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.fleet_report import FleetReport
from evenkeel_moe.engines.reference.fleet_watch import FleetWatch
from evenkeel_moe.engines.reference.lines import ends_of_lines, read_new_lines
from evenkeel_moe.engines.reference.rank_process import StartRank, start_rank_process
from evenkeel_moe.engines.reference.resize_request import ResizeRequests
from evenkeel_moe.engines.reference.supervisor import Supervisor

_POLL_S = 0.05
_POLLS_PER_PROGRESS = 20


def run_fleet(
    config: RankConfig,
    tell: Callable[[str], None] | None = None,
    progress: Callable[[int | None], None] | None = None,
    start_rank: StartRank = start_rank_process,
) -> FleetReport:
    """Run the ranks to their end; on the main thread, SIGINT and SIGTERM stop them cleanly.

    Requests of `ask_to_resize` are carried out.

    Args:
        config: as in `Supervisor`.
        tell: as in `Supervisor`.
        progress: takes about once a second the newest step; None before the first.
        start_rank: as in `Supervisor`.
    """
    supervisor = Supervisor(config, tell=tell, start_rank=start_rank)
    watch = FleetWatch(tell or (lambda words: None))

    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        supervisor.request_stop()

    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        read = ends_of_lines(config.folder)
        supervisor.start()
        requests = ResizeRequests(config.folder)
        polls = 0
        while (report := supervisor.poll()) is None:
            requests.serve(supervisor)
            if polls % _POLLS_PER_PROGRESS == 0:
                watch.feed(read_new_lines(config.folder, read), time.monotonic())
                if progress is not None:
                    progress(watch.step)
            polls += 1
            time.sleep(_POLL_S)
        requests.serve(supervisor)
        return report
    finally:
        supervisor.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
