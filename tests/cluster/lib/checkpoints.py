"""Checkpoints whose weights are large, and take no room on the disk."""

import json


def sparse(folder, layers, hidden, intermediate):
    """Gives a folder a file of weights that takes no room on the disk."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    config |= {"tie_word_embeddings": True, "torch_dtype": "float32", "dtype": "float32"}
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * layers
    (folder / "config.json").write_text(json.dumps(config))
    head, heads, kv = (config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        of = f"model.layers.{layer}."
        shapes |= {
            of + "input_layernorm.weight": [hidden],
            of + "post_attention_layernorm.weight": [hidden],
            of + "self_attn.q_norm.weight": [head],
            of + "self_attn.k_norm.weight": [head],
            of + "self_attn.q_proj.weight": [heads * head, hidden],
            of + "self_attn.k_proj.weight": [kv * head, hidden],
            of + "self_attn.v_proj.weight": [kv * head, hidden],
            of + "self_attn.o_proj.weight": [hidden, heads * head],
            of + "mlp.gate_proj.weight": [intermediate, hidden],
            of + "mlp.up_proj.weight": [intermediate, hidden],
            of + "mlp.down_proj.weight": [hidden, intermediate],
        }
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return end
