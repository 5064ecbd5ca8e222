"""The same work as `tessera bench`, in PyTorch, as the same JSON lines.

usage: python torch_peers.py OUT.jsonl SECTION... [--ours OURS.jsonl] [--device cuda] [--seconds 0.5]

sections:
  steps   training steps (--step, may be repeated: see steps.py), PyTorch at its best: eager, compiled, captured, by flash and cuDNN,
          in bf16 and under autocast, with odd widths as they are and padded; one factor at a time
  op      the works of OURS (records of `tessera bench op`), each in every way that PyTorch has: eager, padded to multiples of
          8 and of 128 (1365 becomes 1368 and 1408), attention by flash and by cuDNN; compiled wherever something can be fused
  decode  generation by a LLaMA-shaped model (--decode, see decode.py)
  sweep   the problems of OURS (records of `tessera bench sweep`), with few repeats: eager, padded to 8, flash and cuDNN. On a GPU
          only what torch.compile could not fuse: the others would need a compilation per problem
  optim   AdamW, fused, with and without clipping; and compiled
  copy    what a large copy reaches
  host    what a tiny operator costs the host

steps, op, decode and optim are compiled in parallel first, then timed one after another (campaign.py); what OUT already holds of
them in this campaign (TESSERA_CAMPAIGN) is not measured again. Records are appended at once. A peer that cannot do a work says so and is
left out; one that could not be compiled in time is recorded as missing.
"""
import argparse
import os
import sys
import time

import campaign


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("sections", nargs="+", choices=["steps", "op", "decode", "sweep", "optim", "copy", "host"])
    parser.add_argument("--ours", action="append", default=[], help="records of tessera: the works of op and sweep; may be repeated")
    parser.add_argument("--device", default="", help="default: cuda if there is one, else cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring, each")
    parser.add_argument("--dtype", default="", help="bf16, f16 or f32; default: bf16 on a GPU; op and sweep take it from OURS")
    parser.add_argument("--ops", default="", help="only these of OURS, a,b,c")
    parser.add_argument("--no-compile", action="store_true", help="of op: eager only, for tests on a CPU")
    parser.add_argument("--limit", type=float, default=500, help="seconds, after which nothing more is measured")
    parser.add_argument("--prepare-limit", type=float, default=240, help="seconds, after which nothing more is compiled")
    parser.add_argument("--parallel", type=int, default=os.cpu_count(), help="processes that compile at a time")
    parser.add_argument("--parameters", type=int, default=130023424, help="of optim")
    parser.add_argument("--step", action="append", default=[], help="of steps: tnp:M=64,N=500,B=64; may be repeated")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="of measuring each way of a step")
    parser.add_argument("--decode", action="append", default=[], help="of decode: llama-2-7b:prompt=32,new=64; may be repeated")
    parser.add_argument("--cache-in", default="", help="packed compile caches to begin with")
    parser.add_argument("--cache-out", default="", help="where to pack them at the end")
    return parser.parse_args()


def in_parallel(args, known):
    """The sections whose work is compiled: all of their tasks together, so that every core has something to do. Returns whether time
    was left for all of them."""
    import torch
    import decode
    import ops
    import optim
    import steps
    from timing import Bench
    bench = Bench(args.out, args.device, args.dtype, args.seconds)
    tasks = []
    if "steps" in args.sections:
        tasks += steps.tasks([steps.Step.parse(text) for text in args.step], known, bench)
    if "decode" in args.sections:
        tasks += decode.tasks(args.decode, known, bench)
    if "optim" in args.sections:
        tasks += optim.tasks(args.parameters, known, bench, not args.no_compile)
    if "op" in args.sections:
        for path in args.ours:
            tasks += ops.tasks(path, args.device, tuple(filter(None, args.ops.split(","))), known, max(1, args.parallel // 3))
    del torch
    settings = campaign.Settings(args.out, args.device, args.dtype, args.seconds,
                                 {"step_seconds": args.step_seconds, "compile": not args.no_compile})
    complete = True
    for task, reason in campaign.run(tasks, settings, args.parallel, args.prepare_limit, args.deadline):
        if reason.startswith("the time was over"):
            print(f"{task.name}: not measured: {reason}", flush=True)
            complete = False
        else:
            task.failed(bench, reason)
    return complete


def main():
    args = arguments()
    args.deadline = time.monotonic() + args.limit
    if ("op" in args.sections or "sweep" in args.sections) and not args.ours:
        sys.exit("torch_peers.py: op and sweep need --ours: the works are those that tessera measured")
    # Two threads of Triton's compiler per process: most of a compilation is single-threaded Python.
    campaign.use_cache(threads=2)
    for archive in filter(None, args.cache_in.split(",")):
        campaign.unpack_cache(archive)
    import torch
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    from timing import Bench, measured
    known = measured(args.out, os.environ["TESSERA_CAMPAIGN"]) if os.environ.get("TESSERA_CAMPAIGN") else set()
    complete = True
    if {"steps", "op", "decode", "optim"} & set(args.sections):
        complete = in_parallel(args, known)
    bench = Bench(args.out, args.device, args.dtype, args.seconds)
    if "copy" in args.sections:
        import optim
        optim.copy(bench)
    if "host" in args.sections:
        import host
        host.host(bench)
    if "sweep" in args.sections:
        import sweep
        for path in args.ours:
            sweep.sweep(bench, args, path)
    if args.cache_out:
        campaign.pack_cache(args.cache_out)
    if not complete:
        sys.exit("torch_peers.py: the time was over before everything was measured; the same call goes on within the campaign that TESSERA_CAMPAIGN names")


if __name__ == "__main__":
    main()
