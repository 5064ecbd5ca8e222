"""Host cost of a tiny operator: a chain of 10,000 multiplications by a number, forward and backward."""
import time

import torch

from timing import percentiles


def host(bench):
    count = 10000
    x = torch.ones(4, device=bench.device, requires_grad=True)

    def chain():
        y = x
        for _ in range(count):
            y = y * 1.0001
        return y

    times = {"fwd": [], "bwd": []}
    for _ in range(7):
        bench.synchronize()
        begin = time.perf_counter()
        y = chain()
        bench.synchronize()
        middle = time.perf_counter()
        y.sum().backward()
        bench.synchronize()
        times["fwd"].append((middle - begin) * 1e3)
        times["bwd"].append((time.perf_counter() - middle) * 1e3)
    for mode, values in times.items():
        bench.record("host chain", {"count": count}, mode, "torch eager", percentiles(values), dtype=torch.float32)
