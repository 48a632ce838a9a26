"""Moves experts between the slots of a real vLLM layer, soundly and not; runs in vLLM's process.

`python -m tests.vllm.layer_damage DTYPE...` prints what the canary said, as JSON in the last line.
"""

import json
import sys
import tempfile
import time

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

from evenkeel_moe.engines.vllm.canary import VllmProbe
from tests.agent.expert_mlp import Ranks

SLOTS, EXPERTS, HIDDEN, FFN = 8, 6, 64, 96
MAP = [[0, 1, 2, 3, 0, 4, 5, 1]]
NEW = [[0, 1, 4, 3, 0, 2, 5, 1]]
"""Experts 2 and 4 trade slots 2 and 5; the damage is in slot 2."""


class LayerSlots:
    """The slots of a layer: weights and biases, and a scale that nobody declared.

    The scale is applied in the kernel by the weight of the token, as a per-slot alpha would be.
    """

    def __init__(self, layer):
        self.experts = layer.routed_experts
        self.tensors = dict(self.experts.named_parameters())
        self.tensors["scale"] = torch.ones(SLOTS)
        kernel = self.experts.quant_method.moe_kernel.fused_experts
        apply = kernel.apply

        def scaled(**kwargs):
            kwargs["topk_weights"] = (
                kwargs["topk_weights"] * self.tensors["scale"][kwargs["topk_ids"].long()]
            )
            apply(**kwargs)

        kernel.apply = scaled
        ask = VllmProbe([layer], 0, SLOTS, torch.device("cpu"))
        self.answer = lambda layer, local: ask(layer, local)

    def snapshot(self):
        copy = object.__new__(LayerSlots)
        copy.tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return copy

    @torch.no_grad()
    def take(self, layer, local, source, left=()):
        del layer
        slots, there = source
        for name, tensor in self.tensors.items():
            if name not in left:
                tensor[local].copy_(slots.tensors[name][there])


def whole(name):
    """Take all, then let `change(row)` damage the tensor in the slot."""

    def with_change(change):
        @torch.no_grad()
        def damage(slots, layer, local, source):
            slots.take(layer, local, source)
            change(slots.tensors[name][local], source)

        return damage

    return with_change


def left(*names):
    return lambda slots, layer, local, source: slots.take(layer, local, source, left=names)


def exchanged(slots, layer, local, source):
    slots.take(layer, local, (source[0], (source[1] + 1) % SLOTS))


def flip(row, _source):
    bits = row.view(-1).view(torch.uint8)
    size = row.element_size()
    at = int(row.abs().view(-1).argmax())
    bits[size * at + size - 1] ^= 0b0100_0000


def ends_early(row, _source):
    row[len(row) // 2 :] = 0


DAMAGE = {
    "a scale left behind": left("scale"),
    "an alias of one tensor": left("w2_weight"),
    "derived state not rebuilt": left("w13_bias", "w2_bias"),
    "a swizzled layout copied as plain": whole("w2_weight")(
        lambda row, _source: row.copy_(row.T.reshape(row.shape).clone())
    ),
    "a dtype cast": whole("w13_weight")(
        lambda row, _source: row.copy_(row.to(torch.float8_e5m2).to(row.dtype))
    ),
    "one bit in one weight": whole("w13_weight")(flip),
    "two experts exchanged": exchanged,
    "a copy that ends early": whole("w13_weight")(ends_early),
}


def make_layer(dtype):
    torch.manual_seed(1)
    layer = FusedMoEFactory(
        num_experts=SLOTS,
        top_k=2,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        params_dtype=dtype,
        has_bias=True,
        prefix=f"model.layers.{len(made)}.mlp.experts",
    )
    experts = layer.routed_experts
    for parameter in experts.parameters():
        of_expert = 0.1 * torch.randn((EXPERTS, *parameter.shape[1:]))
        for slot, expert in enumerate(MAP[0]):
            parameter.data[slot] = of_expert[expert]
    experts.quant_method.process_weights_after_loading(experts)
    slots = LayerSlots(layer)
    for slot, expert in enumerate(MAP[0]):
        slots.tensors["scale"][slot] = 0.9 + 0.03 * expert
    made.append(layer)
    return slots


made: list = []


def damage_layers(dtype):
    """Return what the canary said of sound moves, and of each kind of damage."""
    found: dict = {"alarms": {}}
    ranks = registered(dtype)
    canary = ranks.canaries[0]._canary
    assert canary is not None
    found["tolerance"] = canary.tolerance
    began = time.perf_counter()
    ranks.move_at_random(1000)
    found["moves"] = sum(told.same for told in ranks.told)
    found["seconds"] = time.perf_counter() - began
    for damage, copy in DAMAGE.items():
        ranks = registered(dtype)

        def broken(slots, layer, local, source, copy=copy):
            (copy if local == 2 else LayerSlots.take)(slots, layer, local, source)

        ranks.move(NEW, broken)
        ranks.ask()
        found["alarms"][damage] = ranks.alarms
    return found


def registered(dtype):
    torch.set_default_dtype(dtype)
    ranks = Ranks([make_layer(dtype)], MAP, EXPERTS)
    torch.set_default_dtype(torch.float32)
    ranks.register()
    return ranks


def main(names):
    # vLLM's kernel for bfloat16 uses AMX, which Linux lets a process use once it has asked.
    torch.cpu._init_amx()
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        found = {name: damage_layers(getattr(torch, name)) for name in names}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
