"""Entry point `vllm.general_plugins`: checks vLLM, then wraps a few of its functions.

vLLM calls `register` in every process it starts, in some of them several times. Nothing happens
without `EVENKEEL_RANK__CONTROLLERS`, and nothing is wrapped unless the version and every signature
are known.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.engines.guest.guards import check_version, compare_parts, refuse_differences
from evenkeel_moe.engines.guest.plugin import EnginePlugin, register_guest, timed
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.engines.vllm import hooks
from evenkeel_moe.engines.vllm.guest import VllmGuest
from evenkeel_moe.engines.vllm.hooks import (
    ELASTIC,
    ELASTIC_PARTS,
    GROUPS,
    POLICIES,
    STATE,
    WORKERS,
    worker_functions,
)
from evenkeel_moe.engines.vllm.kv_cache import read_kv_cache
from evenkeel_moe.engines.vllm.loaders import watch_model, watch_worker
from evenkeel_moe.engines.vllm.policy import make_policy
from evenkeel_moe.engines.vllm.state import is_draft

_INSTALLED = "_evenkeel_plugin"


def register() -> None:
    """Install the plugin; called by vLLM. Never raises: a refusal is logged."""
    register_guest(
        "vllm", "vllm", lambda settings, version: VllmPlugin(settings, version).install()
    )


class VllmPlugin(EnginePlugin[VllmGuest]):
    """The wrapped functions of vLLM, and the guest of the process's `EplbState`."""

    def __init__(
        self, settings: GuestSettings, version: str, make_link: Callable[[], RankLink] | None = None
    ) -> None:
        super().__init__(settings, version, make_link)
        self._policy: Any = None
        self._groups: Any = None
        self._engine: Any = None

    def install(self) -> None:
        """Check vLLM, then wrap it; a second call in the same process does nothing.

        Raises:
            Unsupported: nothing was changed.
        """
        state = importlib.import_module(STATE)
        if getattr(state, _INSTALLED, None) is not None:
            return
        check_version("vllm", self._version, hooks.KNOWN_VERSIONS)
        refuse_differences(hooks.compare(self._version))
        policies = importlib.import_module(POLICIES)
        self._groups, self._engine = importlib.import_module(GROUPS), state
        self._wrap_start(state.EplbState)
        self._wrap_step(state.EplbState)
        self._wrap_commits(state)
        self._wrap_workers(importlib.import_module(WORKERS).WorkerWrapperBase)
        if self.settings.places:
            self._policy = make_policy(policies.EPLB_POLICIES["default"], lambda: self.guest)
            policies.EPLB_POLICIES["default"] = self._policy
        setattr(state, _INSTALLED, self)
        self._report_installed("vllm")

    def _wrap_start(self, owner: Any) -> None:
        add_model, should_record = owner.add_model, owner._should_record_current_step

        @functools.wraps(add_model)
        def add_model_and_join(
            state: Any, model: Any, model_config: Any, *name: Any, **named: Any
        ) -> None:
            add_model(state, model, model_config, *name, **named)
            guest = self._guest_of(state)
            with guest.protect_engine("EplbState.add_model"):
                if not is_draft(model_config, *name, **named) and not guest.joined:
                    model_state = state.model_states[model_config.compute_hash()]
                    guest.join(model_state, self._policy, self._wrap_resize)
                    watch_model(model, guest)

        @functools.wraps(should_record)
        def record_always(state: Any, log_stats: bool = False) -> bool:
            guest = self.find_guest(state)
            return (guest is not None and guest.agent is not None) or bool(
                should_record(state, log_stats)
            )

        owner.add_model, owner._should_record_current_step = add_model_and_join, record_always

    def _wrap_step(self, owner: Any) -> None:
        prepare, step, rearrange = owner.prepare_forward, owner.step, owner.rearrange

        @functools.wraps(prepare)
        def prepare_and_note(
            state: Any, model_config: Any, num_unpadded_tokens: int, ubatch_slices: Any = None
        ) -> None:
            prepare(state, model_config, num_unpadded_tokens, ubatch_slices)
            guest = self.find_guest(state)
            if guest is not None:
                guest.prepared(model_config, num_unpadded_tokens)

        @functools.wraps(step)
        def count_and_step(
            state: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
        ) -> None:
            guest = self.find_guest(state)
            if guest is not None and not is_profile:
                with guest.protect_engine("EplbState.step"):
                    guest.before_step(dummy=is_dummy)
            step(state, is_dummy, is_profile, log_stats)

        @functools.wraps(rearrange)
        def note_and_rearrange(
            state: Any,
            is_profile: bool = False,
            rank_mapping: Any = None,
            use_last_expert_load: bool = False,
        ) -> Any:
            guest = self.find_guest(state)
            if guest is not None and not is_profile:
                if guest.between_groups and rank_mapping is None and guest.grew():
                    return None
                guest.rearranging()
            answer = rearrange(state, is_profile, rank_mapping, use_last_expert_load)
            if guest is not None and not is_profile:
                with guest.protect_engine("EplbState.rearrange"):
                    guest.rearranged()
            return answer

        owner.prepare_forward, owner.step = prepare_and_note, count_and_step
        owner.rearrange = note_and_rearrange

    def _guest_of(self, state: Any) -> VllmGuest:
        """Return the guest of an `EplbState`; the first call makes it."""
        return self.find_guest(state) or self._take(
            VllmGuest(self.settings, state, self._groups, self._engine, self._make_link), state
        )

    def _wrap_resize(self) -> None:
        """Learn that vLLM changes the number of ranks; a further call does nothing.

        Raises:
            Unsupported: vLLM does it in another way than the plugin knows; nothing was changed.
        """
        owner = importlib.import_module(ELASTIC).ElasticEPScalingExecutor
        if hasattr(owner, _INSTALLED):
            return
        refuse_differences(compare_parts(ELASTIC_PARTS))
        grow, shrink = owner.commit_scale_up, owner.commit_scale_down

        @functools.wraps(grow)
        def leave_and_grow(executor: Any, is_existing_worker: bool) -> None:
            guest = self.find_guest(executor.worker.model_runner.eplb_state)
            if guest is not None and is_existing_worker:
                with guest.protect_engine("commit_scale_up"):
                    guest.leave()
            grow(executor, is_existing_worker)

        @functools.wraps(shrink)
        def leave_and_shrink(executor: Any, new_dp_size: int, removing: bool) -> None:
            guest = self.find_guest(executor.worker.model_runner.eplb_state)
            if guest is not None:
                with guest.protect_engine("commit_scale_down"):
                    guest.leave()
            shrink(executor, new_dp_size, removing)
            if guest is not None and not removing:
                guest.rejoin()

        owner.commit_scale_up, owner.commit_scale_down = leave_and_grow, leave_and_shrink
        setattr(owner, _INSTALLED, self)

    def _wrap_workers(self, owner: Any) -> None:
        """Learn of each worker and the size of its KV cache; a process may have no worker."""
        allocate = owner.initialize_from_config

        @functools.wraps(allocate)
        def allocate_and_tell(wrapper: Any, kv_cache_configs: Any) -> Any:
            answer = allocate(wrapper, kv_cache_configs)

            def tell(guest: VllmGuest) -> None:
                if getattr(wrapper.worker.model_runner, "eplb_state", None) is guest.state:
                    parallel = guest.state.parallel_config
                    guest.kv_cache_allocated(
                        lambda: read_kv_cache(
                            kv_cache_configs[wrapper.global_rank],
                            int(parallel.decode_context_parallel_size),
                        )
                    )
                    functions = worker_functions(self._version, type(wrapper.worker))
                    watch_worker(wrapper.worker, guest, functions)

            self._notify("WorkerWrapperBase.initialize_from_config", tell)
            return answer

        owner.initialize_from_config = allocate_and_tell

    def _wrap_commits(self, module: Any) -> None:
        move, commit = module._move_to_workspace, module._commit_eplb_maps

        @functools.wraps(move)
        def move_and_report(model_state: Any, ep_rank: int) -> None:
            layer = int(model_state.pending_result.layer_idx)
            _, seconds = timed(lambda: move(model_state=model_state, ep_rank=ep_rank))
            self._notify(
                "_move_to_workspace",
                lambda guest: guest.layer_committed(model_state, layer, seconds),
            )

        @functools.wraps(commit)
        def commit_and_report(model_state: Any, new_physical_to_logical_map: Any) -> None:
            _, seconds = timed(lambda: commit(model_state, new_physical_to_logical_map))
            self._notify(
                "_commit_eplb_maps", lambda guest: guest.all_committed(model_state, seconds)
            )

        module._move_to_workspace, module._commit_eplb_maps = move_and_report, commit_and_report
