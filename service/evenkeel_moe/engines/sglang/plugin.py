"""Entry point `sglang.srt.plugins`: checks SGLang, then registers hooks with SGLang's own registry.

SGLang calls `register` once in every process. Nothing happens without `EVENKEEL_RANK__CONTROLLERS`,
and nothing is hooked unless the version and every signature are known.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.engines.guest.guards import check_version, refuse_differences
from evenkeel_moe.engines.guest.plugin import EnginePlugin, register_guest, timed
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.engines.sglang import hooks
from evenkeel_moe.engines.sglang.guest import SglangGuest
from evenkeel_moe.engines.sglang.hooks import ALGORITHMS, MANAGER, PARTS, RECORDER, RUNNER, UPDATER
from evenkeel_moe.engines.sglang.loaders import watch_loaders


def register() -> None:
    """Install the plugin; called by SGLang. Never raises: a refusal is logged."""
    register_guest(
        "sglang",
        "sglang.version",
        lambda settings, version: SglangPlugin(settings, version).install(),
    )


class SglangPlugin(EnginePlugin[SglangGuest]):
    """The hooks, and the guest of the process's `EPLBManager`."""

    def __init__(
        self, settings: GuestSettings, version: str, make_link: Callable[[], RankLink] | None = None
    ) -> None:
        super().__init__(settings, version, make_link)
        self._batch: Any = None
        """The batch of the first forward pass, until its end makes the guest if none is there."""

    def install(self) -> None:
        """Check SGLang, then register the hooks; SGLang applies them once all plugins are loaded.

        Raises:
            Unsupported: nothing was registered.
        """
        check_version("sglang", self._version, hooks.KNOWN_VERSIONS)
        refuse_differences(hooks.compare())
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        kinds, add = registry.HookType, registry.HookRegistry.register
        manager = f"{MANAGER}.EPLBManager"
        recorder = f"{RECORDER}._ExpertDistributionRecorderReal"
        add(f"{RECORDER}._Accumulator.append", self._counted, kinds.BEFORE)
        add(f"{recorder}._on_forward_pass_start", self._pass_began, kinds.BEFORE)
        add(f"{manager}.on_forward_pass_end", self._around_pass_end, kinds.AROUND)
        add(f"{UPDATER}.ExpertLocationUpdater.update", self._around_update, kinds.AROUND)
        add(f"{RUNNER}.ModelRunner.alloc_memory_pool", self._pool_allocated, kinds.AFTER)
        if self.settings.places:
            watch_loaders(add, kinds, self.find_guest)
            add(f"{manager}._entrypoint", self._around_entrypoint, kinds.AROUND)
            add(f"{manager}._check_rebalance_needed", self._around_check, kinds.AROUND)
            add(f"{ALGORITHMS}.rebalance_experts", self._around_planner, kinds.AROUND)
        self._report_installed("sglang")

    def guest_of(self, manager: Any) -> SglangGuest:
        """Return the guest of a manager; the first call makes it."""
        guest = self.find_guest(manager)
        if guest is None:
            guest = self._take(SglangGuest(self.settings, manager, self._make_link), manager)
            guest.pass_began(self._batch)
            self._batch = None
        return guest

    # --- hooks; SGLang passes the original as the first argument of an AROUND hook
    # ------------------

    def _counted(self, *args: Any, **kwargs: Any) -> None:
        """Before `append(self, forward_pass_id, gatherer_key, single_pass_data, outputs)`."""
        key = kwargs.get("gatherer_key", args[2] if len(args) > 2 else None)
        data = kwargs.get("single_pass_data", args[3] if len(args) > 3 else None)
        if key == "primary" and data is not None:
            self._notify(
                "_Accumulator.append", lambda guest: guest.counted(data["global_physical_count"])
            )

    def _pass_began(self, *args: Any, **kwargs: Any) -> None:
        """Before `_on_forward_pass_start(self, forward_batch)`."""
        batch = kwargs.get("forward_batch", args[1] if len(args) > 1 else None)
        self._batch = batch if self.guest is None else None
        self._notify("_on_forward_pass_start", lambda guest: guest.pass_began(batch))

    def _pool_allocated(self, _result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """After `alloc_memory_pool(self, ...)`; the runner of a draft model has no manager."""
        manager = getattr(runner, "eplb_manager", None)
        if manager is None:
            return
        guest = self.guest_of(manager)
        with guest.protect_engine("alloc_memory_pool"):
            guest.pool_allocated(runner)

    def _around_pass_end(self, original: Callable[[Any], None], manager: Any) -> None:
        guest = self.guest_of(manager)
        with guest.protect_engine("on_forward_pass_end"):
            guest.boundary()
        original(manager)
        with guest.protect_engine("on_forward_pass_end"):
            guest.settle()

    def _around_entrypoint(
        self, original: Callable[[Any], Iterator[None]], manager: Any
    ) -> Iterator[None]:
        return self.guest_of(manager).run(lambda: original(manager))

    def _around_check(
        self, original: Callable[..., bool], manager: Any, average_utilization_rate_over_window: Any
    ) -> bool:
        if self.guest_of(manager).has_plan:
            return True
        return original(manager, average_utilization_rate_over_window)

    def _around_planner(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = PARTS[ALGORITHMS][""]["rebalance_experts"].split()
        asked = dict(zip(names, args, strict=False)) | kwargs
        if (guest := self.guest) is not None:
            answer = guest.plan(asked["tokens_per_expert"], int(asked["num_physical_experts"]))
            if answer is not None:
                return answer
        return original(*args, **kwargs)

    def _around_update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer, seconds = timed(lambda: original(*args, **kwargs))
        layers = kwargs.get("update_layer_ids", args[3] if len(args) > 3 else [])
        self._notify(
            "ExpertLocationUpdater.update",
            lambda guest: guest.switched([int(layer) for layer in layers], seconds),
        )
        return answer
