"""A tiny Qwen3-MoE with random weights, as a checkpoint that vLLM loads."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

LAYERS, EXPERTS, VOCABULARY, HEADS, KV_HEADS, HEAD = 4, 32, 512, 4, 2, 32


HOT = 4
"""Hot experts of a topic in each layer."""


@dataclass(frozen=True)
class Kind:
    """What differs between the models of the tests and the benches."""

    hidden: int = 128
    ffn: int = 128
    """Of an expert."""
    topics: int = 0
    """Word w is of topic w % topics, and so is what follows it. Each topic has hot experts of its
    own. 0: a quarter of the experts is hot, whatever the words are."""


TINY = Kind()
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "float32",
    "vocab_size": VOCABULARY,
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


def write_checkpoint(folder: Path, seed: int, kind: Kind = TINY) -> Path:
    """Write configuration, weights and tokenizer; the same seed gives the same weights."""
    folder.mkdir()
    sizes = {
        "hidden_size": kind.hidden,
        "intermediate_size": kind.hidden,
        "moe_intermediate_size": kind.ffn,
    }
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes), encoding="utf-8")
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
    save_file(_weights(seed, kind), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(seed: int, kind: Kind) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    hidden, ffn = kind.hidden, kind.ffn

    def matrix(rows: int, columns: int, scale: float = 0.08) -> NDArray[np.float32]:
        return (scale * rng.standard_normal((rows, columns))).astype(np.float32)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    found = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": matrix(VOCABULARY, hidden),
    }
    # Larger rows get more tokens. The hot experts start on the first rank and have no replica, so
    # that a plan pays whatever the prompts are.
    hot = np.arange(EXPERTS) // (EXPERTS // 4) == 1
    router = np.where(hot, 12, 5).astype(np.float32)[:, None]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": ones(hidden),
            f"{at}.post_attention_layernorm.weight": ones(hidden),
            f"{at}.self_attn.q_norm.weight": ones(HEAD),
            f"{at}.self_attn.k_norm.weight": ones(HEAD),
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, HEADS * HEAD),
            f"{at}.mlp.gate.weight": router * matrix(EXPERTS, hidden),
        }
        for expert in range(EXPERTS):
            of = f"{at}.mlp.experts.{expert}"
            found[f"{of}.gate_proj.weight"] = matrix(ffn, hidden)
            found[f"{of}.up_proj.weight"] = matrix(ffn, hidden)
            found[f"{of}.down_proj.weight"] = matrix(hidden, ffn)
    if kind.topics:
        _write_topics(found, kind, rng)
    return found


def _write_topics(
    found: dict[str, NDArray[np.float32]], kind: Kind, rng: np.random.Generator
) -> None:
    """Give each topic a direction that its words have in common, and that its experts answer to.

    Attention and experts add so little that the direction is there in every layer.
    """
    drawn = rng.standard_normal((kind.topics, kind.hidden))
    directions = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    of_words = directions[np.arange(VOCABULARY) % kind.topics]
    found["model.embed_tokens.weight"] += (1.5 * of_words).astype(np.float32)
    found["lm_head.weight"] += of_words.astype(np.float32)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found[f"{at}.self_attn.o_proj.weight"] *= 0.05
        for expert in range(EXPERTS):
            found[f"{at}.mlp.experts.{expert}.down_proj.weight"] *= 0.05
        router = 0.16 * rng.standard_normal((EXPERTS, kind.hidden))
        for direction in directions:
            router[rng.choice(EXPERTS, HOT, replace=False)] += 0.25 * direction
        found[f"{at}.mlp.gate.weight"] = router.astype(np.float32)
