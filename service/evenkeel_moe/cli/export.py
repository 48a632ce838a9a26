"""`evenkeel export`: write the placement of a deployment to a file, for engines to start from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from evenkeel_moe.cli.client import CliError, Exit
from evenkeel_moe.cli.console import say
from evenkeel_moe.cli.options import NamedDeployment, with_option_groups
from evenkeel_moe.errors import EvenkeelError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFile:
    """The options that describe the file to write."""

    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default="standard output"),
    ] = None
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="neutral (also for vLLM with the plugin), sglang, trtllm, ascend, vllm,"
            " vllm-mapping or vllm-ranks.",
        ),
    ] = "neutral"
    first_moe_layer: Annotated[
        int,
        typer.Option(min=0, help="Number of the model's hidden layers before its first MoE layer."),
    ] = 0
    layer_ids: Annotated[
        str | None,
        typer.Option(
            help="Hidden layer of each MoE layer, separated by commas.",
            show_default="consecutive from --first-moe-layer",
        ),
    ] = None
    num_hidden_layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of rows of an sglang file: the model's num_hidden_layers.",
            show_default="up to the last MoE layer",
        ),
    ] = None


@with_option_groups
def export(file: ExportedFile, connection: NamedDeployment) -> None:
    """Write the current placement of a deployment, so that it starts balanced after a restart."""
    with connection.client() as client:
        name = connection.found(client)
        answer = client.get(f"deployments/{name}/placement")
        experts = client.get(f"deployments/{name}")["shape"]["num_logical_experts"]
    text = _render(answer, int(experts), name, file)
    output = file.output
    if output is None:
        say(text, nl=False)
        return
    try:
        # Replaced in one step: an engine that starts now reads either the old file or the new one.
        draft = output.with_name(output.name + ".tmp")
        draft.write_text(text, encoding="utf-8")
        draft.replace(output)
    except (OSError, ValueError) as error:
        # A ValueError means that the path does not end in a file name.
        raise CliError(
            f"cannot write {output}: {getattr(error, 'strerror', None) or error}", Exit.USAGE
        ) from error
    say(f"{output}: epoch {answer['epoch']} of {name}, {file.format_name}")


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CliError(
            f"--layer-ids {text} must be numbers separated by commas", Exit.USAGE
        ) from None


def _render(answer: dict[str, Any], experts: int, deployment: str, file: ExportedFile) -> str:
    """Return the text of the file.

    Raises:
        InvalidInput: there is no such format.
        CliError: the layer ids are malformed, or the format cannot hold the placement.
    """
    import numpy as np

    from evenkeel_moe.formats import PlacementFile, PlacementFormat, render_placement
    from evenkeel_moe.model.placement import Placement

    format_ = PlacementFormat.parse(file.format_name)
    rows = np.array(answer["physical_to_logical"], np.int32)
    if file.layer_ids is None:
        ids = tuple(range(file.first_moe_layer, file.first_moe_layer + len(rows)))
    else:
        ids = _parse_ids(file.layer_ids)
    try:
        placement = Placement(rows, int(answer["num_ranks"]), experts)
        info = {"deployment": deployment, "epoch": answer["epoch"], "digest": answer["digest"]}
        return render_placement(
            PlacementFile(placement, ids, info), format_, num_hidden_layers=file.num_hidden_layers
        )
    except EvenkeelError as error:
        raise CliError(f"{error} ({error.reason})", Exit.REFUSED) from error
