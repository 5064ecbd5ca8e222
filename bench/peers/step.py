"""Training steps in PyTorch (the TNP here, GPT-2 and LLaMA in language_step.py), and what a tiny operator costs the host."""
import gc
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

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


BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}


def measure_modes(bench, args, name, make, flops, tokens, **record):
    """Times forward, backward and fused AdamW in every mode and with every backend of attention. `make()` gives a model and a
    function loss(forward); `name` and `record` say what the record is of."""
    op, shape, variant = name
    for backend in args.backends.split(",") if bench.on_gpu else ("math",):
        for mode in args.modes.split(","):
            torch._dynamo.reset()
            model = optimizer = graph = loss = None
            gc.collect()
            if bench.on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                with sdpa_kernel(BACKENDS[backend]):
                    torch.manual_seed(0)
                    model, loss = make()
                    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bench.on_gpu, capturable=bench.on_gpu)
                    forward = model if mode == "eager" else torch.compile(model)

                    def one_step():
                        optimizer.zero_grad(set_to_none=True)
                        loss(forward).backward()
                        optimizer.step()

                    run = one_step
                    if mode == "graph":
                        side = torch.cuda.Stream()
                        side.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(side):
                            for _ in range(3):
                                one_step()
                        torch.cuda.current_stream().wait_stream(side)
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            one_step()
                        run = graph.replay
                    ms = bench.measure(run, seconds=2, least=3, most=100, cold=False)
                    bench.record(op, shape, "step", f"torch {mode} {backend} {variant}", ms, flops,
                                 tokens_per_s=tokens / ms["p50"] * 1e3, **bench.memory(), **record)
            except Exception as error:  # one failed mode must not lose the others
                print(f"{op} {shape} {mode} {backend} {variant}: {str(error)[:300]}", flush=True)


def step(bench, args):
    shapes = [tuple(text.split(",")) for text in args.step] or [("64", "500", "64"), ("10000", "1000", "1"),
                                                                ("10000", "1000", "4")]
    for m, n, b, *rest in shapes:
        m, n, b, recompute = int(m), int(n), int(b), rest == ["checkpoint"]
        for ff in (int(width) for width in args.widths.split(",")):
            def make():
                model = Tnp(ff, checkpoint=recompute).to(bench.device, bench.dtype)
                tokens, y = bench.normal(b, m + n, 11, grad=False), torch.randn(b, n, device=bench.device)
                return model, lambda forward: forward(tokens, y, m)

            measure_modes(bench, args, ("step tnp", {"B": b, "M": m, "N": n}, ff), make, step_flops(b, m, n, recompute),
                          b * (m + n), attrs={"checkpoint": "on" if recompute else "off"})


def host(bench):
    """Host cost of a tiny operator: a chain of 10,000 multiplications by a number, forward and backward."""
    count = 10000
    x = torch.ones(4, device=bench.device, requires_grad=True)

    def chain():
        y = x
        for _ in range(count):
            y = y * 1.0001
        return y

    def synchronize():
        if bench.on_gpu:
            torch.cuda.synchronize()

    times = {"fwd": [], "bwd": []}
    for _ in range(7):
        synchronize()
        begin = time.perf_counter()
        y = chain()
        synchronize()
        middle = time.perf_counter()
        y.sum().backward()
        synchronize()
        times["fwd"].append((middle - begin) * 1e3)
        times["bwd"].append((time.perf_counter() - middle) * 1e3)
    for mode, values in times.items():
        values.sort()
        bench.record("host chain", {"count": count}, mode, "torch eager",
               {"p10": values[0], "p50": values[len(values) // 2], "p90": values[-1], "repeats": len(values)},
               dtype=torch.float32)
