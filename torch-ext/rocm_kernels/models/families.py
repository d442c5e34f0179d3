"""The families of models whose MLPs and decoder layers are known: one record each.

A known MLP computes ``down(activation(gate(x)) * up(x))``, a known decoder layer
``h = x + attention(attention_norm(x))``, then ``h + mlp(mlp_norm(h))``, with norms that multiply by
their weight. A family that computes something else besides gets a field that says so, and the layer
that obeys it.
"""

from dataclasses import dataclass
from typing import NamedTuple, Optional, Tuple


class Join(NamedTuple):
    """Projections of one input that become one weight: its name, then theirs in its order.

    No parts: the model has them as one linear already, of that name.
    """

    name: str
    parts: Tuple[str, ...]

    @property
    def linears(self) -> Tuple[str, ...]:
        """The names that the model's own forward calls."""
        return self.parts or (self.name,)


QKV = Join("qkv_proj", ("q_proj", "k_proj", "v_proj"))
GATE_UP = Join("gate_up_proj", ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Family:
    """What a family calls its classes, and the attributes that the layers read.

    Attributes:
        mlp_class: the gated MLP's class.
        decoder_class: the decoder layer's class; None: it computes something else.
        attention, mlp, attention_norm, mlp_norm: of the decoder layer.
        qkv: of the attention.
        gate_up, down, activation: of the MLP.
    """

    mlp_class: str
    decoder_class: Optional[str] = None
    attention: str = "self_attn"
    attention_norm: str = "input_layernorm"
    qkv: Join = QKV
    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: Join = GATE_UP
    down: str = "down_proj"
    activation: str = "act_fn"


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
GEMMA = Family("GemmaMLP")  # its norms multiply by 1 + weight

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, PHI3, GEMMA)
BY_MLP = {family.mlp_class: family for family in FAMILIES}
BY_DECODER = {family.decoder_class: family for family in FAMILIES if family.decoder_class}

# What the modules that families have as their activation compute, by class.
ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}
