"""BERT with a classifier in PyTorch: the module of transformers written down plainly, with fused projections and
scaled_dot_product_attention."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d, ff, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)
        self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)

    def forward(self, x, first=False, drops=(False, False)):
        """`drops`: whether the attention branch and the feed-forward branch are dropped from backward."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not drops[0]):
            mixed = self.attend(x, first)
        if first:
            x = x[:, :1]
        x = self.norm1(x + mixed)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not drops[1]):
            fed = F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)
        return self.norm2(x + fed)

    def attend(self, x, first):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        mixed = mixed.transpose(1, 2).reshape(b, t, d)
        mixed = self.out(mixed[:, :1] if first else mixed)
        return F.dropout(mixed, self.dropout, self.training)


class DropBP:
    """Draws the branches that a step drops from backward: each with probability `share`, then further ones in their order until they
    have this share of the branches' FLOPs (DropBP, Woo et al., arXiv:2402.17812, equal rates; nn/drop_bp.h)."""

    def __init__(self, share, layers, d, ff, tokens):
        self.share, self.random = share, random.Random(0)
        self.flops = [8 * d * d + 4 * tokens * d, 4 * d * ff] * layers

    def draw(self):
        """(attention, feed-forward) per block"""
        dropped = [self.random.random() < self.share for _ in self.flops]
        gone = sum(flops for flops, drops in zip(self.flops, dropped) if drops)
        for branch, flops in enumerate(self.flops):
            if gone >= (self.share - 1e-12) * sum(self.flops):
                break
            if not dropped[branch]:
                dropped[branch], gone = True, gone + flops
        return list(zip(dropped[::2], dropped[1::2]))


class Bert(nn.Module):
    def __init__(self, d=768, ff=3072, heads=12, layers=12, vocabulary=30522, positions=512, labels=2, dropout=0.1,
                 first=False):
        super().__init__()
        self.first = first
        self.token, self.position, self.kind = nn.Embedding(vocabulary, d), nn.Embedding(positions, d), nn.Embedding(2, d)
        self.norm, self.dropout = nn.LayerNorm(d, eps=1e-12), dropout
        self.blocks = nn.ModuleList(Block(d, ff, heads, dropout) for _ in range(layers))
        self.pool, self.classify = nn.Linear(d, d), nn.Linear(d, labels)
        self.drops = [(False, False)] * layers

    def forward(self, tokens, types, labels):
        x = self.token(tokens) + self.kind(types) + self.position.weight[:tokens.size(1)]
        x = F.dropout(self.norm(x), self.dropout, self.training)
        for block, drops in zip(self.blocks, self.drops):
            x = block(x, self.first and block is self.blocks[-1], drops)
        x = F.dropout(torch.tanh(self.pool(x[:, 0])), self.dropout, self.training)
        return F.cross_entropy(self.classify(x).float(), labels)


def step_flops(b, t, d, ff, layers, first):
    """As plan/bert.cpp counts them."""
    whole = layers * b * t * (3 * 2 * (4 * d * d + 2 * d * ff) + 3.5 * 4 * t * d)
    return whole - (3 * b * (t - 1) * 2 * (d * d + 2 * d * ff) if first else 0)
