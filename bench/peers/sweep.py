"""The problems of `tessera bench sweep`, with few repeats."""
import time

import ops
from works import FUSIBLE, WORKS

TIMING = {"seconds": 0.004, "least": 5, "most": 10, "warmups": 2}  # as bench/sweep.h


def sweep(bench, args, path):
    # Attention last: cuDNN builds a plan for each shape, and what the limit cuts off is named.
    works = sorted(ops.works_of(path, args.device, tuple(filter(None, args.ops.split(",")))), key=lambda work: work[0] == "attention")
    left_out = {}
    for work in works:
        op, reason = work[0], ""
        if op not in WORKS:
            reason = "none is written"
        elif bench.on_gpu and op in FUSIBLE:
            reason = "torch.compile could fuse it, and would have to compile every problem"
        elif time.monotonic() > args.deadline:
            reason = f"{args.limit:.0f} s are over"
        if reason:
            left_out[op, reason] = left_out.get((op, reason), 0) + 1
            continue
        for way in ops.ways_of(bench, work, (8,)):
            ops.attempt(bench, work, way, TIMING, quiet=True, graphs=False)
        bench.clean(always=False)
    for (op, reason), count in left_out.items():
        print(f"{op}: {count} problems have no peer: {reason}")
