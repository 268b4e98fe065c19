"""GGUF files: random blocks of each type with the values that the package gguf gives them, and golden models."""

import json
import os
import re
import tempfile
import zlib

import gguf
import make_goldens
import numpy as np
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q4_K, Type.Q5_K, Type.Q6_K]
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe"}
# Golden models: of which model of tests/goldens, and the type of its matrices.
GOLDENS = [
    (model, kind)
    for model in ("smollm", "llama3", "qwen2", "qwen3", "qwen3_moe")
    for kind in (Type.F32, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0)
]
# Offsets in a block of its scales in f16.
SCALES = {Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208]}


def random_bytes(kind, n, k, rng):
    """Returns rows of random blocks, whose scales are finite."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    if kind not in SCALES:
        x = rng.standard_normal((n, k)).astype("f4")
        return gguf.quants.quantize(x, kind).view(np.uint8).reshape(n, -1)
    blocks = rng.integers(0, 256, (n, k // elements, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = rng.uniform(-0.1, 0.1, (n, k // elements)).astype("f2")
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8).reshape(*scales.shape, 2)
    return blocks.reshape(n, -1)


def random_tensors(out):
    path, values, rng = f"{out}/gguf", {}, np.random.default_rng(11)
    os.makedirs(path, exist_ok=True)
    writer = gguf.GGUFWriter(f"{path}/model.gguf", "qwen3")
    for index, kind in enumerate(TYPES):
        elements, _ = gguf.GGML_QUANT_SIZES[kind]
        n, k = 7 + index, 3 * elements if elements > 1 else 5
        data = random_bytes(kind, n, k, rng)
        writer.add_tensor(f"blk.{index}.ffn_up.weight", data, raw_dtype=kind)
        shaped = data.view(np.float32) if kind == Type.F32 else data.view(np.float16) if kind == Type.F16 else data
        values[f"model.layers.{index}.mlp.up_proj.weight"] = torch.from_numpy(gguf.quants.dequantize(shaped, kind).reshape(n, k).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(values, f"{path}/values.safetensors")
    print("GGUF             values by the package gguf", flush=True)


def permuted(x, heads):
    """The rows of q or k as llama.cpp's converter orders them."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


MODULES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
           "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
           "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
           "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp"}
ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def metadata(writer, arch, config):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if arch == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def rotary_divisors(config):
    """Returns what Llama 3's rule divides each frequency by, which llama.cpp's converter writes instead of the rule."""
    parsed = tf.AutoConfig.for_model(**config)
    scaled, _ = tf.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](parsed, "cpu")
    plain = config["rope_theta"] ** -(torch.arange(0, config["head_dim"], 2, dtype=torch.float64) / config["head_dim"])
    return (plain / scaled.double()).float().numpy()


def golden(out, model, kind):
    source, path = f"target/goldens/seed0/{model}", f"{out}/goldens-gguf/{model}-{kind.name.lower()}"
    os.makedirs(path)
    with open(f"{source}/config.json") as f:
        # GGUF has no window of attention for this family.
        config = json.load(f) | {"use_sliding_window": False, "layer_types": None}
    arch = ARCHITECTURES[config["architectures"][0]]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(f"{path}/model.gguf", arch)
    metadata(writer, arch, config)
    plain, stacks = {}, {}
    for name, x in load_file(f"{source}/model.safetensors").items():
        x = x.float().numpy()
        fits = x.ndim == 2 and x.shape[1] % 32 == 0 and not name.endswith("mlp.gate.weight")
        kept = kind if fits else Type.F32
        packed = gguf.quants.quantize(x, kept)
        plain[name] = torch.from_numpy(gguf.quants.dequantize(packed, kept).reshape(x.shape).copy())
        if match := EXPERT.match(name):
            layer, expert, which = match.groups()
            stacks.setdefault((f"blk.{layer}.ffn_{which}_exps.weight", kept), {})[int(expert)] = packed
            continue
        turned = re.search(r"self_attn\.([qk])_proj\.", name)
        if arch == "llama" and turned:
            packed = permuted(packed, heads[turned[1]])
        if name in ENDS:
            theirs = ENDS[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            module, end = rest.rsplit(".", 1)
            theirs = f"blk.{layer}.{MODULES[module]}.{end}"
        writer.add_tensor(theirs, np.ascontiguousarray(packed), raw_dtype=kept)
    if config.get("rope_scaling"):
        divisors = rotary_divisors(config)
        writer.add_tensor("rope_freqs.weight", divisors, raw_dtype=Type.F32)
    for (name, kept), experts in stacks.items():
        writer.add_tensor(name, np.stack([experts[i] for i in range(len(experts))]), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with tempfile.TemporaryDirectory() as folder:
        save_file(plain, f"{folder}/model.safetensors", metadata={"format": "pt"})
        with open(f"{folder}/config.json", "w") as f:
            json.dump(config, f)
        reference = tf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    cases = {f"{tag}.{k}": v.contiguous().clone() for tag, case in make_goldens.cases(reference, model, 0) for k, v in case.items()}
    save_file(cases, f"{path}/goldens.safetensors")
