"""`evenkeel placement`: list recorded placements, and write the present one for engines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.console import say
from evenkeel_moe.cli.exits import CliError, Exit
from evenkeel_moe.cli.insight_tables import placements_table
from evenkeel_moe.cli.options import DeploymentClientOptions
from evenkeel_moe.cli.watch import ShowOptions
from evenkeel_moe.errors import EvenkeelError

app = CommandGroup(help="List placements, and write one for an engine.")


@app.command("list")
def list_placements(connection: DeploymentClientOptions, shown: ShowOptions) -> None:
    """List the recorded placements, to which a rollback can lead."""
    with connection.client() as client:
        path = connection.path(client, "/epochs")
        shown.run(lambda: client.get(path)["items"], placements_table)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFile:
    """The options that describe the file to write.

    Args:
        out: File to write. Default: standard output.
        format_name: neutral (also for vLLM with the plugin), sglang, trtllm, ascend, vllm,
            vllm-mapping or vllm-ranks.
        first_moe_layer: Number of the model's hidden layers before its first MoE layer.
        layer_ids: Hidden layer of each MoE layer, separated by commas. Default: consecutive from
            --first-moe-layer.
        num_hidden_layers: Number of rows of an sglang file: the model's num_hidden_layers. Default:
            up to the last MoE layer.
    """

    out: Path | None = None
    format_name: Annotated[str, typer.Option("--format", "-f")] = "neutral"
    first_moe_layer: Annotated[int, typer.Option(min=0)] = 0
    layer_ids: str | None = None
    num_hidden_layers: Annotated[int | None, typer.Option(min=1)] = None


@app.command()
def export(file: ExportedFile, connection: DeploymentClientOptions) -> None:
    """Write the present placement, to start balanced after a restart."""
    with connection.client() as client:
        name = connection.found(client)
        answer = client.get(f"deployments/{name}/placement")
        experts = client.get(f"deployments/{name}")["shape"]["num_logical_experts"]
    text = _render(answer, int(experts), name, file)
    out = file.out
    if out is None:
        say(text, nl=False)
        return
    try:
        # Replaced in one step: an engine that starts now reads either the old file or the new one.
        draft = out.with_name(out.name + ".tmp")
        draft.write_text(text, encoding="utf-8")
        draft.replace(out)
    except (OSError, ValueError) as error:
        # A ValueError means that the path does not end in a file name.
        raise CliError(
            f"cannot write {out}: {getattr(error, 'strerror', None) or error}"
        ) from error
    say(f"{out}: epoch {answer['epoch']} of {name}, {file.format_name}")


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CliError(f"--layer-ids {text} must be numbers separated by commas") from None


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
