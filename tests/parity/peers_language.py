"""Peers of the operators that language models add; see peer.py."""
import torch
import torch.nn.functional as F

from peer import operator


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
