"""Converts the checkpoint to a GGUF file for llama.cpp, in bf16, f16, q8_0 or q4_0.

    python gguf_checkpoint.py CHECKPOINT FILE bf16|f16|q8_0|q4_0
"""

import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
# Names of tensors: after `model.layers.N.` in the checkpoint, and after `blk.N.` in GGUF.
IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def renamed(name):
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if inside:
        return f"blk.{inside[1]}.{IN_A_LAYER[inside[2]]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def weights(file):
    """Yields name and f32 values of every tensor of a safetensors file in bf16."""
    with open(file, "rb") as bytes_:
        header = json.loads(bytes_.read(int.from_bytes(bytes_.read(8), "little")))
        data = np.memmap(file, np.uint16, "r", offset=bytes_.tell())
    for name, tensor in header.items():
        start, end = (offset // 2 for offset in tensor["data_offsets"])
        bits = data[start:end].astype(np.uint32) << 16
        yield name, bits.view(np.float32).reshape(tensor["shape"])


def add_tokenizer(writer, checkpoint):
    model = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in model["added_tokens"]}
    tokens = {index: token for token, index in model["model"]["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokens[index] for index in range(len(tokens))])
    types = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(tokens))]
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["model"]["merges"]])


def main(checkpoint, file, weight_type):
    checkpoint, stored = Path(checkpoint), TYPES[weight_type]
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(config["eos_token_id"])
    add_tokenizer(writer, checkpoint)
    for name, values in weights(checkpoint / "model.safetensors"):
        # llama.cpp needs norms in f32.
        if values.ndim == 1:
            writer.add_tensor(renamed(name), values)
        else:
            writer.add_tensor(renamed(name), gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
