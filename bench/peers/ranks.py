"""A training step of GPT-2 124M on several GPUs in PyTorch, the same JSON lines as `tessera bench step gpt` under a launcher.

usage: torchrun --nproc-per-node 2 ranks.py OUT.jsonl [--shape 32x1024,8x1024] [--ways ddp,ddp-graph,fsdp2] [--seconds 2]

ddp        DistributedDataParallel around the compiled model: f32 weights under autocast to bf16, fused AdamW, gradients as views of the buckets
ddp-graph  the same with the whole step as one CUDA graph
fsdp2      fully_shard of every block and of the model, not resharded after the forward pass, compiled, parameters in bf16, sums in f32

Each rank has a batch of its own of that size. `alone_ms` is one rank's compiled step without communication, all ranks side by side, in the
same process; times are those of the slowest rank. A way that does not work is recorded as missing, with the reason. On a CPU (gloo, a small
model with --small) nothing is claimed: it shows that the program runs.
"""
import argparse
import contextlib
import gc
import os
import socket
import time

# Graphs: no watchdog thread may query events of a stream that is being captured. NVLink multicast stays off, as in tessera.
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import language
from timing import Bench, percentiles, reason_of

GRAPH_WARMUPS = 11  # so many eager steps DDP needs before a capture


class Ranks:
    def __init__(self, device, seconds):
        self.device, self.seconds, self.on_gpu = device, seconds, device.type == "cuda"
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def times(self, step, count):
        if not self.on_gpu:
            times = []
            for _ in range(count):
                start = time.perf_counter()
                step()
                times.append((time.perf_counter() - start) * 1e3)
            return times
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        self.synchronize()
        return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]

    def measure(self, step, warmups=3):
        """The percentiles of the slowest rank, and its name."""
        for _ in range(warmups):
            step()
        self.synchronize()
        start = time.perf_counter()
        step()
        self.synchronize()
        once = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=self.device)
        dist.all_reduce(once, op=dist.ReduceOp.MAX)
        count = int(min(100, max(3, self.seconds / max(once.item(), 1e-6))))
        dist.barrier()
        own = percentiles(self.times(step, count)) | {"name": f"rank {self.rank} on {socket.gethostname()} ({self.device})"}
        everyone = [None] * self.size
        dist.all_gather_object(everyone, own)
        slowest = max(everyone, key=lambda one: one["p50"])
        return slowest, slowest.pop("name")


class Work:
    def __init__(self, bench, batch, length, small):
        self.bench, self.batch, self.length = bench, batch, length
        self.layers, self.d, self.heads, self.ff = (2, 64, 4, 128) if small else language.SIZES["gpt"]["small"]
        self.vocabulary = 512 if small else 50257

    def shape(self, ranks):
        return {"B": self.batch, "T": self.length, "V": self.vocabulary, "d": self.d, "layers": self.layers, "ranks": ranks}

    def flops(self):
        return language.flops(self.batch, self.length, self.vocabulary, False, self.layers, self.d, self.ff)

    def model(self):
        torch.manual_seed(0)
        with torch.device(self.bench.device):  # the vocabulary rounded up to 64, which is faster
            return language.Language("gpt", -(-self.vocabulary // 64) * 64, self.length, self.layers, self.d, self.heads, self.ff)

    def inputs(self):
        return [self.bench.integers(self.vocabulary, self.batch, self.length) for _ in range(2)]

    def step(self, forward, parameters, autocast, keep_gradients=False):
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=self.bench.on_gpu, capturable=self.bench.on_gpu)
        tokens, targets = self.inputs()

        def run():
            optimizer.zero_grad(set_to_none=not keep_gradients)
            with torch.autocast(self.bench.device.type, torch.bfloat16, enabled=autocast, cache_enabled=not keep_gradients):
                loss = forward(tokens, targets)
            loss.backward()
            optimizer.step()
        return run

    def alone(self):
        model = self.model()
        return self.step(self.bench.compile(model), model.parameters(), True)

    def ddp(self, graph):
        model = self.bench.compile(self.model())
        stream = torch.cuda.Stream() if graph else None
        if graph:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if graph else contextlib.nullcontext():
            wrapped = DistributedDataParallel(model, device_ids=[self.bench.device.index] if self.bench.on_gpu else None,
                                              gradient_as_bucket_view=True, static_graph=True)
            run = self.step(wrapped, wrapped.parameters(), True, keep_gradients=graph)
            if not graph:
                return run
            for _ in range(GRAPH_WARMUPS):
                run()
        torch.cuda.synchronize()
        return self.bench.captured(run, stream=stream)

    def fsdp2(self):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        model = self.model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mp_policy=policy, reshard_after_forward=False)
        return self.step(self.bench.compile(model), model.parameters(), False)

    def make(self, way):
        return self.fsdp2() if way == "fsdp2" else self.ddp(way == "ddp-graph")


NAMES = {"ddp": "torch DDP compile autocast", "ddp-graph": "torch DDP compile graph autocast", "fsdp2": "torch FSDP2 compile"}
WEIGHTS = {"ddp": "f32 under autocast", "ddp-graph": "f32 under autocast", "fsdp2": "f32 shards, bf16 in use"}


def run_way(work, way, alone, ranks, bench):
    reason, slowest, name = "", None, ""
    try:
        step = work.make(way)
        slowest, name = ranks.measure(step)
    except Exception as error:  # recorded; the other ranks meet the same one
        reason = reason_of(error)
    if ranks.rank != 0:
        return
    common = {"attrs": {}, "dtype": "bf16" if ranks.on_gpu else "f32"}
    if reason:
        return bench.missing("step gpt", work.shape(ranks.size), "step", NAMES[way], reason, required=False, **common)
    tokens = ranks.size * work.batch * work.length
    bench.record("step gpt", work.shape(ranks.size), "step", NAMES[way], slowest, work.flops(), does={"weights": WEIGHTS[way]},
                 tokens_per_s=tokens / slowest["p50"] * 1e3,
                 ranks={"alone_ms": alone["p50"], "efficiency": alone["p50"] / slowest["p50"], "slowest": name}, **common,
                 **bench.memory())
    print(f"{way} {work.batch}x{work.length}: {slowest['p50']:.2f} ms, {100 * alone['p50'] / slowest['p50']:.1f} % of one rank's "
          f"{alone['p50']:.2f} ms, {tokens / slowest['p50'] * 1e3:.4g} tokens/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--shape", default="32x1024,8x1024")
    parser.add_argument("--ways", default="ddp,ddp-graph,fsdp2")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a model of two layers, to see that the program runs")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    local = int(os.environ["LOCAL_RANK"])
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    bench = Bench(args.out, device, None, args.seconds)
    ranks = Ranks(device, args.seconds)
    for shape in args.shape.split(","):
        work = Work(bench, *map(int, shape.split("x")), args.small)
        step = work.alone()
        alone, _ = ranks.measure(step)
        del step
        for way in args.ways.split(","):
            if way not in NAMES:
                parser.error(f"--ways: there is no {way}; expected {', '.join(NAMES)}")
            if way == "ddp-graph" and not on_gpu:
                continue
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            run_way(work, way, alone, ranks, bench)
            torch.compiler.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
