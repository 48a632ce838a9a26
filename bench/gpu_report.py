"""Runs everything that one GPU can show, and writes docs/gpu.md: python -m bench.gpu_report.

On a CPU it runs small and writes bench/out/gpu.md, to show that the code works. Figures of a GPU in
a page are never replaced by those of a CPU.
"""

import argparse
import platform
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench import gpu_costs, gpu_layers, gpu_parts
from bench.gpu_page import ON_CPU, Block, merged, read_blocks, written
from bench.gpu_parts import Sizes

ROOT = Path(__file__).parents[1]
PAGE, ON_CPU_PAGE = ROOT / "docs" / "gpu.md", ROOT / "bench" / "out" / "gpu.md"

Part = Callable[[torch.device, Sizes], list[str]]

PARTS: dict[str, tuple[str, Part, float]] = {
    "checksums": ("Checksums on the device", gpu_parts.checksums, 0.02),
    "profile": ("Profile of the grouped FFN", gpu_parts.profile, 0.05),
    "costs": ("Reading and computing, measured and derived", gpu_costs.costs, 0.2),
    "communicator": ("One rank's communicator", gpu_parts.communicator, 0.03),
    "streams": ("Streams and events", gpu_parts.streams, 0.02),
    "counts": ("Counts of a step", gpu_parts.counts, 0.02),
    "layers": ("The slowest rank, measured", gpu_layers.layer_times, 0.58),
    "lplb": ("LPLB on the device", gpu_parts.lplb, 0.08),
}
"""Name -> title, function, share of the time."""


def report(
    device: torch.device, *, small: bool, seconds: float, names: list[str]
) -> tuple[dict[str, Block], list[str]]:
    """Run parts and return their blocks, and the names of those that failed.

    Args:
        device: to run on.
        small: use small sizes.
        seconds: for all parts together; a part takes about its share.
        names: parts, in order.
    """
    on_gpu = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "CPU"
    today = datetime.fromtimestamp(time.time(), UTC).date().isoformat()
    blocks, failed = {}, []
    for name in names:
        title, run, share = PARTS[name]
        print(f"{name} ...", flush=True)
        began = time.perf_counter()
        try:
            lines = run(device, Sizes(small, seconds * share))
        except Exception as error:
            traceback.print_exc()
            failed.append(name)
            lines = [f"**Failed**: {type(error).__name__}: {str(error)[:300]}"]
        took = time.perf_counter() - began
        print("\n".join(lines), flush=True)
        about = f"{where}, torch {torch.__version__}, {today}, {took:.0f} s."
        head = [f"### {title}", "", about if on_gpu else f"{ON_CPU} {about}", ""]
        blocks[name] = Block(on_gpu, "\n".join([*head, *lines]))
    return blocks, failed


def main() -> int:
    """Run the parts that are named, or all."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default all")
    parser.add_argument("--device", default="cuda:0" if on_gpu else "cpu")
    parser.add_argument("--minutes", type=float, default=25.0 if on_gpu else 0.5)
    parser.add_argument("--small", action="store_true", default=not on_gpu)
    parser.add_argument("--out", type=Path, help="default docs/gpu.md for a GPU")
    given = parser.parse_args()
    device = torch.device(given.device)
    page = given.out or (PAGE if device.type == "cuda" and not given.small else ON_CPU_PAGE)
    if device.type != "cuda":
        print("there is no GPU in use: small sizes on a CPU, and no figure of a GPU changes")
    names = list(given.parts) or list(PARTS)
    blocks, failed = report(
        device,
        small=given.small or device.type != "cuda",
        seconds=60 * given.minutes,
        names=names,
    )
    page.parent.mkdir(exist_ok=True)
    text = page.read_text("utf-8") if page.exists() else ""
    page.write_text(written(text, merged(read_blocks(text), blocks)), "utf-8")
    print(f"wrote {page}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
