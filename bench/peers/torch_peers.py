"""The same work as `tessera bench`, in PyTorch, as the same JSON lines.

usage: python torch_peers.py OUT.jsonl SECTION... [--ours OURS.jsonl] [--device cuda] [--seconds 0.5]

sections:
  op     the works of OURS (records of `tessera bench op`), each in every way that PyTorch has: eager, padded to multiples of
         8 and of 128 (1365 becomes 1368 and 1408), attention by flash and by cuDNN; with --compile also compiled where that
         can fuse something
  sweep  the problems of OURS (records of `tessera bench sweep`), with few repeats: eager, padded to 8, flash and cuDNN
  optim  fused AdamW, with and without clipping
  copy   what a large copy reaches
  step   the TNP's training step, eager, compiled and as a graph, with hidden layers of 1365 and of 1408
  gpt    the training step of GPT-2, --size small of --language 64,1024 unless told otherwise
  llama  that of LLaMA, --size 130m
  bert   fine-tuning steps of BERT-base, eager, compiled and compiled into a graph, under autocast and in bf16
  host   what a tiny operator costs the host

A peer that cannot do a work says so and is left out. Timing as in bench/timer.cpp; backward alone on graphs made before.
"""
import argparse
import json
import sys
import time

import torch

import bert
import step as tnp
from language_step import language_step
from timing import Bench
from works import WORKS, Way

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out")
parser.add_argument("sections", nargs="+", choices=["op", "sweep", "optim", "copy", "step", "gpt", "llama", "bert", "host"])
parser.add_argument("--ours", help="records of tessera: the works of op and sweep")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--seconds", type=float, default=0.5, help="of measuring, each")
parser.add_argument("--dtype", default="", help="bf16, f16 or f32; default: bf16 on a GPU; op and sweep take it from OURS")
parser.add_argument("--ops", default="", help="only these of OURS, a,b,c")
parser.add_argument("--compile", default="", help="of op: operators to compile as well, a,b,c")
parser.add_argument("--compile-limit", type=float, default=120, help="seconds after which nothing more is compiled")
parser.add_argument("--limit", type=float, default=200, help="of sweep: seconds, after which problems have no peer")
parser.add_argument("--parameters", type=int, default=130023424, help="of optim")
parser.add_argument("--step", action="append", default=[], help="M,N,B[,checkpoint]; may be repeated")
parser.add_argument("--modes", default="eager,compile,graph", help="of the step")
parser.add_argument("--widths", default="1365,1408", help="of the step's hidden layers")
parser.add_argument("--backends", default="flash,cudnn", help="of the step's attention, on a GPU")
parser.add_argument("--language", default="64,1024", help="of gpt and llama: sequences and their length")
parser.add_argument("--size", default="", help="of gpt and llama: as tessera bench step takes it")
parser.add_argument("--weights", default="bf16,autocast", help="of gpt and llama: in bf16, or in f32 under autocast")
parser.add_argument("--bert", default="32x128,16x512", help="of bert: texts and tokens of each")
parser.add_argument("--bert-ways", default="amp eager,amp compile,bf16 compile,amp compile first,bf16 compile first,amp graph,bf16 graph",
                    help="of bert")
parser.add_argument("--bert-sizes", default="", help="of bert, for tests: d=32,ff=64,heads=2,layers=2,vocabulary=300")
parser.add_argument("--dropout", default="0.1", help="of bert, a,b")
args = parser.parse_args()

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SWEEP = {"seconds": 0.004, "least": 5, "most": 10, "warmups": 2}  # as bench/sweep.h


def works_of(path):
    """[(op, shape, attrs, dtype, {mode: record})] in the order of the file, each work once."""
    works = {}
    for text in open(path):
        if not text.strip():
            continue
        line = json.loads(text)
        if line["device"].partition(":")[0] != args.device.partition(":")[0]:
            continue
        shape = {name: size for name, size in line["shape"].items() if size}
        attrs = line.get("attrs", {})
        key = (line["op"], tuple(sorted(shape.items())), tuple(sorted(attrs.items())), line["dtype"])
        works.setdefault(key, (line["op"], line["shape"], attrs, line["dtype"], {}))[4][line["mode"]] = line
    wanted = args.ops.split(",") if args.ops else None
    return [work for work in works.values() if wanted is None or work[0] in wanted]


def outputs(way):
    y = way.run(*way.inputs)
    return list(y) if isinstance(y, tuple) else [y]


def measure_way(bench, work, way, timing, quiet=False):
    """The modes of the work that tessera measured."""
    op, shape, attrs, _, modes = work
    wanted = [tensor for tensor in way.inputs if tensor.requires_grad]
    with way.context():
        for mode, ours in modes.items():
            if mode == "fwd":
                with torch.no_grad():
                    ms = bench.measure(lambda: way.run(*way.inputs), **timing)
            else:
                d_y = [torch.ones_like(y) if y.numel() == 1 else torch.randn_like(y) for y in outputs(way)]  # of a loss it is 1
                if mode == "bwd":
                    ms = bench.measure(lambda y: torch.autograd.grad(y, wanted, d_y), prepare=lambda: outputs(way), **timing)
                else:
                    ms = bench.measure(lambda: torch.autograd.grad(outputs(way), wanted, d_y), **timing)
            bench.record(op, shape, mode, "torch " + way.name, ms, ours["flops"], ours["bytes"], attrs=attrs, quiet=quiet)


def attempt(bench, work, way, timing, quiet=False):
    try:
        measure_way(bench, work, way, timing, quiet)
        return True
    except (torch.OutOfMemoryError, RuntimeError) as error:  # no such kernel, no memory: written down, not hidden
        print(f"{work[0]} {work[1]} {work[2] or ''} {way.name}: {str(error).splitlines()[0][:200]}", flush=True)
        return False


def section_op(bench):
    timing = {"seconds": args.seconds}
    to_compile, compiled = set(filter(None, args.compile.split(","))), 0.0
    for work in works_of(args.ours):
        op, shape, attrs, dtype, _ = work
        if op not in WORKS:
            if op not in ("copy", "adamw"):  # sections of their own
                print(f"{op}: no peer is written", flush=True)
            continue
        bench.dtype = DTYPES[dtype]
        for way in WORKS[op](bench, shape, attrs, (8, 128)):
            attempt(bench, work, way, timing)
            # Padding to 8 and to 128 compile to the same kernels but for their tiles: one of them is enough.
            if op in to_compile and way.compiles and not way.name.endswith("padded 8"):
                begin = time.monotonic()
                if compiled > args.compile_limit:
                    print(f"{op} {shape} {way.name}: not compiled, {args.compile_limit:.0f} s are over", flush=True)
                    continue
                torch._dynamo.reset()
                name = way.name.replace("eager", "compile")
                attempt(bench, work, Way(name, torch.compile(way.run, dynamic=False), way.inputs, way.context), timing)
                compiled += time.monotonic() - begin
            del way
            bench.clean()


def section_sweep(bench):
    # Attention last: cuDNN builds a plan for each shape, and what the limit cuts off is named.
    works = sorted(works_of(args.ours), key=lambda work: work[0] == "attention")
    begin, late = time.monotonic(), {}
    for work in works:
        op, shape, attrs, dtype, _ = work
        if op not in WORKS or time.monotonic() - begin > args.limit:
            late[op] = late.get(op, 0) + 1
            continue
        bench.dtype = DTYPES[dtype]
        for way in WORKS[op](bench, shape, attrs, (8,)):
            attempt(bench, work, way, SWEEP, quiet=True)
        bench.clean(always=False)
    for op, count in late.items():
        print(f"{op}: {count} problems have no peer: " + ("none is written" if op not in WORKS else f"{args.limit:.0f} s are over"))


def section_optim(bench):
    width = 2048
    for clip in (True, False):
        weights, left = [], args.parameters
        while left > 0:
            rows = max(1, min(left, width * width) // width)
            weights.append(bench.normal(rows, min(left, width), dtype=torch.float32, scale=0.02))
            left -= weights[-1].numel()
        for weight in weights:
            weight.grad = torch.randn_like(weight).mul_(0.01)
        adamw = torch.optim.AdamW(weights, lr=1e-4, fused=True)

        def one_step():
            if clip:
                torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=bench.on_gpu)
            adamw.step()
        bench.record("adamw", {"P": args.parameters}, "step", "torch fused", bench.measure(one_step),
                     bytes=args.parameters * (32 if clip else 28), attrs={"clip": "on" if clip else "off"}, dtype=torch.float32)
        del weights, adamw
        bench.clean()


def section_copy(bench):
    mib = 1024 if bench.on_gpu else 64
    source = bench.normal(mib << 18, dtype=torch.float32, grad=False)
    target = torch.empty_like(source)
    bench.record("copy", {"MiB": mib}, "fwd", "torch eager", bench.measure(lambda: target.copy_(source)), bytes=2 * mib << 20,
                 dtype=torch.float32)


bench = Bench(args.out, args.device, args.dtype, args.seconds)
for name in args.sections:
    if name in ("op", "sweep") and not args.ours:
        sys.exit(f"torch_peers.py: {name} needs --ours: the works are those that tessera measured")
    {"op": section_op, "sweep": section_sweep, "optim": section_optim, "copy": section_copy,
     "step": lambda b: tnp.step(b, args), "gpt": lambda b: language_step(b, args, "gpt"),
     "llama": lambda b: language_step(b, args, "llama"), "bert": lambda b: bert.bert(b, args), "host": tnp.host}[name](bench)
