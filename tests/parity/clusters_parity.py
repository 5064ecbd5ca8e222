"""k-means of masks and of values, next to scikit-learn's with as many starts, iterations and tolerance 0.

usage: python clusters_parity.py DUMP_CLUSTERS [--features N] [--bits D] [--k K] [--starts S] [--time]

Half of the bits are set; features are copies of 2 k prototypes with an eighth of the bits flipped, or, with --time, independent: then
nothing separates the clusters, and k-means iterates longest. The inertia must be at most 1.01 times scikit-learn's, and be that of the
labels. --time prints both times and their ratio; both use the threads of OMP_NUM_THREADS. Exit status 77: no scikit-learn here, skipped.
"""
import argparse
import os
import subprocess
import sys
import tempfile
import time

from needs import needs

with needs("numpy and scikit-learn"):
    import numpy as np
    from sklearn.cluster import KMeans


def inertia_of(x, labels):
    return sum(((x[labels == label] - x[labels == label].mean(0)) ** 2).sum() for label in np.unique(labels))


def features_of(options, random):
    if options.time:
        return random.integers(0, 2, (options.features, options.bits)).astype(np.float32)
    prototypes = random.integers(0, 2, (2 * options.k, options.bits))
    flips = random.random((options.features, options.bits)) < 1 / 8
    return (prototypes[np.arange(options.features) % (2 * options.k)] ^ flips).astype(np.float32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    for flag, value in (("features", 300), ("bits", 200), ("k", 8), ("starts", 10)):
        parser.add_argument("--" + flag, type=int, default=value)
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    random = np.random.default_rng(1)
    masks = features_of(options, random)
    for kind, x in (("masks", masks), ("values", masks * random.standard_normal(masks.shape).astype(np.float32))):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "features.npy")
            np.save(path, x)
            words = [os.path.abspath(options.program), path, kind, str(options.k), str(options.starts)]
            taken, inertia, *labels = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        begin = time.perf_counter()
        peer = KMeans(options.k, n_init=options.starts, max_iter=300, tol=0, algorithm="lloyd", random_state=0).fit(x)
        peer_taken = time.perf_counter() - begin
        own = inertia_of(x.astype(np.float64), np.array(labels, dtype=int))
        print(f"{kind}: inertia {float(inertia):.10g}, scikit-learn {peer.inertia_:.10g}")
        if options.time:
            print(f"{kind}: {float(taken):.3g} s, scikit-learn {peer_taken:.3g} s, ratio {peer_taken / float(taken):.3g}")
        if abs(own - float(inertia)) > 1e-6 * own:
            sys.exit(f"FAILED {kind}: the labels have an inertia of {own}")
        if float(inertia) > 1.01 * peer.inertia_:
            sys.exit(f"FAILED {kind}: the inertia is more than 1.01 times scikit-learn's")


main()
