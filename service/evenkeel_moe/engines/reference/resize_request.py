"""A request to resize a running fleet, from another process, by files in the fleet's folder."""

import fcntl
import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenkeel_moe.engines.reference.lines import replace_text
from evenkeel_moe.engines.reference.supervisor import Supervisor
from evenkeel_moe.errors import Conflict, EvenkeelError, InvalidInput, Unavailable

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """The arguments of `Supervisor.resize`, and what names the answer."""

    ranks: int
    retire: tuple[int, ...]
    drain_s: float
    request_id: str


class ResizeRequests:
    """The fleet's side: takes requests that are newer than the fleet, and answers each.

    Args:
        folder: of the run, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _request_file(folder).unlink(missing_ok=True)
        self._under_way: SizeRequest | None = None

    def serve(self, fleet: Supervisor) -> None:
        """Begin the resize of a new request, and answer the one whose resize has ended."""
        if self._under_way is not None and (outcome := fleet.resized) is not None:
            self._answer(self._under_way, ok=not outcome.failed, words=outcome.words)
            self._under_way = None
        if (request := self._take()) is None:
            return
        try:
            fleet.resize(request.ranks, request.retire, drain_s=request.drain_s)
        except EvenkeelError as error:
            self._answer(request, ok=False, words=str(error))
        else:
            self._under_way = request

    def _take(self) -> SizeRequest | None:
        path = _request_file(self._folder)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        path.unlink()
        try:
            values = json.loads(text)
            return SizeRequest(
                int(values["ranks"]),
                tuple(map(int, values["retire"])),
                float(values["drain_s"]),
                uuid.UUID(values["request_id"]).hex,
            )
        except (ValueError, TypeError, KeyError):
            return None  # Whoever wrote it does not know how to read an answer.

    def _answer(self, request: SizeRequest, *, ok: bool, words: str) -> None:
        text = json.dumps({"ok": ok, "words": words})
        replace_text(_answer_file(self._folder, request.request_id), text)


def ask_to_resize(
    folder: Path, ranks: int, retire: Sequence[int], drain_s: float, timeout_s: float
) -> tuple[bool, str]:
    """Ask the fleet that runs in a folder to change its number of ranks, and wait for its answer.

    Args:
        folder: of the run.
        ranks: see `Supervisor.resize`.
        retire: the same.
        drain_s: the same.
        timeout_s: longest wait.

    Returns:
        (True if the new group serves, the answer in one sentence).

    Raises:
        InvalidInput: no fleet runs in the folder.
        Conflict: another request waits.
        Unavailable: the fleet ended, or did not answer in time.
    """
    if not _runs(folder):
        raise InvalidInput(f"no fleet runs in the folder {folder}; --out names the folder of one")
    request = SizeRequest(ranks, tuple(retire), drain_s, uuid.uuid4().hex)
    draft = folder / f"resize-{request.request_id}.tmp"
    draft.write_text(json.dumps(asdict(request)), encoding="utf-8")
    try:
        os.link(draft, _request_file(folder))
    except FileExistsError:
        raise Conflict(f"another request to resize the fleet in {folder} waits") from None
    finally:
        draft.unlink()
    path = _answer_file(folder, request.request_id)
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        runs = _runs(folder)  # before the look for the answer, which may be the last deed
        if path.exists():
            answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
            return bool(answer["ok"]), str(answer["words"])
        if not runs:
            raise Unavailable(f"the fleet in {folder} ended before it answered")
        time.sleep(_POLL_S)
    raise Unavailable(f"the fleet in {folder} did not answer within {timeout_s:g} s")


def _runs(folder: Path) -> bool:
    """Return True if a supervisor holds the lock of the folder."""
    try:
        with (folder / "lock").open("r", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _request_file(folder: Path) -> Path:
    return folder / "resize-request.json"


def _answer_file(folder: Path, request_id: str) -> Path:
    return folder / f"resize-answer-{request_id}.json"
