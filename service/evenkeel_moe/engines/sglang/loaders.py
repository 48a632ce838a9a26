"""Hooks on the functions by which SGLang replaces weights, or gives their memory back.

SGLang's loaders look each expert's slots up in the map in use, so the weights land where the plans
have put their experts. The move under way must end first, and the new weights be registered after.
"""

import importlib
from collections.abc import Callable
from typing import Any

import structlog

from evenkeel_moe.agent.ports import GateFailed
from evenkeel_moe.engines.sglang.guest import SglangGuest
from evenkeel_moe.engines.sglang.hooks import RUNNER_UPDATER, SCHEDULER_UPDATER
from evenkeel_moe.errors import Unavailable

_log = structlog.get_logger(__name__)
_MESSAGES = "sglang.srt.managers.io_struct"
FindGuest = Callable[[Any], SglangGuest | None]
"""Return the guest of an `EPLBManager`, if it has one."""


def watch_loaders(add: Callable[..., None], kinds: Any, find_guest: FindGuest) -> None:
    """Register the hooks.

    Args:
        add: SGLang's `HookRegistry.register`.
        kinds: SGLang's `HookType`.
        find_guest: returns the guest of a manager. A draft model has no manager.
    """

    def of_runner(runner: Any) -> SglangGuest | None:
        manager = getattr(runner, "eplb_manager", None)
        return None if manager is None else find_guest(manager)

    def around_load(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a whole update, which answers (success, message)."""
        guest = of_runner(updater.get_model_runner())
        if (refusal := _try_to_begin(guest)) is not None:
            return False, refusal
        try:
            return original(updater, *args, **kwargs)
        finally:
            _end(guest)

    def around_bucket(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a part of an update, which answers (success, message)."""
        refusal = _try_to_begin(of_runner(updater.get_model_runner()))
        return original(updater, *args, **kwargs) if refusal is None else (False, refusal)

    def around_begin(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        if recv_req.selector == "draft":  # The weights of the target model stay.
            return original(scheduler, recv_req)
        refusal = _try_to_begin(of_runner(scheduler.tp_worker.model_runner))
        if refusal is None:
            return original(scheduler, recv_req)
        answer = importlib.import_module(_MESSAGES).BeginWeightUpdateReqOutput
        return answer(success=False, message=refusal)

    def around_end(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        try:
            return original(scheduler, recv_req)
        finally:
            _end(of_runner(scheduler.tp_worker.model_runner))

    def around_release(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        """The weights return with a reload or from SGLang's backup, so no plan may begin."""
        if not recv_req.tags or "weights" in recv_req.tags:
            _try_to_begin(of_runner(scheduler.tp_worker.model_runner), "release_not_prepared")
        return original(scheduler, recv_req)

    updater, manager = (
        f"{RUNNER_UPDATER}.WeightUpdater",
        f"{SCHEDULER_UPDATER}.SchedulerWeightUpdaterManager",
    )
    add(f"{updater}.update_weights_from_disk", around_load, kinds.AROUND)
    add(f"{updater}.update_weights_from_ipc", around_load, kinds.AROUND)
    add(f"{updater}.update_weights_from_tensor", around_bucket, kinds.AROUND)
    add(f"{updater}.load_weights_from_distributed", around_bucket, kinds.AROUND)
    add(f"{manager}.begin_weight_update", around_begin, kinds.AROUND)
    add(f"{manager}.end_weight_update", around_end, kinds.AROUND)
    add(f"{manager}.release_memory_occupation", around_release, kinds.AROUND)


def _try_to_begin(guest: SglangGuest | None, event: str = "weights_refused") -> str | None:
    """Prepare for other weights; if that is not possible, log it as `event` and return why."""
    if guest is None:
        return None
    try:
        guest.before_weights()
    except GateFailed:
        raise  # The rank must leave at once.
    except Unavailable as error:
        _log.error(event, detail=str(error))
        return f"evenkeel: {error}"
    return None


def _end(guest: SglangGuest | None) -> None:
    if guest is not None:
        with guest.protect_engine("an update of weights"):
            guest.weights_loaded()
