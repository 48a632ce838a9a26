"""Runs the demo: starts its parts, watches them, checks the results, and stops the parts."""

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.text import Text

from evenkeel_moe.engines.demo.controller import DemoController
from evenkeel_moe.engines.demo.options import (
    PACE_S_PER_REPLICA,
    PACE_S_PER_TOKEN,
    SLOW_FACTOR,
    SLOW_RANK,
    DemoOptions,
)
from evenkeel_moe.engines.demo.processes import StopFlag, stop_flag
from evenkeel_moe.engines.demo.resize import REQUESTS, ResizeDemo
from evenkeel_moe.engines.demo.summary import Summary, decision_lines, summarise, summary_lines
from evenkeel_moe.engines.demo.view import plain_line, render
from evenkeel_moe.engines.demo.watch import Watch
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.fleet_report import FleetReport
from evenkeel_moe.engines.reference.lines import read_new_lines
from evenkeel_moe.engines.reference.supervisor import Supervisor
from evenkeel_moe.errors import InvalidInput, Unavailable

_POLL_S = 0.25
_PLAIN_S = 2.0
"""Seconds between two lines of the plain view."""
_DEPLOYMENT = "demo"


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo to its end, and stop everything it started.

    Returns:
        0 if every check passed, 1 if not, 128 + n if signal n stopped the demo. With `console`
        a signal is the usual end: 0.
    """
    with stop_flag() as stop, ExitStack() as stack:
        folder = _folder(options, stack)
        starting = f"starting a controller and {options.ranks} ranks in {folder}"
        console.print(starting, highlight=False)
        controller = DemoController(options, folder)
        stack.callback(controller.stop)
        if not controller.wait_ready(stop):
            return _interrupted(stop, console) or _no_controller(controller, console)
        controller.wait_planner(stop)
        hint = status_command(controller.rest_url, controller.token_file)
        console.print(Text(f"to inspect it while it runs: {hint}", "dim"), soft_wrap=True)
        supervisor = Supervisor(_rank_config(options, folder, controller), max_restarts=0)
        stack.callback(supervisor.stop)
        supervisor.start()
        if options.console:
            return _serve_console(console, controller, supervisor, stop)
        if options.resize:
            try:
                passed = ResizeDemo(console, controller, supervisor, stop).run()
            except Unavailable as error:
                if stop:
                    return _interrupted(stop, console)
                console.print(Text(str(error), "red"), soft_wrap=True)
                passed = False
            console.print(Text(_verdict(passed), style="bold"))
            return 0 if passed else 1
        watch, report = _watch(options, console, controller, supervisor, stop)
        if stop:
            return _interrupted(stop, console)
        plans = list(watch.plans.values())
        summary = summarise(watch.fleet, plans, options, costs=watch.costs)
        if not controller.running:
            return _no_controller(controller, console)
        console.print()
        for line in decision_lines(_decisions(controller)):
            console.print(Text(line), soft_wrap=True)
        return _conclude(options, console, summary, report)


def _folder(options: DemoOptions, stack: ExitStack) -> Path:
    if options.folder is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenkeel-demo-")))
    if options.folder.exists() and any(options.folder.iterdir()):
        raise InvalidInput(f"{options.folder} is not empty: the lines of two runs would be mixed")
    options.folder.mkdir(parents=True, exist_ok=True)
    return options.folder.resolve()


def _rank_config(options: DemoOptions, folder: Path, controller: DemoController) -> RankConfig:
    slow: dict[str, Any] = {}
    if options.slow:
        slow = {
            "pace_s_per_token": PACE_S_PER_TOKEN,
            "pace_s_per_replica": PACE_S_PER_REPLICA,
            "slow_rank": SLOW_RANK,
            "slow_factor": SLOW_FACTOR,
            "slow_from": options.slow_from,
            "slow_until": options.slow_until,
            "tell_cost": options.told,
            "report_seconds": not options.told,
        }
    return RankConfig(
        run_folder=str(folder / "ranks"),
        num_ranks=options.ranks,
        nodes=options.node_of_rank,
        dispatch=options.dispatch,
        deployment=_DEPLOYMENT,
        controllers=(controller.grpc_address,),
        steps=0 if options.console or options.resize else options.steps,
        shift_at=options.shift_at,
        shift_back=options.console,
        min_step_s=options.step_s,
        fault=options.fault,
        **slow,
        **(REQUESTS if options.resize else {}),
    ).with_simulated_kv_cache()


def status_command(rest_url: str, token_file: Path) -> str:
    """Return a command that shows the demo, also for a shell in which `evenkeel` is not found."""
    installed = Path(sys.prefix, "bin", "evenkeel")
    program = "evenkeel" if shutil.which("evenkeel") else shlex.quote(str(installed))
    file = shlex.quote(str(token_file.absolute()))
    return f"{program} status {_DEPLOYMENT} --address {rest_url} --token-file {file}"


def _serve_console(
    console: Console, controller: DemoController, supervisor: Supervisor, stop: StopFlag
) -> int:
    """Print the console's link and serve until a signal; return 1 if a part ended before."""
    token = controller.token_file.read_text(encoding="utf-8").split()[-1]
    console.print(Text(f"console: {controller.rest_url}/", "bold"), soft_wrap=True)
    console.print(Text(f"token:   {token}"), soft_wrap=True)
    console.print(Text("The text changes back and forth. Ctrl-C stops everything.", "dim"))
    while not stop:
        if not controller.running:
            return _no_controller(controller, console)
        report = supervisor.poll()
        if report is not None:
            found = "; ".join(report.problems) or f"exit codes {report.codes}"
            console.print(Text(f"the ranks ended: {found}", style="red"))
            return 1
        stop.wait(_POLL_S)
    console.print("stopped: ending the ranks and the controller")
    return 0


def _watch(
    options: DemoOptions,
    console: Console,
    controller: DemoController,
    supervisor: Supervisor,
    stop: StopFlag,
) -> tuple[Watch, FleetReport | None]:
    """Update the view several times a second until the ranks have ended.

    Returns:
        (what was seen, report); the report is None if the ranks did not end in time.
    """
    watch = Watch(options)
    offsets: dict[Path, int] = {}
    start = time.monotonic()
    next_line_s = 0.0
    with ExitStack() as stack:
        live: Live | None = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        while not stop:
            report = supervisor.poll()
            elapsed_s = time.monotonic() - start
            watch.feed_lines(read_new_lines(supervisor.folder, offsets), elapsed_s)
            lost = not controller.running
            if lost:
                watch.feed_status(None, elapsed_s)
            else:
                _ask(watch, controller, elapsed_s, approve=options.mode == "propose")
            if live is not None:
                live.update(render(watch.snapshot(elapsed_s), console.width), refresh=True)
            elif elapsed_s >= next_line_s or report is not None:
                next_line_s = elapsed_s + _PLAIN_S
                _print_plain(console, watch, elapsed_s)
            if report is not None:
                return watch, report
            if lost or watch.fleet.mismatches or elapsed_s > options.timeout_s:
                supervisor.request_stop()
            if elapsed_s > options.timeout_s + 30:
                break
            stop.wait(_POLL_S)
    return watch, None


def _ask(watch: Watch, controller: DemoController, elapsed_s: float, *, approve: bool) -> None:
    """Fetch the deployment and its plans; without an answer nothing changes."""
    try:
        status = controller.get(f"deployments/{_DEPLOYMENT}")
        watch.feed_status(status, elapsed_s)
        if status is None:
            return
        page = controller.get(f"deployments/{_DEPLOYMENT}/plans")
        watch.feed_plans(page["items"] if page is not None else (), elapsed_s)
        for plan_id in watch.proposals() if approve else ():
            controller.post(f"deployments/{_DEPLOYMENT}/plans/{plan_id}/approve")
    except httpx.HTTPError:
        # The ranks serve without a controller too. The view keeps the last answer, and the checks
        # at the end show what is missing.
        return


def _decisions(controller: DemoController) -> list[Mapping[str, Any]]:
    try:
        page = controller.get(f"deployments/{_DEPLOYMENT}/decisions?page_size=1000")
    except httpx.HTTPError:
        return []
    return list(page["items"]) if page is not None else []


def _print_plain(console: Console, watch: Watch, elapsed_s: float) -> None:
    for event in watch.events[watch.printed_events :]:
        console.print(Text(event), soft_wrap=True)
    watch.printed_events = len(watch.events)
    console.print(Text(plain_line(watch.snapshot(elapsed_s))), soft_wrap=True)


def _conclude(
    options: DemoOptions, console: Console, summary: Summary, report: FleetReport | None
) -> int:
    styles = {"FAIL": "red", "found": "red", "ok": "green"}
    for line in summary_lines(summary):
        console.print(Text(line, style=styles.get(line.split()[0], "")), soft_wrap=True)
    if report is None:
        console.print(Text("found rank: the ranks did not end when asked to", style="red"))
    if options.fault is not None:
        found = any(fault.startswith(options.fault.value) for fault in summary.faults_found)
        verdict = f"the {options.fault.value} fault was " + ("found" if found else "NOT found")
        code = 1
    else:
        passed = summary.passed and report is not None and report.ok
        verdict = _verdict(passed)
        code = 0 if passed else 1
    console.print(Text(verdict, style="bold"))
    return code


def _verdict(passed: bool) -> str:
    return "every check passed" if passed else "NOT every check passed"


def _interrupted(stop: StopFlag, console: Console) -> int:
    if stop.signal_number is None:
        return 0
    console.print("stopped: ending the ranks and the controller")
    return 128 + stop.signal_number


def _no_controller(controller: DemoController, console: Console) -> int:
    message = f"the controller does not serve; the end of its log:\n{controller.log_tail()}"
    console.print(Text(message, "red"))
    return 1
