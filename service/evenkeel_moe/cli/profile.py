"""`evenkeel profile`: measure the devices of this machine before an engine uses them."""

from pathlib import Path
from typing import Annotated

import typer

from evenkeel_moe.cli.console import say
from evenkeel_moe.cli.exits import needing
from evenkeel_moe.cli.options import MeasuredRange


def profile(
    d_model: Annotated[int, typer.Option(min=1)],
    d_ffn: Annotated[int, typer.Option(min=1)],
    experts: Annotated[int, typer.Option(min=1)],
    measured: MeasuredRange,
    folder: Annotated[Path, typer.Option("--out")] = Path("curves"),
    dtype: str = "bfloat16",
    device: str | None = None,
) -> None:
    """Measure the time of an MoE layer on this machine.

    It measures by tokens and by replicas, and writes a file for each device.

    Args:
        d_model: Width of the model's hidden state.
        d_ffn: Inner width of one expert.
        experts: Slots of a rank in one layer.
        folder: Folder for the curves; give it to the engine as EVENKEEL_RANK__CURVES.
        dtype: Number type, by its name in torch.
        device: cpu, or a GPU, for example cuda:0. Default: every GPU, else the CPU.
    """
    with needing("rank", "a profile"):
        from evenkeel_moe.cli.device_profile import device_names, profile_device
    for name in device_names() if device is None else [device]:
        for line in profile_device(name, folder, (d_model, d_ffn, experts, dtype), measured):
            say(line)
