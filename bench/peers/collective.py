"""Calls between ranks by torch.distributed: sizes and GB/s as nccl-tests define them, the same JSON lines as `tessera bench collective`.

usage: torchrun --nproc-per-node 2 collective.py OUT.jsonl [--call all_reduce] [--min 8] [--max 1073741824] [--factor 8] [--device cuda]

NCCL on GPUs, eager and as a CUDA graph; gloo on the CPU. Times are those of the slowest rank, calls back to back.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist

from timing import NAMES, Bench, percentiles

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
DIVIDED = ("reduce_scatter", "all_gather", "all_to_all")  # into equal parts, one per rank


def make(kind, count, ranks, dtype, device):
    """One call of `count` elements in all, and the bytes that the bus carries for each of the size."""
    whole, part = torch.zeros(count, dtype=dtype, device=device), torch.zeros(count // ranks, dtype=dtype, device=device)
    around = (ranks - 1) / ranks
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole), 2 * around
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole), around
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part), around
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, 0), 1.0
    other = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(other, whole), around


class Meter:
    def __init__(self, device, seconds):
        self.device, self.seconds, self.on_gpu = device, seconds, device.type == "cuda"

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def slowest(self, work):
        """Seconds of the slowest rank."""
        self.synchronize()
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        own = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=self.device)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        return own.item()

    def measure(self, call, graph):
        rounds = 7
        for _ in range(3):
            call()
        calls = int(min(200, max(1, self.seconds / rounds / max(self.slowest(call), 1e-7))))

        def some():
            for _ in range(calls):
                call()
        work = some
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                some()
            work = captured.replay
            work()
        return percentiles(1e3 * self.slowest(work) / calls for _ in range(rounds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--call", default=",".join(KINDS))
    parser.add_argument("--min", type=int, default=8)
    parser.add_argument("--max", type=int, default=1 << 30)
    parser.add_argument("--factor", type=int, default=8)
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16", "f16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.3)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(args.device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks, leads = dist.get_world_size(), dist.get_rank() == 0
    bench = Bench(args.out, args.device, args.dtype, args.seconds)
    dtype = {name: dtype for dtype, name in NAMES.items()}[args.dtype]
    meter = Meter(device, args.seconds)
    for kind in args.call.split(","):
        size = args.min
        while size <= args.max:
            count = size // dtype.itemsize
            if kind in DIVIDED:
                count = count // ranks * ranks
            if count > 0:
                try:
                    call, bus = make(kind, count, ranks, dtype, device)
                    for graph in ([True, False] if on_gpu else [False]):
                        ms = meter.measure(call, graph)
                        if leads:
                            bench.record(kind, {"bytes": count * dtype.itemsize, "ranks": ranks}, "graph" if graph else "eager",
                                         "torch.distributed", ms, bytes=count * dtype.itemsize * bus, dtype=args.dtype)
                except RuntimeError as error:  # gloo has not all of them; the same on every rank
                    if leads:
                        print(f"{kind}: {error}", flush=True)
                    break
            size *= args.factor
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
