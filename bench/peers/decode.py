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


class Model:
    def __init__(self, bench, shape, batch, capacity):
        self.vocabulary, d, ff, self.heads, self.kv_heads, layers = shape
        head = d // self.heads
        self.device, dtype = bench.device, bench.dtype

        def weight(*sizes):
            return torch.empty(*sizes, device=bench.device, dtype=dtype).normal_(std=0.02)
        self.table, self.norm, self.head = weight(self.vocabulary, d), torch.ones(d, device=bench.device, dtype=dtype), weight(self.vocabulary, d)
        self.blocks = [{"norm": torch.ones_like(self.norm), "qkv": weight((self.heads + 2 * self.kv_heads) * head, d), "out": weight(d, d),
                        "norm2": torch.ones_like(self.norm), "up": weight(2 * ff, d), "down": weight(d, ff)} for _ in range(layers)]
        self.cache = [[torch.zeros(batch, self.kv_heads, capacity, head, device=bench.device, dtype=dtype) for _ in range(2)]
                      for _ in range(layers)]
        half = head // 2
        angles = torch.arange(capacity)[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
        self.cos, self.sin = angles.cos().to(bench.device, dtype), angles.sin().to(bench.device, dtype)
        self.bytes = sum(x.numel() * x.element_size() for block in self.blocks for x in block.values()) + self.head.numel() * self.head.element_size()

    def __call__(self, tokens, first, parts):
        """tokens [B, T] at positions from `first` on -> the token after them, [B, 1]."""
        one, middle, last = parts
        length = tokens.shape[1]
        stop = first + length
        cos, sin = self.cos[first:stop], self.sin[first:stop]
        x = q = None
        for i, block in enumerate(self.blocks):
            keys, values = self.cache[i]
            new = (block["norm"], block["qkv"], cos, sin, keys[:, :, first:stop], values[:, :, first:stop], self.heads, self.kv_heads)
            if i == 0:
                x, q = one(tokens, self.table, *new)
            else:
                x, q = middle(x, mixed, *before, *new)
            mixed = F.scaled_dot_product_attention(q, keys[:, :, :stop], values[:, :, :stop], is_causal=length > 1,
                                                   enable_gqa=self.heads != self.kv_heads)
            before = (block["out"], block["norm2"], block["up"], block["down"])
        return last(x, mixed, *before, self.norm, self.head)


@dataclass
class DecodeTask:
    shape: str
    prompt: int
    new: int
    batch: int
    mode: str
    dtype: str
    name: str = ""
    state: object = field(default=None, repr=False)

    def __post_init__(self):
        self.name = f"decode {self.shape} prompt {self.prompt} {self.mode}"

    def identity(self, kind):
        return {"op": f"decode {self.shape}", "shape": {"B": self.batch, "prompt": self.prompt, "new": self.new}, "dtype": self.dtype,
                "mode": kind, "implementation": f"torch {self.mode}"}

    @torch.inference_mode()
    def prepare(self, bench, gpu, options):
        bench.dtype = DTYPES[self.dtype]
        compiles = self.mode in ("compile", "tuned")
        with gpu.alone():
            model = Model(bench, SHAPES[self.shape], self.batch, self.prompt + self.new - 1)
        parts = (begin, between, end)
        if compiles:
            options = {"coordinate_descent_tuning": True} if self.mode == "tuned" else None
            parts = tuple(bench.compile(part, options=options) for part in parts)
        tokens = torch.zeros(self.batch, self.prompt, dtype=torch.long, device=bench.device)
        chosen = torch.zeros(self.batch, self.new, dtype=torch.long, device=bench.device)

        # Over a prompt cuDNN is faster; over one query flash attention splits the keys.
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if bench.on_gpu else [SDPBackend.MATH]

        def read_prompt():
            with sdpa_kernel(backends, set_priority=True):
                chosen[:, :1] = model(tokens, 0, parts)

        def step(i):
            with sdpa_kernel(backends[-1:]):
                chosen[:, i:i + 1] = model(chosen[:, i - 1:i], self.prompt + i - 1, parts)

        with gpu.alone_once_compiled(compiles):
            read_prompt()
        with gpu.alone_once_compiled(compiles):
            step(1)
            gpu.take()
            graphs = None
            if bench.on_gpu and self.mode != "eager":
                side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    read_prompt()
                    for i in range(1, self.new):
                        step(i)
                torch.cuda.current_stream().wait_stream(side)
                graphs = []
                for i in range(self.new):
                    graphs.append(torch.cuda.CUDAGraph())
                    with torch.cuda.graph(graphs[-1], pool=pool, stream=side):
                        read_prompt() if i == 0 else step(i)
            bench.synchronize()
        self.state = (model, tokens, chosen, [graph.replay for graph in graphs] if graphs else
                      [read_prompt] + [lambda i=i: step(i) for i in range(1, self.new)])

    @torch.inference_mode()
    def measure(self, bench, options):
        bench.dtype = DTYPES[self.dtype]
        model, tokens, chosen, steps = self.state
        given = torch.randint(0, model.vocabulary, (self.batch, self.prompt))
        times = {"ttft": [], "tpot": []}
        warmups, repeats = 2, options.get("decode_repeats", 10)
        for repeat in range(warmups + repeats):
            bench.synchronize()
            start = time.perf_counter()
            tokens.copy_(given)
            steps[0]()
            chosen[:, :1].tolist()
            middle = time.perf_counter()
            for step in steps[1:]:
                step()
            chosen.tolist()
            stop = time.perf_counter()
            if repeat >= warmups:
                times["ttft"].append((middle - start) * 1e3)
                times["tpot"].append((stop - middle) * 1e3 / max(1, self.new - 1))
        for kind, values in times.items():
            what = self.identity(kind)
            bench.record(what["op"], what["shape"], kind, what["implementation"], percentiles(values), bytes=model.bytes,
                         dtype=self.dtype, does={"host": "reads the first token, then all others at once"}, **bench.memory())

    def failed(self, bench, reason):
        for kind in ("ttft", "tpot"):
            what = self.identity(kind)
            bench.missing(what["op"], what["shape"], kind, what["implementation"], reason, dtype=self.dtype, required=self.mode == "compile")


def tasks(works, known, bench):
    wanted = []
    for text in works:
        shape, _, sizes = text.partition(":")
        sizes = dict(part.split("=") for part in sizes.split(",") if part)
        dtype = sizes.get("dtype", "f16" if bench.on_gpu else "f32")
        for mode in ("compile", "tuned", "graph") if bench.on_gpu else ("eager", "compile"):
            task = DecodeTask(shape, int(sizes.get("prompt", 32)), int(sizes.get("new", 64)), int(sizes.get("batch", 1)), mode, dtype)
            if not all(key_of(task.identity(kind) | {"device": str(bench.device)}) in known for kind in ("ttft", "tpot")):
                wanted.append(task)
    return wanted
