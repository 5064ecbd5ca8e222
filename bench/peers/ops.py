"""Operators: the works that tessera measured, each in every way that PyTorch has for it (works.py)."""
from dataclasses import dataclass, field

import torch

from timing import DTYPES, GRAPH_BELOW, GRAPH_BELOW_IF_FUSIBLE, key_of, reason_of, records_in
from works import WORKS, WrongPeer, fusible


def works_of(path, device, ops=()):
    """[(op, shape, attrs, dtype, {mode: record})] in the order of the file, each work once."""
    works = {}
    for line in records_in(path):
        if line["device"].partition(":")[0] != device.partition(":")[0]:
            continue
        shape = {name: size for name, size in line["shape"].items() if size}
        attrs = line.get("attrs", {})
        key = (line["op"], tuple(sorted(shape.items())), tuple(sorted(attrs.items())), line["dtype"])
        works.setdefault(key, (line["op"], line["shape"], attrs, line["dtype"], {}))[4][line["mode"]] = line
    return [work for work in works.values() if not ops or work[0] in ops]


def differentiable(y):
    """Of the results of a work those that have a gradient: not counts."""
    return [one for one in (y if isinstance(y, tuple) else (y,)) if one.requires_grad]


def measure_way(bench, work, way, timing, run=None, quiet=False, skip=(), graphs=True):
    """The modes of the work that tessera measured; of `run`, compiled, if given. What is short is measured as a CUDA graph, too."""
    op, shape, attrs, dtype, modes = work
    name = "torch " + (way.name.replace("eager", "compile") if run else way.name)
    call = run or way.run
    wanted = [tensor for tensor in way.inputs if tensor.requires_grad]

    def forward():
        return differentiable(call(*way.inputs))

    def record(mode, implementation, ms):
        ours = modes[mode]
        bench.record(op, shape, mode, implementation, ms, ours["flops"], ours["bytes"], attrs=attrs, dtype=dtype, quiet=quiet)

    with way.context():
        way.check()
        for mode in modes:
            key = {"op": op, "shape": shape, "attrs": attrs, "dtype": dtype, "device": str(bench.device), "mode": mode}
            if key_of(key | {"implementation": name}) in skip:
                continue
            d_y = None
            if mode != "fwd":  # the gradient of a loss is 1
                d_y = [torch.ones_like(y) if y.numel() == 1 else torch.randn_like(y) for y in forward()]

            def whole():
                if mode == "fwd":
                    with torch.no_grad():
                        return call(*way.inputs)
                return torch.autograd.grad(forward(), wanted, d_y)

            if mode == "bwd":
                ms = bench.measure(lambda y: torch.autograd.grad(y, wanted, d_y), prepare=forward, **timing)
            else:
                ms = bench.measure(whole, **timing)
            if not (bench.on_gpu and graphs and ms["p50"] < (GRAPH_BELOW_IF_FUSIBLE if fusible(op, attrs) else GRAPH_BELOW)):
                record(mode, name, ms)
                continue
            # Backward runs on the stream of its forward pass, which is therefore the stream of the capture.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                if mode == "bwd":
                    y = forward()
                    step = lambda: torch.autograd.grad(y, wanted, d_y, retain_graph=True)
                else:
                    step = whole
                step()
                step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            try:
                record(mode, name + " graph", bench.measure(bench.captured(step, side), **timing))
            except Exception as error:  # what cannot be captured has its time in a stream alone
                print(f"{op} {shape} {mode} {name} graph: {reason_of(error)}", flush=True)
            record(mode, name, ms)


def attempt(bench, work, way, timing, run=None, quiet=False, skip=(), graphs=True):
    try:
        measure_way(bench, work, way, timing, run, quiet, skip, graphs)
        return ""
    except WrongPeer as error:
        for mode in work[4]:
            bench.missing(work[0], work[1], mode, "torch " + way.name, reason_of(error), attrs=work[2], dtype=work[3], required=True)
        return reason_of(error)
    except Exception as error:  # no such kernel, no memory: written down, not hidden
        print(f"{work[0]} {work[1]} {work[2] or ''} {way.name}: {reason_of(error)}", flush=True)
        return reason_of(error)


def ways_of(bench, work, paddings):
    op, shape, attrs, dtype, _ = work
    bench.dtype = DTYPES[dtype]
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")  # a setting of the process
    yield from WORKS[op](bench, shape, attrs, paddings)


def compiles(work, way):
    # Padding to 8 and to 128 compile to the same kernels but for their tiles: one of them is enough.
    return fusible(work[0], work[2]) and way.compiles and not way.name.endswith("padded 8")


@dataclass
class OpTask:
    """A few works, of one dtype, with whatever of them is compiled."""
    works: list
    name: str = ""
    skip: frozenset = frozenset()
    compiled: dict = field(default_factory=dict, repr=False)

    def __post_init__(self):
        self.name = "op " + ", ".join(sorted({work[0] for work in self.works}))

    def prepare(self, bench, gpu, options):
        torch._functorch.config.donated_buffer = False  # backward is captured with retain_graph
        if not options["compile"]:
            return
        for number, work in enumerate(self.works):
            for way in ways_of(bench, work, (8, 128)):
                if not compiles(work, way):
                    continue
                run = bench.compile(way.run)
                try:
                    with way.context(), gpu.alone_once_compiled(True):
                        y = differentiable(run(*way.inputs))
                        if set(work[4]) != {"fwd"}:
                            torch.autograd.grad(y, [x for x in way.inputs if x.requires_grad], [torch.ones_like(one) for one in y])
                    if "fwd" in work[4]:
                        with way.context(), torch.no_grad(), gpu.alone_once_compiled(True):
                            run(*way.inputs)
                    bench.synchronize()
                    self.compiled[number, way.name] = run
                except Exception as error:
                    self.compiled[number, way.name] = reason_of(error)
                del way
            bench.clean(always=False)
        bench.clean()

    def measure(self, bench, options):
        timing = {"seconds": bench.seconds}
        for number, work in enumerate(self.works):
            for way in ways_of(bench, work, (8, 128)):
                attempt(bench, work, way, timing, skip=self.skip)
                run = self.compiled.get((number, way.name))
                if isinstance(run, str):
                    self.missing(bench, work, way.name, run)
                elif run is not None:
                    reason = attempt(bench, work, way, timing, run, skip=self.skip)
                    if reason:
                        self.missing(bench, work, way.name, reason)
                del way
            bench.clean(always=False)

    def missing(self, bench, work, way_name, reason):
        for mode in work[4]:
            bench.missing(work[0], work[1], mode, "torch " + way_name.replace("eager", "compile"), reason, attrs=work[2], dtype=work[3],
                          required=True)

    def failed(self, bench, reason):
        for work in self.works:
            if fusible(work[0], work[2]):
                self.missing(bench, work, "eager", reason)


def tasks(path, device, ops, known, parts):
    """The works of tessera's records in at most `parts` tasks that compile, of about as much work each, and one that does not."""
    works = []
    for work in works_of(path, device, ops):
        if work[0] in WORKS:
            works.append(work)
        elif work[0] not in ("copy", "adamw"):  # sections of their own
            print(f"{work[0]}: no peer is written", flush=True)

    def is_known(work, mode):
        name = "torch compile" if fusible(work[0], work[2]) else None
        for key in known:
            if key[:6] == key_of({"op": work[0], "shape": work[1], "attrs": work[2], "dtype": work[3], "device": device, "mode": mode,
                                  "implementation": ""})[:6] and (name is None or key[6].startswith(name)):
                return True
        return False

    works = [work for work in works if not all(is_known(work, mode) for mode in work[4])]
    known = frozenset(known)
    # f32 with and without TF32 differ by a setting of the process.
    groups = []
    for tf32 in (False, True):
        some = [work for work in works if (work[3] == "tf32") == tf32]
        fused = [work for work in some if fusible(work[0], work[2])]
        groups += [fused[i::parts] for i in range(parts)]
        groups.append([work for work in some if not fusible(work[0], work[2])])
    return [OpTask(group, skip=known) for group in groups if group]
