"""A tiny Qwen3-MoE with random weights, as a checkpoint that vLLM loads."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

LAYERS, EXPERTS, HIDDEN, VOCABULARY, HEADS, KV_HEADS, HEAD = 4, 32, 128, 512, 4, 2, 32

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "moe_intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def write_checkpoint(folder: Path, seed: int) -> Path:
    """Write configuration, weights and tokenizer; the same seed gives the same weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    words = {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {"<pad>": 0, "<eos>": 1, **words},
            "unk_token": "<pad>",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    # Without this name transformers does not take the file for one of torch.
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 0.08) -> NDArray[np.float32]:
        return (scale * rng.standard_normal((rows, columns))).astype(np.float32)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    found = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    # Larger rows get more tokens. The hot experts start on the first rank and have no replica, so
    # that a plan pays whatever the prompts are.
    hot = np.arange(EXPERTS) // (EXPERTS // 4) == 1
    router = np.where(hot, 12, 5).astype(np.float32)[:, None]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{at}.self_attn.q_norm.weight": ones(HEAD),
            f"{at}.self_attn.k_norm.weight": ones(HEAD),
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            f"{at}.mlp.gate.weight": router * matrix(EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            for part in ("gate", "up", "down"):
                found[f"{at}.mlp.experts.{expert}.{part}_proj.weight"] = matrix(HIDDEN, HIDDEN)
    return found
