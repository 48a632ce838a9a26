"""Known devices: memory bandwidth and arithmetic by number type, from their makers' data sheets.

All figures are peaks of one device without sparsity. Huawei's Ascend 910B is not in the table:
published figures differ by a factor of 1.5 in arithmetic and of 4 in bandwidth.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from evenkeel_moe.errors import InvalidInput

BYTES_PER_WEIGHT: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    # One byte of scale for each 32 weights, as in MXFP4. NVFP4 has one for 16: 6 % more bytes.
    "fp4": 0.53125,
    "int4": 0.53125,
}
"""Bytes of one weight by number type, its share of the scales included."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One model of device."""

    name: str
    words: tuple[str, ...]
    """Words that its driver's name for it contains, in lower case."""
    bytes_per_s: float
    """Peak rate of reading its memory."""
    flops: Mapping[str, float]
    """Peak operations a second by number type, a multiplication and an addition as two."""
    tile_tokens: int = 0
    """Rows of one matrix instruction: tokens are computed in multiples of it. 0: not known."""


def _tensor(bf16: float, fp8: float = 0.0, int8: float = 0.0, fp4: float = 0.0) -> dict[str, float]:
    """Return peaks by number type from [TFLOPS]; 0 for a type that the device does not have."""
    found = {"bf16": bf16, "fp16": bf16, "fp8": fp8, "int8": int8, "fp4": fp4}
    return {name: peak * 1e12 for name, peak in found.items() if peak > 0}


# NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950).
_A100 = _tensor(312, int8=624)
# NVIDIA H100 data sheet (SXM, NVL) and product brief (PCIe). Where a sheet gives figures with
# sparsity, they are halved.
_HOPPER = _tensor(989.4, 1978.9, 1978.9)
_HOPPER_NVL = _tensor(835.5, 1671, 1671)
_HOPPER_PCIE = _tensor(756, 1513, 1513)
# HGX H20: published by NVIDIA's partners only.
_H20 = _tensor(148, 296, 296)
_WGMMA = 64  # PTX ISA: wgmma.mma_async multiplies 64 rows.
_TCGEN05 = 128  # PTX ISA: tcgen05.mma multiplies 128 rows at its full rate.

DEVICES: tuple[DeviceSpec, ...] = (
    # Names with more words come before those with fewer.
    DeviceSpec("A100 40GB", ("a100", "40gb"), 1.555e12, _A100),
    DeviceSpec("A100 80GB PCIe", ("a100", "80gb", "pcie"), 1.935e12, _A100),
    DeviceSpec("A100 80GB", ("a100",), 2.039e12, _A100),
    DeviceSpec("H100 NVL", ("h100", "nvl"), 3.9e12, _HOPPER_NVL, _WGMMA),
    DeviceSpec("H100 PCIe", ("h100", "pcie"), 2.0e12, _HOPPER_PCIE, _WGMMA),
    DeviceSpec("H100", ("h100",), 3.35e12, _HOPPER, _WGMMA),
    DeviceSpec("H800 PCIe", ("h800", "pcie"), 2.0e12, _HOPPER_PCIE, _WGMMA),
    DeviceSpec("H800", ("h800",), 3.35e12, _HOPPER, _WGMMA),
    DeviceSpec("H20-3e", ("h20", "3e"), 4.8e12, _H20, _WGMMA),
    DeviceSpec("H20", ("h20",), 4.0e12, _H20, _WGMMA),
    # NVIDIA H200 and GH200 data sheets.
    DeviceSpec("H200 NVL", ("h200", "nvl"), 4.8e12, _HOPPER_NVL, _WGMMA),
    DeviceSpec("H200", ("h200",), 4.8e12, _HOPPER, _WGMMA),
    DeviceSpec("GH200 144G", ("gh200", "144g"), 4.9e12, _HOPPER, _WGMMA),
    DeviceSpec("GH200", ("gh200",), 4.0e12, _HOPPER, _WGMMA),
    # NVIDIA Blackwell architecture brief: HGX B200, and the GPUs of GB200 NVL72.
    DeviceSpec("B200", ("b200",), 8.0e12, _tensor(2250, 4500, 4500, 9000), _TCGEN05),
    DeviceSpec("GB200", ("gb200",), 8.0e12, _tensor(2500, 5000, 5000, 10000), _TCGEN05),
    # AMD Instinct data sheets.
    DeviceSpec("MI300X", ("mi300x",), 5.3e12, _tensor(1307.4, 2614.9, 2614.9)),
    DeviceSpec("MI325X", ("mi325x",), 6.0e12, _tensor(1307.4, 2614.9, 2614.9)),
    DeviceSpec("MI350X", ("mi350x",), 8.0e12, _tensor(2306.9, 4613.7, 4613.7, 9227.5)),
    DeviceSpec("MI355X", ("mi355x",), 8.0e12, _tensor(2516.6, 5033.2, 5033.2, 10066.3)),
)


def find_device(name: str) -> DeviceSpec:
    """Return the device of this name.

    Args:
        name: as `torch.cuda.get_device_name` gives it, or a short form such as "h100".

    Raises:
        InvalidInput: not in the table, or a slice of a device, whose bandwidth is not known.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if "mig" in words:
        raise InvalidInput(f"{name!r} is a slice of a device: its bandwidth is not known")
    for device in DEVICES:
        if words.issuperset(device.words):
            return device
    raise InvalidInput(
        f"{name!r} is not in the table of devices" if name else "the ranks name no device"
    )
