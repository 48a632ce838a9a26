"""The engine-independent parts of a plugin: registration, and the guests of a process."""

import importlib
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import structlog

from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.engines.guest.collective_start import protect_engine
from evenkeel_moe.engines.guest.engine_guest import EngineGuest
from evenkeel_moe.engines.guest.settings import GuestSettings, load_guest_settings
from evenkeel_moe.errors import EvenkeelError

_log = structlog.get_logger(__name__)
_GuestT = TypeVar("_GuestT", bound=EngineGuest)
_T = TypeVar("_T")


class EnginePlugin(Generic[_GuestT]):
    """The guests of one engine process.

    Args:
        settings: the plugin's settings.
        version: the engine's version.
        make_link: makes the link of a rank; None connects to the controllers over gRPC.
    """

    def __init__(
        self, settings: GuestSettings, version: str, make_link: Callable[[], RankLink] | None = None
    ) -> None:
        self.settings = settings
        self.guests: WeakKeyDictionary[Any, _GuestT] = WeakKeyDictionary()
        """One guest per balancer object of the engine."""
        self._version = version
        self._make_link = make_link

    def _notify(self, hook: str, tell: Callable[[_GuestT], object]) -> None:
        """Call every guest from inside an engine function; see `protect_engine`."""
        for guest in list(self.guests.values()):
            with protect_engine(guest, hook):
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
