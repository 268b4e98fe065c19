"""Quantises the checkpoint to int8 for vLLM: weights with a scale per output, activations with a scale per token.

    python w8a8_checkpoint.py CHECKPOINT DIRECTORY
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def quantized(weight):
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round().to(torch.int8), scale.to(torch.bfloat16)


def main(checkpoint, directory):
    checkpoint, directory = Path(checkpoint), Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if "_proj." in name:
            tensors[name], tensors[name.removesuffix("weight") + "weight_scale"] = quantized(weight)
        else:
            tensors[name] = weight
    for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]:
        shutil.copyfile(checkpoint / file, directory / file)
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight_bits | {"strategy": "channel", "dynamic": False},
        "input_activations": eight_bits | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
