"""Generation by a LLaMA-shaped model with random weights in PyTorch: the peer of `tessera bench decode`, as the same JSON lines.

usage: python decode.py OUT.jsonl [--shape llama-2-7b] [--prompt-tokens 32,2048] [--new-tokens 128] [--modes eager,graph,compile]

Greedy, a static cache, scaled_dot_product_attention, fused projections. Times are those of a clock on the host, as in
bench/decode_bench.h: ttft from the call, with the prompt on the host, until the first token is there; tpot the time between the
first token and the last, divided by their number less one; every token is read on the host before the next is issued.

modes:
  eager    as Python issues it
  graph    prefill and decode step each as a CUDA graph of the eager kernels
  compile  blocks and head by torch.compile, then as with graph: what mode="reduce-overhead" does, at a tenth of its compile time
"""
import argparse
import gc
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from timing import Bench

SHAPES = {  # vocabulary, d_model, d_ff, heads, kv_heads, layers: as in bench/decode_bench.cpp
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32),
    "llama-3-8b": (128256, 4096, 14336, 32, 8, 32),
    "llama-tiny": (512, 128, 344, 4, 2, 2),
}


class Block(nn.Module):
    def __init__(self, d, ff, heads, kv_heads, batch, capacity):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, d // heads
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.qkv = nn.Linear(d, (heads + 2 * kv_heads) * self.head, bias=False)
        self.out, self.up, self.down = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * ff, bias=False), nn.Linear(ff, d, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, kv_heads, capacity, self.head))

    def forward(self, x, places, cosines, sines, mask):
        """x [B, T, d] of the positions `places` [T]; mask [1, 1, 1, capacity] of one new token, None of a prompt."""
        batch, length, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, -1, self.head).transpose(1, 2).split(
            (self.heads, self.kv_heads, self.kv_heads), 1)
        q, k = turned(q, cosines, sines), turned(k, cosines, sines)
        self.keys.index_copy_(2, places, k)
        self.values.index_copy_(2, places, v)
        if mask is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        else:
            mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, d))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turned(x, cosines, sines):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


class Llama(nn.Module):
    def __init__(self, shape, batch, capacity):
        super().__init__()
        vocabulary, d, ff, heads, kv_heads, layers = shape
        self.token = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(d, ff, heads, kv_heads, batch, capacity) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d, eps=1e-5), nn.Linear(d, vocabulary, bias=False)
        half = d // heads // 2
        angles = torch.arange(capacity)[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
        self.register_buffer("cosines", angles.cos().to(self.token.weight.dtype))
        self.register_buffer("sines", angles.sin().to(self.token.weight.dtype))
        self.register_buffer("range", torch.arange(capacity))

    def forward(self, tokens, places, is_prompt, block, last):
        """The token that follows, [B, 1]. `block(i)` calls block i, `last` norm and head."""
        x = self.token(tokens)
        cosines, sines = self.cosines[places], self.sines[places]
        mask = None if is_prompt else (self.range <= places[-1])[None, None, None]
        for i in range(len(self.blocks)):
            x = block(i)(x, places, cosines, sines, mask)
        return last(x[:, -1:]).argmax(-1)

    def logits(self, x):
        return self.head(self.norm(x))


def synchronize(bench):
    if bench.on_gpu:
        torch.cuda.synchronize()


class Step:
    """A forward of fixed sizes, eager or as a graph."""

    def __init__(self, model, bench, batch, length, is_prompt, compiled, as_graph):
        self.tokens = torch.zeros(batch, length, dtype=torch.long, device=bench.device)
        self.places = torch.arange(length, device=bench.device)
        if compiled:
            call = torch.compile(lambda module, *rest: module(*rest), dynamic=False)
            block = lambda i: lambda *rest: call(model.blocks[i], *rest)
            last = torch.compile(model.logits, dynamic=False)
        else:
            block, last = lambda i: model.blocks[i], model.logits
        self.work = lambda: model(self.tokens, self.places, is_prompt, block, last)
        self.graph = None
        if as_graph:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.work()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.work()

    def __call__(self):
        if self.graph is None:
            return self.work()
        self.graph.replay()
        return self.result


@torch.inference_mode()
def measure(bench, model, shape_name, prompt, mode, args):
    torch._dynamo.reset()
    compiled, as_graph = mode == "compile", mode != "eager" and bench.on_gpu
    first = Step(model, bench, args.batch, prompt, True, compiled, as_graph)
    step = Step(model, bench, args.batch, 1, False, compiled, as_graph)
    given = torch.randint(0, SHAPES[shape_name][0], (args.batch, prompt))
    times = {"ttft": [], "tpot": []}
    for repeat in range(args.warmups + args.repeats):
        synchronize(bench)
        begin = time.perf_counter()
        first.tokens.copy_(given)
        chosen = first()
        chosen.tolist()
        middle = time.perf_counter()
        step.places.fill_(prompt)
        for _ in range(args.new_tokens - 1):
            step.tokens.copy_(chosen)
            chosen = step()
            chosen.tolist()
            step.places.add_(1)
        end = time.perf_counter()
        if repeat >= args.warmups:
            times["ttft"].append((middle - begin) * 1e3)
            times["tpot"].append((end - middle) * 1e3 / max(1, args.new_tokens - 1))
    weights = sum(x.numel() * x.element_size() for x in model.parameters()) - model.token.weight.numel() * model.token.weight.element_size()
    for kind, values in times.items():
        values.sort()

        def percentile(share):
            at = share * (len(values) - 1)
            low = int(at)
            return values[low] + (values[min(low + 1, len(values) - 1)] - values[low]) * (at - low)

        ms = {"p10": percentile(0.1), "p50": percentile(0.5), "p90": percentile(0.9), "repeats": len(values)}
        bench.record(f"decode {shape_name}", {"B": args.batch, "prompt": prompt, "new": args.new_tokens}, kind, f"torch {mode}", ms,
                     bytes=weights, quiet=True)
        print(f"decode {shape_name} B={args.batch} prompt {prompt} {kind} torch {mode}: p10 {ms['p10']:.3f} p50 {ms['p50']:.3f} "
              f"p90 {ms['p90']:.3f} ms", flush=True)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out")
parser.add_argument("--shape", default="llama-2-7b", choices=sorted(SHAPES))
parser.add_argument("--prompt-tokens", default="32,2048")
parser.add_argument("--new-tokens", type=int, default=128)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--dtype", default="", help="f16, bf16 or f32; default: f16 on a GPU, f32 on the CPU")
parser.add_argument("--modes", default="eager,graph,compile")
parser.add_argument("--repeats", type=int, default=10)
parser.add_argument("--warmups", type=int, default=2)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

bench = Bench(args.out, args.device, args.dtype or ("f16" if args.device.startswith("cuda") else "f32"), 0)
lengths = [int(text) for text in args.prompt_tokens.split(",")]
torch.manual_seed(0)
torch.set_default_device(bench.device)
torch.set_default_dtype(bench.dtype)
nn.Linear.reset_parameters = lambda self: nn.init.normal_(self.weight, std=0.02)
nn.Embedding.reset_parameters = lambda self: nn.init.normal_(self.weight, std=0.02)
model = Llama(SHAPES[args.shape], args.batch, max(lengths) + args.new_tokens)
torch.set_default_device("cpu")
for mode in args.modes.split(","):
    for prompt in lengths:
        try:
            measure(bench, model, args.shape, prompt, mode, args)
        except Exception as error:  # one failed mode must not lose the others
            print(f"decode {args.shape} prompt {prompt} {mode}: {str(error)[:300]}", flush=True)
        gc.collect()
