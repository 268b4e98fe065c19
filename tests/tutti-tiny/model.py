"""Qwen3, written small for fast training on a CPU.

Parameter names are those of Hugging Face's ``Qwen3ForCausalLM``, so a state dict exports without a mapping. The
evaluation loads the exported folder into transformers and never uses this module. It thus shows that both models agree.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN_SIZE = 192
LAYERS = 4
QUERY_HEADS = 8
KEY_VALUE_HEADS = 2
HEAD_DIM = 32
MLP_SIZE = 512
VOCAB_SIZE = 1024
# With the tokens that the skills add.
EXTENDED_VOCAB_SIZE = 1152
ROPE_THETA = 10000.0
NORM_EPSILON = 1e-6


class RmsNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPSILON)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x, cos, sin):
    """Rotary embedding in the half-split layout that Qwen3 checkpoints use."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = linear(HIDDEN_SIZE, QUERY_HEADS * HEAD_DIM)
        self.k_proj = linear(HIDDEN_SIZE, KEY_VALUE_HEADS * HEAD_DIM)
        self.v_proj = linear(HIDDEN_SIZE, KEY_VALUE_HEADS * HEAD_DIM)
        self.o_proj = linear(QUERY_HEADS * HEAD_DIM, HIDDEN_SIZE)
        self.q_norm = RmsNorm(HEAD_DIM)
        self.k_norm = RmsNorm(HEAD_DIM)

    def forward(self, x, cos, sin, mask):
        rows, length, _ = x.shape
        heads = (rows, length, -1, HEAD_DIM)
        query = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin).transpose(1, 2)
        key = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin).transpose(1, 2)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        group = QUERY_HEADS // KEY_VALUE_HEADS
        key = key.repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = linear(HIDDEN_SIZE, MLP_SIZE)
        self.up_proj = linear(HIDDEN_SIZE, MLP_SIZE)
        self.down_proj = linear(MLP_SIZE, HIDDEN_SIZE)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = RmsNorm(HIDDEN_SIZE)
        self.self_attn = Attention()
        self.post_attention_layernorm = RmsNorm(HIDDEN_SIZE)
        self.mlp = Mlp()

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN_SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RmsNorm(HIDDEN_SIZE)


class TuttiTiny(nn.Module):
    def __init__(self, vocab_size=VOCAB_SIZE):
        super().__init__()
        self.model = Decoder(vocab_size)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        for name, weight in self.named_parameters():
            if name.endswith("proj.weight"):
                # Projections into the residual stream start with smaller weights, so that the variance does not grow
                # with depth.
                writes_residual = "o_proj" in name or "down_proj" in name
                scale = 0.5 / math.sqrt(2 * LAYERS) if writes_residual else 0.5
                nn.init.normal_(weight, std=scale / math.sqrt(weight.shape[1]))
        frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens, positions, documents, targets, weights):
        """Returns the weighted mean loss over packed rows. Tokens attend only to earlier tokens of their document."""
        angles = positions[..., None].float() * self.frequencies
        cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
        same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = torch.where(same.tril(), 0.0, -torch.inf)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()
