#!/usr/bin/env python3
"""Tokens per second of tests/bench/deepseek-v4-3-layers with random weights in transformers, the only other program
known to run DeepSeek-V4 on a CPU. `cargo bench -p tutti-models --bench forward -- --model
tests/bench/deepseek-v4-3-layers` runs the same shape here.

    target/venv/bin/python tests/bench/peers/deepseek_v4.py [--only decode-1,prefill-512] [--rounds 2]

`tests/tools/venv` installs the environment."""

import argparse
import json
import pathlib
import time

import torch
import transformers

SHAPE = pathlib.Path(__file__).parents[1] / "deepseek-v4-3-layers/config.json"
CONTEXT = 512  # tokens in front of the token that a decode computes
KINDS = {"decode-1": 1, "decode-4": 4, "decode-16": 16, "prefill-512": 512, "prefill-4096": 4096}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="decode-1,decode-4,decode-16,prefill-512")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    # Without instructions for bfloat16, torch is many times slower with it.
    has_bf16 = " avx512_bf16" in pathlib.Path("/proc/cpuinfo").read_text()
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(dtype)
    config = transformers.DeepseekV4Config(**json.loads(SHAPE.read_text()))
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {dtype}", flush=True)
    for name in options.only.split(","):
        amount, seconds = KINDS[name], []
        for _ in range(options.rounds):
            if name.startswith("prefill"):
                ids = torch.randint(config.vocab_size, (1, amount))
                began = time.perf_counter()
                model(ids, logits_to_keep=1)
            else:
                ids = torch.randint(config.vocab_size, (amount, CONTEXT + 1))
                cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
                began = time.perf_counter()
                model(ids[:, -1:], past_key_values=cache, use_cache=True)
            seconds.append(time.perf_counter() - began)
        print(f"{name}: {amount / min(seconds):.2f} tok/s, {min(seconds) * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
