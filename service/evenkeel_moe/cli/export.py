"""`evenkeel export`: the placement of a live deployment as a file that an engine starts from."""

from pathlib import Path
from typing import Annotated, Any

import typer

from evenkeel_moe.cli.client import CliError, Exit
from evenkeel_moe.cli.options import (
    DEFAULT_DATA_DIR,
    DEFAULT_URL,
    DataDirOption,
    DeploymentOption,
    TokenFileOption,
    TokenOption,
    UrlOption,
    connect,
)

__all__ = ["export"]


def export(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default="standard output"),
    ] = None,
    format_name: Annotated[
        str,
        typer.Option("--format", "-f", help="neutral (also for vLLM), sglang, trtllm or ascend."),
    ] = "neutral",
    first_moe_layer: Annotated[
        int, typer.Option(min=0, help="Hidden layers of the model before its first MoE layer.")
    ] = 0,
    layer_ids: Annotated[
        str | None,
        typer.Option(
            help="Hidden layer of each MoE layer, separated by commas.",
            show_default="one after the other from the first",
        ),
    ] = None,
    num_hidden_layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows of an sglang file: the model's num_hidden_layers.",
            show_default="up to the last MoE layer",
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
) -> None:
    """Write the placement a deployment runs on, so that its restart begins balanced."""
    with connect(url, token, token_file, data_dir) as client:
        name = client.deployment(deployment)
        answer = client.get(f"deployments/{name}/placement")
        experts = client.get(f"deployments/{name}")["shape"]["num_logical_experts"]
    text = _render(
        answer, int(experts), name, format_name, _ids(layer_ids), first_moe_layer, num_hidden_layers
    )
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        # Beside the target first: an engine that starts right now reads the old file or the new one.
        draft = output.with_name(output.name + ".tmp")
        draft.write_text(text, encoding="utf-8")
        draft.replace(output)
    except (OSError, ValueError) as error:
        # A ValueError says that the path ends in no name.
        raise CliError(
            f"cannot write {output}: {getattr(error, 'strerror', None) or error}", Exit.USAGE
        ) from error
    typer.echo(f"{output}: epoch {answer['epoch']} of {name}, {format_name}")


def _ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CliError(
            f"--layer-ids {text} must be numbers separated by commas", Exit.USAGE
        ) from None


def _render(
    answer: dict[str, Any],
    experts: int,
    deployment: str,
    format_name: str,
    layer_ids: tuple[int, ...] | None,
    first_moe_layer: int,
    num_hidden_layers: int | None,
) -> str:
    """The file's text.

    Raises:
        CliError: no such format, or a placement that it cannot hold.
    """
    import numpy as np

    from evenkeel_moe.errors import EvenkeelError
    from evenkeel_moe.formats import PlacementFile, PlacementFormat, render_placement
    from evenkeel_moe.model.placement import Placement

    try:
        format_ = PlacementFormat(format_name)
    except ValueError:
        known = ", ".join(PlacementFormat)
        raise CliError(f"--format {format_name} is none of {known}", Exit.USAGE) from None
    rows = np.array(answer["physical_to_logical"], np.int32)
    ids = layer_ids or tuple(range(first_moe_layer, first_moe_layer + len(rows)))
    try:
        placement = Placement(rows, int(answer["num_ranks"]), experts)
        info = {"deployment": deployment, "epoch": answer["epoch"], "digest": answer["digest"]}
        return render_placement(
            PlacementFile(placement, ids, info), format_, num_hidden_layers=num_hidden_layers
        )
    except EvenkeelError as error:
        raise CliError(f"{error} ({error.reason})", Exit.REFUSED) from error
