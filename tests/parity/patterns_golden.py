#!/usr/bin/env python3
"""Prints the expectations of tests/sparsity/patterns_test.cpp: what numpy, scipy and scikit-learn compute of the masks and
values that the test makes from the same integer hash.

    python3 tests/parity/patterns_golden.py        (needs numpy, scipy, scikit-learn)
"""
import numpy as np
from scipy.spatial.distance import pdist
from sklearn.cluster import KMeans
from sklearn.manifold import TSNE


def hashed(i, seed):
    x = (i * 2654435761 + seed * 40503) & 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 2246822519) & 0xFFFFFFFF
    x ^= x >> 13
    x = (x * 3266489917) & 0xFFFFFFFF
    return x ^ (x >> 16)


def mask(n, d, seed, clusters=0):
    """Bits of n features; with `clusters`, each feature copies a prototype and flips about an eighth of its bits."""
    out = np.zeros((n, d), dtype=np.uint8)
    for i in range(n):
        for j in range(d):
            if clusters == 0:
                out[i, j] = hashed(i * d + j, seed) & 1
            else:
                base = hashed((i % clusters) * d + j, seed) & 1
                out[i, j] = base ^ (hashed(i * d + j, seed + 1) % 8 == 0)
    return out


def main():
    n, d = 60, 96
    a, b = mask(n, d, 1), mask(n, d, 2)
    both, either = (a & b).sum(1), (a | b).sum(1)
    print(f"jaccard mean {np.mean(both / either):.12g} sd {np.std(both / either, ddof=1):.12g}")
    print(f"cosine mean {np.mean(both / np.sqrt(a.sum(1) * b.sum(1))):.12g}")
    print(f"hamming mean {np.mean((a ^ b).mean(1)):.12g}")
    distances = pdist(a, 'hamming')
    print(f"pool hamming mean {distances.mean():.12g} sd {distances.std(ddof=1):.12g} max {distances.max():.12g}")
    print(f"pool jaccard mean {np.mean(1 - pdist(a.astype(bool), 'jaccard')):.12g}")
    c = mask(n, d, 3, clusters=4)
    centres = [0, 13, 26, 39, 52]
    fit = KMeans(5, init=c[centres].astype(float), n_init=1, tol=0, algorithm="lloyd").fit(c.astype(float))
    print("labels {" + ", ".join(map(str, fit.labels_)) + "}")
    print(f"inertia {fit.inertia_:.12g}")
    best = KMeans(8, n_init=10, random_state=0).fit(a.astype(float))
    print(f"best inertia of k = 8 on a {best.inertia_:.12g}")
    best = KMeans(4, n_init=10, random_state=0).fit(c.astype(float))
    print(f"best inertia of k = 4 on c {best.inertia_:.12g}")
    for name, m in (("a", a), ("c", c)):
        kl = min(TSNE(perplexity=15, method="exact", random_state=s, max_iter=1000).fit(m.astype(float)).kl_divergence_
                 for s in range(3))
        print(f"t-SNE divergence on {name} {kl:.12g}")
    values = np.where(a == 1, np.array([[(hashed(i * d + j, 7) % 1000) / 500 - 1 for j in range(d)] for i in range(n)]), 0)
    other = np.where(b == 1, np.array([[(hashed(i * d + j, 8) % 1000) / 500 - 1 for j in range(d)] for i in range(n)]), 0)
    cos = (values * other).sum(1) / np.linalg.norm(values, axis=1) / np.linalg.norm(other, axis=1)
    print(f"value cosine mean {cos.mean():.12g}")
    best = KMeans(4, n_init=10, random_state=0).fit(values)
    print(f"best inertia of k = 4 on values {best.inertia_:.12g}")


main()
