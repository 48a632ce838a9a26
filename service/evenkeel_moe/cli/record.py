"""`evenkeel record`: write what an engine routes to a trace, without a controller.

Heavy imports wait until a command runs, because `--help` must not load numpy.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.console import say
from evenkeel_moe.cli.exits import CliError, Exit, needing
from evenkeel_moe.cli.replay import check_writable, doubt_lines, print_notes
from evenkeel_moe.cli.replay_options import AcceptOption, FirstLayerOption, StartOption
from evenkeel_moe.errors import InvalidInput

app = CommandGroup(help="Record the expert loads of an engine in a file.")
_POLL_S = 0.5
_DUMP_S = 120.0
"""Seconds in which SGLang must have written its dump."""
_FLUSH_S = 30.0
"""Seconds in which the plugin must have written the steps of the recording."""
_INFO_ROUTES = ("server_info", "get_server_info")
"""Where SGLang says how it was started: newer and older versions."""
_MODE_FLAG = "--expert-distribution-recorder-mode"
_MODES = ("stat", "stat_approx")
"""Modes of the recorder that write one dump, with the counts of all ranks."""
_OTHER_USERS = {
    "enable_eplb": "--enable-eplb",
    "enable_expert_distribution_metrics": "--enable-expert-distribution-metrics",
    "expert_balancedness_report_mode": "--expert-balancedness-report-mode",
}
"""Arguments of the server that start the recorder for a use of its own, and their flags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions:
    """The options that both engines share.

    Args:
        seconds: Seconds to record.
        out: Trace to write, *.npz.
    """

    accept: AcceptOption = None
    first_moe_layer: FirstLayerOption = None
    seconds: Annotated[float, typer.Option("--seconds", "-s", min=0.1)] = 60.0
    out: Path = Path("trace.npz")


@app.command()
def sglang(
    recording: RecordOptions,
    address: str = "http://127.0.0.1:30000",
    dumps: Path = Path("/tmp"),
    api_key: Annotated[str | None, typer.Option(envvar="SGLANG_API_KEY")] = None,
) -> None:
    """Record the expert loads of an SGLang server with its own recorder.

    Start the server with --expert-distribution-recorder-mode stat, without --enable-eplb. The
    command asks how it was started before it records. It needs torch.

    Args:
        address: Address of the SGLang server.
        dumps: Folder into which the server writes its dumps, as seen from here: its
            SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR.
        api_key: Key of the server, if it asks for one. Default: none.
    """
    import httpx

    with needing("rank", "a dump of SGLang"):  # At once, not after the recording.
        import torch  # noqa: F401

    _check_out(recording.out)
    if not dumps.is_dir():
        raise InvalidInput(f"{dumps}: there is no such folder")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        client = httpx.Client(base_url=address, headers=headers, timeout=_DUMP_S)
    except httpx.InvalidURL as error:
        raise CliError(f"{address} is not a valid URL: {error}") from error
    with client:
        _check_started(_started(client), client.base_url)
        _answer(client, "POST", "start_expert_distribution_record")
        try:
            _wait(recording.seconds)
        finally:
            _answer(client, "POST", "stop_expert_distribution_record")
        before = set(dumps.glob("*.pt"))
        _answer(client, "POST", "dump_expert_distribution_record")
    path = _await_dump(dumps, before)
    if path is None:
        raise CliError(
            f"the server wrote no *.pt file to {dumps} within {_DUMP_S:g} s: --dumps must be its"
            " SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",
            Exit.UNAVAILABLE,
        )
    _write(path, recording)


@app.command()
def vllm(
    recording: RecordOptions,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    start: StartOption = None,
) -> None:
    """Record the expert loads of a vLLM server that runs with the plugin.

    Args:
        folder: Folder into which the ranks record: EVENKEEL_RANK__RECORD of the server.
    """
    from evenkeel_moe.formats.recording import is_recording, newest_step

    _check_out(recording.out)
    if not is_recording(folder):
        raise InvalidInput(f"{folder}: holds no file of a recording; is the server running?")
    before = newest_step(folder, start)
    _wait(recording.seconds)
    after = newest_step(folder, start)
    # The plugin writes a file every few seconds: the last steps of the time arrive a little later.
    _poll(_FLUSH_S, lambda: newest_step(folder, start) != after or None)
    newest, _ = newest_step(folder, start)
    # Each start of the engine numbers its steps anew.
    first = before[1] + 1 if newest == before[0] else 0
    _write(folder, recording, newest, from_step=first)


def _check_out(out: Path) -> None:
    check_writable(out)
    if out.suffix != ".npz":
        raise InvalidInput(f"{out}: a trace is written as *.npz")


def _started(client: Any) -> dict[str, Any]:
    """Return how the server says that it was started; empty if it does not say.

    Raises:
        CliError: the server cannot be reached, or refuses.
    """
    for route in _INFO_ROUTES:
        answer = _answer(client, "GET", route)
        with suppress(ValueError, RecursionError):
            if answer is not None and isinstance(info := answer.json(), dict):
                return info
    return {}


def _check_started(info: dict[str, Any], url: Any) -> None:
    """Refuse a server that was not started for a recording; it may end if it is asked to record.

    Args:
        info: the arguments of the server by name, among other keys. A key that is missing may have
            any value.
        url: of the server.

    Raises:
        CliError: the server cannot be recorded, or does not say that it can.
    """
    mode, stages = info.get("expert_distribution_recorder_mode", ...), info.get("pp_size")
    known = {
        "expert_distribution_recorder_mode": mode is None or isinstance(mode, str),
        "enable_eplb": isinstance(info.get("enable_eplb"), bool),
        "pp_size": type(stages) is int and stages >= 1,
    }
    start = f"start it with {_MODE_FLAG} stat"
    faults = []
    if not all(known.values()):
        unknown = ", ".join(key for key, is_known in known.items() if not is_known)
        faults.append(
            f"it does not say {unknown} at /{' or /'.join(_INFO_ROUTES)}: --address must be the"
            " address of SGLang itself, of a version with this recorder"
        )
    elif mode is None:
        faults.append(f"it has no recorder, and a request to record can end it: {start}")
    elif mode not in _MODES:
        faults.append(
            f"its recorder has the mode {mode!r:.40}, which writes a dump for each rank: {start}"
        )
    used = [flag for key, flag in _OTHER_USERS.items() if info.get(key) not in (None, False, "off")]
    if used:
        faults.append(
            f"it uses its recorder itself, and would stop with it: start it without"
            f" {' and '.join(used)}"
        )
    if known["pp_size"] and stages != 1:
        faults.append(
            f"it has {stages} pipeline stages, each with a buffer of its own, whose steps do not"
            " match: start it with --pp-size 1, or record with our plugin (docs/offline.md)"
        )
    if faults:
        detail = f"the server at {url} cannot be recorded: {'; '.join(faults)}"
        raise CliError(detail, Exit.REFUSED)


def _answer(client: Any, method: str, route: str) -> Any:
    """Return the answer of a route of SGLang; None if there is nothing to get at it.

    Raises:
        CliError: the server cannot be reached, or refuses.
    """
    import httpx

    try:
        answer = client.request(method, f"/{route}")
    except httpx.HTTPError as error:
        detail = f"no SGLang server at {client.base_url}: {error}"
        raise CliError(detail, Exit.UNAVAILABLE) from error
    if method == "GET" and answer.status_code == 404:
        return None
    if answer.status_code in (401, 403):
        raise CliError(f"/{route} needs a key: give --api-key", Exit.UNAUTHORIZED)
    if not answer.is_success:
        text = " ".join(answer.text.split())[:200]
        raise CliError(f"/{route} answered {answer.status_code}: {text}", Exit.REFUSED)
    return answer


def _wait(seconds: float) -> None:
    """Wait, and say every 10 seconds how long it still takes."""
    end = time.monotonic() + seconds
    say(f"recording for {seconds:g} s", err=True)
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 10.0))
        if end - time.monotonic() > 1.0:
            say(f"  {end - time.monotonic():.0f} s left", err=True)


_Found = TypeVar("_Found")


def _poll(limit_s: float, find: Callable[[], _Found | None]) -> _Found | None:
    """Return the first answer that is not None; None after the limit."""
    end = time.monotonic() + limit_s
    while True:
        found = find()
        if found is not None or time.monotonic() >= end:
            return found
        time.sleep(_POLL_S)


def _await_dump(dumps: Path, before: set[Path]) -> Path | None:
    """Return the new dump once it is whole; SGLang writes dumps in place.

    At the limit it is returned as it is; None if there is none.

    Raises:
        CliError: there are several new dumps.
    """
    from evenkeel_moe.formats.array_files import load_torch

    new: list[Path] = []

    def find() -> Path | None:
        new[:] = sorted(set(dumps.glob("*.pt")) - before, key=lambda path: path.name)
        if len(new) > 1:
            names = ", ".join(path.name for path in new[:4])
            detail = f"{dumps} has {len(new)} new dumps, which may be of several servers: {names}"
            raise CliError(detail, Exit.REFUSED)
        for path in new:
            with suppress(InvalidInput):
                load_torch(path)
                return path
        return None

    return _poll(_DUMP_S, find) or next(iter(new), None)


def _write(
    path: Path, recording: RecordOptions, start: str | None = None, *, from_step: int = 0
) -> None:
    """Read a dump or the folder of a recording, and write the trace."""
    from evenkeel_moe.formats import check_trace, read_trace, write_trace
    from evenkeel_moe.formats.recording import read_recording

    first, accept, out = recording.first_moe_layer, recording.accept or (), recording.out
    if path.is_dir():
        trace = check_trace(read_recording(path, first, from_step=from_step, start=start), accept)
    else:
        trace = read_trace(path, first_moe_layer=first, accept=accept)
    print_notes(trace.findings)
    for line in doubt_lines(trace.findings):
        say(line, err=True)
    write_trace(out, trace)
    say(
        f"{out}: {trace.num_steps} steps, {trace.num_layers} MoE layers, {trace.num_experts}"
        f" experts. Next: evenkeel offline {out} --ranks R --slots S -f FORMAT --out FILE"
    )
