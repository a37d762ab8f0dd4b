"""decoder_shapes: the config of a decoder built like Llama -> the tensors that its weights must hold, by name and shape.

Compared with what transformers builds, family by family, in `tests/stores/weights/test_decoder_shapes.py`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Keys without which a config does not say what is built: transformers would take the sizes of another model."""

Defaults = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor that a config leads to."""

    name: str
    """The whole name in the weights; in `layer_tensors` what follows `layers.N.`."""
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    """The keys of the config that its shape, or its being there, comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the layers of one `model_type` differ from Llama's, and what it takes where a config names nothing."""

    sizes: Defaults
    """Of `SIZES`, in that order: for configs of text models within others, which may leave out what is the default."""
    num_key_value_heads: int | None = None
    """None: as many as attention heads."""
    head_dim: int | None = None
    """None: the hidden size divided by the attention heads."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    query_key_norms: Literal["none", "heads", "all heads"] = "none"
    """Norms of queries and keys: over one head, or over all of them."""
    attention_bias: Literal["never", "if set", "not in o_proj"] = "if set"
    has_mlp_bias: bool = False
    """Whether the key `mlp_bias` counts."""
    is_tied: bool = False


_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GEMMA3 = Family(
    sizes=(262208, 2304, 9216, 26, 8),
    num_key_value_heads=4,
    head_dim=256,
    norms=_GEMMA_NORMS,
    query_key_norms="heads",
    is_tied=True,
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(sizes=(32000, 4096, 11008, 32, 32), has_mlp_bias=True),
    "mistral": Family(sizes=(32000, 4096, 14336, 32, 32), num_key_value_heads=8, attention_bias="never"),
    "qwen2": Family(sizes=(151936, 4096, 22016, 32, 32), num_key_value_heads=32, attention_bias="not in o_proj"),
    "qwen3": Family(sizes=(151936, 4096, 22016, 32, 32), num_key_value_heads=32, head_dim=128, query_key_norms="heads"),
    "gemma": Family(sizes=(256000, 3072, 24576, 28, 16), num_key_value_heads=16, head_dim=256, is_tied=True),
    "gemma2": Family(
        sizes=(256000, 2304, 9216, 26, 8), num_key_value_heads=4, head_dim=256, norms=_GEMMA_NORMS, is_tied=True
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "smollm3": Family(sizes=(128256, 2048, 11008, 36, 16), num_key_value_heads=4, has_mlp_bias=True, is_tied=True),
    "olmo2": Family(
        sizes=(50304, 4096, 11008, 32, 32),
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        query_key_norms="all heads",
    ),
    "granite": Family(sizes=(32000, 4096, 11008, 32, 32), has_mlp_bias=True),
}
"""By `model_type`."""


def filled(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with the family's own values for sizes that it leaves out."""
    shape = {**dict(zip(SIZES, family.sizes, strict=True)), **{k: v for k, v in config.items() if v is not None}}
    shape.setdefault("num_key_value_heads", family.num_key_value_heads or shape["num_attention_heads"])
    shape.setdefault("head_dim", family.head_dim or shape["hidden_size"] // shape["num_attention_heads"])
    return shape


def expected_tensors(
    family: Family, shape: Mapping[str, Any], *, prefix: str = "model.", heads: Sequence[str] = ()
) -> Iterator[Tensor]:
    """Returns every tensor of a model, layer after layer: nothing is built ahead, whatever number of layers a config claims.

    Args:
        shape: a filled config.
        prefix: what the names of the text model begin with.
        heads: the full names of the heads, [vocab, hidden]; none where the embeddings are the head.
    """
    table, keys = (shape["vocab_size"], shape["hidden_size"]), ("vocab_size", "hidden_size")
    for name in (f"{prefix}embed_tokens.weight", *heads):
        yield Tensor(name=name, shape=table, keys=keys)
    parts = layer_tensors(family, shape)
    for layer in range(shape["num_hidden_layers"]):
        for part in parts:
            yield replace(part, name=f"{prefix}layers.{layer}.{part.name}")
    yield Tensor(name=f"{prefix}norm.weight", shape=table[1:], keys=keys[1:])


def layer_tensors(family: Family, shape: Mapping[str, Any]) -> list[Tensor]:
    """Returns what every layer holds; names begin behind `layers.N.`, weights of projections are [out, in]."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    width, heads = shape["head_dim"], shape["num_attention_heads"] * shape["head_dim"]
    key_heads = shape["num_key_value_heads"] * width
    of_heads, of_keys = ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim")
    tensors = [Tensor(name=f"{norm}.weight", shape=(hidden,), keys=("hidden_size",)) for norm in family.norms]
    attention = {"q": (heads, of_heads), "k": (key_heads, of_keys), "v": (key_heads, of_keys)}
    biased = {"q", "k", "v"} if family.attention_bias == "not in o_proj" else set()
    if family.attention_bias == "if set" and shape.get("attention_bias"):
        biased = {"q", "k", "v", "o"}
    for part, (rows, keys) in attention.items():
        name = f"self_attn.{part}_proj"
        tensors.append(Tensor(name=f"{name}.weight", shape=(rows, hidden), keys=(*keys, "hidden_size")))
        if part in biased:
            tensors.append(Tensor(name=f"{name}.bias", shape=(rows,), keys=keys))
    tensors.append(Tensor(name="self_attn.o_proj.weight", shape=(hidden, heads), keys=(*of_heads, "hidden_size")))
    if "o" in biased:
        tensors.append(Tensor(name="self_attn.o_proj.bias", shape=(hidden,), keys=("attention_bias", "hidden_size")))
    if family.query_key_norms != "none":
        is_whole = family.query_key_norms == "all heads"
        for part, (rows, keys) in (("q", attention["q"]), ("k", attention["k"])):
            size = (rows, keys) if is_whole else (width, ("head_dim",))
            tensors.append(Tensor(name=f"self_attn.{part}_norm.weight", shape=(size[0],), keys=size[1]))
    for part, matrix in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        name = f"mlp.{part}_proj"
        tensors.append(Tensor(name=f"{name}.weight", shape=matrix, keys=("intermediate_size", "hidden_size")))
        if family.has_mlp_bias and shape.get("mlp_bias"):
            tensors.append(Tensor(name=f"{name}.bias", shape=matrix[:1], keys=("mlp_bias", "intermediate_size")))
    return tensors


def is_known_part(name: str) -> bool:
    """Whether a name behind `layers.N.` is one that layers of some family have: in another it is a sign of other weights."""
    return name in _PARTS


_PARTS = {
    tensor.name
    for family in FAMILIES.values()
    for tensor in layer_tensors(family, filled(family, {"attention_bias": True, "mlp_bias": True}))
}
