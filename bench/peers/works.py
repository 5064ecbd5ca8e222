"""How PyTorch does the work of each operator: the shapes and attributes are those of tessera's records.

A work has several ways. Their names are the implementations of the records: "eager", "compile", an attention backend, and
"padded N" where sizes were rounded up to multiples of N when the model was built (the work counted is the real one).
Nothing here pads or copies inside the timed part.
"""
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sliced
from timing import DTYPES


@dataclass
class Way:
    name: str
    run: Callable
    inputs: list
    context: Callable = nullcontext  # around every call
    compiles: bool = True            # as well as eagerly, if the work is fusible
    check: Callable = lambda: None   # before anything is timed: raises WrongPeer


class WrongPeer(Exception):
    """Its results are not those of the work."""


def up(n, to):
    return -(-n // to) * to


def widths(sizes, paddings):
    """The sizes as they are and rounded up, each different outcome once: [(name, sizes)]."""
    outcomes = [("", tuple(sizes))]
    for padding in paddings:
        rounded = tuple(up(n, padding) for n in sizes)
        if all(rounded != known for _, known in outcomes):
            outcomes.append((f" padded {padding}", rounded))
    return outcomes


ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
               "relu_squared": lambda h: F.relu(h).square(), "none": lambda h: h}


def gmm_nll(h, y):
    logit, mu, log_sigma = h.float().unbind(-1)
    log_p = (F.log_softmax(logit, -1) - 0.5 * ((y.float()[..., None] - mu) / log_sigma.exp()) ** 2 - log_sigma
             - 0.5 * math.log(2 * math.pi))
    return -torch.logsumexp(log_p, -1).mean()


def attention(b, shape, attrs, paddings):
    batch, heads, dim = shape.get("B", 1), shape.get("H", 8), shape.get("D", 64)
    kv_heads = shape.get("Hk", heads)
    keys = shape.get("Lk", shape.get("M", 1024))
    queries = shape.get("Lq", shape.get("M", 1024) + shape.get("N", 0))
    causal, dropout = attrs.get("causal") == "true", float(attrs.get("dropout", 0))
    if shape.get("S"):
        if dropout == 0:  # varlen_attn has none
            yield from sequences(b, shape["S"], queries, keys, heads, kv_heads, dim, causal, shape.get("even", 0))
        return
    if causal and queries > keys:
        return  # queries that see no key: NaN in PyTorch
    if shape.get("bias") or shape.get("mask"):
        sizes = [shape.get(name, size) for name, size in (("Bb", batch), ("Hb", heads), ("Lqb", queries), ("Lkb", keys))]
        yield from attention_with_bias(b, batch, queries, keys, heads, kv_heads, dim, causal, dropout, sizes,
                                       shape.get("bias", 0), shape.get("mask", 0))
        return
    arguments = {"is_causal": causal, "enable_gqa": kv_heads != heads, "dropout_p": dropout}
    if causal and queries != keys:
        from torch.nn.attention.bias import causal_lower_right
        arguments = {"attn_mask": causal_lower_right(queries, keys), "enable_gqa": kv_heads != heads, "dropout_p": dropout}
    backends = [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)]
    if not b.on_gpu:
        backends = [("math", SDPBackend.MATH)]
    elif b.dtype == torch.float32:
        backends = [("efficient", SDPBackend.EFFICIENT_ATTENTION)]
    for name, backend in backends:
        q, k, v = (b.normal(batch, h, length, dim) for h, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
        yield Way(name, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **arguments), [q, k, v],
                  lambda backend=backend: sdpa_kernel(backend))


def attention_with_bias(b, batch, queries, keys, heads, kv_heads, dim, causal, dropout, sizes, has_bias, has_mask):
    """A bias, and a mask that hides pairs, of `sizes`: as attn_mask, and by flex_attention, compiled. Masks and what depends
    on them alone are made before the timed part; what is hidden in a bias that needs a gradient is hidden within it."""
    visible = None  # bool, broadcasts to [batch, heads, queries, keys]
    if has_mask:
        visible = torch.rand(sizes, device=b.device) < 0.5
    if causal:
        below = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=b.device).tril(keys - queries)
        visible = below if visible is None else visible & below
    hidden = None if visible is None else ~visible
    q, k, v = (b.normal(batch, h, length, dim) for h, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    inputs = [q, k, v] + ([b.normal(*sizes)] if has_bias else [])
    grouped = kv_heads != heads

    def attend(q, k, v, bias=None):
        mask = visible if bias is None else bias if hidden is None else bias.masked_fill(hidden, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, dropout_p=dropout)

    backends = [("math", SDPBackend.MATH)]
    if b.on_gpu:
        backends = [("efficient", SDPBackend.EFFICIENT_ATTENTION)]
        if b.dtype != torch.float32:
            backends.append(("cudnn", SDPBackend.CUDNN_ATTENTION))
    for name, backend in backends:
        yield Way(name, attend, inputs, lambda backend=backend: sdpa_kernel(backend))
    if not b.on_gpu or dropout > 0:
        return
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def at(x, *place):
        return x[tuple(index if size > 1 else 0 for index, size in zip(place, x.shape))]
    blocks = None if visible is None else create_block_mask(lambda n, h, i, j: at(visible, n, h, i, j), batch, heads, queries, keys,
                                                            device=b.device)
    compiled = torch.compile(flex_attention)

    def flex(q, k, v, bias=None):
        score_mod = None if bias is None else lambda score, n, h, i, j: score + at(bias, n, h, i, j)
        return compiled(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=grouped)
    yield Way("compile flex", flex, inputs)


def sequences(b, count, queries, keys, heads, kv_heads, dim, causal, even):
    """Rows of packed sequences, cut as ops/attention/attention_spec.cpp cuts them: by varlen_attn (flash), and
    padded to the longest with cuDNN, without a mask: the padding's work is done, not counted."""
    places = range(count + 1)
    q_starts = [queries * s // count if even else queries * s * s // count ** 2 for s in places]
    k_starts = q_starts
    if queries != keys:
        k_starts = [keys * s // count if even else keys - keys * (count - s) ** 2 // count ** 2 for s in places]
    longest = [max(end - start for start, end in zip(x, x[1:])) for x in (q_starts, k_starts)]
    q, k, v = b.normal(queries, heads, dim), b.normal(keys, kv_heads, dim), b.normal(keys, kv_heads, dim)
    if b.on_gpu and b.dtype != torch.float32:
        import inspect
        from torch.nn.attention.varlen import varlen_attn
        starts = [torch.tensor(x, dtype=torch.int32, device=b.device) for x in (q_starts, k_starts)]
        known = inspect.signature(varlen_attn).parameters  # they changed from release to release
        arguments = {"enable_gqa": True} if "enable_gqa" in known and heads != kv_heads else {}
        arguments |= {"is_causal": causal} if "is_causal" in known else {"window_size": (-1, 0 if causal else -1)}
        yield Way("varlen", lambda q, k, v: varlen_attn(q, k, v, *starts, *longest, **arguments), [q, k, v])
    if causal and longest[0] != longest[1]:
        return
    q, k, v = (b.normal(count, h, length, dim) for h, length in zip((heads, kv_heads, kv_heads), longest[:1] + longest[1:] * 2))
    backend = SDPBackend.CUDNN_ATTENTION if b.on_gpu and b.dtype != torch.float32 else SDPBackend.MATH
    yield Way("cudnn padded to the longest" if b.on_gpu else "padded to the longest",
              lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads),
              [q, k, v], lambda: sdpa_kernel(backend))


def decode_attention(b, shape, attrs, paddings):
    if attrs.get("full") != "true":
        return  # each sequence has a length of its own
    batch, tokens, heads, kv_heads, dim = (shape[name] for name in ("B", "n", "H", "Hk", "D"))
    cache = (batch, shape["capacity"], kv_heads, dim)
    mask = None
    if tokens > 1:
        from torch.nn.attention.bias import causal_lower_right
        mask = causal_lower_right(tokens, shape["capacity"])

    def run(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != kv_heads)
    yield Way("eager", run, [b.normal(batch, tokens, heads, dim), b.normal(*cache), b.normal(*cache)])


def linear_swiglu(b, shape, attrs, paddings):
    def run(x, weight):
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up
    yield Way("eager", run, [b.normal(shape["T"], shape["in"]), b.normal(2 * shape["F"], shape["in"])])


def triton_kernels(b, op):
    """The module of Triton kernels; None, with the reason, where they cannot run."""
    reason = "" if b.on_gpu else "no GPU"
    if b.on_gpu:
        try:
            import kernels
            return kernels
        except ImportError as error:
            reason = str(error)
    print(f"{op}: no peer in Triton: {reason}", flush=True)
    return None


def check_against(run, expected, inputs, what):
    """Throws unless both give the same results and, of the same gradient, the same gradients, to the rounding of the dtype."""
    def results(function):
        y = function(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        return [y, *torch.autograd.grad(y, wanted, torch.ones_like(y))]
    for one, other in zip(results(run), results(expected), strict=True):
        single = one.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        error = (one - other).abs().max() / other.abs().max().clamp(min=1e-30)
        if not error <= (1e-4 if single else 2e-2):
            raise WrongPeer(f"{what} is wrong by {error:.2g} of the largest element")


def sliced_linear(b, shape, attrs, tokens, paddings):
    """PyTorch has no sliced backward pass: torch slice + zero. A threshold has no peer: it waits for the number of rows."""
    if attrs["slice"] == "threshold":
        return
    choice = sliced.Slice(attrs, tokens)
    run = sliced.linear(choice)
    for name, (d_in, d_out) in widths((shape["in"], shape["out"]), paddings):
        inputs = [b.normal(tokens, d_in), b.normal(d_out, d_in, grad=choice.weight_grad != "none")]
        if shape.get("bias"):
            inputs.append(b.normal(d_out))
        yield Way("eager slice + zero" + name, run, inputs)
        published = not name and choice.mode == "first" and choice.weight_grad == "none"
        if published and (kernels := triton_kernels(b, "linear, slice first")):
            tuned = sliced.linear(choice, kernels.multiply_rows)
            yield Way("triton slice + zero", tuned, inputs, compiles=False,
                      check=lambda: check_against(tuned, run, inputs, "Triton's dx of the first rows"))


def linear(b, shape, attrs, paddings):
    tokens = max(shape.get("B", 0), 1) * shape["T"]
    if attrs.get("slice", "none") != "none":
        yield from sliced_linear(b, shape, attrs, tokens, paddings)
        return
    for name, (d_in, d_out) in widths((shape["in"], shape["out"]), paddings):
        inputs = [b.normal(tokens, d_in), b.normal(d_out, d_in)]
        if shape.get("bias"):
            inputs.append(b.normal(d_out))
        yield Way("eager" + name, F.linear, inputs)


def linear_activation(b, shape, attrs, paddings):
    """The counts of what is not zero as a pass of their own, which torch.compile may fuse; and in the epilogue of a Triton GEMM, with
    the published tiles and with the best of several."""
    tokens, kind = max(shape.get("B", 0), 1) * shape["T"], attrs.get("activation", "relu_squared")

    def run(x, weight, bias=None):
        y = ACTIVATIONS[kind](F.linear(x, weight, bias))
        return y, (y != 0).sum(0, dtype=torch.int32)

    for name, (d_in, d_out) in widths((shape["in"], shape["out"]), paddings):
        inputs = [b.normal(tokens, d_in), b.normal(d_out, d_in)]
        if shape.get("bias"):
            inputs.append(b.normal(d_out))
        yield Way("eager" + name, run, inputs)
        if name or not (kernels := triton_kernels(b, "linear_activation")):
            continue
        for tiles, tuned in (("64x64x32", False), ("tuned tiles", True)):
            fused = kernels.linear_activation(kind, tuned)
            yield Way(f"triton {tiles}", fused, inputs, compiles=False, check=lambda fused=fused: check_counts(fused, run, inputs))


def check_counts(run, expected, inputs):
    check_against(run, expected, inputs, "Triton's linear_activation")
    y, counts = run(*inputs)
    if not torch.equal(counts, (y != 0).sum(0, dtype=torch.int32)):
        raise WrongPeer("Triton's linear_activation counts wrongly")


def column_counts(b, shape, attrs, paddings):
    x = b.normal(shape["R"], shape["C"], grad=False)
    yield Way("eager", lambda x: (x != 0).sum(0, dtype=torch.int32), [x * (torch.rand_like(x) < 0.3)])


def matmul(b, shape, attrs, paddings):
    ta, tb = attrs.get("transpose_a") == "true", attrs.get("transpose_b") == "true"
    for name, (m, n, k) in widths((shape["M"], shape["N"], shape["K"]), paddings):
        left = ([shape["A"]] if shape.get("A") else []) + ([k, m] if ta else [m, k])
        right = ([shape["B"]] if shape.get("B") else []) + ([n, k] if tb else [k, n])
        yield Way("eager" + name, lambda x, y: torch.matmul(x.mT if ta else x, y.mT if tb else y),
                  [b.normal(*left), b.normal(*right)])


def mlp(b, shape, attrs, paddings):
    kind = ACTIVATIONS[attrs.get("activation", "silu")]
    tokens = max(shape.get("B", 0), 1) * shape["T"]
    for name, (d, wide, e) in widths((shape["D"], shape["F"], shape["E"]), paddings):
        inputs = [b.normal(tokens, d), b.normal(wide, d, scale=0.5), b.normal(e, wide, scale=0.5)]
        if shape.get("bias"):
            inputs += [b.normal(wide), b.normal(e)]

        def run(x, u, w, u_bias=None, w_bias=None):
            return F.linear(kind(F.linear(x, u, u_bias)), w, w_bias)
        if attrs.get("slice", "none") == "none":
            yield Way("eager" + name, run, inputs)
            continue
        yield Way("eager dense backward" + name, run, inputs)
        if attrs["slice"] != "threshold":
            choice = sliced.Slice(attrs, tokens)
            for weight in inputs[1:3]:
                weight.requires_grad_(choice.weight_grad != "none")
            yield Way("eager slice + zero" + name, sliced.mlp(choice, attrs.get("activation", "silu"), kind), inputs)


def grouped_linear(b, shape, attrs, paddings):
    """One batched product over the groups, and a loop over them."""
    tokens, groups = max(shape.get("B", 0), 1) * shape["T"], shape["K"]
    shared = attrs.get("shared", "true") == "true"
    for name, (d_in, d_out) in widths((shape["in"], shape["out"]), paddings):
        x = b.normal(tokens, d_in) if shared else b.normal(groups, tokens, d_in)
        inputs = [x, b.normal(groups, d_in, d_out)]
        if shape.get("bias"):
            inputs.append(b.normal(groups, 1, d_out))

        def batched(x, w, bias=None):
            x = x.expand(groups, -1, -1) if shared else x
            return torch.bmm(x, w) if bias is None else torch.baddbmm(bias, x, w)

        def loop(x, w, bias=None):
            y = [(x if shared else x[k]) @ w[k] for k in range(groups)]
            return torch.stack(y if bias is None else [y[k] + bias[k] for k in range(groups)])
        yield Way("eager bmm" + name, batched, inputs)
        if len(paddings) > 1:  # of the benchmarks, not of sweeps
            yield Way("eager loop" + name, loop, inputs, compiles=False)


def grouped_mlp(b, shape, attrs, paddings):
    """The heads of a mixture: x [T, D], silu(x up[k]) [T, F], times down[k]: [T, E]. As batched products and as a loop."""
    tokens, groups = max(shape.get("B", 0), 1) * shape["T"], shape["K"]
    kind = ACTIVATIONS[attrs.get("activation", "silu")]
    for name, (d_in, wide) in widths((shape["D"], shape["F"]), paddings):
        inputs = [b.normal(tokens, d_in), b.normal(groups, d_in, wide, scale=0.5), b.normal(groups, wide, shape["E"], scale=0.5)]

        def batched(x, u, w):
            return torch.bmm(kind(torch.bmm(x.expand(groups, -1, -1), u)), w)

        def loop(x, u, w):
            return torch.stack([kind(x @ u[k]) @ w[k] for k in range(groups)])
        yield Way("eager bmm" + name, batched, inputs)
        if len(paddings) > 1:
            yield Way("eager loop" + name, loop, inputs, compiles=False)


def mixture(b, shape, attrs, paddings):
    inputs = [b.normal(shape["T"], shape["K"], 3), b.normal(shape["T"])]
    yield Way("eager", gmm_nll, inputs)


def layernorm(b, shape, attrs, paddings):
    width = shape["C"]
    inputs = [b.normal(shape["R"], width), b.normal(width), b.normal(width)]
    yield Way("eager", lambda x, w, c: F.layer_norm(x, (width,), w, c, 1e-5), inputs)


def rmsnorm(b, shape, attrs, paddings):
    width = shape["C"]
    yield Way("eager", lambda x, w: F.rms_norm(x, (width,), w, 1e-6), [b.normal(shape["R"], width), b.normal(width)])


def add_layernorm(b, shape, attrs, paddings):
    rows, width, dropout = shape["R"], shape["C"], float(attrs.get("dropout", 0))

    def run(x, residual, w, c):
        total = x + F.dropout(residual, dropout)
        return total, F.layer_norm(total, (width,), w, c, 1e-5)
    yield Way("eager", run, [b.normal(rows, width), b.normal(rows, width), b.normal(width), b.normal(width)])


def add_rmsnorm(b, shape, attrs, paddings):
    rows, width, dropout = shape["R"], shape["C"], float(attrs.get("dropout", 0))

    def run(x, residual, w):
        total = x + F.dropout(residual, dropout)
        return total, F.rms_norm(total, (width,), w, 1e-6)
    yield Way("eager", run, [b.normal(rows, width), b.normal(rows, width), b.normal(width)])


def rows(run):
    """An operator on [R, C], or [R, C, S]."""
    def work(b, shape, attrs, paddings):
        sizes = [shape["R"], shape["C"]] + ([shape["S"]] if shape.get("S") else [])
        yield Way("eager", lambda x: run(x, attrs), [b.normal(*sizes)])
    return work


def positive_rows(run):
    def work(b, shape, attrs, paddings):
        x = torch.empty(shape["R"], shape["C"], device=b.device).uniform_(0.5, 2).to(b.dtype).requires_grad_()
        yield Way("eager", lambda x: run(x, attrs), [x])
    return work


def binary(run):
    def work(b, shape, attrs, paddings):
        sizes = [shape["A"], shape["B"], shape["C"]]
        other = [shape[name] for name in ("BA", "BB", "BC") if name in shape]
        left = sizes if "BA" in shape or shape["A"] != 1 else sizes[1:]
        yield Way("eager", run, [b.normal(*left), b.normal(*other)])
    return work


def where(b, shape, attrs, paddings):
    other = [shape[name] for name in ("BA", "BB", "BC") if name in shape]
    mask = b.integers(2, *other).bool()
    yield Way("eager", lambda x, y: torch.where(mask, x, y), [b.normal(shape["A"], shape["B"], shape["C"]), b.normal(*other)])


def reduction(run):
    def work(b, shape, attrs, paddings):
        dim = int(attrs.get("dim", "-100"))
        yield Way("eager", lambda x: run(x, dim), [b.normal(shape["A"], shape["B"], shape["C"])])
    return work


def swiglu(b, shape, attrs, paddings):
    yield Way("eager", lambda gate, up: F.silu(gate) * up, [b.normal(shape["R"], shape["F"]), b.normal(shape["R"], shape["F"])])


def swiglu_packed(b, shape, attrs, paddings):
    def run(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    yield Way("eager", run, [b.normal(shape["R"], 2 * shape["F"])])


def rope(b, shape, attrs, paddings):
    if attrs.get("positions") == "true" or shape["R"] != shape["D"]:
        return
    tokens, width, begin = shape["T"], shape["D"], int(attrs.get("offset", 0))
    table = b.normal(shape["P"], width, grad=False)[begin:begin + tokens]
    cos, sin = (half[:, None, :].repeat(1, 1, 2) for half in table.chunk(2, -1))

    def run(x):
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin
    yield Way("eager", run, [b.normal(shape["B"], tokens, shape["H"], width)])


def cast(b, shape, attrs, paddings):
    dtype = {"f64": torch.float64, "bool": torch.bool} | {name: d for name, d in DTYPES.items() if name != "tf32"}
    if attrs.get("to", "f32") in dtype:
        yield Way("eager", lambda x: x.to(dtype[attrs.get("to", "f32")]), [b.normal(shape["R"], shape["C"])])


def concat(b, shape, attrs, paddings):
    dim, sizes = int(attrs.get("dim", 0)), [shape[name] for name in "XYZ" if shape.get(name)]
    parts = []
    for name in "ABC":
        if shape.get(name):
            sizes[dim] = shape[name]
            parts.append(b.normal(*sizes))
    yield Way("eager", lambda *parts: torch.cat(parts, dim), parts)


def stack(b, shape, attrs, paddings):
    dim, sizes = int(attrs.get("dim", 0)), [shape[name] for name in "XYZ" if shape.get(name)]
    parts = [b.normal(*sizes) for _ in range(3 if shape.get("three") else 2)]
    yield Way("eager", lambda *parts: torch.stack(parts, dim), parts)


def cross_entropy(b, shape, attrs, paddings):
    targets = b.integers(shape["V"], shape["R"])
    x = b.normal(shape["R"], shape["V"], scale=2)
    yield Way("eager", lambda x: F.cross_entropy(x, targets), [x])
    yield Way("eager f32", lambda x: F.cross_entropy(x.float(), targets), [x])


def linear_cross_entropy(b, shape, attrs, paddings):
    """The logits as a whole, rounded to the dtype, as F.linear makes them. The rate of a language model's head."""
    targets = b.integers(shape["V"], shape["N"])
    inputs = [b.normal(shape["N"], shape["d"]), b.normal(shape["V"], shape["d"], scale=2 / math.sqrt(shape["d"]))]
    if shape.get("bias"):
        inputs.append(b.normal(shape["V"]))
    yield Way("eager", lambda x, w, *bias: F.cross_entropy(F.linear(x, w, *bias), targets), inputs)
    for name, (classes,) in widths([shape["V"]], paddings):
        if name and not shape.get("bias"):
            padded = [inputs[0], b.normal(classes, shape["d"], scale=2 / math.sqrt(shape["d"]))]
            yield Way("eager" + name, lambda x, w: F.cross_entropy(F.linear(x, w)[:, :shape["V"]], targets), padded)


def embedding(b, shape, attrs, paddings):
    indices = b.integers(shape["V"], shape["T"])
    yield Way("eager", lambda table: F.embedding(indices, table), [b.normal(shape["V"], shape["C"])])


def gather_rows(b, shape, attrs, paddings):
    indices = b.integers(shape["R"], shape["N"])
    yield Way("eager", lambda x: x.index_select(0, indices), [b.normal(shape["R"], shape["B"])])


def scatter_rows(b, shape, attrs, paddings):
    count = int(attrs["rows"])
    indices = b.integers(count, shape["N"])
    yield Way("eager", lambda x: x.new_zeros(count, shape["B"]).index_add(0, indices, x), [b.normal(shape["N"], shape["B"])])


def take_along(b, shape, attrs, paddings):
    dim, sizes = int(attrs.get("dim", -1)), [shape["A"], shape["B"], shape["C"]]
    chosen = list(sizes)
    chosen[dim] = shape["N"]
    indices = b.integers(sizes[dim], *chosen)
    yield Way("eager", lambda x: x.gather(dim, indices), [b.normal(*sizes)])


def one_hot(b, shape, attrs, paddings):
    classes, dtype = int(attrs["classes"]), b.normal(1, grad=False).dtype
    indices = b.integers(classes, shape["R"], shape["C"])
    yield Way("eager", lambda: F.one_hot(indices, classes).to(dtype), [])


def triangle(run):
    def work(b, shape, attrs, paddings):
        yield Way("eager", lambda x: run(x, int(attrs.get("diagonal", 0))), [b.normal(shape["B"], shape["R"], shape["C"])])
    return work


def topk(b, shape, attrs, paddings):
    yield Way("eager", lambda x: x.topk(int(attrs["k"]), int(attrs.get("dim", -1))).values,
              [b.normal(shape["A"], shape["B"], shape["C"])])


def pruned24(x):
    """Two of four neighbours along the last dimension, of largest magnitude."""
    groups = x.unflatten(-1, (-1, 4))
    kept = groups.abs().topk(2, -1, sorted=False).indices
    return torch.zeros_like(groups).scatter(-1, kept, groups.gather(-1, kept)).flatten(-2)


def cusparselt_search(compressed, dense, transposed):
    """(algorithm, split k, its mode) that cuSPARSELt's search finds, as far as this PyTorch hands it on."""
    try:
        from torch._C import _cusparselt
        algorithm, split_k, mode, _ = _cusparselt.mm_search(compressed, dense, None, None, None, transposed)
        return {"alg_id": algorithm, "split_k": split_k, "split_k_mode": mode}
    except (ImportError, AttributeError, TypeError):
        return {"alg_id": torch._cslt_sparse_mm_search(compressed, dense, transpose_result=transposed)}


def multiply24(b, shape, attrs, paddings):
    """cuBLAS on the dense matrix; cuSPARSELt with its default and its searched algorithm, d written either way. A is compressed
    before the timed part. Its extents must be multiples of 16, b's too."""
    features = attrs.get("along", "features") == "features"
    m, k, n = (shape["T"], shape["F"], shape["n"]) if features else (shape["F"], shape["T"], shape["n"])
    a = b.normal(m, k, grad=False)
    right = b.normal(n, k, grad=False).T if attrs.get("b_transposed") == "true" else b.normal(k, n, grad=False)
    yield Way("eager dense", torch.matmul, [a, right], compiles=False)
    if not b.on_gpu or not torch.backends.cusparselt.is_available() or m % 16 or k % 16 or n % 16:
        return
    compressed = torch._cslt_compress(pruned24(a))
    version = torch.backends.cusparselt.version()
    for transposed in (False, True):
        order = " transposed" if transposed else ""
        for name, found in (("default", {}), ("searched", cusparselt_search(compressed, right, transposed))):
            yield Way(f"cuSPARSELt {version} {name}{order}",
                      lambda a, x, found=found, transposed=transposed: torch._cslt_sparse_mm(
                          a, x, transpose_result=transposed, **found),
                      [compressed, right], compiles=False)


def compress24(b, shape, attrs, paddings):
    """cuSPARSELt compresses a matrix that is 2:4 already; PyTorch's own kernel chooses, too, in tiles of 4 x 4."""
    x = b.normal(shape["T"], shape["F"], grad=False)
    if attrs.get("along", "features") == "tokens":
        x = x.T.contiguous()
    if b.on_gpu and torch.backends.cusparselt.is_available():
        yield Way(f"cuSPARSELt {torch.backends.cusparselt.version()} without choosing", torch._cslt_compress, [pruned24(x)],
                  compiles=False)
    yield Way("eager choice alone", pruned24, [x])


def decompress24(b, shape, attrs, paddings):
    """PyTorch decompresses by a GEMM with the identity; the bound is a copy of the dense matrix."""
    yield Way("eager copy of the dense matrix", torch.clone, [b.normal(shape["T"], shape["F"], grad=False)], compiles=False)


def sparse24_linear(b, shape, attrs, paddings):
    """The dense layer: PyTorch 2.11 has no 2:4 activations with gradients."""
    tokens = max(shape.get("B", 0), 1) * shape["T"]
    inputs = [b.normal(tokens, shape["in"]), b.normal(shape["out"], shape["in"])]
    yield Way("eager dense", F.linear, inputs + ([b.normal(shape["out"])] if shape.get("bias") else []))


def sparse_linear(b, shape, attrs, paddings):
    """`parts` weights over the same x: cuBLAS on all of them, dense, as one; the GEMM of inputs that are set to 0 within the timed
    part, which is what gates are without kernels of their own; and CSR (cuSPARSE), compressed before it."""
    tokens, out, d_in, parts = shape["T"], shape["out"], shape["in"], int(attrs.get("parts", 1))
    x, weight = b.normal(tokens, d_in, grad=False), b.normal(out * parts, d_in, grad=False)
    weight *= torch.rand_like(weight) < shape.get("density", 100) / 100
    sizes = {"bias": (out * parts,), "residual": (tokens, out * parts)}
    added = [b.normal(*size, grad=False) for name, size in sizes.items() if shape.get(name)]
    scales = b.normal(d_in, grad=False).abs() if shape.get("scales") else 1
    gate, threshold, keep = attrs.get("gate", "none"), float(attrs.get("threshold", 0)), int(attrs.get("keep", 0))

    def opened(x, part):
        size = (x * scales).abs()
        if gate == "threshold":
            return torch.where(size > threshold * (1 + part / 2), x, 0)
        kept = size.topk(keep, -1, sorted=False).indices
        return torch.zeros_like(x).scatter(-1, kept, x.gather(-1, kept))

    def gated(x, weight, *added):
        if gate == "top_k":  # of all parts alike
            return sum(added, F.linear(opened(x, 0), weight))
        return sum(added, torch.cat([F.linear(opened(x, i), part) for i, part in enumerate(weight.chunk(parts))], -1))

    yield Way("eager dense", lambda x, weight, *added: sum(added, F.linear(x, weight)), [x, weight, *added], compiles=False)
    if gate != "none":
        yield Way("eager gated", gated, [x, weight, *added])
    if tokens > 0 and weight.count_nonzero() > 0:
        columns = [tensor.mT.contiguous() if tensor.dim() == 2 else tensor[:, None] for tensor in added]
        yield Way("eager CSR, transposed", lambda x, weight, *added: sum(added, weight @ x),
                  [x.T.contiguous(), weight.to_sparse_csr(), *columns], compiles=False)


def bit_pairs(b, shape, attrs, paddings):
    """The common bits of all pairs of rows as a GEMM of zeros and ones, converted before the timed part: in f32 on a CPU; on a GPU
    in int8, in FP8 and bf16 with f32 results, and in bf16 with results that are rounded to it."""
    bits, itself = 32 * shape["W"], not shape.get("N")
    rows = (torch.rand(shape["M"], bits, device=b.device) < 0.5).float()
    others = rows if itself else (torch.rand(shape["N"], bits, device=b.device) < 0.5).float()
    counts, other_counts = rows.sum(1, keepdim=True), others.sum(1)

    def measured(common):
        measure = attrs.get("measure", "overlap")
        if measure == "overlap":
            return common
        either = counts + other_counts - common
        return either - common if measure == "hamming" else torch.where(either > 0, common / either, 1)

    def way(name, dtype, gemm):
        a = rows.to(dtype)
        return Way(name, lambda a, b: measured(gemm(a, b)), [a, (a if itself else others.to(dtype)).T])

    if not b.on_gpu:
        yield way("eager f32", torch.float32, torch.matmul)
        return
    yield way("eager bf16", torch.bfloat16, torch.matmul)
    yield way("eager bf16 to f32", torch.bfloat16, lambda a, b: torch.mm(a, b, out_dtype=torch.float32))
    if shape["M"] > 16 and others.shape[0] % 16 == 0:  # what these GEMMs take
        yield way("eager int8", torch.int8, torch._int_mm)
        one = torch.ones((), device=b.device)
        yield way("eager FP8", torch.float8_e4m3fn,
                  lambda a, b: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32))


def select(b, shape, attrs, paddings):
    """Ascending indices, as ours. PyTorch draws by norm without replacement, not by systematic sampling, and waits for the
    number of rows above a threshold."""
    rows, n, threshold = shape["M"], int(attrs["n"]), float(attrs.get("threshold", 0))
    norms = b.normal(rows, grad=False).abs() + 0.1
    run = {"first": lambda x: torch.arange(n, device=x.device),
           "top_norm": lambda x: torch.topk(x, n, sorted=False).indices.sort().values,
           "threshold": lambda x: (x >= threshold).nonzero(),
           "random": lambda x: torch.randperm(rows, device=x.device)[:n].sort().values,
           "importance": lambda x: torch.multinomial(x, n).sort().values}[attrs.get("mode", "top_norm")]
    yield Way("eager", run, [norms])


def row_norms(b, shape, attrs, paddings):
    yield Way("eager", lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float32),
              [b.normal(shape["M"], shape["C"], grad=False)])


def gather_selected(b, shape, attrs, paddings):
    indices, scales = b.integers(shape["M"], shape["N"]).sort().values, b.normal(shape["N"], 1, grad=False)
    yield Way("eager", lambda x: x.index_select(0, indices) * scales, [b.normal(shape["M"], shape["B"])])


def scatter_selected(b, shape, attrs, paddings):
    rows = int(attrs["rows"])
    indices = torch.arange(shape["N"], device=b.device) * rows // max(shape["N"], 1)
    scales = b.normal(shape["N"], 1, grad=False)
    yield Way("eager", lambda x: x.new_zeros(rows, shape["B"]).index_copy(0, indices, x * scales),
              [b.normal(shape["N"], shape["B"])])


WORKS = {
    "attention": attention, "decode_attention": decode_attention, "linear": linear, "linear_swiglu": linear_swiglu,
    "linear_activation": linear_activation, "column_counts": column_counts,
    "matmul": matmul, "mlp": mlp, "grouped_linear": grouped_linear,
    "grouped_mlp": grouped_mlp,
    "gmm_nll": mixture, "layernorm": layernorm, "rmsnorm": rmsnorm,
    "add_layernorm": add_layernorm, "add_rmsnorm": add_rmsnorm, "cross_entropy": cross_entropy, "embedding": embedding,
    "linear_cross_entropy": linear_cross_entropy,
    "multiply24": multiply24, "compress24": compress24, "decompress24": decompress24, "sparse24_linear": sparse24_linear,
    "sparse_linear": sparse_linear, "bit_pairs": bit_pairs,
    "gather_rows": gather_rows, "scatter_rows": scatter_rows,
    "select": select, "row_norms": row_norms, "gather_selected": gather_selected, "scatter_selected": scatter_selected,
    "relu": rows(lambda x, _: F.relu(x)), "relu_squared": rows(lambda x, _: F.relu(x).square()),
    "silu": rows(lambda x, _: F.silu(x)), "gelu": rows(lambda x, _: F.gelu(x)),
    "gelu_tanh": rows(lambda x, _: F.gelu(x, approximate="tanh")),
    "softmax": rows(lambda x, attrs: F.softmax(x, int(attrs.get("dim", -1)))),
    "log_softmax": rows(lambda x, attrs: F.log_softmax(x, int(attrs.get("dim", -1)))),
    "dropout": rows(lambda x, attrs: F.dropout(x, float(attrs.get("p", 0.1)))),
    "shift": rows(lambda x, attrs: x + float(attrs.get("offset", 0))),
    "reciprocal": rows(lambda x, attrs: float(attrs.get("dividend", 1)) / x),
    "neg": rows(lambda x, _: -x), "abs": rows(lambda x, _: x.abs()), "square": rows(lambda x, _: x.square()),
    "pow": positive_rows(lambda x, attrs: x ** float(attrs.get("exponent", 2))),
    "sin": rows(lambda x, _: x.sin()), "cos": rows(lambda x, _: x.cos()), "softplus": rows(lambda x, _: F.softplus(x)),
    "clamp": rows(lambda x, attrs: x.clamp(float(attrs.get("low", 0)), float(attrs.get("high", 1)))),
    "scale": rows(lambda x, attrs: x * float(attrs.get("factor", 1))),
    "exp": rows(lambda x, _: x.exp()), "tanh": rows(lambda x, _: x.tanh()), "sigmoid": rows(lambda x, _: x.sigmoid()),
    "log": positive_rows(lambda x, _: x.log()), "sqrt": positive_rows(lambda x, _: x.sqrt()),
    "rsqrt": positive_rows(lambda x, _: x.rsqrt()),
    "add": binary(torch.add), "sub": binary(torch.sub), "mul": binary(torch.mul), "div": binary(torch.div),
    "maximum": binary(torch.maximum), "minimum": binary(torch.minimum), "less": binary(torch.lt),
    "less_equal": binary(torch.le), "greater": binary(torch.gt), "greater_equal": binary(torch.ge),
    "equal": binary(torch.eq), "where": where, "cast": cast, "concat": concat, "stack": stack, "rope": rope,
    "swiglu": swiglu, "swiglu_packed": swiglu_packed,
    "sum": reduction(lambda x, dim: x.sum() if dim == -100 else x.sum(dim)),
    "mean": reduction(lambda x, dim: x.mean() if dim == -100 else x.mean(dim)),
    "max": reduction(lambda x, dim: x.max() if dim == -100 else x.max(dim).values),
    "min": reduction(lambda x, dim: x.min() if dim == -100 else x.min(dim).values),
    "argmax": reduction(lambda x, dim: x.argmax(dim)), "argmin": reduction(lambda x, dim: x.argmin(dim)),
    "logsumexp": reduction(lambda x, dim: x.flatten().logsumexp(0) if dim == -100 else x.logsumexp(dim)),
    "cumsum": reduction(lambda x, dim: x.cumsum(-1 if dim == -100 else dim)),
    "take_along": take_along, "one_hot": one_hot, "topk": topk, "tril": triangle(torch.tril), "triu": triangle(torch.triu),
    "norm": reduction(lambda x, dim: torch.linalg.vector_norm(x) if dim == -100 else torch.linalg.vector_norm(x, dim=dim)),
}
# What torch.compile can make better: every pointwise operator and reduction, and products with something around them.
FUSIBLE = set(WORKS) - {"attention", "decode_attention", "linear", "matmul"}


def fusible(op, attrs):
    return op in FUSIBLE or attrs.get("slice", "none") != "none"
