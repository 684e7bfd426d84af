"""A tiny Llama on disk, written and computed here: by the formulas of the model, sharing no code with the lab."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-4,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}
Tensors = dict[str, torch.Tensor]


def make_tensors(config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random weights of one size each; none is symmetric, so that no two can be taken for each other."""
    generator = torch.Generator().manual_seed(5)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (query, hidden),
            layer + "self_attn.k_proj.weight": (key, hidden),
            layer + "self_attn.v_proj.weight": (key, hidden),
            layer + "self_attn.o_proj.weight": (hidden, query),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.gate_proj.weight": (ffn, hidden),
            layer + "mlp.up_proj.weight": (ffn, hidden),
            layer + "mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)).to(dtype)
        for name, shape in shapes.items()
    }


def write_checkpoint(folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Tensors:
    """Write ``config.json``, the weights and a file that stands for a tokenizer; return the weights."""
    config = {**CONFIG, **changes}
    tensors = make_tensors(config, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def log_probs(config: Mapping[str, Any], tensors: Tensors, tokens: list[int], response: int) -> torch.Tensor:
    """Log-prob of each of the last ``response`` tokens under the model, in float64; shape ``(response,)``."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    n, heads, groups = len(tokens), config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    angles = torch.arange(n).double()[:, None] / config["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    cos, sin = (torch.cat([part, part], 1)[:, None] for part in (angles.cos(), angles.sin()))
    future = torch.ones(n, n).triu(1).bool()

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[name]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return x * cos + torch.cat([-other, one], -1) * sin

    x = w["model.embed_tokens.weight"][tokens]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        y = normed(x, layer + "input_layernorm.weight")
        query, key, value = (
            (y @ w[f"{layer}self_attn.{part}_proj.weight"].T).reshape(n, -1, size) for part in ("q", "k", "v")
        )
        query, key = rotated(query), rotated(key)
        seen = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = (query[:, head] @ key[:, group].T / size**0.5).masked_fill(future, -torch.inf)
            seen.append(scores.softmax(-1) @ value[:, group])
        x = x + torch.cat(seen, 1) @ w[layer + "self_attn.o_proj.weight"].T
        y = normed(x, layer + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(y @ w[layer + "mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ w[layer + "mlp.up_proj.weight"].T)) @ w[layer + "mlp.down_proj.weight"].T
    head_weight = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    scores = (normed(x, "model.norm.weight") @ head_weight.T).log_softmax(-1)
    return scores[n - response - 1 : n - 1].gather(1, torch.tensor(tokens[n - response :])[:, None])[:, 0]


def write_rollout(
    path: Path, *, groups: Iterable[int] = (0, 0, 1, 1, 2, 2, 3, 3), **changes: Any
) -> list[dict[str, Any]]:
    """Write a rollout dump as slime's manager does; ``changes`` are fields of every sample."""
    generator = torch.Generator().manual_seed(9)
    samples = []
    for number, group in enumerate(groups):
        prompt, response = 3 + number % 5, 4 + 3 * number % 11
        tokens = torch.randint(0, CONFIG["vocab_size"], (prompt + response,), generator=generator).tolist()
        sample = {
            "group_index": group,
            "index": 40 + number,
            "prompt": f"question {group}",
            "tokens": tokens,
            "response": "an answer",
            "response_length": response,
            "label": None,
            "reward": float(number % 3),
            "loss_mask": [int(place != 1) for place in range(response)],
            "weight_versions": ["3"],
            "rollout_log_probs": [-0.5 - 0.1 * place for place in range(response)],
            "remove_sample": False,
            "status": "completed",
            "metadata": {},
        }
        samples.append({**sample, **changes})
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": 12, "samples": samples}, path)
    return samples
