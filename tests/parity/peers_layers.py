"""Peers of the layers of a model and its losses; see peer.py."""
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F

from peer import absolute, operator, PEERS


# ---- softmax and norms ----

def softmax_cases(g):
    for number in range(44):
        rank = 1 + number % 4
        yield {"x": g.normal(*g.shape(rank)) * g.choice(1.0, 5.0)}, {"dim": g.integer(-rank, rank)}
    for shape, dim in (((0,), 0), ((3, 0), 1), ((0, 3), -1), ((5, 1), 1), ((3, 5003), 1), ((5003, 3), 0), ((1, 300_007), 1)):
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
        choices = list(itertools.product((0, 1), repeat=len(optional)))
        for number in range(48):
            present = choices[number % len(choices)]
            shape = g.shape(1 + number // 4 % 4, least=number % 3 and 1)
            if shape[-1] == 0:  # PyTorch's layer_norm has no answer there
                shape = shape[:-1] + (1,)
            inputs = {"x": g.normal(*shape) * g.choice(1.0, 1.0, 30.0) + g.choice(0.0, 0.0, 2.0)}
            inputs |= {name: g.normal(shape[-1]) for name, there in zip(optional, present) if there}
            yield inputs, {"eps": g.choice(1e-5, 1e-6, 1e-12, 0.1)}
        for rows, width in ((3, 4096), (257, 768), (1031, 129), (2, 100_003), (100_003, 2)):
            yield {"x": g.normal(rows, width)} | {name: g.normal(width) for name in optional}, {}
    return cases


def norm_terms(t, a, d, size=None):
    """The rounding of xhat is that of x (of `size`, if x is a sum) and of its mean, rstd times; the gradients' is that of
    their terms and of xhat."""
    x, dy = t["x"], d["y"].abs()
    size = x.abs() if size is None else size
    mean = x.mean(-1, True) if "bias" in t else torch.zeros_like(x[..., :1])
    rstd = ((x - mean).square().mean(-1, True) + a["eps"]).rsqrt()
    xhat, w = ((x - mean) * rstd).abs(), torch.ones(x.size(-1)) if t["weight"] is None else t["weight"].abs()
    rough = (size + mean.abs()) * rstd
    g = dy * w
    rows = tuple(range(x.dim() - 1))
    dx = rstd * (g + g.mean(-1, True) + xhat * (g * xhat).mean(-1, True)) * (1 + rough.amax(-1, True))
    return {"y": rough * w, "d_x": dx, "d_weight": (dy * (xhat + rough)).sum(rows), "d_bias": dy.sum(rows)}


operator("layernorm", norm_cases(("weight", "bias")), norm_terms)(
    lambda t, a: {"y": F.layer_norm(t["x"], t["x"].shape[-1:], t["weight"], t["bias"], a["eps"])})
operator("rmsnorm", norm_cases(("weight",)), norm_terms)(
    lambda t, a: {"y": F.rms_norm(t["x"], t["x"].shape[-1:], t["weight"], a["eps"])})


def add_norm_cases(optional):
    def cases(g):
        for inputs, attrs in norm_cases(optional)(g):
            yield {"x": inputs["x"], "residual": g.normal(*inputs["x"].shape) * g.choice(1.0, 10.0)} | inputs, attrs
    return cases


def add_norm_terms(t, a, d):
    size = t["x"].abs() + t["residual"].abs()
    terms = norm_terms(t | {"x": t["x"] + t["residual"]}, a, d, size)
    dx = terms["d_x"] + d["sum"].abs()
    return terms | {"sum": size, "d_x": dx, "d_residual": dx}


def add_norm(name, optional, norm):
    @operator(name, add_norm_cases(optional), add_norm_terms)
    def peer(t, a):
        total = t["x"] + t["residual"]
        return {"sum": total, "y": norm(total, t, a)}


add_norm("add_layernorm", ("weight", "bias"), lambda x, t, a: F.layer_norm(x, x.shape[-1:], t["weight"], t["bias"], a["eps"]))
add_norm("add_rmsnorm", ("weight",), lambda x, t, a: F.rms_norm(x, x.shape[-1:], t["weight"], a["eps"]))


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
        inputs = {"x": g.normal(*lead, d_in) if shared else g.normal(*lead, groups, d_in),
                  "weight": g.normal(groups, d_out, d_in)}
        yield inputs | ({"bias": g.normal(groups, d_out)} if number & 2 else {}), {"shared": shared}


@operator("grouped_linear", grouped_cases)
def grouped_linear(t, a):
    y = torch.einsum("...i,koi->...ko" if a["shared"] else "...ki,koi->...ko", t["x"], t["weight"])
    return {"y": y if t["bias"] is None else y + t["bias"]}


ACTIVATIONS = {"none": lambda h: h, "relu": F.relu, "relu_squared": lambda h: F.relu(h).square(), "silu": F.silu,
               "gelu": F.gelu, "gelu_tanh": lambda h: F.gelu(h, approximate="tanh")}


def mlp_cases(g):
    for number, (kind, up, down) in enumerate(itertools.product(list(ACTIVATIONS) * 3, (0, 1), (0, 1))):
        lead, d_in, hidden, d_out = g.shape(number % 4, 130), g.size(129), g.size(257), g.size(67)
        inputs = {"x": g.normal(*lead, d_in), "up": g.normal(hidden, d_in, scale=max(d_in, 1) ** -0.5),
                  "down": g.normal(d_out, hidden, scale=max(hidden, 1) ** -0.5)}
        inputs |= {"up_bias": g.normal(hidden)} if up else {}
        yield inputs | ({"down_bias": g.normal(d_out)} if down else {}), {"activation": kind}


def terms_without_activation(name):
    """|f(h)| <= |h| or h^2: the computation on absolute values with that instead, since f itself may cancel."""
    def terms(t, a, d):
        kind = "relu_squared" if a["activation"] == "relu_squared" else "none"
        return absolute(PEERS[name], t, a | {"activation": kind}, d)
    return terms


@operator("mlp", mlp_cases, terms_without_activation("mlp"))
def mlp(t, a):
    hidden = ACTIVATIONS[a["activation"]](F.linear(t["x"], t["up"], t["up_bias"]))
    return {"y": F.linear(hidden, t["down"], t["down_bias"])}


def grouped_mlp_cases(g):
    for number, kind in enumerate(list(ACTIVATIONS) * 6):
        lead, groups, d_in, hidden, d_out = g.shape(number % 3, 60), g.size(11), g.size(129), g.size(140), g.size(20)
        yield ({"x": g.normal(*lead, d_in), "up": g.normal(groups, hidden, d_in, scale=max(d_in, 1) ** -0.5),
                "down": g.normal(groups, d_out, hidden, scale=max(hidden, 1) ** -0.5)}, {"activation": kind})


@operator("grouped_mlp", grouped_mlp_cases, terms_without_activation("grouped_mlp"))
def grouped_mlp(t, a):
    hidden = ACTIVATIONS[a["activation"]](torch.einsum("...i,khi->...kh", t["x"], t["up"]))
    return {"y": torch.einsum("...kh,koh->...ko", hidden, t["down"])}


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
        yield ({"params": params, "y": g.normal(*shape) * g.choice(1.0, 3.0)},
               {"reduction": ("mean", "sum", "none")[number // 4 % 3]})
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
        yield {"logits": g.normal(1, 300_007), "targets": g.index(300_007, 1)}, {"reduction": how, "label_smoothing": 0.1}
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
