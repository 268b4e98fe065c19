#!/usr/bin/env python3
"""Random tensors in each layout of quantised weights with their values, and golden models in these layouts.

    make_formats.py --out DIR [--models MODEL ...]

Writes DIR/layouts/LAYOUT with config.json, model.safetensors and values.safetensors (the values in the config's dtype),
and DIR/goldens/MODEL-LAYOUT, as tests/goldens/make_goldens.py does. gguf_files.py writes DIR/gguf and DIR/goldens-gguf.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import zlib

import gguf_files
import make_goldens
import numpy as np
import torch
import transformers as tf
from layouts import layouts
from safetensors.torch import load_file, save_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Outputs and inputs. Blocks of 128 are partial in some.
SHAPES = [(8, 32), (40, 96), (136, 320), (264, 128)]


def groups_of(layout, k, rng):
    """With act order, the columns' groups in a random order."""
    if not getattr(layout, "act", False):
        return None
    return torch.from_numpy(rng.permutation(k)) // layout.block[1]


def write(path, config, tensors, values):
    os.makedirs(path, exist_ok=True)
    with open(f"{path}/config.json", "w") as f:
        json.dump(config, f, indent=1)
    save_file({k: v.contiguous() for k, v in tensors.items()}, f"{path}/model.safetensors")
    save_file({k: v.contiguous() for k, v in values.items()}, f"{path}/values.safetensors")


def random_tensors(out):
    for layout in layouts():
        # compressed-tensors computes in the type of the scales, and in bfloat16 where they are no floats.
        names = list(DTYPES)
        if layout.judge:
            names = ["bfloat16"] if "fp4" in layout.name else [n for n in names if DTYPES[n] == layout.scale]
        for name in names:
            rng = np.random.default_rng([7, zlib.crc32(f"{layout.name}/{name}".encode())])
            tensors, values, modules = {}, {}, 0
            for n, k in SHAPES:
                codes, scales, zeros = layout.random(n, k, rng)
                groups = groups_of(layout, k, rng)
                parts = layout.tensors(codes, scales, zeros, groups)
                value = layout.values(codes, scales, zeros, groups).to(DTYPES[name])
                judged = layout.judged(parts)
                if judged is not None:
                    same = (judged.to(DTYPES[name]) == value) | (judged.isnan() & value.isnan())
                    assert same.all(), (layout.name, (~same).sum(), judged, value)
                module = f"model.layers.{modules}.mlp.up_proj"
                tensors |= {f"{module}.{suffix}": x for suffix, x in parts.items()}
                values[f"{module}.weight"] = value
                modules += 1
            config = {"dtype": name, "quantization_config": layout.config}
            write(f"{out}/layouts/{layout.name}-{name}", config, tensors, values)
        print(f"{layout.name:18} {'judged by compressed-tensors' if layout.judge else 'values by this script'}", flush=True)


def is_linear(name, tensor):
    left_out = ("embed_tokens", "lm_head", "mlp.gate.")
    return name.endswith(".weight") and tensor.dim() == 2 and not any(part in name for part in left_out)


def golden(out, model, layout):
    """Writes a golden model in a layout."""
    source, path = f"target/goldens/seed0/{model}", f"{out}/goldens/{model}-{layout.name}"
    state = load_file(f"{source}/model.safetensors")
    rng = np.random.default_rng([9, zlib.crc32(path.encode())])
    tensors, plain = {}, {}
    for name, x in state.items():
        plain[name] = tensors[name] = x
        if is_linear(name, x):
            del tensors[name]
            codes, scales, zeros = layout.quantise(x)
            groups = None
            if getattr(layout, "act", False):  # the columns in another order have the groups of their new places
                order = torch.from_numpy(rng.permutation(x.shape[1]))
                codes, scales, zeros = layout.quantise(x[:, order])
                groups = torch.empty(x.shape[1], dtype=torch.long)
                groups[order] = torch.arange(x.shape[1]) // layout.block[1]
                codes = codes[:, torch.argsort(order)]
            plain[name] = layout.values(codes, scales, zeros, groups)
            tensors |= {name.removesuffix("weight") + k: v for k, v in layout.tensors(codes, scales, zeros, groups).items()}
    with open(f"{source}/config.json") as f:
        config = json.load(f)
    with tempfile.TemporaryDirectory() as folder:
        save_file(plain, f"{folder}/model.safetensors", metadata={"format": "pt"})
        os.system(f"cp {source}/config.json {folder}")
        reference = tf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    cases = {f"{tag}.{k}": v.contiguous().clone() for tag, case in make_goldens.cases(reference, model, 0) for k, v in case.items()}
    write(path, config | {"quantization_config": layout.config}, tensors, {})
    os.remove(f"{path}/values.safetensors")
    save_file(cases, f"{path}/goldens.safetensors")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True)
    ap.add_argument("--models", nargs="*", default=["qwen3", "llama3", "qwen3_moe"])
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    random_tensors(args.out)
    gguf_files.random_tensors(args.out)
    work = [(gguf_files.golden, (args.out, *golden)) for golden in gguf_files.GOLDENS]
    for model in args.models:
        # Experts of this model have 40 inputs, which groups of 8 divide, and layouts with fixed groups do not.
        moe = model == "qwen3_moe"
        for layout in layouts(8 if moe else 32):
            if moe and layout.name in ("mxfp4", "nvfp4", "nvfp4_modelopt", "nf4"):
                continue
            work.append((golden, (args.out, model, layout)))
    # Two ranks cut the 96 inputs of `down_proj` into groups of 16, but not into groups of 32.
    for layout in layouts(16):
        if layout.name == "w4_group":
            layout.name = "w4_group16"
            work.append((golden, (args.out, "llama3", layout)))
    # A process per processor, because each computes with one thread. Forks share the imports, which take seconds.
    with multiprocessing.get_context("fork").Pool() as pool:
        for made in [pool.apply_async(function, arguments) for function, arguments in work]:
            made.get()
    print(f"{len(work)} golden models", flush=True)


if __name__ == "__main__":
    main()
