"""Entry point `vllm.general_plugins`: checks what it finds, then wraps a handful of vLLM's functions.

vLLM calls `register` in every process it starts, some of them several times. Nothing happens without
`EVENKEEL_RANK__CONTROLLERS`, and nothing is wrapped unless the version and every signature are known.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import structlog

from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.engines.guest.collective_start import engine_spared
from evenkeel_moe.engines.guest.guards import (
    Unsupported,
    check_fields,
    check_signatures,
    check_version,
)
from evenkeel_moe.engines.guest.registering import register_guest
from evenkeel_moe.engines.guest.settings import GuestMode, GuestSettings
from evenkeel_moe.engines.vllm.guest import VllmGuest, is_draft, timed
from evenkeel_moe.engines.vllm.policy import make_policy

__all__ = ["KNOWN_VERSIONS", "Plugin", "check_engine", "register"]

_log = structlog.get_logger(__name__)

KNOWN_VERSIONS = ("0.33.0",)
_STATE = "vllm.distributed.eplb.eplb_state"
_POLICIES = "vllm.distributed.eplb.policy"
_GROUPS = "vllm.distributed.parallel_state"
_DONE = "_evenkeel_plugin"

_SIGNATURES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "EplbState": {
        "add_model": ("self", "model", "model_config", "model_name"),
        "prepare_forward": ("self", "model_config", "num_unpadded_tokens", "ubatch_slices"),
        "step": ("self", "is_dummy", "is_profile", "log_stats"),
        "_should_record_current_step": ("self", "log_stats"),
        "rearrange": ("self", "is_profile", "rank_mapping", "use_last_expert_load"),
    },
    "": {
        "_move_to_workspace": ("model_state", "ep_rank"),
        "_commit_eplb_maps": ("model_state", "new_physical_to_logical_map"),
        "rearrange_expert_weights_inplace": (
            "old_global_expert_indices",
            "new_global_expert_indices",
            "expert_weights",
            "expert_buffer",
            "ep_group",
            "communicator",
            "is_profile",
            "rank_mapping",
        ),
    },
}
_PLANNER = (
    "cls",
    "weight",
    "num_replicas",
    "num_groups",
    "num_nodes",
    "num_ranks",
    "old_global_expert_indices",
)
_FIELDS = (
    "physical_to_logical_map",
    "expert_load_pass",
    "model",
    "model_name",
    "rebalanced",
    "pending_result",
)


def register() -> None:
    """What vLLM calls. Never raises: a refusal is said, and vLLM starts without Evenkeel."""
    register_guest("vllm", "vllm", lambda settings, version: Plugin(settings, version).install())


def check_engine(version: str, state: ModuleType, policies: ModuleType) -> None:
    """Hold vLLM against what this plugin was written for.

    Raises:
        Unsupported: another version, or a part that looks otherwise.
    """
    check_version("vllm", version, KNOWN_VERSIONS)
    for owner, wanted in _SIGNATURES.items():
        check_signatures(getattr(state, owner) if owner else state, wanted)
    check_fields(state.EplbModelState, _FIELDS)
    known = getattr(policies, "EPLB_POLICIES", None)
    if not isinstance(known, dict) or set(known) != {"default"}:
        raise Unsupported(f"EPLB_POLICIES is {known!r}, not one policy called default")
    check_signatures(known["default"], {"rebalance_experts": _PLANNER})
    if getattr(state, "EPLB_POLICIES", None) is not known:
        raise Unsupported("eplb_state no longer shares EPLB_POLICIES with the policy package")


class Plugin:
    """The wrapped functions and the guests behind them, for one process.

    Args:
        settings: read once.
        version: vLLM's.
        make_link: rank -> link, instead of gRPC.
    """

    def __init__(
        self, settings: GuestSettings, version: str, make_link: Callable[[], RankLink] | None = None
    ) -> None:
        self.settings = settings
        self.guests: WeakKeyDictionary[Any, VllmGuest] = WeakKeyDictionary()
        self._version = version
        self._make_link = make_link
        self._policy: Any = None
        self._groups: Any = None
        self._engine: Any = None

    def install(self) -> None:
        """Check, then wrap; a second call in the same process does nothing.

        Raises:
            Unsupported: nothing was changed.
        """
        state = importlib.import_module(_STATE)
        if getattr(state, _DONE, None) is not None:
            return
        policies = importlib.import_module(_POLICIES)
        check_engine(self._version, state, policies)
        self._groups, self._engine = importlib.import_module(_GROUPS), state
        self._wrap_state(state.EplbState)
        self._wrap_commits(state)
        if self.settings.mode is GuestMode.PLACE:
            self._policy = make_policy(policies.EPLB_POLICIES["default"], self.guests)
            policies.EPLB_POLICIES["default"] = self._policy
        setattr(state, _DONE, self)
        _log.info("guest_installed", engine="vllm", version=self._version, mode=self.settings.mode)

    def _wrap_state(self, owner: Any) -> None:
        add_model, step = owner.add_model, owner.step
        prepare, should_record = owner.prepare_forward, owner._should_record_current_step

        @functools.wraps(add_model)
        def add_model_and_join(
            state: Any, model: Any, model_config: Any, model_name: Any = None
        ) -> None:
            add_model(state, model, model_config, model_name)
            if not is_draft(model_name) and state not in self.guests:
                link = self._make_link() if self._make_link is not None else None
                guest = self.guests[state] = VllmGuest(
                    self.settings, state, self._groups, self._engine, link
                )
                guest.join(state.model_states[model_config.compute_hash()], self._policy)

        @functools.wraps(prepare)
        def prepare_and_note(
            state: Any, model_config: Any, num_unpadded_tokens: int, ubatch_slices: Any = None
        ) -> None:
            prepare(state, model_config, num_unpadded_tokens, ubatch_slices)
            guest = self.guests.get(state)
            if guest is not None:
                guest.prepared(num_unpadded_tokens)

        @functools.wraps(step)
        def count_and_step(
            state: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
        ) -> None:
            guest = self.guests.get(state)
            if guest is not None and not is_profile:
                with engine_spared(guest, "EplbState.step"):
                    guest.before_step(dummy=is_dummy)
            step(state, is_dummy, is_profile, log_stats)

        @functools.wraps(should_record)
        def record_always(state: Any, log_stats: bool = False) -> bool:
            guest = self.guests.get(state)
            return (guest is not None and guest.agent is not None) or bool(
                should_record(state, log_stats)
            )

        rearrange = owner.rearrange

        @functools.wraps(rearrange)
        def tell_and_rearrange(
            state: Any, is_profile: bool = False, *args: Any, **kwargs: Any
        ) -> Any:
            guest = self.guests.get(state)
            if guest is not None and not is_profile:
                guest.rearranging()
            return rearrange(state, is_profile, *args, **kwargs)

        owner.add_model, owner.prepare_forward = add_model_and_join, prepare_and_note
        owner.rearrange = tell_and_rearrange
        owner.step, owner._should_record_current_step = count_and_step, record_always

    def _wrap_commits(self, module: Any) -> None:
        move, commit = module._move_to_workspace, module._commit_eplb_maps

        @functools.wraps(move)
        def move_and_tell(model_state: Any, ep_rank: int) -> None:
            layer = int(model_state.pending_result.layer_idx)
            seconds = timed(move, model_state=model_state, ep_rank=ep_rank)
            for guest in list(self.guests.values()):
                with engine_spared(guest, "_move_to_workspace"):
                    guest.layer_committed(model_state, layer, seconds)

        @functools.wraps(commit)
        def commit_and_tell(model_state: Any, new_physical_to_logical_map: Any) -> None:
            seconds = timed(commit, model_state, new_physical_to_logical_map)
            for guest in list(self.guests.values()):
                with engine_spared(guest, "_commit_eplb_maps"):
                    guest.all_committed(model_state, seconds)

        module._move_to_workspace, module._commit_eplb_maps = move_and_tell, commit_and_tell
