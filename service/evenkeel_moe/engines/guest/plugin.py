"""The engine-independent parts of a plugin: registration, and the guest of a process."""

import importlib
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.engines.guest.engine_guest import EngineGuest
from evenkeel_moe.engines.guest.settings import GuestSettings, load_guest_settings
from evenkeel_moe.errors import EvenkeelError

_log = structlog.get_logger(__name__)
_GuestT = TypeVar("_GuestT", bound=EngineGuest)
_T = TypeVar("_T")


class EnginePlugin(Generic[_GuestT]):
    """The guest of an engine process, which has one balancer at a time.

    Args:
        settings: the plugin's settings.
        version: the engine's version.
        make_link: makes the link of a rank; None connects to the controllers over gRPC.
    """

    def __init__(
        self, settings: GuestSettings, version: str, make_link: Callable[[], RankLink] | None = None
    ) -> None:
        self.settings = settings
        self.guest: _GuestT | None = None
        """The guest of the engine's newest balancer object; it is None until there is one."""
        self._balancer: object = None
        self._version = version
        self._make_link = make_link

    def find_guest(self, balancer: object) -> _GuestT | None:
        """Return the guest of a balancer object of the engine, if it is the newest one."""
        return self.guest if balancer is self._balancer else None

    def _take(self, guest: _GuestT, balancer: object) -> _GuestT:
        """Take the guest of a new balancer; the engine of the one before has ended."""
        self._notify("the end of an engine", lambda former: former.close())
        self.guest, self._balancer = guest, balancer
        return guest

    def _notify(self, hook: str, tell: Callable[[_GuestT], object]) -> None:
        """Call the guest from inside an engine function; see `EngineGuest.protect_engine`."""
        if (guest := self.guest) is not None:
            with guest.protect_engine(hook):
                tell(guest)

    def _report_installed(self, engine: str) -> None:
        mode = self.settings.mode
        _log.info("guest_installed", engine=engine, version=self._version, mode=mode)


def register_guest(
    engine: str, version_module: str, install: Callable[[GuestSettings, str], None]
) -> None:
    """Install a plugin if the settings name a controller or a folder to record into.

    Never raises: a refusal is logged, and the engine starts without the plugin.

    Args:
        engine: the engine's name in logs.
        version_module: the module whose `__version__` is the engine's version.
        install: called with the settings and that version.
    """
    try:
        settings = load_guest_settings()
        if not settings.is_on:
            _log.debug("guest_off", detail="EVENKEEL_RANK__CONTROLLERS and __RECORD are empty")
            return
        install(settings, str(importlib.import_module(version_module).__version__))
    except EvenkeelError as error:
        _log.error("guest_refused", engine=engine, reason=error.reason, detail=str(error))
    except Exception:  # A plugin must never keep the engine from starting.
        _log.exception("guest_refused", engine=engine)


def timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """Return the result of a call and its duration in seconds."""
    began = time.perf_counter()
    answer = work()
    return answer, time.perf_counter() - began
