"""Generation by a LLaMA-shaped model that several GPUs share: the peer of `tessera bench decode --tensor-parallel N`.

usage: torchrun --nproc-per-node 2 decode_ranks.py OUT.jsonl [--shape llama-2-7b] [--prompt-tokens 32,2048] [--new-tokens 128]
                                                   [--mode graph,compile] [--device cuda]

Megatron's split (Shoeybi et al., arXiv:1909.08053): heads and hidden features are divided, the output and down projections have a
column range each and are summed by an all-reduce of NCCL; of the head each rank has a part of the rows, whose logits are gathered.
Each rank has the whole token table, which costs it memory and saves a sum. As in decode.py a position has a CUDA graph of its own,
which the collectives are part of, the cache is as long as the text needs, and the host waits for the first token and then for all
others at once. The times are those of rank 0.

modes:
  eager    as Python issues it
  graph    graphs of the eager kernels
  compile  what stands between two attentions or all-reduces is compiled into one function, then as graph
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from decode import EPS, SHAPES, Text, queries
from timing import DTYPES, Bench, percentiles


def begin(tokens, table, *new):
    x = F.embedding(tokens, table)
    return x, queries(x, *new)


def mixed_out(mixed, out):
    batch, _, length, _ = mixed.shape
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), out)


def feed(x, branch, norm, up, down):
    x = x + branch
    gate, linear = F.linear(F.rms_norm(x, x.shape[-1:], norm, EPS), up).chunk(2, -1)
    return x, F.linear(F.silu(gate) * linear, down)


def attend(x, branch, *new):
    x = x + branch
    return x, queries(x, *new)


def last_logits(x, branch, norm, head):
    x = x + branch
    return F.linear(F.rms_norm(x, x.shape[-1:], norm, EPS), head)


PARTS = (begin, mixed_out, feed, attend, last_logits)


class RankWeights:
    """One rank's share of random weights."""

    def __init__(self, device, dtype, shape, ranks):
        self.vocabulary, d, ff, heads, kv_heads, layers = shape
        assert heads % ranks == 0 and kv_heads % ranks == 0 and ff % ranks == 0 and self.vocabulary % ranks == 0
        self.head_dim, self.heads, self.kv_heads = d // heads, heads // ranks, kv_heads // ranks

        def weight(*sizes):
            return torch.empty(*sizes, device=device, dtype=dtype).normal_(std=0.02)
        self.table, self.head = weight(self.vocabulary, d), weight(self.vocabulary // ranks, d)
        self.norm = torch.ones(d, device=device, dtype=dtype)
        self.blocks = [{"norm": torch.ones_like(self.norm), "qkv": weight((self.heads + 2 * self.kv_heads) * self.head_dim, d),
                        "out": weight(d, self.heads * self.head_dim), "norm2": torch.ones_like(self.norm),
                        "up": weight(2 * ff // ranks, d), "down": weight(d, ff // ranks)} for _ in range(layers)]
        read = [self.norm, self.head] + [x for block in self.blocks for x in block.values()]
        self.bytes = ranks * sum(x.numel() * x.element_size() for x in read)


class RankText(Text):
    """Text (decode.py) whose sums go over the ranks."""

    def next_token(self, tokens, first, parts):
        w, (one, mixed_to_out, middle, other, logits) = self.weights, parts
        length = tokens.shape[1]
        stop = first + length
        x = branch = None
        for i, block in enumerate(w.blocks):
            keys, values = self.cache[i]
            new = (block["norm"], block["qkv"], self.cos[first:stop], self.sin[first:stop], keys[:, :, first:stop],
                   values[:, :, first:stop], w.heads, w.kv_heads)
            x, q = one(tokens, w.table, *new) if i == 0 else other(x, branch, *new)
            mixed = F.scaled_dot_product_attention(q, keys[:, :, :stop], values[:, :, :stop], is_causal=length > 1,
                                                   enable_gqa=w.heads != w.kv_heads)
            if i + 1 == len(w.blocks):  # only the last token's feed-forward network is needed
                x, mixed = x[:, -1:], mixed[:, :, -1:]
            branch = mixed_to_out(mixed, block["out"])
            dist.all_reduce(branch)
            x, branch = middle(x, branch, block["norm2"], block["up"], block["down"])
            dist.all_reduce(branch)
        own = logits(x, branch, w.norm, w.head)
        ranks = dist.get_world_size()
        all_parts = torch.empty(ranks, *own.shape, device=own.device, dtype=own.dtype)
        dist.all_gather_into_tensor(all_parts, own)
        return all_parts.permute(1, 2, 0, 3).reshape(own.shape[0], 1, -1).argmax(-1)


class Place:
    """What Text and its graphs need to know of the device."""

    def __init__(self, device, dtype):
        self.device, self.dtype, self.on_gpu = device, dtype, device.type == "cuda"

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()


@torch.inference_mode()
def measure(place, weights, parts, mode, prompt, args):
    text = RankText(place, weights, prompt, args.new_tokens, 1)
    text.read_prompt(parts)
    text.step(1, parts)
    place.synchronize()
    text.issue(place, parts, parts, place.on_gpu and mode != "eager")
    dist.barrier()
    return text.measure(place, 2, args.repeats)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--shape", default="llama-2-7b", choices=list(SHAPES))
    parser.add_argument("--prompt-tokens", default="32,2048")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--mode", default="graph,compile")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dtype", choices=["f32", "bf16", "f16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    name = args.dtype or ("f16" if on_gpu else "f32")
    place, ranks = Place(device, DTYPES[name]), dist.get_world_size()
    torch.manual_seed(0)  # the same prompt on all ranks
    weights = RankWeights(device, place.dtype, SHAPES[args.shape], ranks)
    bench = Bench(args.out, args.device, name, 1.0)
    for mode in args.mode.split(","):
        parts = tuple(torch.compile(part, dynamic=False) for part in PARTS) if mode == "compile" else PARTS
        for prompt in map(int, args.prompt_tokens.split(",")):
            times = measure(place, weights, parts, mode, prompt, args)
            if dist.get_rank() != 0:
                continue
            for kind, values in times.items():
                bench.record(f"decode {args.shape}", {"B": 1, "prompt": prompt, "new": args.new_tokens, "ranks": ranks}, kind,
                             f"torch {mode}", percentiles(values), bytes=weights.bytes, dtype=name,
                             does={"host": "reads the first token, then all others at once", "sums over ranks": "NCCL all-reduce"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
