"""Folders of encoders as their publishers lay them out, with the tensors of `encoders`."""

import json
import shutil

import numpy as np
from safetensors.numpy import save_file

from . import encoders
from .paths import DATA

#: Kind -> its name in a checkpoint for each GGUF name within a layer.
LAYER = {
    "jina-bert-v2-code": {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_q_norm": "attention.self.layer_norm_q",
        "attn_k_norm": "attention.self.layer_norm_k",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "attn_norm_2": "layer_norm_1",
        "ffn_up": "mlp.up_gated_layer",
        "ffn_down": "mlp.down_layer",
        "layer_output_norm": "layer_norm_2",
    },
    "jina-bert-v2": {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "mlp.gated_layers",
        "ffn_down": "mlp.wo",
        "layer_output_norm": "mlp.layernorm",
    },
    "nomic-bert-moe": {
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "ffn_gate_inp": "mlp.router.layer",
        "ffn_up_exps": "mlp.experts.mlp.w1",
        "ffn_down_exps": "mlp.experts.mlp.w2",
        "ffn_exps": "mlp.experts",
        "layer_output_norm": "norm2",
    },
    "nomic-bert": {
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
}
#: Kind -> architecture, and options of `encoders.tensors`.
VARIANTS = {
    "jina-bert-v2-code": ("jina-bert-v2", {"more_norms": True}),
    "nomic-bert-moe": ("nomic-bert-moe", {"sum_bias": True}),
}
#: Kind -> prefix of a layer's tensors, and name of the embeddings' norm.
_AROUND = {
    "jina-bert-v2": ("encoder.layer", "embeddings.LayerNorm"),
    "nomic-bert": ("encoder.layers", "emb_ln"),
    "nomic-bert-moe": ("encoder.layers", "emb_ln"),
}


_MOE = {
    "expert_choice_router": False,
    "ffn_div": 1,
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": encoders.USED,
    "num_experts": encoders.EXPERTS,
    "num_shared_experts": 0,
    "router_aux_loss_coef": 0.1,
}


def config(kind):
    """Returns the config.json of the publisher's first model of a kind, with small sizes."""
    _, vocab = encoders.wordpiece()
    size = encoders.LAYERS[kind]
    if kind == "jina-bert-v2":
        code = "jinaai/jina-bert-implementation"
        return {
            "_name_or_path": code,
            "architectures": ["JinaBertForMaskedLM"],
            "attention_probs_dropout_prob": 0.0,
            "attn_implementation": "torch",
            "auto_map": {
                "AutoConfig": f"{code}--configuration_bert.JinaBertConfig",
                "AutoModel": f"{code}--modeling_bert.JinaBertModel",
                "AutoModelForMaskedLM": f"{code}--modeling_bert.JinaBertForMaskedLM",
            },
            "classifier_dropout": None,
            "emb_pooler": "mean",
            "feed_forward_type": "geglu",
            "gradient_checkpointing": False,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": encoders.HIDDEN,
            "initializer_range": 0.02,
            "intermediate_size": encoders.INNER,
            "layer_norm_eps": encoders.EPS,
            "max_position_embeddings": encoders.CONTEXT,
            "model_max_length": encoders.CONTEXT,
            "model_type": "bert",
            "num_attention_heads": encoders.HEADS,
            "num_hidden_layers": size,
            "pad_token_id": 0,
            "position_embedding_type": "alibi",
            "torch_dtype": "float32",
            "type_vocab_size": 2,
            "use_cache": True,
            "vocab_size": vocab,
        }
    code = "nomic-ai/nomic-bert-2048"
    moe = kind == "nomic-bert-moe"
    return {
        "activation_function": "gelu" if moe else "swiglu",
        "architectures": ["NomicBertModel"],
        "attn_pdrop": 0.0,
        "auto_map": {
            "AutoConfig": f"{code}--configuration_hf_nomic_bert.NomicBertConfig",
            "AutoModel": f"{code}--modeling_hf_nomic_bert.NomicBertModel",
        },
        "bos_token_id": None,
        "causal": False,
        "dense_seq_output": True,
        "embd_pdrop": 0.0,
        "eos_token_id": None,
        "fused_bias_fc": True,
        "fused_dropout_add_ln": True,
        "initializer_range": 0.02,
        "layer_norm_epsilon": encoders.EPS,
        "max_trained_positions": encoders.CONTEXT,
        "mlp_fc1_bias": moe,
        "mlp_fc2_bias": moe,
        "model_type": "nomic_bert",
        "n_embd": encoders.HIDDEN,
        "n_head": encoders.HEADS,
        "n_inner": encoders.INNER,
        "n_layer": size,
        "n_positions": 4 * encoders.CONTEXT,
        "pad_vocab_size_multiple": 64,
        "parallel_block": False,
        "parallel_block_tied_norm": False,
        "prenorm": False,
        "qkv_proj_bias": moe,
        "reorder_and_upcast_attn": False,
        "resid_pdrop": 0.0,
        "rotary_emb_base": 10000 if moe else 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "summary_activation": None,
        "summary_first_dropout": 0.0,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "torch_dtype": "float32",
        "type_vocab_size": 2,
        "use_cache": True,
        "use_flash_attn": True,
        "use_rms_norm": False,
        "use_xentropy": True,
        "vocab_size": vocab,
    } | (_MOE if moe else {})


def write(folder, kind, **changes):
    """Writes a folder without a tokenizer; changes: of its config.json. Returns `tensors`."""
    folder.mkdir(exist_ok=True)
    architecture, options = VARIANTS.get(kind, (kind, {}))
    (folder / "config.json").write_text(json.dumps(config(architecture) | changes))
    held = encoders.tensors(architecture, **options)
    layers, norm = _AROUND[architecture]
    names = {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": norm,
    }
    stored = {}
    for name, value in held.items():
        if name.startswith("blk."):
            _, layer, short, suffix = name.split(".")
            where = f"{layers}.{layer}.{LAYER[kind][short]}"
        else:
            short, suffix = name.rsplit(".", 1)
            where = names[short]
        if short == "ffn_up" and kind == "jina-bert-v2-code":  # the gate's rows are the last
            value = np.roll(value, encoders.INNER, axis=0)
        if value.ndim == 3:  # (experts * inner, hidden)
            value = value.swapaxes(1, 2) if short == "ffn_down_exps" else value
            stored[where] = value.reshape(-1, encoders.HIDDEN).copy()
            continue
        stored[f"{where}.{suffix}"] = np.ascontiguousarray(value)
    save_file(stored, folder / "model.safetensors")
    return held


#: Module of jina-embeddings-v3's publisher -> its GGUF name, of a layer or of the whole.
_JINA_V3 = {
    "mixer.Wqkv": "attn_qkv",
    "mixer.out_proj": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "norm1": "attn_output_norm",
    "norm2": "layer_output_norm",
}
_JINA_V3_TOP = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "token_embd_norm",
}


def write_with_tasks(folder, prompts, *, alpha=2.0, rank=4):
    """Writes a folder of jina-embeddings-v3 as published, with random adapters of tasks.

    prompts: name of each task -> its prompt. Returns the weights as in a GGUF file and, for each
    task, those with its adapter merged in float64.
    """
    held = encoders.tensors("jina-bert-v3")
    rng, count = np.random.default_rng(5), len(prompts)
    merged = [{name: value.astype(np.float64) for name, value in held.items()} for _ in prompts]
    names = {f"roberta.{module}": name for module, name in _JINA_V3_TOP.items()}
    for i in range(encoders.LAYERS["jina-bert-v3"]):
        module = f"roberta.encoder.layers.{i}."
        names |= {module + ending: f"blk.{i}.{name}" for ending, name in _JINA_V3.items()}
    stored = {"roberta.pooler.dense.bias": np.zeros(encoders.HIDDEN, np.float32)}
    for module, name in names.items():
        if f"{name}.bias" in held:
            stored[f"{module}.bias"] = held[f"{name}.bias"]
        weight = held[f"{name}.weight"]
        if weight.ndim == 1:
            stored[f"{module}.weight"] = weight
            continue
        stored[f"{module}.parametrizations.weight.original"] = weight
        n, k = weight.shape
        shapes = (count, rank, k), (count, n, rank)
        if "embeddings" in module:
            shapes = (count, n, rank), (count, rank, k)
        a, b = (rng.standard_normal(shape).astype(np.float32) / 4 for shape in shapes)
        stored[f"{module}.parametrizations.weight.0.lora_A"] = a
        stored[f"{module}.parametrizations.weight.0.lora_B"] = b
        for task, weights in enumerate(merged):
            first, second = a[task].astype(np.float64), b[task].astype(np.float64)
            product = first @ second if "embeddings" in module else second @ first
            weights[f"{name}.weight"] += alpha / rank * product
    save_file(stored, folder / "model.safetensors")
    source = DATA / "encoders/jina-bert-v3"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text()) | {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "hidden_size": encoders.HIDDEN,
        "intermediate_size": encoders.INNER,
        "layer_norm_eps": encoders.EPS,
        "max_position_embeddings": encoders.CONTEXT + 2,
        "type_vocab_size": 2,
        "vocab_size": len(held["token_embd.weight"]),
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0,
        "lora_adaptations": list(prompts),
        "lora_alpha": alpha,
        "lora_rank": rank,
        "task_instructions": prompts,
    }
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    return held, dict(zip(prompts, merged, strict=True))
