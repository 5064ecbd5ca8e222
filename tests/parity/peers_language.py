"""Peers of the operators that language models add; see peer.py."""
import math

import numpy as np
import torch
import torch.nn.functional as F

from peer import operator, SELF


def rope_cases(g):
    for number in range(40):
        batch, tokens, heads, width = (g.size(17) for _ in range(4))
        rotary = 2 * g.integer(0, width // 2 + 1)
        offset = g.integer(0, 9)
        rows = offset + tokens + g.integer(0, 3)
        inputs = {"x": g.normal(batch, tokens, heads, width), "table": g.normal(rows, rotary)}
        if number % 3 and rows:
            shape = (tokens,) if number % 3 == 1 else (batch, tokens)
            yield inputs | {"positions": g.index(rows, *shape, wide=bool(number & 1))}, {}
        else:
            yield inputs, {"offset": offset}


def rope(t, a):
    x, table = t["x"], t["table"].detach()
    half = table.size(1) // 2
    rows = table[t["positions"].long()] if t.get("positions") is not None else table[a["offset"]:a["offset"] + x.size(1)]
    c, s = (part.unsqueeze(-2) for part in (rows[..., :half], rows[..., half:]))
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return first * c, second * s, second * c, first * s, rest


def rope_terms(t, a, d):
    t = {name: x.abs().requires_grad_(name == "x") if x is not None and x.is_floating_point() else x for name, x in t.items()}
    p, q, r, s, rest = rope(t, a)
    y = torch.cat([p + q, r + s, rest], -1)
    grad, = torch.autograd.grad(y, t["x"], d["y"].abs())
    return {"y": y.detach(), "d_x": grad}


@operator("rope", rope_cases, rope_terms)
def rope_peer(t, a):
    p, q, r, s, rest = rope(t, a)
    return {"y": torch.cat([p - q, r + s, rest], -1)}


def swiglu_cases(packed):
    def cases(g):
        for number in range(40):
            shape = g.shape(1 + number % 4, 100_000)
            gate, up = g.normal(*shape, scale=g.choice(1.0, 3.0)), g.normal(*shape)
            if packed:
                half = shape[:-1] + (2 * shape[-1],)
                yield {"x": g.normal(*half)}, {}
            else:
                yield {"gate": gate, "up": up}, {}
    return cases


def swiglu_terms(gate, up, dy):
    """The sums of silu and of its slope, in absolute values: s (1 + g (1 - s)) cancels near g = -1.28."""
    s = torch.sigmoid(gate)
    slope = s * (1 + gate.abs() * (1 - s))
    return {"y": (F.silu(gate) * up).abs(), "d_gate": (dy * up).abs() * slope, "d_up": (dy * F.silu(gate)).abs()}


def plain_terms(t, a, d):
    return swiglu_terms(t["gate"], t["up"], d["y"])


def packed_terms(t, a, d):
    terms = swiglu_terms(*t["x"].chunk(2, -1), d["y"])
    return {"y": terms["y"], "d_x": torch.cat([terms["d_gate"], terms["d_up"]], -1)}


operator("swiglu", swiglu_cases(False), plain_terms)(lambda t, a: {"y": F.silu(t["gate"]) * t["up"]})


@operator("swiglu_packed", swiglu_cases(True), packed_terms)
def swiglu_packed(t, a):
    gate, up = t["x"].chunk(2, -1)
    return {"y": F.silu(gate) * up}


# ---- the head ----

def head_cases(g):
    for number in range(48):
        shape, width, classes = g.shape(number % 3, 300), g.size(129, 1), g.choice(1, 2, 3, 10, 129, 1031)
        targets = g.index(classes, *shape, wide=bool(number & 1))
        if number % 3:
            targets = np.where(g.rng.random(shape) < 0.2, -100, targets).astype(targets.dtype)
        inputs = {"x": g.normal(*shape, width), "weight": g.normal(classes, width, scale=width ** -0.5), "targets": targets}
        inputs |= {"bias": g.normal(classes)} if number % 4 == 1 else {}
        yield inputs, {"label_smoothing": g.choice(0.0, 0.0, 0.1), "reduction": ("mean", "sum", "none")[number // 4 % 3],
                       "chunk": g.choice(0, 0, 1, 5, 64)}


def head_terms(t, a, d):
    """The logits' roundings are those of their terms, |x| |weight|^T, and every probability has that of its logit."""
    x, weight, keep = t["x"], t["weight"], t["targets"] != a["ignore_index"]
    if x.numel() == 0:
        return {}
    logits = F.linear(x, weight, t.get("bias"))
    size = 1 + F.linear(x.abs(), weight.abs(), None if t.get("bias") is None else t["bias"].abs())
    p, e, classes = torch.softmax(logits, -1), a["label_smoothing"], weight.size(0)
    count = keep.sum().clamp(min=1) if a["reduction"] == "mean" else 1
    loss = (size.amax(-1) + (logits - logits.amax(-1, True)).exp().sum(-1).log()) * keep
    hot = F.one_hot(t["targets"].long() * keep, classes)
    dl = (d["loss"].abs() * keep / count)[..., None] * (p * size + (p * size).sum(-1, True) * p + (1 - e) * hot + e / classes)
    rows = dl.reshape(-1, classes)
    return {"loss": loss if a["reduction"] == "none" else loss.sum() / count, "d_x": dl @ weight.abs(),
            "d_weight": rows.T @ x.abs().reshape(-1, x.size(-1)), "d_bias": rows.sum(0)}


@operator("linear_cross_entropy", head_cases, head_terms)
def linear_cross_entropy(t, a):
    logits, targets = F.linear(t["x"], t["weight"], t.get("bias")), t["targets"].long()
    loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=a["ignore_index"],
                           label_smoothing=a["label_smoothing"], reduction=a["reduction"])
    return {"loss": loss.reshape(targets.shape) if a["reduction"] == "none" else loss}


def linear_swiglu_cases(g):
    for number in range(40):
        width, half = g.size(257, 1), g.size(129, 1)
        yield {"x": g.normal(*g.shape(number % 3, 100), width), "weight": g.normal(2 * half, width, scale=width ** -0.5)}, {}


def linear_swiglu_terms(t, a, d):
    gate, up = F.linear(t["x"].abs(), t["weight"].abs()).chunk(2, -1)
    return {"y": gate * up * (1 + gate)}


@operator("linear_swiglu", linear_swiglu_cases, linear_swiglu_terms)
def linear_swiglu(t, a):
    gate, up = F.linear(t["x"], t["weight"]).chunk(2, -1)
    return {"y": F.silu(gate) * up}


# ---- the cache ----

def cache_sizes(g, number):
    """Sequences, new tokens, rows of the cache, query heads, key heads, head size, and tokens before the new ones."""
    batch, new, key_heads, group, dim = g.integer(1, 4), g.integer(1, 5), g.integer(1, 4), g.integer(1, 4), 2 * g.integer(1, 33)
    rows = new + g.choice(0, 1, 7, 64, 300)
    return batch, new, rows, key_heads * group, key_heads, dim, g.index(rows - new + 1, batch, wide=bool(number & 1))


def decode_attention_cases(g):
    for number in range(40):
        batch, new, rows, heads, key_heads, dim, past = cache_sizes(g, number)
        yield ({"q": g.normal(batch, new, heads, dim), "keys": g.normal(batch, rows, key_heads, dim),
                "values": g.normal(batch, rows, key_heads, dim), "past": past}, {"scale": g.choice(0.0, 0.3)})


def decode_scores(t, a):
    q, k, v = (t[name].transpose(1, 2) for name in ("q", "keys", "values"))
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    new = torch.arange(q.size(2))[None, :, None]
    seen = torch.arange(k.size(2))[None, None, :] <= t["past"].long()[:, None, None] + new
    return q, k, v, a["scale"] or 1 / math.sqrt(q.size(-1)), seen[:, None]


def decode_attention_terms(t, a, d):
    q, k, v, scale, seen = decode_scores(t, a)
    p = torch.softmax((scale * (q @ k.transpose(-1, -2))).masked_fill(~seen, -math.inf), -1)
    return {"o": ((p * (1 + scale * (q.abs() @ k.abs().transpose(-1, -2)))) @ v.abs()).transpose(1, 2)}


@operator("decode_attention", decode_attention_cases, decode_attention_terms)
def decode_attention(t, a):
    q, k, v, scale, seen = decode_scores(t, a)
    return {"o": F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(1, 2)}


def appended(cache, x, past):
    rows = past.long()[:, None] + torch.arange(x.size(1))
    y = cache.clone()
    y[torch.arange(x.size(0))[:, None], rows] = x
    return y


def append_to_cache_cases(g):
    for number in range(30):
        batch, new, rows, _, heads, dim, past = cache_sizes(g, number)
        yield {"cache": g.normal(batch, rows, heads, dim), "x": g.normal(batch, new, heads, dim), "past": past}, {}


operator("append_to_cache", append_to_cache_cases, SELF)(lambda t, a: {"y": appended(t["cache"], t["x"], t["past"])})


def rope_to_cache_cases(g):
    for number in range(30):
        batch, new, rows, heads, key_heads, dim, past = cache_sizes(g, number)
        cache = (batch, rows, key_heads, dim)
        yield {"qkv": g.normal(batch, new, heads + 2 * key_heads, dim), "table": g.normal(rows, 2 * g.integer(0, dim // 2 + 1)),
               "past": past, "keys": g.normal(*cache), "values": g.normal(*cache)}, {}


def turned_parts(t, a, plus):
    key_heads = t["keys"].size(2)
    both, v = t["qkv"].split([t["qkv"].size(2) - key_heads, key_heads], 2)
    positions = t["past"].long()[:, None] + torch.arange(both.size(1))
    p, q, r, s, rest = rope({"x": both, "table": t["table"], "positions": positions}, a)
    turned = torch.cat([p + q, r + s, rest] if plus else [p - q, r + s, rest], -1)
    q, k = turned.split([turned.size(2) - key_heads, key_heads], 2)
    return {"q": q, "keys": appended(t["keys"], k, t["past"]), "values": appended(t["values"], v, t["past"])}


def rope_to_cache_terms(t, a, d):
    return turned_parts({name: x.abs() if x.is_floating_point() else x for name, x in t.items()}, a, True)


@operator("rope_to_cache", rope_to_cache_cases, rope_to_cache_terms)
def rope_to_cache(t, a):
    return turned_parts(t, a, False)
