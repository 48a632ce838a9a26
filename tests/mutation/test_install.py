"""A change takes the place of a function that runs."""

import importlib
import json

import pytest

from tests.mutation import __main__ as tool
from tests.mutation.__main__ import in_child, install
from tests.mutation.changes import changes

SOURCE = """
class Base:
    def __init__(self):
        self.kept = 1

class Part(Base):
    def __init__(self):
        super().__init__()
        self.own = 2
"""


def test_a_change_that_leaves_out_super_is_installed(tmp_path, monkeypatch):
    path = tmp_path / "changed_part.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("changed_part")
    change = next(c for c in changes(SOURCE, str(path)) if c.before == "super().__init__()")
    assert vars(module.Part()) == {"kept": 1, "own": 2}
    install(module, change.code)
    assert vars(module.Part()) == {"own": 2}


def test_what_goes_wrong_in_a_child_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "CACHE", tmp_path)
    assert in_child(lambda: [1, "a"], 20) == [1, "a"]
    with pytest.raises(RuntimeError, match="not JSON serializable"):
        in_child(lambda: json.dumps(object()), 20)
