"""Compares every operator of tessera with PyTorch, through `tessera op` and safetensors files.

usage: python torch_parity.py TESSERA [--only OP,...] [--seed N]

Outputs and gradients of f32 on the CPU must lie within 1e-5, of the largest element, of PyTorch's in f64; bf16 and f16 (every
fourth case) within the rule of the tests, 2x PyTorch's own error in that dtype and 2 ulp. Every operator of `tessera op --list`
must have a peer in peers_*.py. Exit status 77: no PyTorch here, skipped.
"""
import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib

from needs import needs

with needs("torch, numpy and safetensors"):
    import numpy as np
    import torch
    from safetensors.torch import load_file, save_file

import peers_elements  # noqa: F401, each fills PEERS
import peers_language  # noqa: F401
import peers_layers  # noqa: F401
from peer import ABSOLUTE, PEERS, SELF, Source, absolute

RELATIVE = 1e-5
# What is left of terms that cancel may be smaller than their rounding, for which no f32 program can be blamed: four roundings
# of 2^-24 of the sum of their absolute values are granted. They decide only there: see "sharp".
ROUNDINGS = 4 * 2.0**-24
SMALLEST = 2.0**-126  # below it f32 has no full precision: results are flushed or subnormal
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

parser = argparse.ArgumentParser()
parser.add_argument("tessera")
parser.add_argument("--only", default="")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.set_num_threads(1)
folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())


def run_tessera(name, inputs, attrs, grad):
    """(results by name, "") or (None, message)."""
    handle, source = tempfile.mkstemp(dir=folder.name)
    os.close(handle)
    save_file({key: x.contiguous() for key, x in inputs.items()}, source)
    command = [args.tessera, "op", name, "--in", source, "--out", source + ".out"] + ["--grad"] * grad
    for key, value in attrs.items():
        command += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    done = subprocess.run(command, capture_output=True, text=True)
    os.unlink(source)
    if done.returncode != 0:
        return None, done.stderr.strip()
    results = load_file(source + ".out")
    os.unlink(source + ".out")
    return results, ""


class Case:
    def __init__(self, op, number, arrays, attrs, dtype):
        self.op, self.peer, self.number, self.attrs, self.dtype = op, PEERS[op["name"]], number, attrs, dtype
        self.complete = {a["name"]: a["default"] for a in op["attributes"]} | attrs
        # 0-dimensional arrays come from NumPy as plain numbers
        self.inputs = {key: torch.as_tensor(np.asarray(x)) for key, x in arrays.items()}
        self.inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in self.inputs.items()}
        self.extra = {}
        if op["name"] == "dropout":  # tessera's own mask: what it makes of ones
            ones, message = run_tessera("dropout", {"x": torch.ones_like(self.inputs["x"])}, attrs, False)
            assert ones, message
            self.extra = {"mask": (ones["y"] != 0).double()}
        outputs = self.peer.run(self.tensors(torch.float64, False), self.complete)
        g = np.random.default_rng(number)
        self.d = {o["name"]: torch.as_tensor(np.asarray(g.standard_normal(outputs[o["name"]].shape))).to(dtype)
                  for o in op["outputs"] if o["differentiable"] and outputs[o["name"]].dtype in FLOATING}

    def __str__(self):
        parts = [f"{key}{list(x.shape)}" for key, x in self.inputs.items()] + [f"{k}={v}" for k, v in self.attrs.items()]
        return f"{self.op['name']} {' '.join(parts)} {str(self.dtype)[6:]} (case {self.number})"

    def tensors(self, dtype, grad):
        t = {i["name"]: None for i in self.op["inputs"]} | {key: x.to(dtype) for key, x in self.extra.items()}
        for key, x in self.inputs.items():
            t[key] = x.to(dtype) if x.is_floating_point() else x
            if grad and x.is_floating_point():
                t[key] = t[key].clone().requires_grad_()
        return t

    def torch_results(self, dtype):
        t = self.tensors(dtype, bool(self.d))
        outputs = self.peer.run(t, self.complete)
        results = {name: y.detach() for name, y in outputs.items()}
        if self.d:
            wanted = list(self.inputs_with_gradient())
            grads = torch.autograd.grad([outputs[n] for n in self.d], [t[n] for n in wanted],
                                        [d.to(outputs[n].dtype) for n, d in self.d.items()], allow_unused=True)
            results |= {"d_" + n: torch.zeros_like(t[n]) if x is None else x for n, x in zip(wanted, grads)}
        return results

    def inputs_with_gradient(self):
        differentiable = {i["name"] for i in self.op["inputs"] if i["differentiable"]}
        return (key for key, x in self.inputs.items() if x.is_floating_point() and key in differentiable)

    def terms(self):
        if self.peer.terms is SELF:
            return {}
        compute = (lambda t, a, d: absolute(self.peer, t, a, d)) if self.peer.terms is ABSOLUTE else self.peer.terms
        return compute(self.tensors(torch.float64, False), self.complete, {n: d.double() for n, d in self.d.items()})

    def tessera_results(self):
        inputs = self.inputs | {"d_" + name: d for name, d in self.d.items()}
        return run_tessera(self.op["name"], inputs, self.attrs, bool(self.d))


def largest(x):
    """Of the finite elements."""
    x = x.double()
    x = x[x.isfinite()].abs()
    return float(x.max()) if x.numel() else 0.0


def error(got, want):
    """The largest difference; infinite where NaN and infinities do not agree."""
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    difference = torch.where(same, torch.zeros_like(want), (got - want).abs())
    if not difference.numel():
        return 0.0
    return float("inf") if bool(difference.isnan().any()) else float(difference.max())


class Row:
    """One line of the table. Errors are shown as shares of what the bound is a share of, so 1e-5 is the limit in f32."""

    def __init__(self):
        self.cases = self.results = self.sharp = self.unmatched = 0
        self.worst = {"out": [0.0, 0.0], "grad": [0.0, 0.0], "small": [0.0, 0.0]}
        self.failures = []

    def compare_f32(self, case, name, ours, truth, baseline, term):
        floor = SMALLEST + ROUNDINGS * largest(term) if term is not None else SMALLEST
        bound = RELATIVE * largest(truth) + floor
        errors = error(ours, truth), error(baseline, truth)
        self.results += 1
        self.sharp += bound <= 2 * RELATIVE * largest(truth) or errors[0] == 0
        kind = self.worst["grad" if name.startswith("d_") else "out"]
        for side in (0, 1):
            kind[side] = max(kind[side], errors[side] / bound * RELATIVE)
        if not errors[0] <= bound:
            self.failures.append(f"{case}: {name}: error {errors[0]:.3g}, bound {bound:.3g}, largest {largest(truth):.3g}, "
                                 f"PyTorch in f32 {errors[1]:.3g}")

    def compare_small(self, case, name, ours, truth, baseline):
        info = torch.finfo(ours.dtype)
        truth = torch.where(truth.to(ours.dtype).isinf(), truth.to(ours.dtype).double(), truth)  # what overflows is infinite
        step = info.smallest_normal * info.eps  # of subnormal numbers
        rounded = 2 * max(info.eps * largest(truth), step)
        base = error(baseline, truth) if baseline is not None else 0.0
        bound = (2 * base if base < float("inf") else 0.0) + rounded
        mine = error(ours, truth)
        self.worst["small"][0] = max(self.worst["small"][0], mine / bound)
        if not mine <= bound:
            self.failures.append(f"{case}: {name}: error {mine:.3g}, bound {bound:.3g}, largest {largest(truth):.3g}, "
                                 f"PyTorch's {base:.3g}")

    def compare(self, case, ours, message):
        self.cases += 1
        before = len(self.failures)
        if ours is None:
            self.failures.append(f"{case}: {message}")
            return
        truth = case.torch_results(torch.float64)
        try:
            baseline = case.torch_results(case.dtype)
        except RuntimeError as unsupported:  # a kernel that PyTorch lacks for this dtype: then the bound is 2 ulp alone
            if case.dtype == torch.float32 or "not implemented" not in str(unsupported):
                raise
            baseline = {}
            self.unmatched += 1
        terms = case.terms() if case.dtype == torch.float32 else {}
        if set(ours) != set(truth):
            self.failures.append(f"{case}: tensors {sorted(ours)}, expected {sorted(truth)}")
        for name in sorted(set(ours) & set(truth)):
            if ours[name].shape != truth[name].shape:
                self.failures.append(f"{case}: {name} is {list(ours[name].shape)}, PyTorch's {list(truth[name].shape)}")
            elif case.dtype == torch.float32 or ours[name].dtype not in FLOATING or ours[name].dtype == torch.float64:
                self.compare_f32(case, name, ours[name], truth[name], baseline[name], terms.get(name))
            else:
                self.compare_small(case, name, ours[name], truth[name], baseline.get(name))
        del self.failures[before + 1:]  # one a case


def check_dropout(row):
    """The mask: its share, its determinism, and that it depends on the seed and not on dtype or shape."""
    def mask(p, seed, shape=(401, 499), dtype=torch.float32):
        results, message = run_tessera("dropout", {"x": torch.ones(shape, dtype=dtype)}, {"p": p, "seed": seed}, False)
        assert results, message
        return results["y"] != 0

    def expect(condition, what):
        row.cases += 1
        if not condition:
            row.failures.append("dropout: " + what)

    for p in (0.1, 0.5, 0.9):
        kept = mask(p, 5)
        n = kept.numel()
        deviation = abs(float(kept.double().mean()) - (1 - p)) / (p * (1 - p) / n) ** 0.5
        expect(deviation < 5, f"p {p}: {deviation:.1f} standard deviations off its share")  # chance of that: 6e-7
        for axis in (0, 1):  # rows and columns alike
            lines = kept.double().mean(axis)
            spread = float(lines.var()) / (p * (1 - p) / kept.size(axis))
            expect(0.7 < spread < 1.4, f"p {p}: variance of lines is {spread:.2f} of a binomial's")  # 5 deviations of 400 lines
        expect(bool((kept == mask(p, 5)).all()), "the same seed gives another mask")
        expect(bool((kept == mask(p, 5, dtype=torch.bfloat16)).all()), "another dtype gives another mask")
        expect(bool((kept.flatten() == mask(p, 5, (499 * 401,))).all()), "another shape gives another mask")
        agreement = float((kept == mask(p, 6)).double().mean())
        expect(abs(agreement - (p * p + (1 - p) ** 2)) < 0.01, f"seeds 5 and 6 agree on {agreement:.3f}")


def check_refusals(rows):
    """What PyTorch refuses and tessera refuses too."""
    x = torch.ones(2, 0)
    wrong = torch.tensor([0, 9])
    for name, inputs, attrs in (("max", {"x": x}, {"dim": 1}), ("max", {"x": x}, {}),
                                ("embedding", {"table": torch.ones(3, 4), "indices": wrong}, {}),
                                ("gather_rows", {"x": torch.ones(3, 4), "indices": wrong}, {}),
                                ("scatter_rows", {"x": torch.ones(2, 4), "indices": wrong}, {"rows": 3}),
                                ("cross_entropy", {"logits": torch.ones(2, 4), "targets": wrong}, {}),
                                ("add", {"a": torch.ones(2, 3), "b": torch.ones(2, 4)}, {}),
                                ("matmul", {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, {})):
        if name not in rows:
            continue
        results, message = run_tessera(name, inputs, attrs, False)
        rows[name].cases += 1
        if results is not None or len(message.splitlines()) != 1:
            shapes = [list(t.shape) for t in inputs.values()]
            rows[name].failures.append(f"{name} {shapes}: expected one line of complaint, got {message!r}")


def check_operator(op):
    row, jobs = Row(), []
    source = Source(zlib.crc32(op["name"].encode()) + args.seed)
    for number, (arrays, attrs) in enumerate(PEERS[op["name"]].cases(source)):
        jobs.append(Case(op, number, arrays, attrs, torch.float32))
        if number % 4 == 1:
            jobs.append(Case(op, number, arrays, attrs, (torch.bfloat16, torch.float16)[number // 4 % 2]))
    for case, (ours, message) in zip(jobs, pool.map(Case.tessera_results, jobs)):
        row.compare(case, ours, message)
    if op["name"] == "dropout":
        check_dropout(row)
    if row.sharp * 2 < row.results:
        row.failures.append(f"{op['name']}: only {row.sharp} of {row.results} bounds are sharp; its cases say little")
    return row


start = time.time()
listed = json.loads(subprocess.run([args.tessera, "op", "--list", "--json"], capture_output=True, text=True, check=True).stdout)
selected = [op for op in listed if not args.only or op["name"] in args.only.split(",")]
# Operators without a peer here, by family: they have the f64 oracle. (linear_activation, qr, svd and inverse_factor could have one.)
APART = {
    "bits": "pack_bits unpack_bits transpose_bits count_bits count_differences bit_pairs nearest_bits "
            "hamming_histogram",
    "2:4 matrices": "compress24 compress24_both compress24_like decompress24 soft_scale multiply24 sparse24_linear "
                    "transposable24 weight24_linear masked_decay24",
    "2:4 networks": "mlp_sparse24 mlp_sparse24_l1 hidden_gradient24 linear_activation linear_activation24 column_counts",
    "compressed weights": "sparse_linear sparse_linear_swiglu sparse_low_rank_linear",
    "factors, up to signs": "qr svd inverse_factor",
    "pruning": "keep_largest obs_columns",
    "several operators": "decoder_layers",
}
apart = {name for names in APART.values() for name in names.split()}
orphans = [f"{op['name']}: no peer in tests/parity" for op in selected if op["name"] not in PEERS and op["name"] not in apart]
orphans += [f"{name}: has a peer, and is said to have none" for name in sorted(apart & set(PEERS))]
orphans += [f"{name}: a peer without an operator" for name in PEERS if name not in {op["name"] for op in listed}]
rows = {op["name"]: check_operator(op) for op in selected if op["name"] in PEERS}
check_refusals(rows)

print("worst error relative to the largest element, against PyTorch in f64; the limit is 1e-05. sharp: results whose bound is")
print("that limit and not the rounding of terms that cancel. bf16, f16: share of the bound of the tests")
print(f"{'operator':<16}{'cases':>6}{'sharp':>7}{'outputs':>10}{'torch f32':>10}{'gradients':>11}{'torch f32':>10}"
      f"{'bf16 f16':>9}")
for name, row in rows.items():
    (out, torch_out), (grad, torch_grad), small = row.worst["out"], row.worst["grad"], row.worst["small"][0]
    print(f"{name:<16}{row.cases:>6}{row.sharp / max(row.results, 1):>7.0%}{out:>10.1e}{torch_out:>10.1e}{grad:>11.1e}"
          f"{torch_grad:>10.1e}{small:>9.2f}{f'  {row.unmatched} without a peer kernel' if row.unmatched else ''}")
failures = orphans + [line for row in rows.values() for line in row.failures]
for line in failures[:60]:
    print("FAILED", line)
total = sum(row.cases for row in rows.values()) + len(orphans)
print(f"{total - len(failures)} passed, {len(failures)} failed; {time.time() - start:.0f} s")
sys.exit(1 if failures else 0)
