"""Options of `evenkeel replay`: what they are called and what they mean."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BYTES_PER_EXPERT",
    "BaselinesOption",
    "BytesOption",
    "CraftReplicasOption",
    "CrossNodeOption",
    "CurrentOption",
    "DispatchOption",
    "DuplicatesOption",
    "EvaluationsOption",
    "FirstMoeLayerOption",
    "FormatOption",
    "FreeBytesOption",
    "GroupsOption",
    "HorizonOption",
    "HtmlOption",
    "JsonOption",
    "NewestOption",
    "NodesOption",
    "NumHiddenLayersOption",
    "OutOption",
    "PoliciesOption",
    "PolicyOption",
    "PooledOption",
    "PriceOption",
    "RanksOption",
    "SavePlansOption",
    "SeedOption",
    "SlotsOption",
    "SpeedsOption",
    "TraceOption",
    "VerdictOption",
    "WindowOption",
]

BYTES_PER_EXPERT = 3 * 7168 * 2048
"""A DeepSeek-V3 expert in FP8."""

TraceOption = Annotated[
    Path,
    typer.Option(
        "--trace",
        "-t",
        help="Recorded loads: *.npz (ours), *.pt or a folder (SGLang recorder), a folder (TensorRT-LLM statistics).",
    ),
]
RanksOption = Annotated[int, typer.Option("--ranks", help="EP ranks of the fleet.", min=1)]
SlotsOption = Annotated[
    int | None,
    typer.Option(
        "--slots",
        help="Slots of one layer over all ranks.",
        show_default="one redundant slot per rank",
    ),
]
FirstMoeLayerOption = Annotated[
    int | None,
    typer.Option(
        "--first-moe-layer",
        help="Hidden layers before the first MoE layer.",
        show_default="what the file says; SGLang: the first row that ever counted a token",
    ),
]
WindowOption = Annotated[int, typer.Option("--window", help="Steps a policy plans on.", min=1)]
NodesOption = Annotated[int, typer.Option("--nodes", help="Nodes of consecutive ranks.", min=1)]
GroupsOption = Annotated[
    int, typer.Option("--expert-groups", help="Routing groups of the model (DeepSeek).", min=1)
]
BytesOption = Annotated[
    int,
    typer.Option(
        "--bytes-per-expert", help="Bytes of one expert; default: DeepSeek-V3 in FP8.", min=0
    ),
]
SpeedsOption = Annotated[
    str | None,
    typer.Option(
        "--rank-speeds",
        help="Relative speed of every rank, as in 1,1,1,0.88.",
        show_default="all equal",
    ),
]
DispatchOption = Annotated[
    str,
    typer.Option(
        "--dispatch", help="How the engine splits tokens over replicas: even, nearest or optimal."
    ),
]
PriceOption = Annotated[
    float,
    typer.Option(
        "--copy-price",
        help="What one copy must save per step, as a share of a perfectly split layer's time, to keel and to verdicts."
        " keel's own price, which falls with the slots of a rank and the tokens they see, holds where it is higher."
        " 0.01 makes copies rare, 0 leaves it to keel.",
        min=0.0,
    ),
]
PooledOption = Annotated[
    bool,
    typer.Option(
        "--pooled", help="Slots are pooled over layers; --slots is then the average of a layer."
    ),
]
EvaluationsOption = Annotated[
    int | None,
    typer.Option(
        "--max-evaluations",
        help="Most candidates the search of one plan may evaluate.",
        min=1,
        show_default="what the policy sets itself",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of policies that draw.", min=0)]
DuplicatesOption = Annotated[
    bool,
    typer.Option(
        "--allow-duplicates", help="Let a rank hold an expert twice, as the engines' planners do."
    ),
]
CraftReplicasOption = Annotated[
    str | None,
    typer.Option(
        "--craft-replicas",
        help="How many replicas craft uses: memory, as many as fit; knee, up to where the curve of gain over replicas"
        " bends; a number, as 0.001: as long as a further replica gains so much balancedness, summed over layers.",
        show_default="memory",
    ),
]
FreeBytesOption = Annotated[
    int | None,
    typer.Option(
        "--free-bytes",
        help="Memory of one rank that craft's replicas may take, all layers together.",
        min=0,
        show_default="what the slots hold",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PoliciesOption = Annotated[
    str | None,
    typer.Option("--policies", "-p", help="Comma-separated.", show_default="all there are"),
]
HorizonOption = Annotated[
    int, typer.Option("--horizon", help="Steps a plan is scored on before the next replan.", min=1)
]
VerdictOption = Annotated[
    bool,
    typer.Option(
        "--verdict",
        help="Also every policy as POLICY+verdict: acts only where held-out steps say it pays.",
    ),
]
BaselinesOption = Annotated[
    bool, typer.Option("--baselines/--no-baselines", help="Also initial, once and ewma.")
]
SavePlansOption = Annotated[
    Path | None,
    typer.Option("--save-plans", help="Write every plan to this npz, to be scored elsewhere."),
]
CrossNodeOption = Annotated[
    float,
    typer.Option(
        "--cross-node-factor",
        help="Price of a copy from another node, over that of others.",
        min=1.0,
    ),
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Write one self-contained page with drawings.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="File to write.")]
PolicyOption = Annotated[str, typer.Option("--policy", "-p", help="One policy.")]
FormatOption = Annotated[
    str, typer.Option("--format", "-f", help="neutral, sglang, trtllm or ascend.")
]
CurrentOption = Annotated[
    Path | None,
    typer.Option("--current", help="Placement in force, any format: copies from it are kept few."),
]
NumHiddenLayersOption = Annotated[
    int | None,
    typer.Option(
        "--num-hidden-layers",
        help="Rows of an sglang file.",
        min=1,
        show_default="up to the last MoE layer",
    ),
]
NewestOption = Annotated[
    int | None,
    typer.Option(
        "--window", help="Newest steps to plan on.", min=1, show_default="the whole trace"
    ),
]
