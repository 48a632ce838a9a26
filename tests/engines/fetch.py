"""Gets the modules of the engines to test, and says which: `python -m tests.engines.fetch`."""

from tests.engines import ascend
from tests.engines.sglang import engine as sglang
from tests.engines.vllm import engine as vllm
from tests.engines.wheels import engine_root


def main() -> None:
    """Download what is missing, and print the folder of each engine."""
    for name, version, folder in (
        ("vLLM", vllm.VERSION, vllm.root_folder()),
        ("SGLang", sglang.VERSION, sglang.root_folder()),
        ("vllm-ascend", ascend.VERSION, engine_root(*ascend.WHEEL)),
    ):
        print(f"{name} {version}: {folder}", flush=True)


if __name__ == "__main__":
    main()
