"""Writes a checkpoint with seeded random bf16 weights in the shape of a config.json, and a tokenizer of realistic size.

python checkpoint.py CONFIG DIRECTORY

All contenders read this checkpoint, so they have the work of a real model's weights and tokenizer. Dense Qwen3 is
written here; other families are written by transformers, which then must be installed.
"""

import json
import math
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Pattern by which Qwen's tokenizer splits text into words.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# A minimal chat template. The quality of answers does not matter.
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tensors(config):
    """Yields name and shape of every tensor, in file order."""
    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        yield of + "input_layernorm.weight", (hidden,)
        yield of + "self_attn.q_proj.weight", (query, hidden)
        yield of + "self_attn.k_proj.weight", (kv, hidden)
        yield of + "self_attn.v_proj.weight", (kv, hidden)
        yield of + "self_attn.o_proj.weight", (hidden, query)
        yield of + "self_attn.q_norm.weight", (head,)
        yield of + "self_attn.k_norm.weight", (head,)
        yield of + "post_attention_layernorm.weight", (hidden,)
        yield of + "mlp.gate_proj.weight", (mlp, hidden)
        yield of + "mlp.up_proj.weight", (mlp, hidden)
        yield of + "mlp.down_proj.weight", (hidden, mlp)
    yield "model.norm.weight", (hidden,)


def write_weights(file, config):
    """Writes norms as ones, and all other weights as normally distributed numbers with a standard deviation of 0.02."""
    header, end = {}, 0
    for name, shape in tensors(config):
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors(config):
            if name.endswith("norm.weight"):
                values = np.ones(shape, np.float32)
            else:
                values = random.standard_normal(shape, np.float32) * np.float32(0.02)
            # The upper half of an f32 is its bf16, rounded down.
            out.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def write_by_transformers(file, config):
    """Writes the initial weights that transformers makes for the model of a config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.parent), dtype=torch.bfloat16)
    written = file.parent / "written"
    model.save_pretrained(written, max_shard_size="100GB")
    (written / "model.safetensors").rename(file)
    shutil.rmtree(written)


def tokenizer(size):
    """Returns a byte-level BPE tokenizer. Its merges are learned from Python's library; unused tokens fill it up to
    `size`."""

    def empty(model):
        made = Tokenizer(model)
        made.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
        made.decoder = decoders.ByteLevel()
        return made

    learned = empty(models.BPE())
    texts = sorted(str(file) for file in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learned.train(texts, trainers.BpeTrainer(vocab_size=16384, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    words = dict(model["vocab"])
    # Ordinary tokens end here, so that eos has the id of config.json.
    ordinary = 151_643
    for number in range(ordinary - len(words)):
        words[f"unused{number:06d}"] = len(words)
    full = empty(models.BPE(vocab=words, merges=[tuple(merge) for merge in model["merges"]]))
    reserved = [f"<|reserved_{number}|>" for number in range(size - ordinary - len(SPECIAL))]
    full.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL + reserved])
    assert full.get_vocab_size() == size, full.get_vocab_size()
    return full


def main(shape, directory):
    shape, directory = Path(shape), Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads(shape.read_text())
    made = tokenizer(config["vocab_size"])
    made.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
    greedy = {"bos_token_id": 151643, "eos_token_id": [151645], "pad_token_id": 151643, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(greedy, indent=2))
    # The file gets its final name when it is complete, because `setup` considers a directory with model.safetensors
    # finished.
    unfinished = directory / "model.safetensors.unfinished"
    if config["model_type"] == "qwen3":
        write_weights(unfinished, config)
    else:
        write_by_transformers(unfinished, shape)
    shutil.copyfile(shape, directory / "config.json")
    unfinished.rename(directory / "model.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
