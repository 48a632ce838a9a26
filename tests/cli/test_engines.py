"""`evenkeel engines check`."""

import pytest

from evenkeel_moe.engines.guest.guards import EngineReport, Hook
from evenkeel_moe.engines.sglang import hooks as sglang
from evenkeel_moe.engines.vllm import hooks as vllm

KNOWN = ("0.32.0", "0.33.0")
FOUND = (Hook("EplbState.step"), Hook("EplbModelState"))
CHANGED = (Hook("EplbState.step"), Hook("EplbModelState", "EplbModelState has no model"))


@pytest.fixture
def installed(monkeypatch):
    """Return a function that says what is installed: the report of vLLM, and no SGLang."""

    def call(report):
        monkeypatch.setattr(sglang, "report", lambda: None)
        monkeypatch.setattr(vllm, "report", lambda: report)

    return call


@pytest.mark.parametrize(
    ("version", "hooks", "code", "words"),
    [
        ("0.33.0+cu130", FOUND, 0, "all 2 parts found, and the version was tested: it starts"),
        ("0.34.0", FOUND, 1, "make test-engines ENGINES=vllm==0.34.0"),
        ("0.33.0", CHANGED, 1, "1 of 2 parts changed: the plugin refuses to start"),
    ],
)
def test_the_verdict_is_the_last_line_and_the_exit_code(
    installed, command, version, hooks, code, words
):
    installed(EngineReport("vllm", version, KNOWN, hooks))
    ended, out, _ = command("engines", "check")
    assert ended == code
    lines = out.splitlines()
    assert lines[0] == "found    EplbState.step"
    assert ("changed  EplbModelState has no model" in lines) == (hooks is CHANGED)
    assert lines[-1].startswith(f"vllm {version}: ") and words in lines[-1]


def test_an_engine_that_is_not_installed_is_named(installed, command):
    installed(None)
    code, _, err = command("engines", "check")
    assert code == 2 and "vllm and sglang are not installed here" in err
    code, _, err = command("engines", "check", "sglang")
    assert code == 2 and "sglang is not installed here" in err
    code, _, err = command("engines", "check", "other")
    assert code == 2 and "unknown engine 'other'; known: vllm, sglang" in err


VLLM = ("--enable-expert-parallel", "--enable-eplb")


@pytest.mark.parametrize(
    ("engine", "flags", "words"),
    [
        ("vllm", ("serve", "MODEL", *VLLM, "--tensor-parallel-size", "8"), None),
        ("vllm", (*VLLM, "--eplb-config", '{"use_async": false}', "--quantization=fp8"), None),
        ("vllm", ("--enable-expert-parallel",), "--enable-eplb is missing"),
        ("vllm", (*VLLM, "--all2all-backend", "moonep"), "--all2all-backend moonep: MoonEP"),
        ("vllm", (*VLLM, "--all2all_backend=moonep"), "--all2all-backend moonep: MoonEP"),
        ("vllm", (*VLLM, "--quantization", "gpt_oss_mxfp4"), "--quantization gpt_oss_mxfp4: "),
        ("vllm", (*VLLM, "--enable-elastic-ep"), None),
        ("vllm", (*VLLM, "--enable-lora", "--lora-target-modules", "q_proj", "v_proj"), None),
        ("sglang", ("--enable-eplb", "--elastic-ep-backend", "mooncake"), "a death SGLang masks"),
        ("vllm", (*VLLM, "--speculative-config", '{"method": "medusa"}'), ".method medusa: a Med"),
        ("sglang", ("--enable-eplb", "--dwdp-size", "1"), None),
        ("sglang", ("--enable-eplb", "--dwdp-size", "4"), "--dwdp-size 4: DWDP"),
        ("sglang", ("--enable-eplb", "--enable-paged-experts"), "--enable-paged-experts: paged"),
        ("sglang", ("--enable-eplb", "--moe-runner-backend", "lora_marlin"), "lora_marlin: the"),
        ("sglang", ("--enable-eplb", "--moe-runner-backend=triton_kernel"), "kernel: the kernel c"),
        ("sglang", ("--enable-eplb", "--attn-dp-size", "1"), None),
        ("sglang", ("--enable-eplb", "--attn-dp-size", "8"), "8: without an all-to-all SGLang"),
        ("sglang", ("--enable-eplb", "--enable-dp-attention"), None),
        ("sglang", ("--enable-eplb", "--enable-dp-attention", "--dp-size=1"), None),
        ("sglang", ("--enable-eplb", "--enable-dp-attention", "--dp-size=8"), "an all-to-all SGL"),
        ("sglang", ("--enable-eplb", "--attn-dp-size=8", "--moe-a2a-backend=deepep"), None),
        ("sglang", ("--enable-eplb", "--attn-dp-size=8", "--enable-waterfill"), None),
        ("sglang", ("--enable-eplb", "--attn-dp-size=8", "--disaggregation-mode=prefill"), None),
        ("sglang", ("--enable-eplb", "--attn-dp-size=8", "--disaggregation-mode=decode"), "8: wi"),
    ],
)
def test_flags_that_exclude_the_balance_of_experts_are_named(
    installed, command, engine, flags, words
):
    installed(None)
    code, out, _ = command("engines", "check", engine, "--", *flags)
    if words is None:
        known = f"{engine}: no flag is known to exclude the balance of experts"
        assert (code, out.splitlines()) == (0, [known])
    else:
        (line,) = out.splitlines()
        assert code == 1 and line.startswith("excluded --") and words in line


@pytest.mark.parametrize(("mode", "code"), [("observe", 0), ("place", 1)])
@pytest.mark.parametrize(
    ("engine", "flags", "words"),
    [
        ("vllm", (*VLLM, "--enable-lora"), "--enable-lora: LoRA adapters of experts do not"),
        (
            "sglang",
            ("--enable-eplb", "--expert-distribution-recorder-mode", "per_pass"),
            "--expert-distribution-recorder-mode per_pass: SGLang's scheduler ends",
        ),
        (
            "sglang",
            ("--enable-eplb", "--moe-runner-backend", "hpc_ops"),
            "--moe-runner-backend hpc_ops: the kernel reads copies of scales",
        ),
    ],
)
def test_flags_that_exclude_plans_alone_are_named_and_do_not_exclude_observing(
    installed, command, monkeypatch, engine, flags, words, mode, code
):
    installed(None)
    monkeypatch.setenv("EVENKEEL_RANK__MODE", mode)
    ended, out, _ = command("engines", "check", engine, "--", *flags)
    assert ended == code and out.startswith(f"excluded in mode place {words}")


def test_flags_come_from_the_engines_own_file_too(installed, command, tmp_path):
    installed(None)
    file = tmp_path / "vllm.yaml"
    file.write_text("enable-expert-parallel: true\nenable_eplb: true\nall2all-backend: moonep\n")
    check = ("engines", "check", "vllm", "--", "--config", file)
    assert "moonep" in command(*check)[1]
    assert command(*check, "--all2all-backend", "deepep_low_latency")[0] == 0
    file.write_text("- moonep\n")
    code, _, err = command(*check)
    assert code == 2 and "holds no options" in err
