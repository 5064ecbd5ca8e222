"""A step of fine-tuning BERT-base with a classifier in PyTorch: the module of transformers written down plainly, with fused
projections and scaled_dot_product_attention, and fused AdamW."""
import time

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

    def forward(self, x, first=False):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        mixed = mixed.transpose(1, 2).reshape(b, t, d)
        if first:
            x, mixed = x[:, :1], mixed[:, :1]
        mixed = self.out(mixed)
        x = self.norm1(x + F.dropout(mixed, self.dropout, self.training))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training))


class Bert(nn.Module):
    def __init__(self, d=768, ff=3072, heads=12, layers=12, vocabulary=30522, positions=512, labels=2, dropout=0.1,
                 first=False):
        super().__init__()
        self.first = first
        self.token, self.position, self.kind = nn.Embedding(vocabulary, d), nn.Embedding(positions, d), nn.Embedding(2, d)
        self.norm, self.dropout = nn.LayerNorm(d, eps=1e-12), dropout
        self.blocks = nn.ModuleList(Block(d, ff, heads, dropout) for _ in range(layers))
        self.pool, self.classify = nn.Linear(d, d), nn.Linear(d, labels)

    def forward(self, tokens, types, labels):
        x = self.token(tokens) + self.kind(types) + self.position.weight[:tokens.size(1)]
        x = F.dropout(self.norm(x), self.dropout, self.training)
        for block in self.blocks:
            x = block(x, self.first and block is self.blocks[-1])
        x = F.dropout(torch.tanh(self.pool(x[:, 0])), self.dropout, self.training)
        return F.cross_entropy(self.classify(x).float(), labels)


def step_flops(b, t, d, ff, layers, first):
    whole = 3 * layers * b * t * (2 * (4 * d * d + 2 * d * ff) + 4 * t * d)
    return whole - (3 * b * (t - 1) * 2 * (d * d + 2 * d * ff) if first else 0)


def bert(bench, args):
    """Ways: parameters in f32 under autocast, as transformers trains, or all of them in bf16; eager, compiled, or compiled and
    captured in a graph; all rows of the last block, as transformers makes them, or the first tokens' alone ("first"), which are
    what the classifier reads and what tessera makes."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in args.bert_sizes.split(",") if part)}
    names = {"vocabulary": "V", "ff": "d_ff"}  # as bench/bert_bench.cpp calls what is not BERT-base's
    others = {names.get(name, name): size for name, size in sizes.items()}
    shapes = [tuple(int(n) for n in text.split("x")) for text in args.bert.split(",")]
    for b, t in shapes:
        for dropout in (float(p) for p in args.dropout.split(",")):
            for way in args.bert_ways.split(","):
                precision, mode, *rest = way.split()
                first = rest == ["first"]
                torch._dynamo.reset()
                model = optimizer = None
                bench.clean()
                if bench.on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                begin = time.monotonic()
                try:
                    torch.manual_seed(0)
                    dtype = torch.float32 if precision == "amp" else bench.dtype
                    model = Bert(dropout=dropout, first=first, **sizes).to(bench.device, dtype)
                    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=bench.on_gpu, capturable=bench.on_gpu)
                    tokens = bench.integers(sizes.get("vocabulary", 30522), b, t)
                    types, labels = bench.integers(2, b, t), bench.integers(2, b)
                    compiled = {"eager": lambda m: m, "compile": torch.compile,
                                "graph": lambda m: torch.compile(m, mode="reduce-overhead")}[mode](model)

                    def one_step():
                        optimizer.zero_grad(set_to_none=True)
                        with torch.autocast(bench.device.type, bench.dtype, enabled=precision == "amp" and bench.on_gpu):
                            loss = compiled(tokens, types, labels)
                        loss.backward()
                        optimizer.step()

                    ms = bench.measure(one_step, seconds=args.seconds, least=3, most=100, cold=False)
                    name = " ".join(["torch", mode, precision, *rest])
                    bench.record("step bert", {"B": b, "T": t, **others}, "step", name, ms,
                                 step_flops(b, t, sizes.get("d", 768), sizes.get("ff", 3072), sizes.get("layers", 12), first),
                                 attrs={"dropout": f"{dropout:g}"}, tokens_per_s=b * t / ms["p50"] * 1e3,
                                 **bench.memory())
                except Exception as error:  # one failed way must not lose the others
                    print(f"step bert {b}x{t} {way}: {str(error)[:300]}", flush=True)
                print(f"({time.monotonic() - begin:.1f} s)", flush=True)
