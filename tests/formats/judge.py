#!/usr/bin/env python3
"""Judges checkpoints that `conductor quantize` wrote: judge.py PLAIN QUANTISED [PLAIN QUANTISED …]. compressed-tensors
dequantises each matrix, and transformers reads both the quantised checkpoint and one with the dequantised weights.
Prints JSON, for each pair: "error" is the relative error over all matrices, "modules" that of each, "reading" the
largest difference of a logprob between the two checkpoints (null where there is none to compare), and "logprobs" those
of the tokens 1 to 200 by the dequantised weights in f32."""

import json
import shutil
import sys
import tempfile

import torch
import transformers as tf
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

tf.logging.set_verbosity_error()
tf.logging.disable_progress_bar()
torch.set_grad_enabled(False)

def judge(plain, quantised):
    with open(f"{quantised}/config.json") as f:
        config = json.load(f)
    section = QuantizationConfig.model_validate(config["quantization_config"])
    scheme = section.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(section.format)
    state = load_file(f"{quantised}/model.safetensors")
    before = load_file(f"{plain}/model.safetensors")

    weights, modules, squares = {}, {}, torch.zeros(2, dtype=torch.float64)
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight")
    for name in before:
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" not in state:
            weights[name] = state[name]
            assert torch.equal(state[name], before[name]), name
            continue
        held = {part: state[f"{module}.{part}"] for part in parts if f"{module}.{part}" in state}
        weights[name] = compressor.decompress(held, scheme)["weight"].to(before[name].dtype)
        both = torch.stack([(weights[name].double() - before[name].double()).square().sum(), before[name].double().square().sum()])
        squares += both
        modules[module] = float((both[0] / both[1]).sqrt())
    left_out = set(section.ignore)
    assert not left_out & modules.keys() and all(name.removesuffix(".weight") in left_out for name in weights
        if weights[name].dim() == 2 and name.removesuffix(".weight") not in modules and "embed_tokens" not in name)

    with tempfile.TemporaryDirectory() as folder:
        save_file({k: v.float().contiguous() for k, v in weights.items()}, f"{folder}/model.safetensors", metadata={"format": "pt"})
        shutil.copy(f"{plain}/config.json", folder)
        reference = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.arange(1, 201)[None]
    logprobs = reference(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]

    reading = None
    if "experts" not in "".join(modules):  # transformers stacks experts, and its reader of such checkpoints knows none
        read = tf.AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32, attn_implementation="eager").eval()
        linear = {name: module for name, module in read.named_modules() if name in modules}
        assert linear.keys() == modules.keys(), linear.keys() ^ modules.keys()
        if not scheme.input_activations:  # with them, it also quantises activations
            again = read(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            reading = float((again - logprobs).abs().max())
    return {"error": float((squares[0] / squares[1]).sqrt()), "modules": modules, "reading": reading, "logprobs": logprobs.tolist()}


json.dump([judge(*pair) for pair in zip(sys.argv[1::2], sys.argv[2::2])], sys.stdout)
