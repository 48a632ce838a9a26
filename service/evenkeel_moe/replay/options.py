"""Options of `evenkeel replay` that several of its commands share; a docstring is an option's help.

This module imports nothing heavy, because `--help` must not load numpy.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from evenkeel_moe.model.dispatch_model import DispatchModel

TraceOption = Annotated[
    Path,
    typer.Option(
        "--trace",
        "-t",
        help="Recorded loads: *.npz (ours, or experts of tokens), *.pt or a folder (SGLang"
        " recorder), *.jsonl (vLLM statistics), or a folder (TensorRT-LLM statistics).",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingOptions:
    """The options that say how a recording is read."""

    first_moe_layer: Annotated[
        int | None,
        typer.Option(
            show_default="as in the file; SGLang: the first row that ever counted a token"
        ),
    ] = None
    """Number of hidden layers before the first MoE layer."""
    start: Annotated[str | None, typer.Option(show_default="the newest")] = None
    """Of a folder with several starts of an engine, the one to read: the first 8 digits of its
    files."""
    accept: Annotated[list[str] | None, typer.Option(show_default="none")] = None
    """Finding about the recording that you have looked at: it becomes a note. Repeat the option for
    more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOptions:
    """The options that describe the fleet."""

    ranks: Annotated[int, typer.Option(min=1)] = 8
    """Number of EP ranks."""
    slots: Annotated[
        int | None, typer.Option("--slots", show_default="one redundant slot per rank")
    ] = None
    """Slots of one layer over all ranks."""
    nodes: Annotated[int, typer.Option(min=1)] = 1
    """Number of nodes, each with consecutive ranks."""
    expert_groups: Annotated[int, typer.Option(min=1)] = 1
    """Routing groups of the model (DeepSeek)."""
    bytes_per_expert: Annotated[int, typer.Option(min=0)] = 3 * 7168 * 2048
    """Bytes of one expert; default: DeepSeek-V3 in FP8."""
    rank_speeds: Annotated[str | None, typer.Option(show_default="all equal")] = None
    """Relative speed of every rank, for example 1,1,1,0.88."""
    shared_experts: Annotated[float | None, typer.Option(min=0.0, show_default="not counted")] = (
        None
    )
    """Weights of the shared experts of a layer over those of one routed expert; their time counts
    in the cost models curve and roofline, and under waterfill dispatch in tokens too."""
    pooled: Annotated[bool, typer.Option("--pooled")] = False
    """Slots are pooled over layers; --slots is then the average of a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvOptions:
    """The options that describe the KV cache, against which replicas are weighed."""

    kv_bytes_per_token: Annotated[int | None, typer.Option(min=1)] = None
    """Bytes of one token in the KV cache of a rank, over all layers. Shows what each number of
    replicas leaves of the cache."""
    kv_free_bytes: Annotated[int | None, typer.Option(min=0)] = None
    """Bytes of the KV cache of a rank beside the fleet's slots, without sequences."""
    tokens_per_sequence: Annotated[int | None, typer.Option(min=1)] = None
    """Tokens that a sequence holds in the KV cache."""
    moe_share: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, show_default="unknown: the estimate is an interval"),
    ] = None
    """MoE time / step time, for the estimate of goodput."""


class CostKind(StrEnum):
    """The cost models that a replay can be asked for."""

    TOKENS = "tokens"
    CURVE = "curve"
    ROOFLINE = "roofline"


@dataclass(frozen=True, kw_only=True, slots=True)
class CostOptions:
    """The options that say how the time of a rank follows from its tokens."""

    cost: CostKind = CostKind.TOKENS
    """Cost model by which plans are made and scored. tokens: time is proportional to tokens. curve:
    a profile of seconds by tokens and replicas; see the option curve. roofline: a replica takes the
    longer of reading its weights and computing its tokens; see the options device and
    read-tokens."""
    device: str | None = None
    """Device of the ranks, for example h100, h200, b200, a100 or mi300x."""
    weight_format: Annotated[str | None, typer.Option(show_default="fp8")] = None
    """Number type of the weights: bf16, fp16, fp8, int8, fp4 or int4."""
    read_tokens: Annotated[float | None, typer.Option(min=0.0)] = None
    """Tokens that take as long to compute as the weights of one expert take to read, in place of a
    device."""
    curve: Path | None = None
    """File with a device's profile, as `evenkeel profile` writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningOptions:
    """The options that describe how policies plan."""

    dispatch: DispatchModel = DispatchModel.EVEN
    """How the engine splits tokens over replicas."""
    copy_price: Annotated[float, typer.Option(min=0.0)] = 0.0
    """Time that one copy must save per step, as a share of the time of a perfectly split layer. It
    applies to keel and to verdicts. keel computes its own price, which falls with the slots of a
    rank and their tokens, and uses the higher of the two. 0.01 makes copies rare; 0 leaves the
    price to keel."""
    cross_node_factor: Annotated[float, typer.Option(min=1.0)] = 1.0
    """Price of a copy from another node, relative to one inside a node."""
    max_evaluations: Annotated[
        int | None, typer.Option(min=1, show_default="the policy's own limit")
    ] = None
    """Maximum number of candidates that the search for one plan may evaluate."""
    seed: Annotated[int, typer.Option(min=0)] = 0
    """Seed of policies that use random numbers."""
    allow_duplicates: Annotated[bool, typer.Option("--allow-duplicates")] = False
    """Let a rank hold an expert twice, as the engines' planners do."""
    fill_slots: Annotated[bool, typer.Option("--fill-slots")] = False
    """Fill the slots that a policy leaves empty, for engines that need an expert in every slot, as
    SGLang does."""
    craft_replicas: Annotated[str | None, typer.Option(show_default="memory")] = None
    """How many replicas craft uses. memory: as many as fit. knee: up to the bend in the curve of
    gain over replicas. per_replica_gain: the number with the highest gain per replica, which the
    paper calls automatic. A number, for example 0.001: as long as one more replica gains this much
    balancedness, summed over layers."""
    free_bytes: Annotated[int | None, typer.Option(min=0, show_default="what the slots hold")] = (
        None
    )
    """Bytes of one rank that craft's replicas may use, all layers together."""
