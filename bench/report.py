"""Interleaved timing and the JSON report, shared by all benches.

The ratios are the results: the contenders run in turn in the same process, with one thread each,
and the best run of each counts. Seconds are printed for information only.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

OUT = Path(__file__).parent / "out"


class Row(NamedTuple):
    """One figure of a bench."""

    name: str
    value: float
    unit: str


def best_of(contenders: Mapping[str, Callable[[], object]], repeats: int = 20) -> dict[str, float]:
    """Return the best seconds of each contender over interleaved runs, after one warm-up each."""
    for run in contenders.values():
        run()
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    return f"{cpu}, Python {platform.python_version()}"


def write_report(bench: str, rows: list[Row], packages: tuple[str, ...] = ()) -> Path:
    """Print the rows and the versions behind them, and write a new bench/out/BENCH.json."""
    print_versions(packages)
    path = OUT / f"{bench}.json"
    path.unlink(missing_ok=True)
    print_parts(bench, [rows])
    print(f"wrote {path}")
    return path


def run_sections(
    bench: str,
    sections: Mapping[str, Callable[[], Iterable[list[Row]]]],
    packages: tuple[str, ...],
    arguments: Sequence[str] | None = None,
) -> None:
    """Run all sections of a bench, or those that its command names.

    Args:
        bench: the name of the report.
        sections: each yields its rows in parts.
        packages: that the figures depend on.
        arguments: of the command; None takes those of this process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.{bench}")
    names = f"of {', '.join(sections)}; default all"
    parser.add_argument("names", nargs="*", metavar="SECTION", help=names)
    chosen = parser.parse_args(arguments).names or list(sections)
    unknown = [name for name in chosen if name not in sections]
    if unknown:
        parser.error(f"unknown sections {', '.join(unknown)}; known: {', '.join(sections)}")
    print_versions(packages)
    begun = time.perf_counter()

    def parts() -> Iterator[list[Row]]:
        for name in chosen:
            print(f"# {name}, after {time.perf_counter() - begun:.0f} s", flush=True)
            yield from sections[name]()

    print_parts(bench, parts())
    print(f"{time.perf_counter() - begun:.0f} s")


def print_parts(bench: str, parts: Iterable[list[Row]]) -> None:
    """Print the rows of each part as it comes, and save it to the report."""
    for part in parts:
        for row in part:
            print_row(row)
        save_rows(bench, part)


def print_versions(packages: tuple[str, ...]) -> None:
    """Print the versions of the packages that the figures depend on."""
    for package in packages:
        try:
            print(f"{package} {version(package)}", flush=True)
        except PackageNotFoundError:
            print(f"{package} not installed", flush=True)


def print_row(row: Row) -> None:
    """Print one figure."""
    print(f"{row.name:40} {row.value:14.6g} {row.unit}", flush=True)


def read_rows(bench: str) -> dict[str, Row]:
    """Return the rows of bench/out/BENCH.json by name; none if there is no such file."""
    path = OUT / f"{bench}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["name"]: Row(**row) for row in rows}


def save_rows(bench: str, rows: list[Row]) -> Path:
    """Write rows to bench/out/BENCH.json atomically. Rows of other names stay as they are."""
    OUT.mkdir(exist_ok=True)
    kept = read_rows(bench) | {row.name: row for row in rows}
    path = OUT / f"{bench}.json"
    body = {"machine": _machine(), "rows": [row._asdict() for row in kept.values()]}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(body, indent=1) + "\n")
    part.replace(path)
    return path
