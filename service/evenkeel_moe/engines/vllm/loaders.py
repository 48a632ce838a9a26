"""Wraps the functions by which one worker of vLLM warms up and replaces weights.

They are wrapped on the objects, because the classes of workers and models differ by device and by
model. `load_weights` of the model is among them: extensions of RL frameworks call it directly, in
buckets, and tell no end.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from evenkeel_moe.engines.guest.guards import compare_signatures, refuse_differences
from evenkeel_moe.engines.vllm.guest import VllmGuest
from evenkeel_moe.engines.vllm.hooks import WARM_UP

_WATCHED = "_evenkeel_watched"
_Call = Callable[..., None]


def watch_model(model: Any, guest: VllmGuest) -> None:
    """In place mode, tell the guest before the target model loads weights."""
    if guest.places:
        _wrap(model, "load_weights", lambda *_, **__: guest.before_weights())


def watch_worker(worker: Any, guest: VllmGuest, functions: Mapping[str, str]) -> None:
    """Tell the guest of the warm-up of a worker and, in place mode, of other weights; once each.

    Args:
        worker: vLLM's worker of this rank, whose class depends on the device.
        guest: of the worker's `EplbState`.
        functions: see `hooks.worker_functions`.

    Raises:
        Unsupported: the worker lacks one of them, or it takes other parameters; nothing is wrapped.
    """
    if getattr(worker, _WATCHED, False):
        return
    refuse_differences(compare_signatures(type(worker), functions))
    setattr(worker, _WATCHED, True)
    guest.worker_watched = True

    def warms_up(*_: Any, **__: Any) -> None:
        guest.warm_up_began()

    def warm(*_: Any, **__: Any) -> None:
        with guest.protect_engine(WARM_UP):
            guest.warm_up_ended()

    def begins(*_: Any, **__: Any) -> None:
        guest.before_weights()

    def ended(*_: Any, **__: Any) -> None:
        with guest.protect_engine("a reload of weights"):
            guest.weights_loaded()

    def sleeps(level: int = 1, *_: Any, **__: Any) -> None:
        guest.before_sleep(level)

    def discards(tags: Any, *_: Any, **__: Any) -> None:
        if "weights" in tags:
            guest.before_weights(discard=True)

    def woke(tags: Any = None, *_: Any, **__: Any) -> None:
        if tags is None or "weights" in tags:
            guest.woke()

    around: dict[str, tuple[_Call | None, _Call | None]] = {
        WARM_UP: (warms_up, warm),
        "reload_weights": (begins, ended),
        "reset_weights": (begins, ended),
        "start_weight_update": (begins, None),
        "finish_weight_update": (None, ended),
        "sleep": (sleeps, None),
        "discard": (discards, None),
        "wake_up": (None, woke),
    }
    for name in functions:
        if guest.places or name == WARM_UP:
            _wrap(worker, name, *around[name])


def _wrap(owner: Any, name: str, before: _Call | None, after: _Call | None = None) -> None:
    """Call `before`, which may refuse by an error, and `after`, also after an error."""
    original = getattr(owner, name)

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
