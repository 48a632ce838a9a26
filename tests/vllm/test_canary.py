"""The canary on a real layer of vLLM, in a process of its own."""

import json
import os
import subprocess

import pytest

from tests.vllm.server import PYTHON, ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
KINDS = 8
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def told():
    """Run all number types in one process: most of its time is the import of vLLM."""
    alone = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [PYTHON, "-m", "tests.vllm.layer_damage", *DTYPES],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **alone},
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_damage_of_every_kind_shows_on_a_real_layer_and_sound_moves_do_not(told, dtype, capsys):
    found = told[dtype]
    assert found["moves"] >= 1000 and found["tolerance"] == 0.0
    assert len(found["alarms"]) == KINDS
    for damage, alarms in found["alarms"].items():
        assert len(alarms) == 1, (damage, alarms)
        assert alarms[0].startswith("layer 0 expert 4 in slot 2 of rank 0"), damage
    with capsys.disabled():
        each = 1000 * found["seconds"] / found["moves"]
        print(f"\n{dtype}: {found['moves']} moves, {each:.2f} ms each with the copies")
