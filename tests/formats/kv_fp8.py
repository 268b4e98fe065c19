#!/usr/bin/env python3
"""Golden models with scales of keys and values, and what transformers computes with a KV cache in fp8.

    kv_fp8.py --out DIR

Writes DIR/MODEL/: a checkpoint of tests/goldens with scales in the names that a writer of checkpoints has, and
goldens.safetensors as tests/goldens makes it. The cache of the reference rounds what it stores to float8_e4m3fn after a
division by the scale, saturates, and returns the rounded numbers times the scale. All else is float32.
"""

import argparse, os, shutil, zlib

import numpy as np
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import make_goldens

LARGEST = 448.0
# A distance beyond the error of sums in f32, and the number of prompts among which one is looked for.
FAR_ENOUGH, ATTEMPTS = 1e-6, 30
# The names of scales by model. None: there are none, and all are 1.
NAMES = {
    "llama3": ("k_scale", "v_scale"),
    "qwen2": ("k_proj.output_scale", "v_proj.output_scale"),
    "qwen3": ("k_proj.k_scale", "v_proj.v_scale"),
    "qwen3_tied": None,
    "qwen3_moe": ("kv_scale", "kv_scale"),
    "qwen3_5": ("k_scale", "v_scale"),
}


# For each call of `rounded`: the least distance of a number from the middle between two floats, relative to the number
# or to the root mean square of its head, whichever is larger.
distances = []


def rounded(x, scale):
    y = (x / scale).clamp(-LARGEST, LARGEST)
    stored = y.to(torch.float8_e4m3fn).to(torch.float32)
    unit = torch.exp2(y.abs().clamp(min=2.0**-6).log2().floor() - 3)
    off = ((y.abs() / unit) % 1 - 0.5).abs() * unit / torch.maximum(y.abs(), y.square().mean(-1, keepdim=True).sqrt())
    distances.append(off.min().item())
    return stored * scale


class Fp8Cache(tf.DynamicCache):
    def __init__(self, scales, **kw):
        super().__init__(**kw)
        self.scales = scales

    def update(self, keys, values, layer, *args, **kw):
        of_key, of_value = self.scales.get(layer, (1.0, 1.0))
        return super().update(rounded(keys, of_key), rounded(values, of_value), layer, *args, **kw)


def golden(out, model):
    source, path, names = f"target/goldens/seed0/{model}", f"{out}/{model}", NAMES[model]
    state = load_file(f"{source}/model.safetensors")
    rng = np.random.default_rng([12, zlib.crc32(model.encode())])
    scales = {}
    for module in sorted(k.removesuffix("k_proj.weight") for k in state if k.endswith("self_attn.k_proj.weight")):
        if names is None:
            continue
        # The largest numbers of some layers saturate.
        pair = (rng.uniform(0.004, 0.02, 2)).astype("f4")
        if names[0] == names[1]:
            pair[1] = pair[0]
        layer = int(module.split("layers.")[1].split(".")[0])
        scales[layer] = tuple(pair.tolist())
        # Writers store a scale as a number or as a list of one.
        shape = () if layer % 2 else (1,)
        state |= {module + name: torch.full(shape, x) for name, x in zip(names, scales[layer])}
    reference = tf.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    make_goldens.new_cache = lambda model: Fp8Cache(scales, config=make_goldens.core(model).config)
    cases, closest = {}, 1.0
    for n in make_goldens.LENGTHS:
        # A number in the middle between two floats may be rounded to the other one elsewhere, where the sums of f32
        # before it have another order, and everything after it differs. So the prompt is one without such a number.
        prompts = []
        for attempt in range(ATTEMPTS):
            ids = np.random.default_rng([attempt, zlib.crc32(f"{model}/{n}".encode())]).integers(0, make_goldens.TEXT, n)
            distances.clear()
            case = make_goldens.run_case(reference, ids)
            prompts.append((min(distances), attempt, case))
            if min(distances) > FAR_ENOUGH:
                break
        distance, _, case = max(prompts, key=lambda prompt: prompt[0])
        closest = min(closest, distance)
        cases |= {f"t{n}.{k}": v.contiguous().clone() for k, v in case.items()}
    os.makedirs(path, exist_ok=True)
    shutil.copy(f"{source}/config.json", path)
    save_file(state, f"{path}/model.safetensors", metadata={"format": "pt"})
    save_file(cases, f"{path}/goldens.safetensors")
    print(f"{model:12} {len(scales)} layers with scales, closest middle {closest:.1e}", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    for model in NAMES:
        golden(args.out, model)


if __name__ == "__main__":
    main()
