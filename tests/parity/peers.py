"""Every operator of tessera in PyTorch: its cases, the computation, and what its rounding may cost.

A peer is run(t, a): outputs by name, from tensors by name (None: absent) and attributes. It runs in f64 (the truth), f32 and
the small dtypes (the baseline). cases(g) yields (inputs, attributes) of arrays in f64 or i64/i32. terms(t, a, d), in f64,
gives for outputs and gradients the largest sum of the absolute terms that the result adds up, if these may cancel: rounding
is proportional to the terms, not to what is left of them. The default is the computation itself on absolute values, which is
exactly that for products and sums; SELF says that nothing cancels.
"""
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F

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


# ---- element by element ----

SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 20.0, -20.0, 87.0, -87.0, 100.0, -100.0, 1e4, -1e4, np.nan])


def unary_cases(fill="normal", special=SPECIAL, attrs=({},)):
    def cases(g):
        for number in range(36):
            yield {"x": getattr(g, fill)(*g.shape(number % 5)) * g.choice(1.0, 1.0, 3.0)}, attrs[number % len(attrs)]
        yield {"x": g.normal(0)}, attrs[0]
        yield {"x": g.normal(3, 0, 5)}, attrs[0]
        for value in special:  # one number each: a large one would hide what is wrong with a small one
            yield {"x": np.array([value])}, attrs[0]
    return cases


def unary(name, f, terms=SELF, **how):
    operator(name, unary_cases(**how), terms and (terms if terms is SELF else lambda t, a, d: terms(t["x"], d["y"])))(
        lambda t, a: {"y": f(t["x"])})


def cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


unary("relu", F.relu)
unary("relu_squared", lambda x: F.relu(x).square())
unary("silu", F.silu, lambda x, dy: {"d_x": dy.abs() * torch.sigmoid(x) * (1 + x.abs())})
for kind, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):  # 1 + erf and 1 + tanh cancel for negative x
    unary(kind, lambda x, how=approximate: F.gelu(x, approximate=how),
          lambda x, dy: {"y": x.abs(), "d_x": dy.abs() * (1 + x.abs() * torch.exp(-x * x / 2))})
unary("exp", torch.exp, special=SPECIAL[np.abs(SPECIAL) < 90])
unary("log", torch.log, fill="positive", special=np.array([0.0, 1.0, 1e-30, 1e30, np.inf, np.nan, -1.0]))
unary("sqrt", torch.sqrt, fill="positive", special=np.array([0.0, 1.0, 1e-30, 1e30, np.nan, -1.0]))
unary("tanh", torch.tanh, lambda x, dy: {"d_x": dy.abs()})  # 1 - y^2
unary("sigmoid", torch.sigmoid, lambda x, dy: {"d_x": dy.abs() * torch.sigmoid(x)})  # 1 - y
operator("scale", unary_cases(attrs=[{"factor": f} for f in (-2.5, 0.0, 1.0, 1e-3, 3)]), SELF)(
    lambda t, a: {"y": t["x"] * a["factor"]})


def binary_cases(divisor):
    def cases(g):
        fill = g.away_from_0 if divisor else g.normal
        for number in range(48):
            whole = g.shape(number % 5, least=number % 3 == 0 and 1 or 0)
            cut = [tuple(1 if g.integer(0, 3) == 0 else n for n in whole) for _ in range(2)]
            if number % 2:
                cut[g.integer(0, 2)] = whole
            drop = g.integer(0, len(whole) + 1)  # leading dimensions that one of them lacks
            side = g.integer(0, 2)
            cut[side] = cut[side][drop:]
            yield {"a": g.normal(*cut[0]), "b": fill(*cut[1])}, {}
        for a, b in (((), ()), ((), (3, 4)), ((5, 1), ()), ((0,), (1,)), ((4, 0), (1,)), ((1, 0), (3, 1)), ((2, 1, 3), (5, 1)),
                     ((1031, 129), (129,)), ((1031, 129), (1031, 1)), ((1,), (1, 1, 1, 1))):
            yield {"a": g.normal(*a), "b": fill(*b)}, {}
    return cases


for kind in ("add", "sub", "mul", "div"):
    operator(kind, binary_cases(kind == "div"))(lambda t, a, f=getattr(torch, kind): {"y": f(t["a"], t["b"])})


# ---- reductions ----

def reduce_cases(kind):
    def cases(g):
        for number in range(60):
            rank = number % 5
            x = g.normal(*g.shape(rank, least=1 if kind == "max" or number % 4 else 0))
            dim = -100 if rank == 0 or number % 3 == 0 else g.integer(-rank, rank)
            yield {"x": x}, {"dim": dim, "keep": dim != -100 and bool(g.integer(0, 2))}
        for shape, dim in (((3, 0), 0), ((0, 3), 1), ((2, 0, 4), 2)):  # no results at all
            yield {"x": g.normal(*shape)}, {"dim": dim}
        if kind != "max":  # results over nothing
            for shape, dim in (((0,), -100), ((3, 0), 1), ((0, 3), 0), ((2, 0, 4), 1)):
                yield {"x": g.normal(*shape)}, {"dim": dim}
        for dim in (-100, 0, 1):
            yield {"x": g.normal(300, 521) + 10}, {"dim": dim}
            yield {"x": np.zeros((3, 4))}, {"dim": dim}  # all are the maximum; the norm's gradient is 0
            yield {"x": g.rng.integers(0, 3, (17, 13)).astype(float)}, {"dim": dim}
            yield {"x": np.where(g.normal(9, 9) > 1, np.nan, g.normal(9, 9))}, {"dim": dim}
    return cases


def reduction(kind, terms, whole, along):
    def run(t, a):
        x = t["x"]
        return {"y": whole(x) if a["dim"] == -100 else along(x, a["dim"], a["keep"])}
    operator(kind, reduce_cases(kind), terms)(run)


reduction("sum", ABSOLUTE, torch.sum, lambda x, dim, keep: x.sum(dim, keep))
reduction("mean", ABSOLUTE, torch.mean, lambda x, dim, keep: x.mean(dim, keep))
# Documented difference: among equal ones the first takes the whole gradient, over all dimensions as well, where torch.max(x)
# shares it; and a NaN takes it as it does along one.
reduction("max", SELF, lambda x: x.reshape(-1).max(0).values, lambda x, dim, keep: x.max(dim, keep).values)
reduction("norm", SELF, lambda x: torch.linalg.vector_norm(x),
          lambda x, dim, keep: torch.linalg.vector_norm(x, dim=dim, keepdim=keep))

# ---- cast, dropout ----

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
          "f8e4m3": torch.float8_e4m3fn, "i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "bool": torch.bool}


def cast_cases(g):
    for to, rank in itertools.product(DTYPES, range(4)):
        x = g.normal(*g.shape(rank), scale=g.choice(1.0, 300.0))
        yield {"x": np.abs(x) % 256 if to == "u8" else x}, {"to": to}
    for to in DTYPES:
        yield {"x": g.normal(5, 0)}, {"to": to}
    for to in ("f64", "f32", "bf16", "f16", "f8e4m3", "bool"):
        x = [0.0, -0.0, 1e-8, 6e-5, 448.0, 449.0, 465.0, 1e6, -1e6, 65504.0, 65520.0, 3e38, 0.0625 * 17, np.inf, -np.inf, np.nan]
        yield {"x": np.array(x)}, {"to": to}


@operator("cast", cast_cases, SELF)
def cast(t, a):
    x = t["x"]
    if a["to"] == "f8e4m3":  # documented difference: saturates at 448, where PyTorch gives NaN
        x = x.clamp(-448, 448)
    return {"y": x.to(DTYPES[a["to"]])}


def dropout_cases(g):
    for number, p in enumerate((0.0, 0.1, 0.3, 0.5, 0.9, 0.999)):
        for rank in range(4):
            yield {"x": g.normal(*g.shape(rank))}, {"p": p, "seed": number * 7 - 3}
        yield {"x": g.normal(300, 401)}, {"p": p, "seed": 99}


@operator("dropout", dropout_cases, SELF)
def dropout(t, a):
    return {"y": t["x"] * t["mask"] / (1 - a["p"])}  # the mask is tessera's own; see torch_parity.py


# ---- softmax and norms ----

def softmax_cases(g):
    for number in range(44):
        rank = 1 + number % 4
        yield {"x": g.normal(*g.shape(rank)) * g.choice(1.0, 5.0)}, {"dim": g.integer(-rank, rank)}
    for shape, dim in (((0,), 0), ((3, 0), 1), ((0, 3), -1), ((5, 1), 1), ((3, 5003), 1), ((5003, 3), 0)):
        yield {"x": g.normal(*shape)}, {"dim": dim}
    yield {"x": g.normal(7, 11, scale=1e4)}, {"dim": 1}
    yield {"x": np.where(g.normal(7, 11) > 0.5, -np.inf, g.normal(7, 11))}, {"dim": 1}


def softmax_terms(t, a, d):
    y, dy = torch.softmax(t["x"], a["dim"]), d["y"].abs()
    return {"d_x": y * (dy + (y * dy).sum(a["dim"], True))}


def log_softmax_terms(t, a, d):
    x, dim, dy = t["x"], a["dim"], d["y"].abs()
    if x.size(dim) == 0:
        return {}
    m = x.amax(dim, True)
    return {"y": (x - m).abs() + (x - m).exp().sum(dim, True).log(), "d_x": dy + torch.softmax(x, dim) * dy.sum(dim, True)}


operator("softmax", softmax_cases, softmax_terms)(lambda t, a: {"y": torch.softmax(t["x"], a["dim"])})
operator("log_softmax", softmax_cases, log_softmax_terms)(lambda t, a: {"y": torch.log_softmax(t["x"], a["dim"])})


def norm_cases(optional):
    def cases(g):
        for number, present in enumerate(itertools.islice(itertools.cycle(itertools.product((0, 1), repeat=len(optional))), 48)):
            shape = g.shape(1 + number // 4 % 4, least=number % 3 and 1)
            if shape[-1] == 0:  # PyTorch's layer_norm has no answer there
                shape = shape[:-1] + (1,)
            inputs = {"x": g.normal(*shape) * g.choice(1.0, 1.0, 30.0) + g.choice(0.0, 0.0, 2.0)}
            inputs |= {name: g.normal(shape[-1]) for name, there in zip(optional, present) if there}
            yield inputs, {"eps": g.choice(1e-5, 1e-6, 1e-12, 0.1)}
        for rows, width in ((3, 4096), (257, 768), (1031, 129)):
            yield {"x": g.normal(rows, width)} | {name: g.normal(width) for name in optional}, {}
    return cases


def norm_terms(t, a, d):
    """The rounding of xhat is that of x and of its mean, rstd times; the gradients' is that of their terms and of xhat."""
    x, dy = t["x"], d["y"].abs()
    mean = x.mean(-1, True) if "bias" in t else torch.zeros_like(x[..., :1])
    rstd = ((x - mean).square().mean(-1, True) + a["eps"]).rsqrt()
    xhat, w = ((x - mean) * rstd).abs(), torch.ones(x.size(-1)) if t["weight"] is None else t["weight"].abs()
    rough = (x.abs() + mean.abs()) * rstd
    g = dy * w
    rows = tuple(range(x.dim() - 1))
    return {"y": rough * w, "d_x": rstd * (g + g.mean(-1, True) + xhat * (g * xhat).mean(-1, True)) * (1 + rough.amax(-1, True)),
            "d_weight": (dy * (xhat + rough)).sum(rows), "d_bias": dy.sum(rows)}


operator("layernorm", norm_cases(("weight", "bias")), norm_terms)(
    lambda t, a: {"y": F.layer_norm(t["x"], t["x"].shape[-1:], t["weight"], t["bias"], a["eps"])})
operator("rmsnorm", norm_cases(("weight",)), norm_terms)(
    lambda t, a: {"y": F.rms_norm(t["x"], t["x"].shape[-1:], t["weight"], a["eps"])})


# ---- attention ----

def attention_cases(g):
    sizes = [(1, 1, 1, 1, 1), (2, 5, 7, 3, 8), (2, 7, 5, 3, 8), (1, 1, 9, 2, 16), (1, 9, 1, 2, 16), (3, 17, 17, 1, 13),
             (2, 33, 65, 2, 64), (1, 129, 128, 2, 32), (1, 257, 31, 3, 5), (2, 31, 257, 1, 128), (1, 3, 300, 1, 256),
             (0, 3, 4, 2, 8), (2, 0, 4, 2, 8), (2, 3, 0, 2, 8), (2, 3, 4, 0, 8), (1, 4, 2, 2, 64), (1, 1031, 1025, 1, 24)]
    for b, lq, lk, h, dim in sizes:
        for causal, scale in itertools.product((False, True), (0.0, 0.37)):
            yield ({"q": g.normal(b, lq, h, dim), "k": g.normal(b, lk, h, dim), "v": g.normal(b, lk, h, dim)},
                   {"causal": causal, "scale": scale})
    for _ in range(16):
        b, h, dim = g.integer(1, 4), g.integer(1, 5), g.integer(1, 80)
        lq, lk = g.integer(1, 140), g.integer(1, 140)
        yield ({"q": g.normal(b, lq, h, dim, scale=2), "k": g.normal(b, lk, h, dim), "v": g.normal(b, lk, h, dim)},
               {"causal": bool(g.integer(0, 2)), "scale": g.choice(0.0, 0.1)})


def scores_of(t, a):
    q, k, v = (t[name].transpose(1, 2) for name in "qkv")
    lq, lk = q.size(2), k.size(2)
    scale = a["scale"] or 1 / math.sqrt(q.size(-1))
    seen = torch.ones(lq, lk, dtype=torch.bool)
    if a["causal"]:  # lower right: the last query sees every key
        seen = torch.arange(lk)[None, :] <= torch.arange(lq)[:, None] + (lk - lq)
    return q, k, v, scale, seen


@operator("attention", attention_cases, lambda t, a, d: attention_terms(t, a, d))
def attention(t, a):
    q, k, v, scale, seen = scores_of(t, a)
    s = (scale * (q @ k.transpose(-1, -2))).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, -1).detach()
    if seen.size(1) and bool(seen.any(-1).all()):
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    else:  # documented: a query that sees nothing gives 0 and passes no gradient, where softmax would give NaN
        p = torch.softmax(s.masked_fill(~seen.any(-1, keepdim=True), 0), -1) * seen.any(-1, keepdim=True)
        o = p @ v
    return {"o": o.transpose(1, 2), "lse": lse}


def attention_terms(t, a, d):
    """A score is a sum of terms; its rounding is the relative error of its probability: p times 1 + those terms."""
    q, k, v, scale, seen = scores_of(t, a)
    s = (scale * (q @ k.transpose(-1, -2))).masked_fill(~seen, -math.inf)
    size = 1 + scale * (q.abs() @ k.abs().transpose(-1, -2))
    p = torch.softmax(s, -1).nan_to_num(0) * size
    d_o = d["o"].transpose(1, 2).abs()
    dp = d_o @ v.abs().transpose(-1, -2)
    ds = scale * p * (dp + (p * dp).sum(-1, True))
    back = {"o": p @ v.abs(), "d_q": ds @ k.abs(), "d_k": ds.transpose(-1, -2) @ q.abs(), "d_v": p.transpose(-1, -2) @ d_o}
    return {name: x.transpose(1, 2) for name, x in back.items()} | {"lse": p.sum(-1) + math.log(max(seen.size(1), 1))}


# ---- products ----

def matmul_cases(g):
    leads = [((), ()), ((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((1,), (4,)), ((0,), (1,)),
             ((2, 3), (2, 3)), ((4, 1, 2), (3, 1))]
    for number in range(100):
        (of_a, of_b), ta, tb = leads[number // 4 % len(leads)], bool(number & 1), bool(number & 2)
        small = 300 if len(of_a) + len(of_b) < 2 else 70
        m, k, n = (g.size(small) for _ in range(3))
        yield ({"a": g.normal(*of_a, *((k, m) if ta else (m, k))), "b": g.normal(*of_b, *((n, k) if tb else (k, n)))},
               {"transpose_a": ta, "transpose_b": tb})
    yield {"a": g.normal(65, 4099), "b": g.normal(4099, 33)}, {}


@operator("matmul", matmul_cases)
def matmul(t, a):
    of_a = t["a"].transpose(-1, -2) if a["transpose_a"] else t["a"]
    return {"y": of_a @ (t["b"].transpose(-1, -2) if a["transpose_b"] else t["b"])}


def linear_cases(g):
    for number in range(60):
        lead, d_in, d_out = g.shape(number % 4, 300), g.size(257), g.size(257)
        inputs = {"x": g.normal(*lead, d_in), "weight": g.normal(d_out, d_in)}
        yield inputs | ({"bias": g.normal(d_out)} if number // 4 % 2 else {}), {}
    yield {"x": g.normal(67, 1365), "weight": g.normal(129, 1365), "bias": g.normal(129)}, {}


operator("linear", linear_cases)(lambda t, a: {"y": F.linear(t["x"], t["weight"], t["bias"])})


def grouped_cases(g):
    for number in range(64):
        lead, groups, d_in, d_out = g.shape(number % 3, 100), g.size(13), g.size(129), g.size(67)
        shared = bool(number & 1)
        inputs = {"x": g.normal(*lead, d_in) if shared else g.normal(*lead, groups, d_in), "weight": g.normal(groups, d_out, d_in)}
        yield inputs | ({"bias": g.normal(groups, d_out)} if number & 2 else {}), {"shared": shared}


@operator("grouped_linear", grouped_cases)
def grouped_linear(t, a):
    y = torch.einsum("...i,koi->...ko" if a["shared"] else "...ki,koi->...ko", t["x"], t["weight"])
    return {"y": y if t["bias"] is None else y + t["bias"]}


ACTIVATIONS = {"none": lambda h: h, "relu": F.relu, "relu_squared": lambda h: F.relu(h).square(), "silu": F.silu, "gelu": F.gelu,
               "gelu_tanh": lambda h: F.gelu(h, approximate="tanh")}


def mlp_cases(g):
    for number, (kind, up, down) in enumerate(itertools.product(list(ACTIVATIONS) * 3, (0, 1), (0, 1))):
        lead, d_in, hidden, d_out = g.shape(number % 4, 130), g.size(129), g.size(257), g.size(67)
        inputs = {"x": g.normal(*lead, d_in), "up": g.normal(hidden, d_in, scale=max(d_in, 1) ** -0.5),
                  "down": g.normal(d_out, hidden, scale=max(hidden, 1) ** -0.5)}
        inputs |= {"up_bias": g.normal(hidden)} if up else {}
        yield inputs | ({"down_bias": g.normal(d_out)} if down else {}), {"activation": kind}


def mlp_terms(t, a, d):
    """|f(h)| <= |h| or h^2: the computation on absolute values with that instead, since f itself may cancel."""
    return absolute(PEERS["mlp"], t, a | {"activation": "relu_squared" if a["activation"] == "relu_squared" else "none"}, d)


@operator("mlp", mlp_cases, mlp_terms)
def mlp(t, a):
    hidden = ACTIVATIONS[a["activation"]](F.linear(t["x"], t["up"], t["up_bias"]))
    return {"y": F.linear(hidden, t["down"], t["down_bias"])}


# ---- losses ----

def reduced(losses, how):
    return {"mean": losses.mean, "sum": losses.sum, "none": lambda: losses}[how]()


def gmm_cases(g):
    for number in range(54):
        shape, k = g.shape(number % 4, 3000), g.choice(1, 2, 3, 5, 10, 10, 32, 67)
        params = g.normal(*shape, k, 3, scale=g.choice(0.3, 1.0))
        params[..., 0] *= g.choice(1.0, 1.0, 10.0)
        if number % 9 == 8 and k > 1:
            params[..., 0, 0] = -np.inf  # a component switched off
        yield {"params": params, "y": g.normal(*shape) * g.choice(1.0, 3.0)}, {"reduction": ("mean", "sum", "none")[number // 4 % 3]}
    for how in ("mean", "sum", "none"):
        yield {"params": g.normal(0, 3, 3), "y": g.normal(0)}, {"reduction": how}
        yield {"params": g.normal(4099, 10, 3), "y": g.normal(4099)}, {"reduction": how}
        yield {"params": g.normal(31, 7, 3) * [1e4, 1, 0.1], "y": g.normal(31)}, {"reduction": how}  # one component each
        yield {"params": g.normal(31, 7, 3, scale=0.1), "y": g.normal(31, scale=100)}, {"reduction": how}  # far tails


def gmm_joint(t):
    w, mu, s = t["params"].unbind(-1)
    z = (t["y"][..., None] - mu) / s.exp()
    return w, s, z, F.log_softmax(w, -1) - 0.5 * z * z - s - 0.5 * math.log(2 * math.pi)


def gmm_terms(t, a, d):
    """An exponent's rounding is the relative error of its responsibility: the factor 1 + largest exponent that matters."""
    w, s, z, joint = gmm_joint(t)
    if joint.numel() == 0:
        return {}
    g = d["loss"].abs() * torch.ones_like(t["y"]) / (max(t["y"].numel(), 1) if a["reduction"] == "mean" else 1)
    r = torch.softmax(joint, -1)
    log_pi = F.log_softmax(w, -1)
    parts = torch.where(r > 1e-8, log_pi.abs() + z * z / 2 + s.abs() + 1, torch.zeros_like(z))  # less is no term
    rough = 1 + parts.amax(-1, True)
    g = g[..., None] * rough
    d_mu = g * r * z.abs() / s.exp()
    return {"loss": reduced(rough[..., 0], a["reduction"]), "d_y": d_mu.sum(-1),
            "d_params": torch.stack([g * (r + log_pi.exp()), d_mu, g * r * (1 + z * z)], -1)}


operator("gmm_nll", gmm_cases, gmm_terms)(
    lambda t, a: {"loss": reduced(-torch.logsumexp(gmm_joint(t)[3], -1), a["reduction"])})


def cross_entropy_cases(g):
    for number in range(60):
        shape, classes = g.shape(number % 4, 500), g.choice(1, 2, 3, 10, 129, 1031)
        ignore = g.choice(-100, -100, 0, -1)
        targets = g.index(classes, *shape, wide=bool(number & 1))
        if number % 3:
            targets = np.where(g.rng.random(shape) < 0.2, ignore, targets).astype(targets.dtype)
        yield ({"logits": g.normal(*shape, classes, scale=g.choice(1.0, 5.0)), "targets": targets},
               {"ignore_index": ignore, "label_smoothing": g.choice(0.0, 0.0, 0.1, 1.0),
                "reduction": ("mean", "sum", "none")[number // 4 % 3]})
    for how in ("mean", "sum", "none"):
        yield {"logits": g.normal(0, 5), "targets": g.index(5, 0)}, {"reduction": how}
        yield {"logits": g.normal(4, 5), "targets": np.full(4, -100)}, {"reduction": how}  # all ignored
        yield {"logits": g.normal(3, 50304), "targets": g.index(50304, 3)}, {"reduction": how}
        yield {"logits": g.normal(9, 7, scale=1e4), "targets": g.index(7, 9)}, {"reduction": how}
        off = np.where(np.arange(7) == 3, -np.inf, g.normal(9, 7))  # a class of probability 0, wanted by some rows
        yield {"logits": off, "targets": np.arange(9) % 7}, {"reduction": how}


def cross_entropy_terms(t, a, d):
    x, keep = t["logits"], t["targets"] != a["ignore_index"]
    if x.numel() == 0:
        return {}
    e, classes = a["label_smoothing"], x.size(-1)
    m = x.amax(-1, True)
    loss = ((m - x).abs().amax(-1) + (x - m).exp().sum(-1).log()) * keep
    p = torch.softmax(x, -1)
    g = d["loss"].abs() * keep / (keep.sum().clamp(min=1) if a["reduction"] == "mean" else 1)
    hot = F.one_hot(t["targets"].long() * keep, classes)
    return {"loss": loss.sum() / keep.sum().clamp(min=1) if a["reduction"] == "mean" else reduced(loss, a["reduction"]),
            "d_logits": g[..., None] * (p + (1 - e) * hot + e / classes)}


@operator("cross_entropy", cross_entropy_cases, cross_entropy_terms)
def cross_entropy(t, a):
    targets = t["targets"].long()
    loss = F.cross_entropy(t["logits"].reshape(-1, t["logits"].size(-1)), targets.reshape(-1), ignore_index=a["ignore_index"],
                           label_smoothing=a["label_smoothing"], reduction=a["reduction"])
    return {"loss": loss.reshape(targets.shape) if a["reduction"] == "none" else loss}


# ---- rows by number ----

def embedding_cases(g):
    for number in range(40):
        rows, width = g.size(least=1), g.size(129)
        yield {"table": g.normal(rows, width), "indices": g.index(rows, *g.shape(number % 4, 800), wide=bool(number & 1))}, {}
    yield {"table": g.normal(3, 65), "indices": g.index(3, 2000)}, {}  # every row many times


operator("embedding", embedding_cases)(lambda t, a: {"y": t["table"][t["indices"].long()]})


def gather_cases(g):
    for number in range(40):
        rest, rows = g.shape(number % 4, 300), g.size(least=1)
        yield {"x": g.normal(rows, *rest), "indices": g.index(rows, g.size(), wide=bool(number & 1))}, {}


operator("gather_rows", gather_cases)(lambda t, a: {"y": t["x"][t["indices"].long()]})


def scatter_cases(g):
    for number in range(40):
        rest, rows, count = g.shape(number % 4, 300), g.size(least=1), g.size()
        yield {"x": g.normal(count, *rest), "indices": g.index(rows, count, wide=bool(number & 1))}, {"rows": rows}
    yield {"x": g.normal(0, 3), "indices": g.index(1, 0)}, {"rows": 0}


@operator("scatter_rows", scatter_cases)
def scatter_rows(t, a):
    x = t["x"]
    return {"y": torch.zeros((a["rows"], *x.shape[1:]), dtype=x.dtype).index_add(0, t["indices"].long(), x)}


# ---- shape ----

def concat_cases(g):
    for number in range(40):
        rank = 1 + number % 4
        shape, dim = g.shape(rank), g.integer(-rank, rank)
        parts = {}
        for name in ("abc", "ab", "ac", "a")[number // 4 % 4]:
            part = list(shape)
            part[dim] = g.size(31)
            parts[name] = g.normal(*part)
        yield parts, {"dim": dim}


operator("concat", concat_cases, SELF)(
    lambda t, a: {"y": torch.cat([t[name] for name in "abc" if t[name] is not None], a["dim"])})


def slice_cases(g):
    for number in range(48):
        rank = 1 + number % 4
        shape, dim = g.shape(rank, least=1), g.integer(-rank, rank)
        n = shape[dim]
        begin = g.integer(0, n + 1)
        end = g.integer(begin, n + 1)
        if number % 3 == 0 and 0 < begin and 0 < end < n:  # the same counted from the end
            begin, end = begin - n, end - n
        yield {"x": g.normal(*shape)}, {"dim": dim, "begin": begin, "end": end, "step": g.choice(1, 1, 2, 3, 100)}
    yield {"x": g.normal(0, 3)}, {"dim": 0, "begin": 0, "end": 0}


@operator("slice", slice_cases, SELF)
def slice_(t, a):
    at = [slice(None)] * t["x"].dim()
    at[a["dim"]] = slice(a["begin"], a["end"], a["step"])
    return {"y": t["x"][tuple(at)]}


def transpose_cases(g):
    for number in range(40):
        rank = 1 + number % 5
        yield {"x": g.normal(*g.shape(rank))}, {"a": g.integer(-rank, rank), "b": g.integer(-rank, rank)}


operator("transpose", transpose_cases, SELF)(lambda t, a: {"y": t["x"].transpose(a["a"], a["b"])})


def word(sizes):
    return ",".join(str(n) for n in sizes)


def reshape_cases(g):
    for number in range(40):
        x = g.normal(*g.shape(number % 5))
        parts = [1]
        for prime in (2, 3, 5, 7, 13, 31):  # the same number of elements in other sizes
            while x.size > 0 and (x.size // math.prod(parts)) % prime == 0 and len(parts) < 5:
                parts.append(prime)
        parts.append(x.size // math.prod(parts))
        g.rng.shuffle(parts)
        if x.size and number % 2:
            parts[g.integer(0, len(parts))] = -1
        yield {"x": x}, {"shape": word(parts)}
    yield {"x": g.normal(1, 1)}, {"shape": ""}
    yield {"x": g.normal()}, {"shape": "1,1,1"}
    yield {"x": g.normal(0, 4)}, {"shape": "2,0,9"}


operator("reshape", reshape_cases, SELF)(
    lambda t, a: {"y": t["x"].reshape([int(n) for n in a["shape"].split(",") if n])})


def expand_cases(g):
    for number in range(40):
        shape = g.shape(number % 5)
        x = tuple(1 if g.integer(0, 2) else n for n in shape)
        cut = g.integer(0, len(x) + 1)
        lead = len(shape) - len(x[cut:])
        sizes = [-1 if at >= lead and g.integer(0, 3) == 0 and x[at] == n else n for at, n in enumerate(shape)]
        yield {"x": g.normal(*x[cut:])}, {"shape": word(sizes)}


operator("expand", expand_cases)(lambda t, a: {"y": t["x"].expand([int(n) for n in a["shape"].split(",") if n])})


def absolute(peer, t, a, d):
    """The outputs and gradients of the peer on absolute values."""
    t = {name: x.abs().requires_grad_() if x is not None and x.is_floating_point() else x for name, x in t.items()}
    outputs = peer.run(t, a)
    wanted = [name for name, x in t.items() if x is not None and x.requires_grad]
    grads = torch.autograd.grad([outputs[name] for name in d], [t[name] for name in wanted], [x.abs() for x in d.values()],
                                allow_unused=True)
    return {name: y.detach() for name, y in outputs.items()} | {"d_" + name: x for name, x in zip(wanted, grads) if x is not None}
