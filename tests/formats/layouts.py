"""The layouts of quantised weights in safetensors files.

A layout packs codes, scales and zero points into the tensors of a module, and says which values they stand for. Where
compressed-tensors knows the layout, its own code packs and dequantises, and must agree with the values.
"""

import json

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])


def ceil(a, b):
    return -(-a // b)


def spread(x, block, n, k):
    """Repeats the entries of a grid of scales over their blocks."""
    return x.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]


class Layout:
    """`bits` and `kind` describe codes: "e4m3", "e2m1", "int" (signed), "uint" or "nf4"."""

    def __init__(self, name, kind, bits, block, pack, config, asym=False, scale=torch.float32, judge=None):
        self.name, self.kind, self.bits, self.asym, self.scale, self.judge = name, kind, bits, asym, scale, judge
        self.block, self.pack, self.config = block, pack, config

    def grid(self, n, k):
        block = [size or whole for size, whole in zip(self.block, (n, k))]
        return block, (ceil(n, block[0]), ceil(k, block[1]))

    def random(self, n, k, rng):
        """Returns codes, scales and zero points in which every code and both ends of zero points occur."""
        ints = lambda low, high, shape: torch.from_numpy(rng.integers(low, high, shape))
        block, grid = self.grid(n, k)
        codes = ints(0, 1 << self.bits, (n, k))
        if self.kind == "e4m3":
            codes = torch.where((codes & 127) == 127, codes & 128, codes)
        if self.kind == "int":
            codes = codes - (1 << self.bits - 1)
        scales = torch.from_numpy(rng.uniform(0.001, 0.1, grid).astype("f4"))
        zeros = None
        if self.asym:
            low = -(1 << self.bits - 1) if self.kind == "int" else 0
            zeros = ints(low, low + (1 << self.bits), grid)
            zeros.view(-1)[0], zeros.view(-1)[-1] = low, low + (1 << self.bits) - 1
        return codes, self.round_scales(scales), zeros

    def quantise(self, w):
        """Returns codes, scales and zero points near the values `w`."""
        n, k = w.shape
        block, grid = self.grid(n, k)
        padded = torch.full((grid[0] * block[0], grid[1] * block[1]), float("nan"))
        padded[:n, :k] = w
        tiles = padded.view(grid[0], block[0], grid[1], block[1]).transpose(1, 2).reshape(*grid, -1)
        largest = tiles.abs().nan_to_num(0).amax(-1).clamp_min(1e-6)
        zeros = None
        if self.kind in ("int", "uint"):
            half = 1 << self.bits - 1
            low, high = (-half, half - 1) if self.kind == "int" else (0, 2 * half - 1)
            if self.asym:
                least, most = tiles.nan_to_num(0).amin(-1), tiles.nan_to_num(0).amax(-1)
                scales = self.round_scales((most - least).clamp_min(1e-6) / (2 * half - 1))
                zeros = (low - least / scales).round().clamp(low, high).long()
            else:
                scales = self.round_scales(largest / (half - 1))
            at = spread(scales, block, n, k)
            shift = spread(zeros, block, n, k) if zeros is not None else 0
            return ((w / at).round() + shift).clamp(low, high).long(), scales, zeros
        top = {"e4m3": 448.0, "e2m1": 6.0, "nf4": 1.0}[self.kind]
        scales = self.round_scales(largest / top)
        scaled = w / spread(self.whole(scales), block, n, k)
        if self.kind == "e4m3":
            codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).long()
        else:
            table = E2M1 if self.kind == "e2m1" else NF4
            codes = (scaled[..., None] - table).abs().argmin(-1)
        assert codes.numel() < 64 or len(codes.unique()) > 4, f"{self.name}: the codes say nothing"
        return codes, scales, zeros

    def round_scales(self, scales):
        if self.name == "mxfp4":
            return torch.exp2(torch.log2(scales).ceil())
        if self.name.startswith("nvfp4"):
            factor = 0.01 if self.name == "nvfp4" else 0.0123
            self.all = torch.tensor([1 / factor if self.name == "nvfp4" else factor], dtype=torch.float32)
            return (scales / factor).to(torch.float8_e4m3fn).float()
        return scales.to(self.scale).float()

    def whole(self, scales):
        """Returns the scales of blocks, with the scale of the whole matrix."""
        if self.name == "nvfp4":
            return scales / self.all
        return scales * self.all if self.name == "nvfp4_modelopt" else scales

    def values(self, codes, scales, zeros, groups=None):
        """Returns the values in f32. `groups` names the group of each column, with act order."""
        n, k = codes.shape
        block, _ = self.grid(n, k)
        scales = self.whole(scales)
        of = lambda x: x[:, groups] if groups is not None else spread(x, block, n, k)
        if self.kind == "e4m3":
            x = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        elif self.kind in ("e2m1", "nf4"):
            x = (E2M1 if self.kind == "e2m1" else NF4)[codes]
        else:
            x = (codes - (of(zeros) if zeros is not None else 0)).float()
        return x * of(scales)

    def tensors(self, codes, scales, zeros, groups=None):
        return self.pack(self, codes, scales, zeros, groups)

    def judged(self, parts):
        """Returns the values by the library's own code, or None."""
        if self.judge is None:
            return None
        group = self.config["config_groups"]["group_0"]
        args = {k: v for k, v in group["weights"].items()}
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=self.judge)
        got = BaseCompressor.get_value_from_registry(self.judge).decompress(dict(parts), scheme)
        return got["weight"]


def pack_float8(self, codes, scales, zeros, groups):
    name = "weight_scale_inv" if self.name == "fp8_blocks" else "weight_scale"
    scales = scales.to(self.scale)
    return {"weight": codes.to(torch.uint8).view(torch.float8_e4m3fn), name: scales.reshape(1) if self.block == (0, 0) else scales}


def pack_int8(self, codes, scales, zeros, groups):
    out = {"weight": codes.to(torch.int8), "weight_scale": scales.to(self.scale)}
    return out | ({"weight_zero_point": zeros.to(torch.int8)} if zeros is not None else {})


def pack_words(self, codes, scales, zeros, groups):
    out = {"weight_packed": pack_to_int32(codes.to(torch.int8), self.bits), "weight_scale": scales.to(self.scale),
           "weight_shape": torch.tensor(codes.shape)}
    if zeros is not None:
        out["weight_zero_point"] = pack_to_int32(zeros.to(torch.int8), self.bits, packed_dim=0).contiguous()
    return out | ({"weight_g_idx": groups.int()} if groups is not None else {})


def pairs(codes):
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def pack_mx(self, codes, scales, zeros, groups):
    return {"weight_packed": pairs(codes), "weight_scale": (torch.log2(scales) + 127).to(torch.uint8)}


def pack_nv(self, codes, scales, zeros, groups):
    scale = scales.to(torch.float8_e4m3fn)
    if self.name == "nvfp4":
        return {"weight_packed": pairs(codes), "weight_scale": scale, "weight_global_scale": self.all.clone()}
    return {"weight": pairs(codes), "weight_scale": scale, "weight_scale_2": self.all.reshape(()).clone(),
            "input_scale": torch.tensor(1.0)}


def words(codes, bits, dim):
    """Packs unsigned numbers along a dimension, low first, as GPTQ does."""
    x = codes.numpy().astype(np.uint64).swapaxes(0, dim)
    x = np.concatenate([x, np.zeros((-len(x) % (32 // bits), x.shape[1]), np.uint64)])
    x = x.reshape(-1, 32 // bits, x.shape[1])
    packed = sum(x[:, i] << np.uint64(i * bits) for i in range(32 // bits))
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).swapaxes(0, dim).copy())


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_awq(self, codes, scales, zeros, groups):
    def outputs(x):  # [rows, N] to [rows, N / 8]
        x = x.numpy().astype(np.uint64).reshape(x.shape[0], -1, 8)
        packed = sum(x[:, :, column] << np.uint64(4 * i) for i, column in enumerate(AWQ_ORDER))
        return torch.from_numpy(packed.astype(np.uint32).view(np.int32))
    return {"qweight": outputs(codes.T), "qzeros": outputs(zeros.T), "scales": scales.T.contiguous().to(self.scale)}


def pack_gptq(self, codes, scales, zeros, groups):
    n, k = codes.shape
    size = self.block[1] or k
    stored = words(zeros.T.contiguous(), self.bits, 1)
    if self.name != "gptq_v2":
        # The first version stores zero points less 1. As in GPTQModel, a whole word is one difference, in which a zero
        # point of 0 borrows from the next.
        ones = sum(1 << at for at in range(0, 32, self.bits))
        stored = torch.from_numpy((stored.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    return {"qweight": words(codes.T.contiguous(), self.bits, 0), "qzeros": stored, "scales": scales.T.contiguous().to(self.scale),
            "g_idx": (groups if groups is not None else torch.arange(k) // size).int()}


def pack_nf4(self, codes, scales, zeros, groups):
    flat = codes.reshape(-1)
    state = dict(quant_type="nf4", blocksize=self.block[1], shape=list(codes.shape), dtype="float32")
    return {"weight": (flat[0::2] << 4 | flat[1::2]).to(torch.uint8)[:, None], "weight.absmax": scales.reshape(-1),
            "weight.quant_map": NF4.clone(),
            "weight.quant_state.bitsandbytes__nf4": torch.from_numpy(np.frombuffer(json.dumps(state).encode(), np.uint8).copy())}


def ct(format, weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*mlp.gate$"]}


def weights(bits, kind, strategy, symmetric=True, **more):
    return dict(num_bits=bits, type=kind, strategy=strategy, symmetric=symmetric) | more


def gptq(format, bits, group, act=False):
    return dict(quant_method="gptq", bits=bits, group_size=group, desc_act=act, sym=False, checkpoint_format=format)


BF16, F16 = torch.bfloat16, torch.float16


def layouts(group=32):
    """All layouts. Groups have `group` columns where the layout leaves that open."""
    g = group
    packed = lambda name, bits, strategy, asym, scale=BF16: Layout(
        name, "int", bits, (1, g if strategy == "group" else 0), pack_words,
        ct("pack-quantized", weights(bits, "int", strategy, not asym, group_size=g if strategy == "group" else None)),
        asym=asym, scale=scale, judge="pack-quantized")
    act = lambda layout: setattr(layout, "act", True) or layout
    return [
        Layout("fp8_blocks", "e4m3", 8, (128, 128), pack_float8,
               dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128])),
        Layout("fp8_tensor", "e4m3", 8, (0, 0), pack_float8, ct("float-quantized", weights(8, "float", "tensor")),
               scale=BF16, judge="float-quantized"),
        Layout("fp8_channel", "e4m3", 8, (1, 0), pack_float8, ct("float-quantized", weights(8, "float", "channel")),
               scale=F16, judge="float-quantized"),
        Layout("fp8_ct_blocks", "e4m3", 8, (128, 128), pack_float8,
               ct("float-quantized", weights(8, "float", "block", block_structure=[128, 128])), judge="float-quantized"),
        Layout("w8a8", "int", 8, (1, 0), pack_int8, ct("int-quantized", weights(8, "int", "channel")),
               scale=BF16, judge="int-quantized"),
        Layout("w8a8_asym", "int", 8, (1, 0), pack_int8, ct("int-quantized", weights(8, "int", "channel", False)),
               asym=True, judge="int-quantized"),
        packed("w4_group", 4, "group", False),
        packed("w4_group_asym", 4, "group", True, F16),
        packed("w4_channel_asym", 4, "channel", True),
        packed("w8_group", 8, "group", False),
        packed("w8_group_asym", 8, "group", True),
        packed("w2_group", 2, "group", True),
        act(Layout("w4_act", "int", 4, (1, g), pack_words,
                   ct("pack-quantized", weights(4, "int", "group", False, group_size=g)), asym=True, scale=F16)),
        Layout("mxfp4", "e2m1", 4, (1, 32), pack_mx, ct("mxfp4-pack-quantized", weights(4, "float", "group", group_size=32)),
               judge="mxfp4-pack-quantized"),
        Layout("nvfp4", "e2m1", 4, (1, 16), pack_nv,
               ct("nvfp4-pack-quantized", weights(4, "float", "tensor_group", group_size=16)), judge="nvfp4-pack-quantized"),
        Layout("nvfp4_modelopt", "e2m1", 4, (1, 16), pack_nv, dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"])),
        Layout("awq", "uint", 4, (1, g), pack_awq,
               dict(quant_method="awq", bits=4, group_size=g, zero_point=True, version="gemm"), asym=True, scale=F16),
        Layout("gptq", "uint", 4, (1, g), pack_gptq, gptq("gptq", 4, g), asym=True, scale=F16),
        Layout("gptq_v2", "uint", 4, (1, g), pack_gptq, gptq("gptq_v2", 4, g), asym=True, scale=F16),
        Layout("gptq8", "uint", 8, (1, 0), pack_gptq, gptq("gptq", 8, -1), asym=True, scale=F16),
        act(Layout("gptq_act", "uint", 4, (1, g), pack_gptq, gptq("gptq", 4, g, True), asym=True, scale=F16)),
        Layout("nf4", "nf4", 4, (1, 32), pack_nf4, dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    ]
