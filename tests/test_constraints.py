"""constraints.txt must lead to the same versions on every machine, whatever index it takes them from."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(
        line.split("#")[0].strip().split("==") for line in lines if "==" in line.split("#")[0]
    )


def test_no_version_is_of_one_index_only():
    """`2.13.0+cpu` is only where somebody put it; `2.13.0` takes that build too, where it is found."""
    assert [name for name, version in pins().items() if "+" in version] == []


def test_torch_is_the_one_that_ranks_ask_for():
    assert f'agent = ["torch=={pins()["torch"]}"]' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )
