"""`evenkeel capacity`: what other numbers of ranks would bring.

Heavy imports wait until the command runs, because `--help` must not load numpy.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from evenkeel_moe.cli.console import Listing, TableColumn, legend, work_bars
from evenkeel_moe.cli.insight import COMPUTED_WITHIN_S
from evenkeel_moe.cli.options import DeploymentClientOptions
from evenkeel_moe.cli.replay_options import ConfigOption
from evenkeel_moe.cli.tables import interval, number, yes_or_no
from evenkeel_moe.cli.watch import OutputOptions
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.quantities import bytes_text, duration_text, share


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthOptions:
    """The options that say which widths to compare.

    Args:
        to_ranks: Number of ranks to compare. Repeat for more. Default: up to eight numbers.
        to_slots: Slots of a layer over all ranks, at these numbers of ranks. Default: as many
            replicas as now.
        retire: Rank to retire, instead of --to-ranks. Repeat for more. Default: those with the
            fewest bytes to move away.
        whole_nodes: Only all ranks of a node retire or join.
        multi_node_bytes: Memory of a rank that only a group on several nodes needs for transport.
    """

    to_ranks: Annotated[list[int] | None, typer.Option(min=1)] = None
    to_slots: Annotated[int | None, typer.Option(min=1)] = None
    retire: Annotated[list[int] | None, typer.Option(min=0)] = None
    whole_nodes: bool = False
    multi_node_bytes: Annotated[int, typer.Option(min=0)] = 0


def capacity(
    recording: Annotated[
        Path | None, typer.Argument(metavar="RECORDING", show_default=False)
    ] = None,
    config: ConfigOption = None,
    *,
    widths: WidthOptions,
    connection: DeploymentClientOptions,
    shown: OutputOptions,
) -> None:
    """Compare numbers of ranks: MoE time, memory, bytes to move.

    It also says which ranks to retire. Of a recording, --config tells ranks, sizes of the model and
    KV cache. Nothing is moved, started or stored.

    Args:
        recording: What an engine recorded, instead of a live deployment.
    """
    asked = {name: value for name, value in asdict(widths).items() if value}
    if recording is None:
        if config is not None:
            raise InvalidInput("--config belongs to a recording: a deployment tells its own sizes")
        with connection.client() as client:
            path = connection.path(client, "/capacity")
            answer = client.get(path, timeout_s=COMPUTED_WITHIN_S, **asked)
    else:
        answer = _of_recording(recording, config, asked)
    shown.show(answer, lambda: capacity_view(answer))


def _of_recording(recording: Path, config: Path | None, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer for a recording, with the fields of a deployment's that it has."""
    from evenkeel_moe.cli.replay import read_current, read_recorded, with_origin
    from evenkeel_moe.replay.capacity import weigh_recording
    from evenkeel_moe.replay.from_options import replay_setup
    from evenkeel_moe.replay.options import CapacityOptions, read_options

    options = read_options(CapacityOptions, config, **asked)
    trace = read_recorded(recording, options)
    setup = replay_setup(trace, options, window_steps=trace.num_steps, horizon_steps=1)
    current = None
    if options.current is not None:
        current = read_current(options.current, options.ranks, trace)
    trace = with_origin(trace, setup, [options.policy], options)
    with work_bars() as (on_work, _):
        on_work(f"{options.policy}: planning", 0)
        found = weigh_recording(setup, options, current, trace.findings)
    answer = asdict(found)
    answer["cost_model"] |= {"words": found.cost_model.words}
    findings = [asdict(each) for each in trace.findings]
    return {"trace": trace.name, "policy": options.policy, "findings": findings, **answer}


def capacity_view(answer: Mapping[str, Any]) -> RenderableType:
    """Return a comparison of widths in words and as a table."""
    in_seconds = answer["cost_model"]["unit"] == "s"

    def ranks(row: Mapping[str, Any]) -> str:
        return f"{row['ranks']}{' (now)' if row['present'] else ''}"

    def time(value: float) -> str:
        return duration_text(value) if in_seconds else number(value, ".4g")

    columns = (
        TableColumn("RANKS", ranks, right=True),
        TableColumn("SLOTS", "slots", right=True),
        TableColumn("NODES", "nodes", right=True, wide=True),
        TableColumn("MOE TIME", "moe_time", time, right=True),
        TableColumn("SAVED", "gain", share, right=True),
        TableColumn("INTERVAL", interval, wide=True),
        TableColumn("BALANCEDNESS", "balancedness", number, right=True),
        TableColumn("EXPERTS", "expert_bytes", bytes_text, right=True),
        TableColumn("KV TOKENS", "kv_tokens", "{:,}".format, right=True),
        TableColumn("FITS", "fits", yes_or_no),
        TableColumn("TO MOVE", lambda row: _moved(row, "bytes_to_move", "copies"), right=True),
        TableColumn("AT LEAST", lambda row: _moved(row, "least_bytes", "least_copies"), right=True),
    )
    name = answer.get("deployment") or answer["trace"]
    return Group(
        Text(f"{name}: numbers of ranks compared", style="bold"),
        *(Text(words) for words in answer["words"]),
        Text(),
        Listing(columns, answer["rows"]),
        Text(),
        *(Text(row["words"]) for row in answer["rows"]),
        legend(
            "experts, KV tokens: of a rank; saved: share of today's MoE time;"
            " at least: the fewest bytes with which any placement of this width can be reached"
        ),
    )


def _moved(row: Mapping[str, Any], nbytes: str, experts: str) -> str:
    known = row[nbytes]
    return f"{row[experts]:,} experts" if known is None else bytes_text(known)
