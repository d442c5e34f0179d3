"""The families of models whose MLPs and decoder layers are known: one record each; and of which a
module of another class may be.

A known MLP computes ``down(activation(gate(x)) * up(x))``, a known decoder layer
``h = x + attention(attention_norm(x))``, then ``h + mlp(mlp_norm(h))``. What a family computes
besides, or leaves out, is a field that the layers obey. What its norms multiply by, their weight or
1 + weight, is asked of each norm (norms.py).
"""

from dataclasses import dataclass, replace
from typing import Iterable, List, NamedTuple, Optional, Tuple

from torch import nn


class Join(NamedTuple):
    """Projections of one input that become one weight: its name, then theirs in its order.

    No parts: the model has them as one linear already, of that name. A part of which a model may
    have one or another is ``"one|other"``.
    """

    name: str
    parts: Tuple[str, ...]

    def of(self, parent: nn.Module) -> Tuple[str, ...]:
        """The names that a module's own forward calls."""
        return tuple(
            next((name for name in part.split("|") if parent._modules.get(name)), part)
            for part in self.parts or (self.name,)
        )


QKV = Join("qkv_proj", ("q_proj", "k_proj", "v_proj"))
GATE_UP = Join("gate_up_proj", ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Family:
    """What a family calls its classes, and the attributes that the layers read.

    Attributes:
        mlp_class: the gated MLP's class; None: the layers have none, such as those of experts.
        decoder_class: the decoder layer's class; None: it computes something else.
        attention, mlp: of the decoder layer.
        attention_norm, mlp_norm: of the decoder layer, norms of their inputs; None: there is none.
        attention_out_norm, mlp_out_norm: of the decoder layer, norms of what the attention and the
            MLP return, before the residual is added; None: there is none.
        residual_multiplier: of the decoder layer, the number that what the attention and the MLP
            return is multiplied by, before the residual is added; None: there is none.
        qkv: of the attention; None: it makes of its input what is not known here.
        gate_up, down, activation: of the MLP.
    """

    mlp_class: Optional[str] = None
    decoder_class: Optional[str] = None
    attention: str = "self_attn"
    attention_norm: Optional[str] = "input_layernorm"
    attention_out_norm: Optional[str] = None
    qkv: Optional[Join] = QKV
    mlp: str = "mlp"
    mlp_norm: Optional[str] = "post_attention_layernorm"
    mlp_out_norm: Optional[str] = None
    residual_multiplier: Optional[str] = None
    gate_up: Join = GATE_UP
    down: str = "down_proj"
    activation: str = "act_fn"

    @property
    def norms(self) -> Tuple[str, ...]:
        """The names of the decoder layer's norms."""
        names = (self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm)
        return tuple(name for name in names if name)


LLAMA = Family("LlamaMLP", "LlamaDecoderLayer")
MISTRAL = Family("MistralMLP", "MistralDecoderLayer")
QWEN2 = Family("Qwen2MLP", "Qwen2DecoderLayer")
QWEN3 = Family("Qwen3MLP", "Qwen3DecoderLayer")
SMOLLM3 = Family("SmolLM3MLP", "SmolLM3DecoderLayer")
PHI3 = Family(
    "Phi3MLP",
    "Phi3DecoderLayer",
    qkv=Join("qkv_proj", ()),
    gate_up=Join("gate_up_proj", ()),
    activation="activation_fn",
)
GEMMA = Family("GemmaMLP", "GemmaDecoderLayer")
GEMMA2 = Family(
    "Gemma2MLP",
    "Gemma2DecoderLayer",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
GEMMA3 = replace(GEMMA2, mlp_class="Gemma3MLP", decoder_class="Gemma3DecoderLayer")
GRANITE = Family("GraniteMLP", "GraniteDecoderLayer", residual_multiplier="residual_multiplier")
OLMO2 = Family(
    "Olmo2MLP",
    "Olmo2DecoderLayer",
    attention_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
)
# Of layers of experts the attention is served; the experts stay as they are.
MIXTRAL = Family(decoder_class="MixtralDecoderLayer")
QWEN3_MOE = Family("Qwen3MoeMLP", "Qwen3MoeDecoderLayer")
GPT_OSS = Family(decoder_class="GptOssDecoderLayer")

LLAMA4 = Family(
    "Llama4TextMLP", "Llama4TextDecoderLayer", mlp="feed_forward", activation="activation_fn"
)
# Of the latent attention: what is made of the hidden states. q_proj where queries are not latent.
DEEPSEEK_V3 = Family(
    "DeepseekV3MLP",
    "DeepseekV3DecoderLayer",
    qkv=Join("qkv_a_proj", ("q_a_proj|q_proj", "kv_a_proj_with_mqa")),
)

GLM = Family(
    "GlmMLP", "GlmDecoderLayer", gate_up=Join("gate_up_proj", ()), activation="activation_fn"
)
GLM4 = replace(
    GLM,
    mlp_class="Glm4MLP",
    decoder_class="Glm4DecoderLayer",
    attention_out_norm="post_self_attn_layernorm",
    mlp_out_norm="post_mlp_layernorm",
)


def _alike(family: Family, *names: str, mlp: bool = True) -> Tuple[Family, ...]:
    """Families whose layers compute what another's do, under names of their own; without ``mlp``
    that is all experts."""
    return tuple(
        replace(
            family,
            mlp_class=f"{name}MLP" if mlp else None,
            decoder_class=f"{name}DecoderLayer",
        )
        for name in names
    )


ALIKE = (
    *_alike(LLAMA, "Cwm", "DiffLlama", "Ernie4_5", "Helium", "HunYuanDenseV1", "Ministral",
            "Ministral3", "SeedOss"),
    *_alike(QWEN3_MOE, "Dots1", "Ernie4_5_Moe", "ExaoneMoe", "Glm4Moe", "HYV3", "HunYuanMoEV1",
            "Qwen2Moe", "SolarOpen"),
    *_alike(MIXTRAL, "AriaText", "Mellum", "MiniMaxM2", "Olmoe", mlp=False),
    *_alike(GRANITE, "GraniteSWA"),
    *_alike(OLMO2, "Exaone4", "Olmo3"),
    *_alike(OLMO2, "FlexOlmo", mlp=False),
    *_alike(DEEPSEEK_V3, "DeepseekV2", "Glm4MoeLite", "Youtu"),
)  # fmt: skip

FAMILIES = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    SMOLLM3,
    PHI3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GRANITE,
    OLMO2,
    MIXTRAL,
    QWEN3_MOE,
    GPT_OSS,
    LLAMA4,
    DEEPSEEK_V3,
    GLM,
    GLM4,
    *ALIKE,
)
BY_MLP = {family.mlp_class: family for family in FAMILIES if family.mlp_class}
BY_DECODER = {family.decoder_class: family for family in FAMILIES if family.decoder_class}

_UNNAMED = [
    *dict.fromkeys(replace(family, mlp_class=None, decoder_class=None) for family in FAMILIES)
]

_JOINS = [*dict.fromkeys(family.qkv for family in _UNNAMED)]


def families_of_mlp(mlp: nn.Module) -> List[Family]:
    """Those that an MLP may be of: the one that names its class, or any whose MLPs have modules of
    the same names."""
    named = BY_MLP.get(type(mlp).__name__)
    if named is not None:
        return [named]
    return [f for f in _UNNAMED if _has(mlp, (*f.gate_up.of(mlp), f.down, f.activation))]


def families_of_decoder(layer: nn.Module) -> List[Family]:
    """Likewise of a decoder layer. Its own attention and MLP may be of two of them."""
    named = BY_DECODER.get(type(layer).__name__)
    if named is not None:
        return [named]
    found = []
    for family in _UNNAMED:
        scaled = family.residual_multiplier is None or hasattr(layer, family.residual_multiplier)
        if not scaled or not _has(layer, (family.attention, family.mlp, *family.norms)):
            continue
        attention, mlp = layer._modules[family.attention], layer._modules[family.mlp]
        own = next(iter(families_of_mlp(mlp)), family)
        parts = {"gate_up": own.gate_up, "down": own.down, "activation": own.activation}
        joins = [join for join in _JOINS if _has(attention, join.of(attention))] or [None]
        found.extend(replace(family, qkv=join, **parts) for join in joins)
    # One that says more first: a number may be 1 for now.
    found.sort(key=lambda f: (f.residual_multiplier is None, -len(f.norms)))
    return [*dict.fromkeys(found)]


def families_of_attention(attention: nn.Module) -> List[Family]:
    """Likewise of an attention alone."""
    return [Family(qkv=join) for join in _JOINS if _has(attention, (*join.of(attention), "o_proj"))]


def _has(parent: nn.Module, names: Iterable[str]) -> bool:
    return all(parent._modules.get(name) is not None for name in names)


# What the modules that families have as their activation compute, by class.
ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}
