"""AdamW, and a large copy."""
from dataclasses import dataclass, field

import torch

from timing import key_of

WIDTH = 2048


@dataclass
class AdamWTask:
    parameters: int
    clip: bool
    compiled: bool
    name: str = ""
    state: object = field(default=None, repr=False)

    def __post_init__(self):
        self.name = f"adamw clip {'on' if self.clip else 'off'}{' compiled' if self.compiled else ''}"

    def identity(self):
        return {"op": "adamw", "shape": {"P": self.parameters}, "attrs": {"clip": "on" if self.clip else "off"}, "dtype": "f32",
                "mode": "step", "implementation": "torch compile" if self.compiled else "torch fused"}

    def prepare(self, bench, gpu, options):
        with gpu.alone():
            weights, left = [], self.parameters
            while left > 0:
                rows = max(1, min(left, WIDTH * WIDTH) // WIDTH)
                weights.append(bench.normal(rows, min(left, WIDTH), dtype=torch.float32, scale=0.02))
                left -= weights[-1].numel()
            for weight in weights:
                weight.grad = torch.randn_like(weight).mul_(0.01)
        fused = bench.on_gpu and not self.compiled  # what is fused already cannot be compiled with the clipping
        adamw = torch.optim.AdamW(weights, lr=torch.tensor(1e-4, device=bench.device) if self.compiled else 1e-4, fused=fused or None,
                                  capturable=bench.on_gpu)

        def one_step():
            if self.clip:
                torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=bench.on_gpu)
            adamw.step()
        self.state = bench.compile(one_step) if self.compiled else one_step
        with gpu.alone_once_compiled(self.compiled):
            for _ in range(3):
                self.state()
            bench.synchronize()

    def measure(self, bench, options):
        what = self.identity()
        bench.record("adamw", what["shape"], "step", what["implementation"], bench.measure(self.state),
                     bytes=self.parameters * (32 if self.clip else 28), attrs=what["attrs"], dtype="f32")

    def failed(self, bench, reason):
        what = self.identity()
        bench.missing("adamw", what["shape"], "step", what["implementation"], reason, attrs=what["attrs"], dtype="f32",
                      required=self.compiled)


def tasks(parameters, known, bench, with_compile):
    wanted = [AdamWTask(parameters, clip, compiled) for clip in (True, False) for compiled in ((False, True) if with_compile else (False,))]
    return [task for task in wanted if key_of(task.identity() | {"device": str(bench.device)}) not in known]


def copy(bench):
    mib = 1024 if bench.on_gpu else 64
    source = bench.normal(mib << 18, dtype=torch.float32, grad=False)
    target = torch.empty_like(source)
    bench.record("copy", {"MiB": mib}, "fwd", "torch eager", bench.measure(lambda: target.copy_(source)), bytes=2 * mib << 20,
                 dtype="f32")
