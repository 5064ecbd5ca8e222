"""Generation by a LLaMA-shaped model with random weights: the peer of `tessera bench decode`.

A work is given as SHAPE:prompt=32,new=64,batch=1. Greedy, fused projections, scaled_dot_product_attention. Times are those of a
clock on the host, as in bench/decode_bench.h: ttft from the call, with the prompt on the host, until the first token is there; tpot
the time between the first token and the last, divided by their number less one.

The cache is as long as this text needs and no longer. Position i has a CUDA graph of its own, whose attention reads the first i rows
of the cache and no mask; the token that it chooses stays on the GPU and is the input of the next graph. The host reads the first
token, which ttft needs, and then all others at once: it waits for none of them.

modes:
  eager    as Python issues it, without graphs
  graph    graphs of the eager kernels
  compile  what stands between two attentions is compiled into one function (residual, norms, projections, RoPE, the cache's new
           row), then as graph
  tuned    the same with coordinate_descent_tuning, which also turns products with one row into Triton kernels
"""
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from timing import DTYPES, key_of, percentiles

SHAPES = {  # vocabulary, d_model, d_ff, heads, kv_heads, layers: as in bench/decode_bench.cpp
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32),
    "llama-3-8b": (128256, 4096, 14336, 32, 8, 32),
    "llama-tiny": (512, 128, 344, 4, 2, 2),
}
EPS = 1e-5


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def queries(x, norm, qkv, cos, sin, keys, values, heads, kv_heads):
    """x [B, T, d] -> q [B, heads, T, head_dim]; writes the new rows of the cache, `keys` and `values`."""
    batch, length, _ = x.shape
    y = F.linear(F.rms_norm(x, x.shape[-1:], norm, EPS), qkv).view(batch, length, heads + 2 * kv_heads, -1).transpose(1, 2)
    q, k, v = y.split((heads, kv_heads, kv_heads), 1)
    keys.copy_(rotated(k, cos, sin))
    values.copy_(v)
    return rotated(q, cos, sin)


def finish(x, mixed, out, norm, up, down):
    batch, length, _ = x.shape
    x = x + F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), out)
    gate, linear = F.linear(F.rms_norm(x, x.shape[-1:], norm, EPS), up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * linear, down)


def begin(tokens, table, norm, qkv, cos, sin, keys, values, heads, kv_heads):
    x = F.embedding(tokens, table)
    return x, queries(x, norm, qkv, cos, sin, keys, values, heads, kv_heads)


def between(x, mixed, out, norm2, up, down, norm, qkv, cos, sin, keys, values, heads, kv_heads):
    x = finish(x, mixed, out, norm2, up, down)
    return x, queries(x, norm, qkv, cos, sin, keys, values, heads, kv_heads)


def end(x, mixed, out, norm2, up, down, norm, head):
    x = finish(x[:, -1:], mixed[:, :, -1:], out, norm2, up, down)
    return F.linear(F.rms_norm(x, x.shape[-1:], norm, EPS), head).argmax(-1)


class Weights:
    def __init__(self, bench, shape):
        self.vocabulary, d, ff, self.heads, self.kv_heads, layers = shape
        self.head_dim = d // self.heads

        def weight(*sizes):
            return torch.empty(*sizes, device=bench.device, dtype=bench.dtype).normal_(std=0.02)
        self.table, self.head = weight(self.vocabulary, d), weight(self.vocabulary, d)
        self.norm = torch.ones(d, device=bench.device, dtype=bench.dtype)
        self.blocks = [{"norm": torch.ones_like(self.norm), "qkv": weight((self.heads + 2 * self.kv_heads) * self.head_dim, d),
                        "out": weight(d, d), "norm2": torch.ones_like(self.norm), "up": weight(2 * ff, d), "down": weight(d, ff)}
                       for _ in range(layers)]
        read = [self.norm, self.head] + [x for block in self.blocks for x in block.values()]  # by a step; of the table it takes a row
        self.bytes = sum(x.numel() * x.element_size() for x in read)


class Text:
    """A batch of texts in the making: tokens, cache, and what the host issues for each new token."""

    def __init__(self, bench, weights, prompt, new, batch):
        self.weights, self.prompt, self.new, self.batch = weights, prompt, new, batch
        capacity, half = prompt + new - 1, weights.head_dim // 2
        self.cache = [[torch.zeros(batch, weights.kv_heads, capacity, weights.head_dim, device=bench.device, dtype=bench.dtype)
                       for _ in range(2)] for _ in weights.blocks]
        angles = torch.arange(capacity)[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
        self.cos, self.sin = angles.cos().to(bench.device, bench.dtype), angles.sin().to(bench.device, bench.dtype)
        self.tokens = torch.zeros(batch, prompt, dtype=torch.long, device=bench.device)
        self.chosen = torch.zeros(batch, new, dtype=torch.long, device=bench.device)
        # Over a prompt cuDNN is faster; over one query flash attention splits the keys.
        self.backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if bench.on_gpu else [SDPBackend.MATH]
        self.issued = []

    def next_token(self, tokens, first, parts):
        """tokens [B, T] at positions from `first` on -> the token after them, [B, 1]."""
        w, (one, middle, last) = self.weights, parts
        length = tokens.shape[1]
        stop = first + length
        x = mixed = before = None
        for i, block in enumerate(w.blocks):
            keys, values = self.cache[i]
            new = (block["norm"], block["qkv"], self.cos[first:stop], self.sin[first:stop], keys[:, :, first:stop],
                   values[:, :, first:stop], w.heads, w.kv_heads)
            x, q = one(tokens, w.table, *new) if i == 0 else middle(x, mixed, *before, *new)
            mixed = F.scaled_dot_product_attention(q, keys[:, :, :stop], values[:, :, :stop], is_causal=length > 1,
                                                   enable_gqa=w.heads != w.kv_heads)
            before = (block["out"], block["norm2"], block["up"], block["down"])
        return last(x, mixed, *before, w.norm, w.head)

    def read_prompt(self, parts):
        with sdpa_kernel(self.backends, set_priority=True):
            self.chosen[:, :1] = self.next_token(self.tokens, 0, parts)

    def step(self, i, parts):
        with sdpa_kernel(self.backends[-1:]):
            self.chosen[:, i:i + 1] = self.next_token(self.chosen[:, i - 1:i], self.prompt + i - 1, parts)

    def issue(self, bench, plain, tuned, as_graphs):
        """One function per new token: a call, or the replay of a graph."""
        calls = [lambda: self.read_prompt(plain)] + [lambda i=i: self.step(i, tuned) for i in range(1, self.new)]
        if not as_graphs:
            self.issued = calls
            return
        side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        for call in calls:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                call()
            self.issued.append(graph.replay)

    def measure(self, bench, warmups, repeats):
        given = torch.randint(0, self.weights.vocabulary, (self.batch, self.prompt))
        times = {"ttft": [], "tpot": []}
        for repeat in range(warmups + repeats):
            bench.synchronize()
            start = time.perf_counter()
            self.tokens.copy_(given)
            self.issued[0]()
            self.chosen[:, :1].tolist()
            middle = time.perf_counter()
            for step in self.issued[1:]:
                step()
            self.chosen.tolist()
            stop = time.perf_counter()
            if repeat >= warmups:
                times["ttft"].append((middle - start) * 1e3)
                times["tpot"].append((stop - middle) * 1e3 / max(1, self.new - 1))
        return times


@dataclass
class DecodeTask:
    """One mode and all prompts: they share the weights and what was compiled for a step."""
    shape: str
    works: list  # of (prompt, new, batch)
    mode: str
    dtype: str
    name: str = ""
    state: list = field(default_factory=list, repr=False)

    def __post_init__(self):
        self.name = f"decode {self.shape} prompts {', '.join(str(work[0]) for work in self.works)} {self.mode}"

    def identity(self, work, kind):
        prompt, new, batch = work
        return {"op": f"decode {self.shape}", "shape": {"B": batch, "prompt": prompt, "new": new}, "dtype": self.dtype,
                "mode": kind, "implementation": f"torch {self.mode}"}

    @torch.inference_mode()
    def prepare(self, bench, gpu, options):
        bench.dtype = DTYPES[self.dtype]
        compiles = self.mode in ("compile", "tuned")
        with gpu.alone():
            weights = Weights(bench, SHAPES[self.shape])
        plain = tuned = (begin, between, end)
        if compiles:
            plain = tuned = tuple(bench.compile(part) for part in plain)
        if self.mode == "tuned":
            tuned = tuple(bench.compile(part, options={"coordinate_descent_tuning": True}) for part in (begin, between, end))

        def one_by_one(parts):  # each takes the GPU once it is compiled, and gives it back before the next is compiled
            def guarded(part):
                def call(*arguments):
                    with gpu.alone_once_compiled(compiles):
                        return part(*arguments)
                return call
            return tuple(guarded(part) for part in parts)

        for prompt, new, batch in self.works:
            text = Text(bench, weights, prompt, new, batch)
            text.read_prompt(one_by_one(plain))
            text.step(1, one_by_one(tuned))
            with gpu.alone():
                text.issue(bench, plain, tuned, bench.on_gpu and self.mode != "eager")
                bench.synchronize()
            self.state.append(text)

    @torch.inference_mode()
    def measure(self, bench, options):
        bench.dtype = DTYPES[self.dtype]
        for work, text in zip(self.works, self.state):
            times = text.measure(bench, 2, options.get("decode_repeats", 10))
            for kind, values in times.items():
                what = self.identity(work, kind)
                bench.record(what["op"], what["shape"], kind, what["implementation"], percentiles(values), bytes=text.weights.bytes,
                             dtype=self.dtype, does={"host": "reads the first token, then all others at once"})

    def failed(self, bench, reason):
        for work in self.works:
            for kind in ("ttft", "tpot"):
                what = self.identity(work, kind)
                bench.missing(what["op"], what["shape"], kind, what["implementation"], reason, dtype=self.dtype,
                              required=self.mode == "compile")


def tasks(works, known, bench):
    groups = {}
    for text in works:
        shape, _, sizes = text.partition(":")
        sizes = dict(part.split("=") for part in sizes.split(",") if part)
        dtype = sizes.get("dtype", "f16" if bench.on_gpu else "f32")
        groups.setdefault((shape, dtype), []).append((int(sizes.get("prompt", 32)), int(sizes.get("new", 64)), int(sizes.get("batch", 1))))
    wanted = []
    for (shape, dtype), of_shape in groups.items():
        for mode in ("tuned", "compile", "graph") if bench.on_gpu else ("eager", "compile"):
            task = DecodeTask(shape, of_shape, mode, dtype)
            task = DecodeTask(shape, [work for work in of_shape if not all(
                key_of(task.identity(work, kind) | {"device": str(bench.device)}) in known for kind in ("ttft", "tpot"))], mode, dtype)
            if task.works:
                wanted.append(task)
    return wanted
