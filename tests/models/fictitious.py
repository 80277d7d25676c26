"""A made-up architecture in one data file, with every feature that such files support."""

from jax_q4k.models.architectures.base import Architecture, CheckpointClass
from jax_q4k.models.architectures.tensor_tables import ATTENTION, NORMS_AND_POST_NORMS, QK_NORMS

ARCHITECTURE = Architecture(
    "fictitious",
    checkpoints=(
        CheckpointClass(
            "FictitiousForCausalLM",
            required=("num_key_value_heads", "head_dim", "sliding_window"),
            window=True,
            keys={
                "rope.freq_base_swa": "rope_local_base_freq",
                "attn_logit_softcapping": "attn_logit_softcapping",
            },
            optional_keys={"final_logit_softcapping": "final_logit_softcapping"},
        ),
    ),
    attention=ATTENTION + QK_NORMS,
    norms=NORMS_AND_POST_NORMS,
    activation="gelu",
    windowed=lambda layer: layer % 2 == 0,
    attention_soft_cap=50.0,
    final_soft_cap=0.0,
    local_rope_theta=100.0,
    embedding_scale=lambda config: config.hidden_size**0.5,
    attention_scale=lambda config: (config.hidden_size / config.num_heads) ** -0.5,
    norm_offset=1.0,
)
