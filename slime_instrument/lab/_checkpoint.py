"""A Hugging Face checkpoint of the Llama shape: its sizes as slime's arguments, its tensors under Megatron's names.

Only the standard library is needed to look at one; whether it can be trained is settled before a process starts. What
would change the numbers and is not done here (biases, scaled rotary positions, quantised weights) is refused.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_instrument._errors import five_parts
from slime_instrument.lab._options import LabError

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Megatron's names without the wrappers' prefixes, and what they are made of. Megatron fuses some weights into one.
_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_QKV, _FC1 = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
_LAYER: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm",),
    _QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm",),
    _FC1: ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2.weight": ("mlp.down_proj",),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_TYPES = ("F32", "BF16", "F16")
_FOLLOWS = "Nothing was trained."
# Tables that follow from the configuration; some checkpoints hold them.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Checkpoint:
    """The configuration of a checkpoint, in ``config.json``, and where its tensors are.

    Attributes:
        tied: whether the output layer is the embedding, in which case there is no ``lm_head.weight``.
    """

    folder: Path
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int
    positions: int
    rope_theta: float
    norm_eps: float
    tied: bool

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read ``config.json``.

        Raises:
            LabError: it is missing, or describes a model of another shape.
        """
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _refused(folder, "a Hugging Face checkpoint with config.json", str(error)) from None
        _check_shape(folder, config)
        rope = config.get("rope_parameters") or {}
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                folder=folder,
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                ffn=int(config["intermediate_size"]),
                heads=heads,
                groups=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                vocabulary=int(config["vocab_size"]),
                positions=int(config["max_position_embeddings"]),
                rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
                norm_eps=float(config["rms_norm_eps"]),
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _refused(folder, "the sizes of a Llama model in config.json", f"{error!r}") from None

    @property
    def arguments(self) -> dict[str, Any]:
        """slime's arguments that describe this model."""
        return {
            "model_name": "llama",
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "vocab_size": self.vocabulary,
            "padded_vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rotary_base": self.rope_theta,
            "layernorm_epsilon": self.norm_eps,
            "untie_embeddings_and_output_weights": not self.tied,
            **_SHAPE,
        }

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model is made of, by its name in the checkpoint."""
        query, key = self.heads * self.head_dim, self.groups * self.head_dim
        layer = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (key, self.hidden),
            "self_attn.v_proj": (key, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.ffn, self.hidden),
            "mlp.up_proj": (self.ffn, self.hidden),
            "mlp.down_proj": (self.hidden, self.ffn),
        }
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, self.hidden)
        return found

    def check_tensors(self) -> None:
        """Look at the headers of the files, not at the weights.

        Raises:
            LabError: a tensor is missing, has another shape or type, or is none of this model.
        """
        for name, shape in self.shapes.items():
            if name not in self._held:
                raise _refused(self.folder, f"the tensor {name}", "none of that name")
            _, found, kind = self._held[name]
            if found != shape:
                raise _refused(self.folder, f"{name} of shape {shape}, as config.json says", str(found))
            if kind not in _TYPES:
                raise _refused(self.folder, f"{name} in one of {', '.join(_TYPES)}", kind)
        # A tied head is stored by some; what is trained is the embedding.
        known = self.shapes.keys() | {"lm_head.weight"}
        unknown = [name for name in self._held if name not in known and not _DERIVED.search(name)]
        if unknown:
            raise _refused(self.folder, "no tensor that a Llama model does not have", ", ".join(sorted(unknown)[:3]))

    def file_of(self, name: str) -> Path:
        """Where a tensor is."""
        return self._held[name][0]

    @cached_property
    def _held(self) -> dict[str, tuple[Path, tuple[int, ...], str]]:
        """File, shape and type of each tensor that is there."""
        return {name: (path, *entry) for path in self._weight_files() for name, entry in _header(path).items()}

    def _weight_files(self) -> list[Path]:
        index = self.folder / INDEX
        if not index.is_file():
            return [self.folder / WEIGHTS]
        try:
            names: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return sorted({self.folder / name for name in names.values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise _refused(self.folder, f"a weight_map in {INDEX}", repr(error)) from None

    # Between the two formats. ``name`` is Megatron's, without the prefixes of wrappers.

    def sources(self, name: str) -> tuple[str, ...]:
        """The tensors of the checkpoint that Megatron's ``name`` is made of.

        Raises:
            LabError: a Llama model has no such parameter.
        """
        if name == "output_layer.weight" and self.tied:
            # The last pipeline stage has a copy of the embedding.
            return ("model.embed_tokens.weight",)
        if name in _MODEL:
            return (_MODEL[name],)
        found = _LAYER_NAME.fullmatch(name)
        if found is None or found[2] not in _LAYER:
            raise _refused(self.folder, "a model with the parameters of Llama", f"one with {name}")
        return tuple(f"model.layers.{found[1]}.{part}.weight" for part in _LAYER[found[2]])

    def fused(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Megatron's parameter from the tensors of :meth:`sources`, whole."""
        import torch

        if name.endswith(_QKV):
            # For each query group its query heads, then its key head, then its value head.
            by_group = [part.reshape(self.groups, -1, self.hidden) for part in parts]
            return torch.cat(by_group, dim=1).reshape(-1, self.hidden)
        return torch.cat(list(parts)) if name.endswith(_FC1) else parts[0]

    def split(self, name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint in Megatron's parameter; the inverse of :meth:`fused`."""
        if name.endswith(_QKV):
            group = whole.reshape(self.groups, -1, self.hidden)
            per_group = self.heads // self.groups * self.head_dim
            query, key, value = group.tensor_split((per_group, per_group + self.head_dim), dim=1)
            parts = [part.reshape(-1, self.hidden) for part in (query, key, value)]
        else:
            parts = list(whole.chunk(2)) if name.endswith(_FC1) else [whole]
        return dict(zip(self.sources(name), parts, strict=True))


# What holds for every Llama model. With the sizes, these are no choice of the user's.
_SHAPE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "add_bias_linear": False,
    "qk_layernorm": False,
    "num_experts": None,
    "multi_latent_attention": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def _check_shape(folder: Path, config: Any) -> None:
    if not isinstance(config, dict) or config.get("model_type") != "llama":
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise _refused(folder, "model_type llama", repr(found))
    rope = config.get("rope_parameters") or {}
    for name, value, usual in (
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", config.get("attention_bias") or False, False),
        ("mlp_bias", config.get("mlp_bias") or False, False),
        ("rope_scaling", config.get("rope_scaling"), None),
        ("rope_parameters.rope_type", rope.get("rope_type", "default"), "default"),
        ("partial_rotary_factor", rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0, 1.0),
        ("quantization_config", config.get("quantization_config"), None),
    ):
        if value != usual and not (name == "rope_scaling" and _is_no_scaling(value)):
            raise _refused(folder, f"{name} {usual}", repr(value))


def _is_no_scaling(value: Any) -> bool:
    """Whether this is the way in which transformers 5 writes that positions are not scaled."""
    return isinstance(value, dict) and value.get("rope_type", value.get("type")) == "default"


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of each tensor in a safetensors file: eight bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(min(length, path.stat().st_size)))
        return {
            name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items() if name != "__metadata__"
        }
    except (
        OSError,
        ValueError,
        struct.error,
        KeyError,
        TypeError,
        AttributeError,
        MemoryError,
        OverflowError,
    ) as error:
        raise _refused(path.parent, f"weights in {path.name}, in the format of safetensors", repr(error)) from None


def _refused(folder: Path, expected: str, found: str) -> LabError:
    return LabError(
        five_parts(
            f"lab checkpoint {folder}",
            expected=expected,
            found=found,
            follows=_FOLLOWS,
            next_step="Give the folder of a Llama model as transformers saves it (save_pretrained).",
        )
    )
