"""The Transformer Neural Process in PyTorch, with the shapes of models/tnp.h."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from works import gmm_nll


class Mlp(nn.Module):
    def __init__(self, d, ff):
        super().__init__()
        self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    """Post-norm; queries from all M + N tokens, keys and values from the first M; of the last block only the rows of the
    targets, which are all that is read (models/tnp.h)."""

    def __init__(self, d, ff, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = (nn.Linear(d, width, bias=False) for width in (d, 2 * d, d))
        self.norm1, self.norm2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.mlp = Mlp(d, ff)

    def forward(self, x, m: int, last: bool):
        known = x[:, :m]
        x = x[:, m:] if last else x
        b, length, d = x.shape
        q = self.q(x).view(b, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(known).view(b, m, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, length, d)
        x = self.norm1(x + self.o(mixed))
        return self.norm2(x + self.mlp(x))


class Tnp(nn.Module):
    def __init__(self, ff, features=10, d=512, heads=8, layers=12, k=10, checkpoint=False):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features + 1, d, bias=False), nn.SiLU(), nn.Linear(d, d, bias=False))
        self.blocks = nn.ModuleList(Block(d, ff, heads) for _ in range(layers))
        self.head_in = nn.Parameter(torch.randn(k, d, ff) / d ** 0.5)
        self.head_out = nn.Parameter(torch.randn(k, ff, 3) / ff ** 0.5)
        self.checkpoint = checkpoint

    def forward(self, tokens, y, m: int):
        from torch.utils.checkpoint import checkpoint
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            last = i + 1 == len(self.blocks)
            x = checkpoint(block, x, m, last, use_reentrant=False) if self.checkpoint else block(x, m, last)
        t = x.flatten(0, 1)
        h = F.silu(torch.einsum("td,kdf->ktf", t, self.head_in))
        return gmm_nll(torch.einsum("ktf,kfc->tkc", h, self.head_out), y.reshape(-1))


def step_flops(b, m, n, recompute, d=512, ff=1365, layers=12, k=10, features=10):
    tokens, memory = b * (m + n), b * m
    rows = layers * tokens - memory
    products = 2 * tokens * d * (features + 1 + d) + 2 * rows * d * (2 * d + 2 * ff) + layers * 2 * memory * d * 2 * d
    attention = rows * 4 * m * d
    heads = 2 * b * n * k * ff * (d + 3)
    return 3 * (products + heads) + 3.5 * attention + (products + attention if recompute else 0)
