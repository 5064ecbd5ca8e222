"""The same work as `tessera bench`, in PyTorch, as the same JSON lines.

usage: python torch_peers.py OUT.jsonl [--device cuda] [--seconds 0.5] SECTION...
sections: op (every operator's TNP shapes), step (the TNP training step), host (cost of tiny operators)

Every measurement names its implementation: "torch eager", "torch compile", "torch compile+graph", with the attention
backend and the width of the hidden layer (1365 as in the model, 1408 padded). Timing as in bench/timer.cpp: device events
around each repeat, the L2 cache overwritten before each cold one, medians.
"""
import argparse
import gc
import json
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--seconds", type=float, default=0.5)
parser.add_argument("--step", action="append", default=[], help="M,N,B[,checkpoint]; may be repeated")
parser.add_argument("--modes", default="eager,compile,graph", help="of the step")
parser.add_argument("--widths", default="1365,1408", help="of the step's hidden layers")
parser.add_argument("--backends", default="flash,cudnn", help="of the step's attention, on a GPU")
parser.add_argument("--dtype", default="")
parser.add_argument("sections", nargs="+")
args = parser.parse_args()

device = torch.device(args.device)
on_gpu = device.type == "cuda"
card = torch.cuda.get_device_name(0) if on_gpu else "cpu"
half = torch.bfloat16 if on_gpu else torch.float32
dtype = {"": half, "bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}[args.dtype]
dtype_name = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
flush = torch.empty(max(2 * 60 << 20, 64 << 20), dtype=torch.uint8, device=device) if on_gpu else None
out = open(args.out, "a")


def measure(work, prepare=None, seconds=None, least=5, most=200, warmups=3, cold=True):
    seconds = args.seconds if seconds is None else seconds

    def repeat():
        state = prepare() if prepare else None
        if on_gpu:
            if cold:
                flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work(state) if prepare else work()
            stop.record()
            return start, stop
        begin = time.perf_counter()
        work(state) if prepare else work()
        return (time.perf_counter() - begin) * 1e3

    def read(pair):
        if not on_gpu:
            return pair
        pair[1].synchronize()
        return pair[0].elapsed_time(pair[1])

    for _ in range(warmups):
        estimate = read(repeat())
    repeats = min(most, max(least, int(seconds * 1e3 / max(estimate, 1e-3))))
    times = sorted(read(pair) for pair in [repeat() for _ in range(repeats)])

    def percentile(share):
        at = share * (len(times) - 1)
        low = int(at)
        return times[low] + (times[min(low + 1, len(times) - 1)] - times[low]) * (at - low)

    return {"p10": percentile(0.1), "p50": percentile(0.5), "p90": percentile(0.9), "repeats": repeats}


def record(op, shape, mode, implementation, ms, flops=0.0, elements=0.0, attrs=None, dt=None, **more):
    dt = dt or dtype
    size = torch.finfo(dt).bits // 8
    line = {"op": op, "shape": shape, "dtype": dtype_name[dt], "device": str(device), "card": card, "mode": mode,
            "implementation": implementation, "row": "", "ms": ms, "flops": flops, "bytes": elements * size,
            "tflops": flops / ms["p50"] / 1e9, "gbs": elements * size / ms["p50"] / 1e6, "ceiling_share": 0.0,
            "deterministic": False, "build": f"torch {torch.__version__}",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    if attrs:
        line["attrs"] = attrs
    line.update(more)
    out.write(json.dumps(line) + "\n")
    out.flush()
    print(f"{op} {shape} {attrs or ''} {line['dtype']} {mode} {implementation}: {ms['p50']:.4g} ms", flush=True)


def normal(*shape, dt=None, grad=True):
    tensor = torch.randn(*shape, device=device, dtype=torch.float32).to(dt or dtype)
    return tensor.requires_grad_(grad)


def both(op, shape, implementation, run, inputs, forward=(0, 0), backward=(0, 0), attrs=None):
    """Forward and backward of one operator; a failure is written down, not hidden."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    try:
        with torch.no_grad():
            record(op, shape, "fwd", implementation, measure(lambda: run(*inputs)), *forward, attrs=attrs)
        d_y = torch.randn_like(run(*inputs))
        ms = measure(lambda y: torch.autograd.grad(y, wanted, d_y), prepare=lambda: run(*inputs))
        record(op, shape, "bwd", implementation, ms, *backward, attrs=attrs)
    except torch.OutOfMemoryError as error:
        print(f"{op} {shape} {implementation}: {str(error)[:200]}", flush=True)
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def gmm_nll(h, y):
    logit, mu, log_sigma = h.float().unbind(-1)
    log_p = (F.log_softmax(logit, -1) - 0.5 * ((y.float()[..., None] - mu) / log_sigma.exp()) ** 2 - log_sigma
             - 0.5 * math.log(2 * math.pi))
    return -torch.logsumexp(log_p, -1).mean()


def section_op():
    """The committed shapes of the operators on the TNP's path."""
    compiled = [("torch eager", lambda f: f)]
    if on_gpu and "compile" in args.modes:
        compiled.append(("torch compile", torch.compile))
    for name, wrap in compiled:
        torch._dynamo.reset()
        rows, width = 36096, 1365
        n = rows * width
        both("silu", {"R": rows, "C": width}, name, wrap(F.silu), [normal(rows, width)], (n, 2 * n), (n, 3 * n))
        for tokens in (11000, 36096, 205000):
            for d_in, d_out in ((512, 1365), (1365, 512)):
                fl = 2 * tokens * d_in * d_out
                el = tokens * (d_in + d_out) + d_in * d_out
                both("linear", {"T": tokens, "in": d_in, "out": d_out}, name, wrap(F.linear),
                     [normal(tokens, d_in), normal(d_out, d_in)], (fl, el), (2 * fl, 2 * el))
            fl = 4 * tokens * 512 * 1365
            both("mlp", {"T": tokens, "D": 512, "F": 1365, "E": 512}, name,
                 wrap(lambda x, u, d: F.linear(F.silu(F.linear(x, u)), d)),
                 [normal(tokens, 512), normal(1365, 512), normal(512, 1365)], (fl, tokens * 1024), (2 * fl, tokens * 1536))
        for rows, width in ((65536, 768), (36096, 512), (205000, 512)):
            n = rows * width
            both("layernorm", {"R": rows, "C": width}, name, wrap(lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b)),
                 [normal(rows, width), normal(width), normal(width)], (8 * n, 2 * n), (12 * n, 3 * n))
            both("rmsnorm", {"R": rows, "C": width}, name, wrap(lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6)),
                 [normal(rows, width), normal(width)], (6 * n, 2 * n), (10 * n, 3 * n))
        rows, width = 32768, 4096
        both("softmax", {"R": rows, "C": width}, name, wrap(lambda x: F.softmax(x, -1)), [normal(rows, width)],
             (5 * rows * width, 2 * rows * width), (4 * rows * width, 3 * rows * width))
        rows, width = 8192, 50304
        target = torch.randint(0, width, (rows,), device=device)
        both("cross_entropy", {"R": rows, "V": width}, name, wrap(lambda x: F.cross_entropy(x.float(), target)),
             [normal(rows, width)], (5 * rows * width, rows * width), (4 * rows * width, 2 * rows * width))
        for tokens in (32000, 1 << 23):
            y = torch.randn(tokens, device=device)
            both("gmm_nll", {"T": tokens, "K": 10}, name, wrap(lambda h: gmm_nll(h, y)), [normal(tokens, 10, 3)],
                 (0, tokens * 32), (0, tokens * 62))
        for tokens in (5000, 32000):
            for d_in, d_out, shared in ((512, 1365, True), (1365, 3, False)):
                fl = 2 * tokens * 10 * d_in * d_out
                equation = "td,kfd->tkf" if shared else "tkd,kfd->tkf"
                x = normal(tokens, d_in) if shared else normal(tokens, 10, d_in)
                both("grouped_linear", {"T": tokens, "K": 10, "in": d_in, "out": d_out}, name,
                     wrap(lambda x, w: torch.einsum(equation, x, w)), [x, normal(10, d_out, d_in)], (fl, 0), (2 * fl, 0),
                     attrs=None if shared else {"shared": "false"})
    backends = [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)] if on_gpu else \
        [("math", SDPBackend.MATH)]
    for m, n, b in ((64, 500, 64), (10000, 1000, 1), (10000, 1000, 4), (200000, 5000, 1)):
        fl = 4.0 * b * 8 * (m + n) * m * 64
        el = b * 8 * 64 * (2 * (m + n) + 2 * m)
        for backend_name, backend in backends:
            with sdpa_kernel(backend):
                q, k, v = normal(b, 8, m + n, 64), normal(b, 8, m, 64), normal(b, 8, m, 64)
                both("attention", {"B": b, "M": m, "N": n, "H": 8, "D": 64}, f"torch {backend_name}",
                     F.scaled_dot_product_attention, [q, k, v], (fl, el), (2.5 * fl, 2 * el))
    for b, length, heads, dim, causal in ((16, 1024, 32, 64, False), (16, 1024, 32, 64, True), (4, 4096, 32, 64, False),
                                          (4, 4096, 32, 64, True), (4, 4096, 16, 128, False), (4, 4096, 16, 128, True)):
        fl = 4.0 * b * heads * length * length * dim / (2 if causal else 1)
        for backend_name, backend in backends:
            with sdpa_kernel(backend):
                q, k, v = (normal(b, heads, length, dim) for _ in range(3))
                both("attention", {"B": b, "M": length, "H": heads, "D": dim}, f"torch {backend_name}",
                     lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), [q, k, v], (fl, 0),
                     (2.5 * fl, 0), attrs={"causal": "true" if causal else "false"})


class Mlp(nn.Module):
    def __init__(self, d, ff):
        super().__init__()
        self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    """Post-norm; queries from all M + N tokens, keys and values from the first M (models/tnp.h)."""

    def __init__(self, d, ff, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = (nn.Linear(d, width, bias=False) for width in (d, 2 * d, d))
        self.norm1, self.norm2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.mlp = Mlp(d, ff)

    def forward(self, x, m: int):
        b, length, d = x.shape
        q = self.q(x).view(b, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x[:, :m]).view(b, m, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
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
        for block in self.blocks:
            x = checkpoint(block, x, m, use_reentrant=False) if self.checkpoint else block(x, m)
        t = x[:, m:].flatten(0, 1)
        h = F.silu(torch.einsum("td,kdf->ktf", t, self.head_in))
        return gmm_nll(torch.einsum("ktf,kfc->tkc", h, self.head_out), y.reshape(-1))


def step_flops(b, m, n, recompute, d=512, ff=1365, layers=12, k=10, features=10):
    tokens, memory = b * (m + n), b * m
    products = 2 * tokens * d * (features + 1 + d) + layers * (2 * tokens * d * (2 * d + 2 * ff) + 2 * memory * d * 2 * d)
    attention = layers * 4 * tokens * m * d
    heads = 2 * b * n * k * ff * (d + 3)
    return 3 * (products + heads) + 3.5 * attention + (products + attention if recompute else 0)


def section_step():
    shapes = [tuple(text.split(",")) for text in args.step] or [("64", "500", "64"), ("10000", "1000", "1"),
                                                                ("10000", "1000", "4")]
    for m, n, b, *rest in shapes:
        m, n, b, recompute = int(m), int(n), int(b), rest == ["checkpoint"]
        for ff in (int(width) for width in args.widths.split(",")):
            for backend_name in args.backends.split(",") if on_gpu else ("math",):
                backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                           "math": SDPBackend.MATH}[backend_name]
                for mode in args.modes.split(","):
                    torch._dynamo.reset()
                    model = optimizer = graph = None
                    gc.collect()
                    if on_gpu:
                        torch.cuda.empty_cache()
                        torch.cuda.reset_peak_memory_stats()
                    try:
                        with sdpa_kernel(backend):
                            torch.manual_seed(0)
                            model = Tnp(ff, checkpoint=recompute).to(device, dtype)
                            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu, capturable=on_gpu)
                            tokens, y = normal(b, m + n, 11, grad=False), torch.randn(b, n, device=device)
                            forward = model if mode == "eager" else torch.compile(model)

                            def step():
                                optimizer.zero_grad(set_to_none=True)
                                forward(tokens, y, m).backward()
                                optimizer.step()

                            run = step
                            if mode == "graph":
                                side = torch.cuda.Stream()
                                side.wait_stream(torch.cuda.current_stream())
                                with torch.cuda.stream(side):
                                    for _ in range(3):
                                        step()
                                torch.cuda.current_stream().wait_stream(side)
                                graph = torch.cuda.CUDAGraph()
                                with torch.cuda.graph(graph):
                                    step()
                                run = graph.replay
                            ms = measure(run, seconds=2, least=3, most=100, cold=False)
                            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
                            record("step tnp", {"B": b, "M": m, "N": n}, "step", f"torch {mode} {backend_name} {ff}", ms,
                                   step_flops(b, m, n, recompute), attrs={"checkpoint": "on" if recompute else "off"},
                                   peak_bytes=peak, tokens_per_s=b * (m + n) / ms["p50"] * 1e3)
                    except Exception as error:  # one failed mode must not lose the others
                        print(f"step tnp M={m} N={n} B={b} {mode} {backend_name} {ff}: {str(error)[:300]}", flush=True)


def section_host():
    """Host cost of a tiny operator: a chain of 10,000 multiplications by a number, forward and backward."""
    count = 10000
    x = torch.ones(4, device=device, requires_grad=True)

    def chain():
        y = x
        for _ in range(count):
            y = y * 1.0001
        return y

    def synchronize():
        if on_gpu:
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
        record("host chain", {"count": count}, mode, "torch eager",
               {"p10": values[0], "p50": values[len(values) // 2], "p90": values[-1], "repeats": len(values)},
               dt=torch.float32)


for name in args.sections:
    if f"section_{name}" not in globals():
        parser.error(f"section {name}: expected op, step or host")
for name in args.sections:
    globals()[f"section_{name}"]()
