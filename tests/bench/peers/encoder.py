#!/usr/bin/env python3
"""Pictures per second of the vision encoder of tests/bench/qwen3-vl-2b with random weights in OpenVINO and in
transformers. `cargo bench -p tutti-models --bench encoder` runs the same shape here.

    target/peers/export-venv/bin/python tests/bench/peers/encoder.py [--sides 448,1024] [--rounds 3]

`tests/bench/peers/setup openvino` installs the environment."""

import argparse
import json
import pathlib
import time

import openvino
import torch
import transformers
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

SHAPE = pathlib.Path(__file__).parents[1] / "qwen3-vl-2b/config.json"


class OneGrid(torch.nn.Module):
    """The encoder of pictures of one size."""

    def __init__(self, model, grid):
        super().__init__()
        self.model, self.grid = model, grid

    def forward(self, patches):
        out = self.model(patches, grid_thw=self.grid)
        return out.pooler_output if hasattr(out, "pooler_output") else out[0]


def best(run, rounds):
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="448,1024")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = json.loads(SHAPE.read_text())["vision_config"]
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    config = Qwen3VLVisionConfig(**config, attn_implementation="sdpa")
    model = Qwen3VLVisionModel._from_config(config, dtype=torch.float32).eval()
    # Without instructions for bfloat16, torch takes minutes per picture with it.
    has_bf16 = " avx512_bf16" in pathlib.Path("/proc/cpuinfo").read_text()
    types = (torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, openvino {openvino.__version__}")
    for side in map(int, options.sides.split(",")):
        patches = side // config.patch_size
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        x = torch.randn(patches * patches, width)
        encoder = OneGrid(model, torch.tensor([[1, patches, patches]]))
        seconds = {}
        for dtype in types:
            encoder.model.to(dtype)
            encoder(x[:].to(dtype))
            seconds[f"transformers, {dtype}".replace("torch.", "")] = best(lambda: encoder(x.to(dtype)), options.rounds)
        encoder.model.to(torch.float32)
        converted = openvino.convert_model(encoder, example_input=x)
        for precision in ("f32", "bf16", "f16"):
            hints = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
            compiled = openvino.Core().compile_model(converted, "CPU", hints)
            held = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
            if f"OpenVINO, {held}" in seconds:
                continue  # the CPU lacks this precision
            request = compiled.create_infer_request()
            request.infer([x.numpy()])
            seconds[f"OpenVINO, {held}"] = best(lambda: request.infer([x.numpy()]), options.rounds)
        for name, time_ in seconds.items():
            print(f"{side} x {side}: {name:24} {time_ * 1e3:9.1f} ms, {1 / time_:7.3f} pictures/s", flush=True)


if __name__ == "__main__":
    main()
