"""`python -m examples.qwen3moe`: a controller, and a Hugging Face MoE model split over ranks."""

import argparse
import sys

from examples.local_fleet import Event, run_example
from examples.qwen3moe.child import run_rank


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    options.add_argument(
        "--limit-s", type=float, default=120.0, help="give up if no plan was carried out by then"
    )
    asked = options.parse_args()
    size = asked.ranks
    if run_example(run_rank, size, asked.limit_s, lambda seen, _log: judge(seen, size)) != 0:
        return 1
    print("the outputs before and after the migration are equal, bit for bit, on every rank")
    return 0


def judge(seen: list[Event], size: int) -> str:
    """Return what went wrong; empty if nothing did."""
    ends = [detail for _, kind, detail in seen if kind == "end"]
    if len(ends) < size:
        return f"{size - len(ends)} ranks did not finish"
    if any(kind == "differs" for _, kind, _ in seen):
        return "an output changed"
    if not all(detail.get("as_untouched_model", True) for _, _, detail in seen):
        return "the split model's outputs differ from the library's model"
    if sum(kind == "served" for _, kind, _ in seen) < size:
        return "not all requests were served in time"
    if len({detail["digest"] for detail in ends}) > 1:
        return "the ranks ended with different maps"
    if not all(detail["epoch"] > 0 for detail in ends):
        return "no plan was carried out in time"
    return ""


if __name__ == "__main__":
    sys.exit(main())
