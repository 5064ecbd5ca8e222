"""Every operator of tessera in PyTorch: its cases, the computation, and what its rounding may cost.

A peer is run(t, a): outputs by name, from tensors by name (None: absent) and attributes. It runs in f64 (the truth), f32 and
the small dtypes (the baseline). cases(g) yields (inputs, attributes) of arrays in f64 or i64/i32. terms(t, a, d), in f64,
gives for outputs and gradients the largest sum of the absolute terms that the result adds up, if these may cancel: rounding
is proportional to the terms, not to what is left of them. The default is the computation itself on absolute values, which is
exactly that for products and sums; SELF says that nothing cancels.
"""
import math

import numpy as np
import torch

PEERS = {}
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 64, 67, 129, 257, 1031)
SELF = object()
ABSOLUTE = object()


class Peer:
    def __init__(self, name, run, cases, terms):
        self.name, self.run, self.cases, self.terms = name, run, cases, terms


def operator(name, cases, terms=ABSOLUTE):
    def add(run):
        PEERS[name] = Peer(name, run, cases, terms)
        return run
    return add


class Source:
    """Random inputs, the same in every run."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape, scale=1.0):
        return self.rng.standard_normal(shape) * scale

    def positive(self, *shape):
        return np.exp(self.rng.standard_normal(shape))

    def away_from_0(self, *shape):
        z = self.rng.standard_normal(shape)
        return z + np.where(z < 0, -0.1, 0.1)

    def index(self, high, *shape, wide=True):
        return self.rng.integers(0, max(high, 1), shape).astype(np.int64 if wide else np.int32)

    def size(self, most=1031, least=0):
        return int(self.rng.choice([n for n in SIZES if least <= n <= most]))

    def integer(self, low, high):
        return int(self.rng.integers(low, high))

    def choice(self, *values):
        return values[int(self.rng.integers(len(values)))]

    def shape(self, rank, most=200_000, least=0):
        while True:
            sizes = tuple(self.size(least=least) for _ in range(rank))
            if math.prod(sizes) <= most:
                return sizes


def absolute(peer, t, a, d):
    """The outputs and gradients of the peer on absolute values."""
    t = {name: x.abs().requires_grad_() if x is not None and x.is_floating_point() else x for name, x in t.items()}
    outputs = peer.run(t, a)
    wanted = [name for name, x in t.items() if x is not None and x.requires_grad]
    grads = torch.autograd.grad([outputs[name] for name in d], [t[name] for name in wanted], [x.abs() for x in d.values()],
                                allow_unused=True)
    return ({name: y.detach() for name, y in outputs.items()} |
            {"d_" + name: x for name, x in zip(wanted, grads) if x is not None})
