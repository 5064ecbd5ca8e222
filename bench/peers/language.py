"""GPT-2 and LLaMA in PyTorch, on random tokens. The head and the loss are part of what is compiled."""
import torch
import torch.nn as nn
import torch.nn.functional as F

# layers, width, heads, hidden width: those of train/language_job.cpp
SIZES = {"gpt": {"small": (12, 768, 12, 3072), "medium": (24, 1024, 16, 4096), "large": (36, 1280, 20, 5120), "xl": (48, 1600, 25, 6400)},
         "llama": {"60m": (8, 512, 8, 1376), "130m": (12, 768, 12, 2048), "350m": (24, 1024, 16, 2736), "1b": (24, 2048, 32, 5461)}}


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class GptBlock(nn.Module):
    def __init__(self, d, heads, ff):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, angles):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def turn(x, angles):
    """Positions turn pairs of elements, half a head apart."""
    cos, sin = angles
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LlamaBlock(nn.Module):
    def __init__(self, d, heads, ff):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 2 * ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x, angles):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(turn(q, angles), turn(k, angles), v))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Language(nn.Module):
    def __init__(self, kind, vocabulary, length, layers, d, heads, ff):
        super().__init__()
        self.token = nn.Embedding(vocabulary, d)
        self.position = nn.Embedding(length, d) if kind == "gpt" else None
        self.blocks = nn.ModuleList({"gpt": GptBlock, "llama": LlamaBlock}[kind](d, heads, ff) for _ in range(layers))
        self.norm = nn.LayerNorm(d) if kind == "gpt" else nn.RMSNorm(d, eps=1e-5)
        self.head = nn.Linear(d, vocabulary, bias=False)
        if kind == "gpt":
            self.head.weight = self.token.weight
        frequencies = 10000.0 ** (-torch.arange(0, d // heads, 2) / (d // heads))
        angles = torch.outer(torch.arange(length), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)

    def forward(self, tokens, targets):
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position.weight
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def flops(b, t, vocabulary, gated, layers, d, ff):
    """As plan::count_flops counts them (plan/language.cpp)."""
    products = 2 * b * t * layers * (4 * d * d + (3 if gated else 2) * d * ff)
    return 3 * (products + 2 * b * t * vocabulary * d) + 3.5 * 2 * b * t * t * d * layers
