"""Options that the commands on recordings share.

They import nothing heavy, because `--help` must not load numpy. `replay/options.py` has the options
that a file gives.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

RecordingArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECORDING",
        help="What an engine recorded: *.npz, *.pt, *.jsonl or a folder; see docs/formats.md.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file with more options; docs/offline.md lists them."),
]
AcceptOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Finding about the recording that you have looked at. Repeat for more.",
        show_default="none",
    ),
]
FirstLayerOption = Annotated[
    int | None,
    typer.Option(
        help="Number of hidden layers before the first MoE layer.",
        show_default="as in the file; SGLang: the first row that ever counted a token",
    ),
]
StartOption = Annotated[
    str | None,
    typer.Option(
        help="Of a folder with several starts of an engine, the one to read: the first 8 digits of"
        " its files.",
        show_default="the newest",
    ),
]
RanksOption = Annotated[int | None, typer.Option(help="Number of EP ranks.", show_default="8")]
SlotsOption = Annotated[
    int | None,
    typer.Option(
        help="Slots of one layer over all ranks.", show_default="one redundant slot per rank"
    ),
]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", "-p", help="Name of a policy.", show_default="keel")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementFileOptions:
    """The options that describe a placement file to write.

    Args:
        out: File to write.
        format_name: neutral (vLLM with the plugin), sglang, trtllm, ascend, vllm, vllm-mapping or
            vllm-ranks.
    """

    out: Path
    format_name: Annotated[str, typer.Option("--format", "-f")] = "neutral"
