"""The console's files: libraries as listed, packaged and short."""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from setuptools import Distribution

from deploy.console_vendor import FOLDER, LIST, adapt
from tests.structure import MOST_FILE_LINES
from tests.waiting import deadline

ROOT = Path(__file__).parents[2]
CONSOLE = FOLDER.parent
OWN = [path for path in sorted(CONSOLE.rglob("*")) if path.is_file() and FOLDER not in path.parents]
TESTS = sorted((Path(__file__).parent / "js").glob("*.test.js"))


def test_every_library_file_is_the_listed_one():
    packages = json.loads(LIST.read_text(encoding="utf-8"))["packages"]
    listed = {
        name: file["sha256"] for package in packages for name, file in package["files"].items()
    }
    there = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in FOLDER.iterdir()
        if path != LIST
    }
    assert there == listed
    for package in packages:
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert package["licence"] in ("MIT", "Apache-2.0")
        assert package["integrity"].startswith("sha512-")
        assert f"{package['name']}.LICENSE" in package["files"]


def test_libraries_are_adapted_to_load_without_an_import_map():
    text = 'import{x}from"preact";y\n//# sourceMappingURL=y.map\n'
    assert adapt("hooks.js", text) == 'import{x}from"./preact.js";y\n'
    assert adapt("uplot.js", "var uPlot=1;").endswith("export default uPlot;\n")
    assert adapt("preact.LICENSE", text) == text


def test_the_wheel_contains_every_file(monkeypatch):
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    build = distribution.get_command_obj("build_py")
    build.finalize_options()
    build.manifest_files = {}  # Files are packed because of package-data, not because of git.
    packed = build.find_data_files("evenkeel_moe", "service/evenkeel_moe")
    for path in [*OWN, *FOLDER.iterdir()]:
        assert str(path.relative_to(ROOT)) in packed, path


def test_no_file_of_our_own_is_long():
    for path in [*OWN, *TESTS]:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= MOST_FILE_LINES, path
        if path.suffix == ".js":
            wide = [number for number, line in enumerate(lines, start=1) if len(line) > 100]
            assert not wide, (path, wide)


def test_our_own_scripts_evaluate_no_text():
    for path in OWN:
        if path.suffix == ".js":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\beval\(|new Function|innerHTML|document\.write", text), path


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_pure_functions_pass_their_tests_in_node():
    assert TESTS
    command = ["node", "--test", *map(str, TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
