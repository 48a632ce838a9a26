"""Options of `evenkeel replay` that several of its commands share.

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
            help="Number of hidden layers before the first MoE layer.",
            show_default="as in the file; SGLang: the first row that ever counted a token",
        ),
    ] = None
    start: Annotated[
        str | None,
        typer.Option(
            help="Of a folder with several starts of an engine, the one to read: the first 8 digits"
            " of its files.",
            show_default="the newest",
        ),
    ] = None
    accept: Annotated[
        list[str] | None,
        typer.Option(
            help="Finding about the recording that you have looked at: it becomes a note. Repeat"
            " the option for more.",
            show_default="none",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOptions:
    """The options that describe the fleet."""

    ranks: Annotated[int, typer.Option(help="Number of EP ranks.", min=1)] = 8
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            help="Slots of one layer over all ranks.",
            show_default="one redundant slot per rank",
        ),
    ] = None
    nodes: Annotated[
        int, typer.Option(help="Number of nodes, each with consecutive ranks.", min=1)
    ] = 1
    expert_groups: Annotated[
        int, typer.Option(help="Routing groups of the model (DeepSeek).", min=1)
    ] = 1
    bytes_per_expert: Annotated[
        int, typer.Option(help="Bytes of one expert; default: DeepSeek-V3 in FP8.", min=0)
    ] = 3 * 7168 * 2048
    rank_speeds: Annotated[
        str | None,
        typer.Option(
            help="Relative speed of every rank, for example 1,1,1,0.88.", show_default="all equal"
        ),
    ] = None
    shared_experts: Annotated[
        float | None,
        typer.Option(
            help="Weights of the shared experts of a layer over those of one routed expert; their"
            " time counts in the cost models curve and roofline, and under waterfill dispatch in"
            " tokens too.",
            min=0.0,
            show_default="not counted",
        ),
    ] = None
    pooled: Annotated[
        bool,
        typer.Option(
            "--pooled", help="Slots are pooled over layers; --slots is then the average of a layer."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KvOptions:
    """The options that describe the KV cache, against which replicas are weighed."""

    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(
            help="Bytes of one token in the KV cache of a rank, over all layers. Shows what each"
            " number of replicas leaves of the cache.",
            min=1,
        ),
    ] = None
    kv_free_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of the KV cache of a rank beside the fleet's slots, without sequences.",
            min=0,
        ),
    ] = None
    tokens_per_sequence: Annotated[
        int | None,
        typer.Option(help="Tokens that a sequence holds in the KV cache.", min=1),
    ] = None
    moe_share: Annotated[
        float | None,
        typer.Option(
            help="MoE time / step time, for the estimate of goodput.",
            min=0.0,
            max=1.0,
            show_default="unknown: the estimate is an interval",
        ),
    ] = None


class CostKind(StrEnum):
    """The cost models that a replay can be asked for."""

    TOKENS = "tokens"
    CURVE = "curve"
    ROOFLINE = "roofline"


@dataclass(frozen=True, kw_only=True, slots=True)
class CostOptions:
    """The options that say how the time of a rank follows from its tokens."""

    cost: Annotated[
        CostKind,
        typer.Option(
            help="Cost model by which plans are made and scored. tokens: time is proportional to"
            " tokens. curve: a profile of seconds by tokens and replicas; see the option curve."
            " roofline: a replica takes the longer of reading its weights and computing its tokens;"
            " see the options device and read-tokens."
        ),
    ] = CostKind.TOKENS
    device: Annotated[
        str | None,
        typer.Option(help="Device of the ranks, for example h100, h200, b200, a100 or mi300x."),
    ] = None
    weight_format: Annotated[
        str | None,
        typer.Option(
            help="Number type of the weights: bf16, fp16, fp8, int8, fp4 or int4.",
            show_default="fp8",
        ),
    ] = None
    read_tokens: Annotated[
        float | None,
        typer.Option(
            help="Tokens that take as long to compute as the weights of one expert take to read,"
            " in place of a device.",
            min=0.0,
        ),
    ] = None
    curve: Annotated[
        Path | None,
        typer.Option(help="File with a device's profile, as `evenkeel profile` writes it."),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningOptions:
    """The options that describe how policies plan."""

    dispatch: Annotated[
        DispatchModel, typer.Option(help="How the engine splits tokens over replicas.")
    ] = DispatchModel.EVEN
    copy_price: Annotated[
        float,
        typer.Option(
            help="Time that one copy must save per step, as a share of the time of a perfectly"
            " split layer. It applies to keel and to verdicts. keel computes its own price, which"
            " falls with the slots of a rank and their tokens, and uses the higher of the two."
            " 0.01 makes copies rare; 0 leaves the price to keel.",
            min=0.0,
        ),
    ] = 0.0
    cross_node_factor: Annotated[
        float,
        typer.Option(
            help="Price of a copy from another node, relative to one inside a node.", min=1.0
        ),
    ] = 1.0
    max_evaluations: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of candidates that the search for one plan may evaluate.",
            min=1,
            show_default="the policy's own limit",
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of policies that use random numbers.", min=0)] = 0
    allow_duplicates: Annotated[
        bool,
        typer.Option(
            "--allow-duplicates",
            help="Let a rank hold an expert twice, as the engines' planners do.",
        ),
    ] = False
    fill_slots: Annotated[
        bool,
        typer.Option(
            "--fill-slots",
            help="Fill the slots that a policy leaves empty, for engines that need an expert in"
            " every slot, as SGLang does.",
        ),
    ] = False
    craft_replicas: Annotated[
        str | None,
        typer.Option(
            help="How many replicas craft uses. memory: as many as fit. knee: up to the bend in the"
            " curve of gain over replicas. per_replica_gain: the number with the highest gain per"
            " replica, which the paper calls automatic. A number, for example 0.001: as long as one"
            " more replica gains this much balancedness, summed over layers.",
            show_default="memory",
        ),
    ] = None
    free_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of one rank that craft's replicas may use, all layers together.",
            min=0,
            show_default="what the slots hold",
        ),
    ] = None
