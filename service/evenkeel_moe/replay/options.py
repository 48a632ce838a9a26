"""The options of `evenkeel offline` and `evenkeel replay`, as flags and a file give them.

A key of the file of `--config` is the name of a field. The command line has the same names, with
hyphens, for the options that are given most often.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats.reading import naming, read_text
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.planning.problem.survival import Survive
from evenkeel_moe.yaml_text import parse_yaml

_Count = Annotated[int, Field(ge=1)]
_Bytes = Annotated[int, Field(ge=0)]
_WINDOW = "Steps on which a policy plans. Default: 100; in `replay plan` the whole recording."


class _Options(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ReadingOptions(_Options):
    """How a recording is read."""

    first_moe_layer: int | None = None
    """Hidden layers before the first MoE layer. Default: as in the file; SGLang: the first row that
    counted."""
    start: str | None = None
    """Which start of an engine to read: the first 8 digits of its files. Default: the newest."""
    accept: tuple[str, ...] = ()
    """Findings that become notes."""


class FleetOptions(_Options):
    """The fleet."""

    ranks: _Count = 8
    """EP ranks."""
    slots: int | None = None
    """Slots of one layer over all ranks. Default: one redundant slot per rank."""
    nodes: _Count = 1
    """Nodes, each with consecutive ranks."""
    expert_groups: _Count = 1
    """Routing groups of the model (DeepSeek)."""
    bytes_per_expert: _Bytes = 3 * 7168 * 2048
    """Bytes of one expert; default: DeepSeek-V3 in FP8."""
    rank_speeds: tuple[float, ...] | None = None
    """Relative speed of every rank, for example [1, 1, 1, 0.88]. Default: all equal."""
    shared_experts: Annotated[float, Field(ge=0)] | None = None
    """Weights of a layer's shared experts over those of one routed expert. They count where time is
    known, and under waterfill dispatch."""
    pooled: bool = False
    """Slots are pooled over layers; `slots` is then the average of a layer."""


class KvOptions(_Options):
    """The KV cache, against which replicas are weighed."""

    kv_bytes_per_token: _Count | None = None
    """Bytes of one token in the KV cache of a rank, over all layers."""
    kv_free_bytes: _Bytes | None = None
    """Bytes of the KV cache of a rank beside the fleet's slots, without sequences."""
    tokens_per_sequence: _Count | None = None
    """Tokens that a sequence holds in the KV cache."""
    moe_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """MoE time / step time, for the estimate of goodput. Default: unknown."""


class CostKind(StrEnum):
    """The cost models that a replay can be asked for."""

    TOKENS = "tokens"
    CURVE = "curve"
    ROOFLINE = "roofline"


class CostOptions(_Options):
    """How the time of a rank follows from its tokens."""

    cost: CostKind = CostKind.TOKENS
    """Cost model: tokens; curve, a profile of seconds; or roofline, the longer of reading weights
    and computing tokens."""
    device: str | None = None
    """Device of the ranks, such as h100, h200, b200, a100 or mi300x."""
    weight_format: str | None = None
    """Number type of the weights: bf16, fp16, fp8, int8, fp4 or int4. Default: fp8."""
    read_tokens: Annotated[float, Field(ge=0)] | None = None
    """Tokens that take as long to compute as one expert takes to read, in place of a device."""
    curve: Path | None = None
    """File with a device's profile, as `evenkeel profile` writes it."""


class PlanningOptions(_Options):
    """How policies plan."""

    dispatch: DispatchModel = DispatchModel.EVEN
    """How the engine splits tokens over replicas: even, nearest, optimal, waterfill or fewest."""
    copy_price: Annotated[float, Field(ge=0)] = 0.0
    """Time that a copy must save per step, as a share of the time of a perfectly split layer; keel
    uses the higher of it and its own price."""
    cross_node_factor: Annotated[float, Field(ge=1)] = 1.0
    """Price of a copy from another node, relative to one inside a node."""
    max_evaluations: _Count | None = None
    """Most candidates that the search for a plan evaluates. Default: the policy's own limit."""
    seed: _Bytes = 0
    """Seed of policies that use random numbers."""
    allow_duplicates: bool = False
    """Let a rank hold an expert twice, as the engines' planners do."""
    fill_slots: bool = False
    """Fill the slots that a policy leaves empty, as SGLang needs it."""
    survive: Survive = Survive.NONE
    """Failure that keel's plans survive: rank, node or none."""
    craft_replicas: str | float | None = None
    """How many replicas craft uses: memory, knee, per_replica_gain, or a number
    (docs/policies.md)."""
    free_bytes: _Bytes | None = None
    """Bytes of one rank that craft's replicas may use, over all layers. Default: what the slots
    hold."""


class ReplayOptions(PlanningOptions, CostOptions, FleetOptions, ReadingOptions):
    """The options of every command that plans on a recording."""


class FileOptions(ReplayOptions):
    """The options of the commands that plan one placement and write it to a file."""

    policy: str = "keel"
    """Name of a policy."""
    num_hidden_layers: _Count | None = None
    """Rows of an sglang file. Default: as in the recording, else up to the last MoE layer."""


class _HeldOutOptions(_Options):
    held_out: _Bytes | None = None
    """Newest steps to judge on. Default: a sixth of the steps, at least 16."""


class _CurrentOptions(_Options):
    current: Path | None = None
    """File with the present placement, in any format, to keep copies few."""


class CompareOptions(KvOptions, ReplayOptions):
    """The options of `evenkeel replay compare`."""

    policies: str | None = None
    """Names, separated by commas. Default: all policies."""
    window: _Count = Field(default=100, description=_WINDOW)
    horizon: _Count = 50
    """Steps on which a plan is scored before the next replan."""
    verdict: bool = False
    """Also compare POLICY+verdict, whose plans are adopted only if held-out steps show that they
    pay."""
    baselines: bool = True
    """Also compare the baselines initial, once and ewma (docs/policies.md)."""


class SinglePlanOptions(_CurrentOptions, KvOptions, FileOptions):
    """The options of `evenkeel replay plan`."""

    window: _Count | None = Field(default=None, description=_WINDOW)


class OfflineOptions(_HeldOutOptions, FileOptions):
    """The options of `evenkeel offline`."""

    compare_with: Path | None = None
    """File with the placement to compare with, in any format. Default: that at the start of
    the engine."""
    replica_probabilities: Path | None = None
    """Also write the share of tokens of each slot to this *.pt file (docs/formats.md). For sglang;
    needs torch."""


class CapacityOptions(_HeldOutOptions, _CurrentOptions, KvOptions, ReplayOptions):
    """The options of `evenkeel capacity` on a recording."""

    policy: str = "keel"
    """Name of a policy."""
    to_ranks: tuple[_Count, ...] = ()
    """Numbers of ranks to compare. Default: up to eight, in whole nodes if there are several."""
    to_slots: _Count | None = None
    """Slots of a layer over all ranks. Default: at least as many replicas as now."""
    retire: tuple[_Bytes, ...] = ()
    """Ranks to retire, instead of `to_ranks`."""
    whole_nodes: bool = False
    """Only all ranks of a node retire or join."""
    multi_node_bytes: _Bytes = 0
    """Memory of a rank that only a group on several nodes needs, as for its transport."""


_Model = TypeVar("_Model", bound=_Options)


def read_options(model: type[_Model], file: Path | None, **flags: Any) -> _Model:
    """Return the options that a file and the command line give; the command line wins.

    Args:
        model: the options of the command.
        file: YAML with values by field; None has none.
        flags: values by field; None was not given.

    Raises:
        InvalidInput: the file cannot be read, or a key or a value is not valid. It is named.
    """
    told = {} if file is None else _read(file)
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    try:
        return model.model_validate({**told, **given})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        at = f"--{key.replace('_', '-')}" if key in given else f"{file}: {key}"
        if first["type"] == "extra_forbidden":
            raise InvalidInput(f"{at}: there is no such option") from None
        value = first["input"]
        raise InvalidInput(f"{at}: {value!r:.80}: {first['msg']}") from None


def _read(file: Path) -> dict[str, Any]:
    with naming(file):
        text = read_text(file)
    told = parse_yaml(text, f"{file}:")
    if not isinstance(told, dict | None):
        raise InvalidInput(f"{file} does not hold keys with values")
    return {str(key): value for key, value in (told or {}).items()}
