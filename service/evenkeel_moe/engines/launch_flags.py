"""Flags of a server with which its engine, or the plugin, does not balance experts.

Neither engine is imported: its own check needs its devices and the model. What is listed was read
in the sources of the version that each row names. An engine of another version may differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.yaml_text import parse_yaml

_MOST_BYTES = 1 << 20
_OFF = ("", "0", "false", "no", "none", "null")
"""Values with which an option is off."""


@dataclass(frozen=True, slots=True)
class Limit:
    """An option with which experts are not balanced."""

    option: str
    values: tuple[str, ...]
    """Beginnings of the values that matter; none: every value that turns the option on."""
    words: str
    source: str
    """The version and file in which this was read."""
    unless: tuple[str, ...] = ()
    """Other options, as NAME or NAME=VALUE; with one of them only the engine's start can tell."""
    together_with: tuple[str, ...] = ()
    """Other options of which one must be on as well; none: it matters alone."""
    only_place: bool = False
    """True if the plugin starts in mode observe all the same."""

    def meets(self, flags: Mapping[str, Any]) -> bool:
        """Return True if a server with these flags is concerned."""
        if any(_is_on(flags, option) for option in self.unless):
            return False
        if self.together_with and not any(_is_on(flags, option) for option in self.together_with):
            return False
        if self.values:
            value = flags.get(self.option)
            return isinstance(value, str) and value.startswith(self.values)
        return _is_on(flags, self.option)


def _is_on(flags: Mapping[str, Any], option: str) -> bool:
    """Return True unless an option, as NAME or NAME=VALUE, is missing, off or has another value.

    A size of 1 divides nothing.
    """
    option, equals, wanted = option.partition("=")
    value = str(flags.get(option, "")).lower()
    if equals:
        return value == wanted
    return value not in _OFF and not (option.endswith("-size") and value == "1")


_WITHOUT_PADDING = (
    "moe-a2a-backend",
    "moe-runner-backend",
    "enable-waterfill",
    "enable-prefill-cp",
    "disaggregation-mode=prefill",
)
"""Options with which SGLang may route the tokens of each rank on that rank, or has no padding."""
_DATA_PARALLEL = ("dp-size", "data-parallel-size")
"""Without one of them SGLang drops --enable-dp-attention."""
LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "vllm": (
        Limit(
            "all2all-backend",
            ("moonep",),
            "MoonEP's replicated weights do not follow moves of experts",
            "vLLM 0.32.0, config/vllm.py",
        ),
        Limit(
            "moe-backend",
            ("flashinfer_moe_ep_mega_deep_gemm",),
            "FlashInfer's MoE-EP kernel takes no map of experts",
            "vLLM 0.32.0, layers/fused_moe/flashinfer_moe_ep.py",
        ),
        Limit(
            "enable-lora",
            (),
            "LoRA adapters of experts do not follow the moves of mode place; --lora-target-modules"
            " can leave them out",
            "vLLM 0.32.0, lora/model_manager.py",
            unless=("lora-target-modules",),
            only_place=True,
        ),
        Limit(
            "quantization",
            (
                *("awq", "auto_awq", "gptq", "auto_gptq", "moe_wna16", "humming", "inc"),
                *("modelopt_mxfp8", "gpt_oss_mxfp4"),
            ),
            "the method of this quantization does not support EPLB",
            "vLLM 0.32.0, layers/quantization: no supports_eplb",
        ),
        Limit(
            "speculative-config.method",
            ("medusa",),
            "a Medusa drafter with experts is refused",
            "vLLM 0.32.0, v1/spec_decode/medusa.py",
        ),
    ),
    "sglang": (
        Limit(
            "dwdp-size",
            (),
            "DWDP divides the experts once and for all",
            "SGLang 0.5.23, arg_groups/parallel_hook.py",
        ),
        Limit(
            "enable-paged-experts",
            (),
            "paged experts live on one GPU and are not balanced",
            "SGLang 0.5.23, layers/moe/paged_experts/method.py",
        ),
        Limit(
            "moe-runner-backend",
            ("lora", "experimental_sgl_marlin"),
            "the MoE runner for LoRA needs every expert at its own place",
            "SGLang 0.5.23, arg_groups/lora_hook.py, lora/marlin_lora_temp/policy.py",
        ),
        Limit(
            "moe-runner-backend",
            ("triton_kernel",),
            "the kernel chooses the experts by itself, without the map of experts",
            "SGLang 0.5.23, layers/moe/topk.py",
        ),
        Limit(
            "moe-runner-backend",
            ("hpc_ops",),
            "the kernel reads copies of scales, which do not follow moves of experts",
            "SGLang 0.5.23, layers/quantization/fp8.py",
            only_place=True,
        ),
        Limit(
            "elastic-ep-backend",
            (),
            "after a death SGLang masks the rank inside a forward pass, and the plugin's collective"
            " calls need all ranks",
            "SGLang 0.5.23, elastic_ep/elastic_ep.py, model_executor/model_runner.py",
        ),
        Limit(
            "expert-distribution-recorder-mode",
            ("per_pass", "per_token"),
            "SGLang's scheduler ends at the first rebalance with another mode than stat or"
            " stat_approx",
            "SGLang 0.5.23, eplb/eplb_manager.py",
            only_place=True,
        ),
        *(
            Limit(
                option,
                (),
                "without an all-to-all SGLang fills the batches of attention data parallelism up"
                " to one length and counts what fills them; unless the model chooses one, choose a"
                " --moe-a2a-backend",
                source,
                unless=_WITHOUT_PADDING,
                together_with=others,
            )
            for option, source, others in (
                ("attn-dp-size", "SGLang 0.5.23, layers/moe/utils.py", ()),
                ("attention-data-parallel-size", "SGLang 0.5.23, layers/moe/utils.py", ()),
                ("enable-dp-attention", "SGLang 0.5.21, layers/moe/utils.py", _DATA_PARALLEL),
            )
        ),
    ),
}
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "vllm": ("enable-expert-parallel", "enable-eplb"),
    "sglang": ("enable-eplb",),
}
"""Options without which the engine has no balancer for the plugin to use."""


def find_limits(engine: str, flags: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield why a server with these flags does not balance experts with the plugin.

    Args:
        engine: vllm or sglang.
        flags: as `read_flags` returns them.

    Yields:
        (reason in words, True if the plugin starts in mode observe all the same).
    """
    for option in REQUIRED[engine]:
        if not _is_on(flags, option):
            words = f"--{option} is missing: without it the engine has no balancer (the plugin)"
            yield words, False
    for limit in LIMITS[engine]:
        if limit.meets(flags):
            value = flags[limit.option]
            shown = "" if value is True else f" {value}"
            yield f"--{limit.option}{shown}: {limit.words} ({limit.source})", limit.only_place


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a server's command line by name, without the leading dashes.

    An option without a value is True. `--config FILE` adds the options of a YAML file, which those
    of the command line override. Words that belong to no option, such as the model, are left out.

    Raises:
        InvalidInput: the file cannot be read.
    """
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            flags |= _parts(name, value) if equals else {name: True}
            name = "" if equals else name
        elif name:
            flags |= _parts(name, word)
            name = ""
    if isinstance(file := flags.pop("config", None), str):
        flags = _of_file(Path(file)) | flags
    return flags


def _parts(name: str, value: Any) -> dict[str, Any]:
    """Return an option; one that holds a mapping gives an option `name.key` for each key."""
    if isinstance(value, str) and value.startswith("{"):
        value = parse_yaml(value, f"--{name} ")
    if not isinstance(value, Mapping):
        return {name: value}
    return {f"{name}.{key}": one for key, one in value.items()}


def _of_file(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidInput(f"{path} has more than {_MOST_BYTES} bytes")
        found = parse_yaml(path.read_text("utf-8"), f"{path}:")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Mapping):
        raise InvalidInput(f"{path} holds no options: {found!r:.60}")
    flags: dict[str, Any] = {}
    for key, value in found.items():
        flags |= _parts(str(key).replace("_", "-"), value)
    return flags
