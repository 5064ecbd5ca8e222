"""Timing and records of the PyTorch peers, as bench/timer.cpp and bench/record.cpp have them: device events around each
repeat, percentiles, a line of JSON a measurement. Before each cold repeat the L2 cache is filled with clean lines and the GPU is
kept busy for as long as eager PyTorch takes to issue an operator (bench/cold.h): what an operator costs the host is section
`host`'s matter."""
import gc
import json
import time

import torch


class Bench:
    def __init__(self, out, device, dtype, seconds):
        self.out = open(out, "a")
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.card = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        half = torch.bfloat16 if self.on_gpu else torch.float32
        self.dtype = {"": half, "bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}[dtype]
        self.seconds = seconds
        # Twice the L2 cache of an H100 or H200.
        self.flush = torch.zeros(25 << 20, device=device) if self.on_gpu else None
        self.sum = torch.zeros((), device=device)

    def normal(self, *shape, dtype=None, grad=True, scale=1.0):
        tensor = torch.randn(*shape, device=self.device, dtype=torch.float32).mul_(scale).to(dtype or self.dtype)
        return tensor.requires_grad_(grad)

    def integers(self, high, *shape):
        return torch.randint(0, high, shape, device=self.device)

    def measure(self, work, prepare=None, seconds=None, least=5, most=200, warmups=3, cold=True):
        """`prepare` runs before each repeat, untimed; what it returns is the argument of `work`."""
        seconds = self.seconds if seconds is None else seconds

        def repeat():
            state = prepare() if prepare else None
            if self.on_gpu:
                if cold:
                    torch.sum(self.flush, 0, out=self.sum)
                    torch.cuda._sleep(200_000)  # some 0.1 ms
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                work(state) if prepare else work()
                stop.record()
                return start, stop
            begin = time.perf_counter()
            work(state) if prepare else work()
            return (time.perf_counter() - begin) * 1e3

        def read(pair):
            if not self.on_gpu:
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

    def record(self, op, shape, mode, implementation, ms, flops=0.0, bytes=0.0, attrs=None, dtype=None, quiet=False, **more):
        name = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype or self.dtype]
        line = {"op": op, "shape": shape, "dtype": name, "device": str(self.device), "card": self.card, "mode": mode,
                "implementation": implementation, "row": "", "ms": ms, "flops": flops, "bytes": bytes,
                "tflops": flops / ms["p50"] / 1e9, "gbs": bytes / ms["p50"] / 1e6, "ceiling_share": 0.0,
                "deterministic": False, "build": f"torch {torch.__version__}",
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        if attrs:
            line["attrs"] = attrs
        line.update(more)
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()
        if not quiet:
            print(f"{op} {shape} {attrs or ''} {name} {mode} {implementation}: {ms['p50']:.4g} ms", flush=True)

    def memory(self):
        """What a record says of memory since the last reset: of tensors, and held from the driver."""
        if not self.on_gpu:
            return {}
        return {"live_bytes": torch.cuda.max_memory_allocated(), "peak_bytes": torch.cuda.max_memory_reserved()}

    def clean(self, always=True):
        """Returns cached memory to the driver: each time, or only when much has gathered (it costs milliseconds)."""
        if not self.on_gpu or (not always and torch.cuda.memory_reserved() < 20 << 30):
            return
        gc.collect()
        torch.cuda.empty_cache()
