"""What an engine's plugin loader calls: on only when asked for, and never in the engine's way."""

import importlib
from collections.abc import Callable

import structlog

from evenkeel_moe.engines.guest.settings import GuestSettings, load_guest_settings
from evenkeel_moe.errors import EvenkeelError

__all__ = ["register_guest"]

_log = structlog.get_logger(__name__)


def register_guest(
    engine: str, version_module: str, install: Callable[[GuestSettings, str], None]
) -> None:
    """Install a plugin if a controller is named. Never raises: a refusal is said, and the engine starts without it.

    Args:
        engine: its name in logs.
        version_module: module whose `__version__` is the engine's.
        install: given the settings and that version.
    """
    try:
        settings = load_guest_settings()
        if not settings.addresses:
            _log.debug("guest_off", detail="EVENKEEL_RANK__CONTROLLERS is empty")
            return
        install(settings, str(importlib.import_module(version_module).__version__))
    except EvenkeelError as error:
        _log.error("guest_refused", engine=engine, reason=error.reason, detail=str(error))
    except Exception:  # a plugin must never keep the engine from starting
        _log.exception("guest_refused", engine=engine)
