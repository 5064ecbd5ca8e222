"""Training steps (forward, backward, fused AdamW) of the TNP, GPT-2, LLaMA and BERT, at PyTorch's best.

A step is given as NAME:size=N,...: tnp:M=64,N=500,B=64; gpt:B=64,T=1024; llama:B=32,T=1024; bert:B=32,T=128,dropout=0.1, with dropbp=0.5 for
DropBP. Every size of a model can be given that way (for tests), and precision=tf32 for f32 with GEMMs in TF32.

The ways to run a step differ in five factors:
  mode       eager         as Python issues it
             eager-graph   the eager step captured by hand in one CUDA graph
             compile       torch.compile of the model
             overhead      torch.compile(mode="reduce-overhead"): CUDA graphs of forward and backward
             graph         torch.compile, and the whole step captured by hand in one CUDA graph
             blocks        torch.compile of each block, for steps with DropBP: which branches are dropped is different each time
  attention  cudnn, flash (f32: efficient)
  precision  bf16          weights in bf16, no f32 masters: the least work that PyTorch can be asked for
             autocast      f32 weights under torch.autocast
  width      odd sizes as they are, or rounded up when the model was built (1365 to 1408, a vocabulary of 50257 to 50304)
  rows       BERT's last block: all rows, as transformers makes them, or the first token's alone, which are all that is read
Their product would be 80 runs. `plan` varies one factor at a time around the way that is fastest as far as known: 8 runs at most.
"""
import contextlib
import gc
from dataclasses import dataclass, field, replace

import torch

import bert
import language
import tnp
from timing import reason_of

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
COMPILED = ("compile", "overhead", "graph", "blocks")
ALL_DROPS = [(attention, feed_forward) for attention in (False, True) for feed_forward in (False, True)]


@dataclass(frozen=True)
class Way:
    mode: str
    backend: str
    precision: str
    width: str = ""
    rows: str = ""

    def name(self):
        return "torch " + " ".join(part for part in (self.mode, self.backend, self.precision, self.width, self.rows) if part)


@dataclass(frozen=True)
class Step:
    """What is measured: name and sizes, as bench/*_bench.cpp has them."""
    name: str
    sizes: tuple  # of (name, value)

    @staticmethod
    def parse(text):
        name, _, sizes = text.partition(":")
        if name not in ("tnp", "gpt", "llama", "bert"):
            raise ValueError(f"step {text}: expected tnp, gpt, llama or bert")
        return Step(name, tuple(tuple(part.split("=")) for part in sizes.split(",") if part))

    def get(self, name, usual):
        value = dict(self.sizes).get(name)
        return usual if value is None else type(usual)(value)

    def shape(self):
        """The usual sizes of a model are not part of a record's shape, others are."""
        if self.name == "tnp":
            usual = {"F": 10, "d": 512, "d_ff": 1365, "heads": 8, "layers": 12, "K": 10}
            base = {"B": self.get("B", 64), "M": self.get("M", 64), "N": self.get("N", 500)}
        elif self.name == "bert":
            usual = {"V": 30522, "d": 768, "d_ff": 3072, "heads": 12, "layers": 12}
            base = {"B": self.get("B", 32), "T": self.get("T", 128)}
        else:
            layers, d, heads, ff = self.language_sizes()
            base = {"B": self.get("B", 64), "T": self.get("T", 1024), "V": self.vocabulary(), "d": d, "layers": layers}
            _, _, usual_heads, usual_ff = language.SIZES[self.name][{"gpt": "small", "llama": "130m"}[self.name]]
            unusual = [("heads", heads, usual_heads), ("d_ff", ff, usual_ff)]
            if self.name == "llama":
                unusual.append(("kv_heads", heads, usual_heads))
            return base | {name: size for name, size, known in unusual if size != known}
        return base | {name: self.get(name, size) for name, size in usual.items() if self.get(name, size) != size}

    def language_sizes(self):
        known = language.SIZES[self.name][self.get("size", {"gpt": "small", "llama": "130m"}[self.name])]
        return tuple(self.get(name, size) for name, size in zip(("layers", "d", "heads", "d_ff"), known))

    def vocabulary(self):
        return self.get("V", {"gpt": 50257, "llama": 32000}[self.name])

    def attrs(self):
        if self.name == "tnp":
            return {"checkpoint": self.get("checkpoint", "off")}
        if self.name != "bert":
            return {}
        attrs = {"dropout": f"{self.get('dropout', 0.1):g}"}
        if self.drop_share():
            attrs["dropbp"] = f"{self.drop_share():g} of the branches' FLOPs, equal rates"
        return attrs

    def drop_share(self):
        return self.get("dropbp", 0.0) if self.name == "bert" else 0.0

    def drops(self):
        if not self.drop_share():
            return None
        s = self.shape()
        return bert.DropBP(self.drop_share(), s.get("layers", 12), s.get("d", 768), s.get("d_ff", 3072), s["T"])

    def tokens(self):
        length = self.get("M", 64) + self.get("N", 500) if self.name == "tnp" else self.get("T", {"bert": 128}.get(self.name, 1024))
        return self.get("B", {"bert": 32}.get(self.name, 64)) * length

    def odd_width(self):
        """(as it is, rounded up) of the one size that GEMMs dislike, or two equal ones."""
        if self.name == "bert":
            return "", ""
        width, multiple = (self.get("d_ff", 1365), 128) if self.name == "tnp" else (self.vocabulary(), 64)
        if self.name == "llama" and width % multiple == 0:
            return "", ""
        return str(width), str(-(-width // multiple) * multiple)

    def flops(self, way):
        s = self.shape()
        if self.name == "tnp":
            return tnp.step_flops(s["B"], s["M"], s["N"], self.attrs()["checkpoint"] == "on", s.get("d", 512), s.get("d_ff", 1365),
                                  s.get("layers", 12), s.get("K", 10), s.get("F", 10))
        if self.name == "bert":
            return bert.step_flops(s["B"], s["T"], s.get("d", 768), s.get("d_ff", 3072), s.get("layers", 12), way.rows == "first")
        layers, d, _, ff = self.language_sizes()
        return language.flops(s["B"], s["T"], s["V"], self.name == "llama", layers, d, ff)

    def make(self, bench, way):
        """A model and a function loss(forward)."""
        s = self.shape()
        with torch.device(bench.device):
            if self.name == "tnp":
                model = tnp.Tnp(int(way.width), s.get("F", 10), s.get("d", 512), s.get("heads", 8), s.get("layers", 12), s.get("K", 10),
                                self.attrs()["checkpoint"] == "on")
            elif self.name == "bert":
                model = bert.Bert(s.get("d", 768), s.get("d_ff", 3072), s.get("heads", 12), s.get("layers", 12), s.get("V", 30522),
                                  max(512, s["T"]), dropout=self.get("dropout", 0.1), first=way.rows == "first")
            else:
                layers, d, heads, ff = self.language_sizes()
                model = language.Language(self.name, int(way.width or s["V"]), s["T"], layers, d, heads, ff)
        weights = torch.bfloat16 if way.precision == "bf16" else torch.float32
        model = model.to(weights)
        if self.name == "tnp":
            inputs = (bench.normal(s["B"], s["M"] + s["N"], s.get("F", 10) + 1, grad=False, dtype=weights),
                      torch.randn(s["B"], s["N"], device=bench.device), s["M"])
        elif self.name == "bert":
            inputs = (bench.integers(s.get("V", 30522), s["B"], s["T"]), bench.integers(2, s["B"], s["T"]), bench.integers(2, s["B"]))
        else:
            inputs = (bench.integers(s["V"], s["B"], s["T"]), bench.integers(s["V"], s["B"], s["T"]))

        def loss(forward):
            with torch.autocast(bench.device.type, torch.bfloat16) if way.precision == "autocast" else contextlib.nullcontext():
                return forward(*inputs)
        return model, loss

    def does(self, way):
        """What a record says of how it does the work, for the column of differences."""
        facts = {"weights": {"bf16": "bf16 without masters", "autocast": "f32 under autocast"}.get(way.precision, "f32")}
        if self.name == "tnp":
            facts["recomputed"] = "every block" if self.attrs()["checkpoint"] == "on" else "nothing"
        if self.name == "bert":
            facts["last block"] = "first token" if way.rows == "first" else "all rows"
        return facts


def plan(step, on_gpu=True):
    """The ways of a step, the one that is best as far as known first, grouped by what shares a compilation:
    [[way, ...], ...]."""
    as_is, padded = step.odd_width()
    precision = step.get("precision", "bf16")
    single = precision != "bf16"
    best = Way("graph", "efficient" if single else "cudnn", precision, padded, "first" if step.name == "bert" else "")
    if not on_gpu:
        best = replace(best, mode="blocks" if step.drop_share() else "compile", backend="math", precision="f32")
        return [[best], [replace(best, mode="eager")]] + ([[replace(best, mode="eager", width=as_is)]] if as_is != padded else [])
    if step.get("M", 0) >= 100_000:  # a step takes seconds: no mode can hide or add anything
        return [[replace(best, mode="compile")]]
    if step.drop_share():
        ways = [replace(best, mode="blocks"), replace(best, mode="eager")]
        if not single:
            ways += [replace(ways[0], backend="flash"), replace(ways[0], precision="autocast")]
        return [[way] for way in ways]
    groups = [[best, replace(best, mode="compile")]]
    if not single:
        groups += [[replace(best, mode="overhead")], [replace(best, mode="eager-graph"), replace(best, mode="eager")],
                   [replace(best, backend="flash")], [replace(best, precision="autocast")]]
    if as_is != padded:
        groups.append([replace(best, width=as_is)])
    if best.rows:
        groups.append([replace(best, rows="all rows")])
    return groups


@dataclass
class StepTask:
    """The ways of one group: they share the model and what was compiled of it."""
    step: Step
    ways: list
    name: str = ""
    state: object = field(default=None, repr=False)

    def __post_init__(self):
        self.name = f"step {self.step.name} {self.step.shape()} {' + '.join(way.name()[6:] for way in self.ways)}"

    def dtype(self, way):
        return way.precision if way.precision in ("tf32", "f32") else "bf16"

    def identity(self, way):
        return {"op": f"step {self.step.name}", "shape": self.step.shape(), "attrs": self.step.attrs(), "dtype": self.dtype(way),
                "mode": "step", "implementation": way.name()}

    def context(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        return sdpa_kernel(getattr(SDPBackend, BACKENDS[self.ways[0].backend]))

    def prepare(self, bench, gpu, options):
        first = self.ways[0]
        if first.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        compiles = first.mode in COMPILED
        with self.context():
            torch.manual_seed(0)
            with gpu.alone() if not compiles else contextlib.nullcontext():
                model, loss = self.step.make(bench, first)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bench.on_gpu, capturable=bench.on_gpu)
            forward = model
            if first.mode == "blocks":
                for block in model.blocks:
                    block.forward = bench.compile(block.forward)
            elif compiles:
                forward = bench.compile(model, mode="reduce-overhead" if first.mode == "overhead" else None)
            drops, forced = self.step.drops(), []

            def one_step():
                if drops:
                    model.drops = forced or drops.draw()
                optimizer.zero_grad(set_to_none=True)
                loss(forward).backward()
                optimizer.step()

            with gpu.alone_once_compiled(compiles):
                one_step()
                for branches in ALL_DROPS if drops else []:
                    forced = [branches] * len(model.blocks)
                    one_step()
                forced = []
                if first.mode == "overhead":  # it records its graphs in the second and third step
                    one_step()
                    one_step()
                bench.synchronize()
                optimizer.zero_grad(set_to_none=True)
                bench.clean()
        self.state = one_step

    def measure(self, bench, options):
        for way in sorted(self.ways, key=lambda way: "graph" in way.mode):  # the graph keeps its memory, so it comes last
            try:
                self.measure_way(bench, way, options)
            except Exception as error:  # one failed way must not lose the others
                self.missing(bench, way, reason_of(error))

    def measure_way(self, bench, way, options):
        run = self.state
        gc.collect()
        bench.clean()
        if bench.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with self.context():
            if way.mode in ("graph", "eager-graph"):
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        run()
                torch.cuda.current_stream().wait_stream(side)
                run = bench.captured(run)
            ms = bench.measure(run, seconds=options.get("step_seconds", 1.0), least=5, most=100, cold=False)
        what, memory = self.identity(way), bench.memory()
        if way.mode == "overhead":  # its graphs' tensors are not counted as allocated
            memory.pop("live_bytes", None)
        bench.record(what["op"], what["shape"], "step", what["implementation"], ms, self.step.flops(way), attrs=what["attrs"],
                     dtype=what["dtype"], tokens_per_s=self.step.tokens() / ms["p50"] * 1e3, does=self.step.does(way), **memory)

    def missing(self, bench, way, reason):
        what = self.identity(way)
        bench.missing(what["op"], what["shape"], "step", what["implementation"], reason, attrs=what["attrs"], dtype=what["dtype"],
                      required=way == plan(self.step, bench.on_gpu)[0][0])

    def failed(self, bench, reason):
        for way in self.ways:
            self.missing(bench, way, reason)


def tasks(steps, known, bench):
    """Of all steps, without the ways that `known`, keys of records, holds."""
    from timing import key_of
    wanted = []
    for step in steps:
        for group in plan(step, bench.on_gpu):
            task = StepTask(step, group)
            left = [way for way in group if key_of(task.identity(way) | {"device": str(bench.device)}) not in known]
            if left:
                wanted.append(StepTask(step, left))
    return wanted
