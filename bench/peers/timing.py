"""Timing and records of the PyTorch peers, as bench/timer.cpp and bench/record.cpp have them: device events around each repeat,
percentiles, one line of JSON per measurement, appended at once.

Before each cold repeat the L2 cache is filled with clean lines and the GPU is kept busy for as long as the host takes to issue an
operator (bench/cold.h), so that the host's time is hidden on both sides. Eager PyTorch takes longer than that for an operator of
many kernels, so whatever is short is measured a second time as a CUDA graph, and both times are recorded: the faster one counts.
What an operator costs the host is the matter of section `host`.
"""
import contextlib
import ctypes
import gc
import json
import os
import time

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "tf32": torch.float32}
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# ms: what runs shorter in a stream is measured as a CUDA graph, too; of what has many kernels, longer ones.
GRAPH_BELOW, GRAPH_BELOW_IF_FUSIBLE = 0.2, 1.0


def driver_version():
    """Of the GPU's driver, as NVML states it; "" where there is none. bench/record.cpp reads the same."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        return text.value.decode() if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, 96) == 0 else ""
    except OSError:
        return ""


def key_of(record):
    """What is measured, and how: two records of a campaign with the same key are the same measurement."""
    shape = tuple(sorted((name, size) for name, size in record["shape"].items() if size))
    return (record["op"], shape, tuple(sorted(record.get("attrs", {}).items())), record["dtype"], record["device"].partition(":")[0],
            record["mode"], record["implementation"])


def records_in(path):
    """The records of a file. A line that a writer left unfinished, because it was killed, is skipped."""
    with open(path) as lines:
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def measured(path, campaign):
    """Keys of the records of this campaign in the file; what is missing there is not measured."""
    if not os.path.exists(path):
        return set()
    return {key_of(record) for record in records_in(path) if record.get("campaign", "") == campaign and "missing" not in record}


class Bench:
    def __init__(self, out, device, dtype, seconds):
        self.path = out
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.gpu = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        self.driver = driver_version() if self.on_gpu else ""
        self.campaign = os.environ.get("TESSERA_CAMPAIGN", "")
        self.dtype = DTYPES[dtype or ("bf16" if self.on_gpu else "f32")]
        self.seconds = seconds
        self.flush = self.sum = None

    def compile(self, function, mode=None, options=None, dynamic=False):
        """By torch.compile's default backend on a GPU. On a CPU, where nothing is claimed, the same path without generated code."""
        if not self.on_gpu:
            return torch.compile(function, backend="aot_eager", dynamic=dynamic)
        return torch.compile(function, mode=mode, options=options, dynamic=dynamic)

    def normal(self, *shape, dtype=None, grad=True, scale=1.0):
        tensor = torch.randn(*shape, device=self.device, dtype=torch.float32).mul_(scale).to(dtype or self.dtype)
        return tensor.requires_grad_(grad)

    def integers(self, high, *shape):
        return torch.randint(0, high, shape, device=self.device)

    def make_cold(self):
        if self.flush is None:  # twice the L2 cache of an H100 or H200
            self.flush, self.sum = torch.zeros(25 << 20, device=self.device), torch.zeros((), device=self.device)
        torch.sum(self.flush, 0, out=self.sum)
        torch.cuda._sleep(200_000)  # some 0.1 ms

    def measure(self, work, prepare=None, seconds=None, least=5, most=200, warmups=3, cold=True):
        """`prepare` runs before each repeat, untimed; what it returns is the argument of `work`. Work that takes longer than
        `seconds` is warmed up once and repeated twice."""
        seconds = self.seconds if seconds is None else seconds

        def repeat():
            state = prepare() if prepare else None
            if self.on_gpu:
                if cold:
                    self.make_cold()
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

        estimate = 0.0
        for _ in range(warmups):
            estimate = read(repeat())
            if estimate > seconds * 1e3:
                least = min(least, 2)
                break
        repeats = min(most, max(least, int(seconds * 1e3 / max(estimate, 1e-3))))
        times = [read(pair) for pair in [repeat() for _ in range(repeats)]]
        return percentiles(times)

    def captured(self, work, stream=None):
        """`work` as a CUDA graph: a function that replays it. It has run on that stream before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = work()

        def replay():
            graph.replay()
            return kept
        return replay

    def line(self, op, shape, mode, implementation, attrs=None, dtype=None, **more):
        name = dtype if isinstance(dtype, str) else NAMES[dtype or self.dtype]
        line = {"op": op, "shape": shape, "dtype": name, "device": str(self.device), "gpu": self.gpu, "driver": self.driver,
                "mode": mode, "implementation": implementation, "build": f"torch {torch.__version__}", "campaign": self.campaign,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        if attrs:
            line["attrs"] = attrs
        line.update(more)
        return line

    def write(self, line):
        torn = os.path.exists(self.path) and os.path.getsize(self.path) > 0
        if torn:
            with open(self.path, "rb") as old:
                old.seek(-1, os.SEEK_END)
                torn = old.read() != b"\n"
        with open(self.path, "a") as out:
            out.write("\n" * torn + json.dumps(line) + "\n")

    def record(self, op, shape, mode, implementation, ms, flops=0.0, bytes=0.0, attrs=None, dtype=None, quiet=False, **more):
        line = self.line(op, shape, mode, implementation, attrs, dtype, ms=ms, flops=flops, bytes=bytes,
                         tflops=flops / ms["p50"] / 1e9, gbs=bytes / ms["p50"] / 1e6, deterministic=False, **more)
        self.write(line)
        if not quiet:
            print(f"{op} {shape} {attrs or ''} {line['dtype']} {mode} {implementation}: {ms['p50']:.4g} ms", flush=True)

    def missing(self, op, shape, mode, implementation, reason, attrs=None, dtype=None, required=False):
        """What could not be measured, and why. Without a time of what is required the work has no peer at all: what is left of
        its ways would be weaker."""
        self.write(self.line(op, shape, mode, implementation, attrs, dtype, missing=reason, required=required))
        print(f"{op} {shape} {attrs or ''} {mode} {implementation}: missing: {reason}", flush=True)

    def memory(self):
        """What a record says of memory since the last reset: of tensors, and held from the driver."""
        if not self.on_gpu:
            return {}
        return {"live_bytes": torch.cuda.max_memory_allocated(), "peak_bytes": torch.cuda.max_memory_reserved()}

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def clean(self, always=True):
        """Returns cached memory to the driver: each time, or only when much has gathered (it costs milliseconds)."""
        if not self.on_gpu or (not always and torch.cuda.memory_reserved() < 20 << 30):
            return
        gc.collect()
        torch.cuda.empty_cache()


def percentiles(times):
    times = sorted(times)

    def percentile(share):
        at = share * (len(times) - 1)
        low = int(at)
        return times[low] + (times[min(low + 1, len(times) - 1)] - times[low]) * (at - low)

    return {"p10": percentile(0.1), "p50": percentile(0.5), "p90": percentile(0.9), "repeats": len(times)}


def reason_of(error):
    """The first line of an exception that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
