"""Wraps the functions by which one worker of vLLM replaces weights.

They are wrapped on the objects, because the classes of workers and models differ by device and by
model. `load_weights` of the model is among them: extensions of RL frameworks call it directly, in
buckets, and tell no end.
"""

import functools
from collections.abc import Callable
from typing import Any

from evenkeel_moe.engines.guest.collective_start import protect_engine
from evenkeel_moe.engines.vllm.guest import VllmGuest

_WATCHED = "_evenkeel_watched"


def watch_model(model: Any, guest: VllmGuest) -> None:
    """Tell the guest before the target model loads weights."""
    _wrap(model, "load_weights", lambda *_, **__: guest.before_weights())


def watch_worker(worker: Any, guest: VllmGuest) -> None:
    """Tell the guest of every reload, weight update and sleep of a worker; once per worker."""
    if getattr(worker, _WATCHED, False):
        return
    setattr(worker, _WATCHED, True)

    def begins(*_: Any, **__: Any) -> None:
        guest.before_weights()

    def ended(*_: Any, **__: Any) -> None:
        with protect_engine(guest, "a reload of weights"):
            guest.weights_loaded()

    def sleeps(level: int = 1, *_: Any, **__: Any) -> None:
        guest.before_sleep(level)

    def discards(tags: Any, *_: Any, **__: Any) -> None:
        if "weights" in tags:
            guest.before_weights(discard=True)

    def woke(tags: Any = None, *_: Any, **__: Any) -> None:
        if tags is None or "weights" in tags:
            guest.woke()

    for name in ("reload_weights", "reset_weights"):
        _wrap(worker, name, begins, ended)
    _wrap(worker, "start_weight_update", begins)
    _wrap(worker, "finish_weight_update", None, ended)
    _wrap(worker, "sleep", sleeps)
    _wrap(worker, "discard", discards)
    _wrap(worker, "wake_up", None, woke)


def _wrap(
    owner: Any,
    name: str,
    before: Callable[..., None] | None,
    after: Callable[..., None] | None = None,
) -> None:
    """Call `before`, which may refuse by an error, and `after`, also after an error."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            if after is not None:
                after(*args, **kwargs)

    setattr(owner, name, wrapped)
