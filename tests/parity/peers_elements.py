"""Peers of what works element by element, of reductions, and of what moves elements; see peer.py."""
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F

from peer import ABSOLUTE, operator, SELF


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
    """f(x), or f(x, attributes) if cases with attributes are given."""
    operator(name, unary_cases(**how), terms and (terms if terms is SELF else lambda t, a, d: terms(t["x"], d["y"])))(
        lambda t, a: {"y": f(t["x"], a) if "attrs" in how else f(t["x"])})


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
unary("scale", lambda x, a: x * a["factor"], attrs=[{"factor": f} for f in (-2.5, 0.0, 1.0, 1e-3, 3)])
unary("shift", lambda x, a: x + a["offset"], lambda x, dy: {"y": x.abs() + 2.5, "d_x": dy.abs()},
      attrs=[{"offset": f} for f in (-2.5, 0.0, 1e-3)])
unary("reciprocal", lambda x, a: a["dividend"] / x, fill="away_from_0", special=np.array([0.0, 1.0, np.inf, np.nan]),
      attrs=[{"dividend": f} for f in (1.0, -2.5)])
unary("neg", torch.neg)
unary("abs", torch.abs)
unary("square", torch.square, special=SPECIAL[~(np.abs(SPECIAL) > 100)])
unary("pow", lambda x, a: x ** a["exponent"], fill="positive", special=np.array([1.0, 2.0, np.nan]),
      attrs=[{"exponent": f} for f in (2.0, 0.0, 1.0, 0.5, -1.0, 1.7)])
unary("rsqrt", torch.rsqrt, fill="positive", special=np.array([0.0, 1.0, np.inf, np.nan, -1.0]))
unary("sin", torch.sin, lambda x, dy: {"d_x": dy.abs()}, special=SPECIAL[~(np.abs(SPECIAL) > 100)])
unary("cos", torch.cos, lambda x, dy: {"y": torch.ones_like(x)}, special=SPECIAL[~(np.abs(SPECIAL) > 100)])
unary("softplus", lambda x: F.softplus(x, threshold=1000))
unary("clamp", lambda x, a: x.clamp(a["low"], a["high"]), attrs=[{"low": -1.0, "high": 0.5}, {"low": 0.0, "high": 1e3}])


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


for kind in ("maximum", "minimum"):
    operator(kind, binary_cases(False), SELF)(lambda t, a, f=getattr(torch, kind): {"y": f(t["a"], t["b"])})


def comparison_cases(g):
    for inputs, attrs in binary_cases(False)(g):
        yield {name: np.round(x) for name, x in inputs.items()}, attrs  # some are equal
    yield {"a": np.array([np.nan, np.nan, np.inf]), "b": np.array([1.0, np.nan, np.inf])}, {}


for kind, f in (("less", torch.lt), ("less_equal", torch.le), ("greater", torch.gt), ("greater_equal", torch.ge),
                ("equal", torch.eq)):
    operator(kind, comparison_cases, SELF)(lambda t, a, f=f: {"y": f(t["a"], t["b"])})


def where_cases(g):
    for inputs, attrs in binary_cases(False)(g):
        yield inputs | {"mask": np.asarray(g.normal(*inputs["b"].shape) > 0)}, attrs


operator("where", where_cases)(lambda t, a: {"y": torch.where(t["mask"], t["a"], t["b"])})


# ---- reductions ----

def reduce_cases(kind):
    def cases(g):
        for number in range(60):
            rank = number % 5
            x = g.normal(*g.shape(rank, least=1 if kind in ("max", "min") or number % 4 else 0))
            dim = -100 if rank == 0 or number % 3 == 0 else g.integer(-rank, rank)
            yield {"x": x}, {"dim": dim, "keep": dim != -100 and bool(g.integer(0, 2))}
            if rank > 1:
                dims = g.rng.permutation(rank)[:g.integer(1, rank + 1)]
                yield {"x": x}, {"dims": ",".join(str(n) for n in dims), "keep": bool(g.integer(0, 2))}
        for shape, dim in (((3, 0), 0), ((0, 3), 1), ((2, 0, 4), 2)):  # no results at all
            yield {"x": g.normal(*shape)}, {"dim": dim}
        if kind not in ("max", "min"):  # results over nothing
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
        x, dim = t["x"], a.get("dim", -100)
        if a.get("dims"):
            dims = sorted(int(n) for n in a["dims"].split(","))
            kept = [n for n in range(x.dim()) if n not in dims]  # as one last dimension
            y = along(x.permute(*kept, *dims).reshape(*(x.shape[n] for n in kept), math.prod(x.shape[n] for n in dims)), -1, False)
            return {"y": y.reshape([1 if n in dims else x.shape[n] for n in range(x.dim())]) if a["keep"] else y}
        return {"y": whole(x) if dim == -100 else along(x, dim, a["keep"])}
    operator(kind, reduce_cases(kind), terms)(run)


reduction("sum", ABSOLUTE, torch.sum, lambda x, dim, keep: x.sum(dim, keep))
reduction("mean", ABSOLUTE, torch.mean, lambda x, dim, keep: x.mean(dim, keep))
# Documented difference: among equal ones the first takes the whole gradient, over all dimensions as well, where torch.max(x)
# shares it; and a NaN takes it as it does along one.
reduction("max", SELF, lambda x: x.reshape(-1).max(0).values, lambda x, dim, keep: x.max(dim, keep).values)
reduction("min", SELF, lambda x: x.reshape(-1).min(0).values, lambda x, dim, keep: x.min(dim, keep).values)
reduction("norm", SELF, lambda x: torch.linalg.vector_norm(x),
          lambda x, dim, keep: torch.linalg.vector_norm(x, dim=dim, keepdim=keep))


reduction("logsumexp", SELF, lambda x: x.reshape(-1).logsumexp(0), lambda x, dim, keep: x.logsumexp(dim, keep))


def cumsum_cases(g):
    for number in range(40):
        rank = 1 + number % 4
        yield {"x": g.normal(*g.shape(rank))}, {"dim": g.integer(-rank, rank)}
    yield {"x": g.normal(3, 20_011)}, {"dim": 1}
    yield {"x": g.normal(20_011, 3)}, {"dim": 0}
    yield {"x": np.where(g.normal(9, 9) > 1, np.nan, g.normal(9, 9))}, {"dim": 1}


operator("cumsum", cumsum_cases)(lambda t, a: {"y": t["x"].cumsum(a["dim"])})


def topk_cases(g):
    for number in range(40):
        rank = 1 + number % 3
        shape = g.shape(rank, least=1)
        dim = g.integer(-rank, rank)
        yield {"x": g.normal(*shape)}, {"dim": dim, "k": g.integer(0, shape[dim] + 1)}
    yield {"x": g.normal(2, 5003)}, {"dim": 1, "k": 1025}
    yield {"x": np.where(g.normal(9, 9) > 1, np.inf, g.normal(9, 9))}, {"dim": 1, "k": 9}


@operator("topk", topk_cases, SELF)
def topk(t, a):
    values, indices = t["x"].sort(dim=a["dim"], descending=True, stable=True)  # torch.topk breaks ties in any way
    return {"values": values.narrow(a["dim"], 0, a["k"]), "indices": indices.narrow(a["dim"], 0, a["k"])}


def index_cases(g):
    for number in range(40):
        rank = 1 + number % 4
        x = g.normal(*g.shape(rank, least=1))
        yield {"x": np.round(x, number % 3)}, {"dim": g.integer(-rank, rank), "keep": bool(g.integer(0, 2))}  # ties
    yield {"x": np.where(g.normal(9, 9) > 1, np.nan, g.normal(9, 9))}, {"dim": 1, "keep": False}


operator("argmax", index_cases, SELF)(lambda t, a: {"index": t["x"].argmax(a["dim"], a["keep"])})
operator("argmin", index_cases, SELF)(lambda t, a: {"index": t["x"].argmin(a["dim"], a["keep"])})


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
        x = [0.0, -0.0, 1e-8, 6e-5, 448.0, 449.0, 465.0, 1e6, -1e6, 65504.0, 65520.0, 3e38, 1.0625, np.inf, -np.inf, np.nan]
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


# ---- rows by number ----

def embedding_cases(g):
    for number in range(40):
        rows, width = g.size(least=1), g.size(129)
        yield {"table": g.normal(rows, width), "indices": g.index(rows, *g.shape(number % 4, 800), wide=bool(number & 1))}, {}
    yield {"table": g.normal(3, 65), "indices": g.index(3, 2000)}, {}  # every row many times
    yield {"table": g.normal(2, 1), "indices": g.index(2, 200_000)}, {}


operator("embedding", embedding_cases)(lambda t, a: {"y": t["table"][t["indices"].long()]})


def gather_cases(g):
    for number in range(40):
        rest, rows = g.shape(number % 4, 300), g.size(least=1)
        yield {"x": g.normal(rows, *rest), "indices": g.index(rows, g.size(), wide=bool(number & 1))}, {}


operator("gather_rows", gather_cases)(lambda t, a: {"y": t["x"][t["indices"].long()]})


def take_along_cases(g):
    for number in range(40):
        rank = 1 + number % 4
        shape = g.shape(rank, 3000, least=1)
        dim = g.integer(-rank, rank)
        chosen = list(shape)
        chosen[dim] = g.size(257)
        yield {"x": g.normal(*shape), "indices": g.index(shape[dim], *chosen, wide=bool(number & 1))}, {"dim": dim}


operator("take_along", take_along_cases)(lambda t, a: {"y": t["x"].gather(a["dim"], t["indices"].long())})


def one_hot_cases(g):
    for number, dtype in enumerate(DTYPES):
        classes = g.size(129, least=1)
        yield ({"indices": g.index(classes, *g.shape(number % 4, 1000), wide=bool(number & 1))},
               {"classes": classes, "dtype": dtype})


operator("one_hot", one_hot_cases, SELF)(
    lambda t, a: {"y": F.one_hot(t["indices"].long(), a["classes"]).to(DTYPES[a["dtype"]])})


def triangle_cases(g):
    for number in range(40):
        yield {"x": g.normal(*g.shape(2 + number % 3))}, {"diagonal": g.integer(-9, 9)}
    yield {"x": np.where(g.normal(9, 9) > 1, np.nan, g.normal(9, 9))}, {"diagonal": 0}


for kind, f in (("tril", torch.tril), ("triu", torch.triu)):
    operator(kind, triangle_cases, SELF)(lambda t, a, f=f: {"y": f(t["x"], a["diagonal"])})


def scatter_cases(g):
    for number in range(40):
        rest, rows, count = g.shape(number % 4, 300), g.size(least=1), g.size()
        yield {"x": g.normal(count, *rest), "indices": g.index(rows, count, wide=bool(number & 1))}, {"rows": rows}
    yield {"x": g.normal(0, 3), "indices": g.index(1, 0)}, {"rows": 0}
    yield {"x": g.normal(200_000, 1) + 1, "indices": g.index(2, 200_000)}, {"rows": 2}


@operator("scatter_rows", scatter_cases)
def scatter_rows(t, a):
    x = t["x"]
    return {"y": torch.zeros((a["rows"], *x.shape[1:]), dtype=x.dtype).index_add(0, t["indices"].long(), x)}


# ---- selections of rows ----

def row_norms_cases(g):
    for number in range(40):
        yield {"x": g.normal(*g.shape(1 + number % 4, 100_000))}, {}


@operator("row_norms", row_norms_cases, SELF)
def row_norms(t, a):
    x = t["x"]
    return {"y": torch.linalg.vector_norm(x.reshape(x.shape[0], math.prod(x.shape[1:])), dim=1)}


def select_cases(g):
    for number in range(60):
        rows = g.size()
        inputs = {"norms": np.round(g.positive(rows), number % 3)}  # ties
        if number % 4 == 0:
            inputs["device_n"] = np.array([g.integer(-2, rows + 3)], dtype=np.int32)
        if number % 4 >= 2:
            inputs["device_rows"] = np.array([g.integer(0, rows + 3)], dtype=np.int64)
        mode = ("first", "top_norm", "threshold")[number % 3]
        if mode == "threshold":
            inputs.pop("device_n", None)
        yield inputs, {"mode": mode, "n": g.integer(0, rows + 1), "threshold": 1.0}


@operator("select", select_cases, SELF)
def select(t, a):  # the modes that draw nothing
    norms = t["norms"]
    capacity = len(norms) if a["mode"] == "threshold" else a["n"]
    live, n = len(norms), capacity
    if t["device_rows"] is not None:
        live = min(live, int(t["device_rows"]))
    if t["device_n"] is not None:
        n = min(max(0, int(t["device_n"])), n)
    order = torch.sort(norms[:live], descending=True, stable=True).indices
    chosen = {"first": torch.arange(live)[:n], "top_norm": order[:n].sort().values,
              "threshold": (norms[:live] >= a["threshold"]).nonzero()[:, 0]}[a["mode"]]
    indices, scales = torch.full((capacity,), len(norms)), torch.zeros(capacity, dtype=norms.dtype)
    indices[:len(chosen)], scales[:len(chosen)] = chosen, 1
    return {"indices": indices, "scales": scales, "count": torch.tensor([len(chosen)])}


def chosen_rows(g, number):
    """(rows, how many are chosen, padding included; inputs of the operators)"""
    rows, padding = g.size(), number % 3
    chosen = np.sort(g.rng.permutation(rows)[:g.size(most=max(rows, 1))])
    indices = np.concatenate([chosen, np.full(padding, rows)]).astype(np.int64 if number & 1 else np.int32)
    inputs = {"indices": indices}
    if number & 2:
        inputs["scales"] = g.positive(len(indices))
    return rows, len(indices), inputs


def scaled(x, scales):
    return x if scales is None else x * scales.reshape(-1, *[1] * (x.dim() - 1))


def gather_selected_cases(g):
    for number in range(40):
        rows, _, inputs = chosen_rows(g, number)
        yield {"x": g.normal(rows, *g.shape(number % 4, 300))} | inputs, {}


@operator("gather_selected", gather_selected_cases)
def gather_selected(t, a):
    x = t["x"]
    return {"y": scaled(torch.cat([x, x.new_zeros(1, *x.shape[1:])])[t["indices"].long()], t["scales"])}


def scatter_selected_cases(g):
    for number in range(40):
        rows, count, inputs = chosen_rows(g, number)
        yield {"x": g.normal(count, *g.shape(number % 4, 300))} | inputs, {"rows": rows}


@operator("scatter_selected", scatter_selected_cases)
def scatter_selected(t, a):
    x = scaled(t["x"], t["scales"])
    return {"y": x.new_zeros(a["rows"] + 1, *x.shape[1:]).index_copy(0, t["indices"].long(), x)[:a["rows"]]}


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


def stack_cases(g):
    for number in range(24):
        rank = number % 4
        shape = g.shape(rank)
        yield {name: g.normal(*shape) for name in ("abc", "ab")[number // 4 % 2]}, {"dim": g.integer(-rank - 1, rank + 1)}


operator("stack", stack_cases, SELF)(
    lambda t, a: {"y": torch.stack([t[name] for name in "abc" if t[name] is not None], a["dim"])})


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


def split_cases(g):
    for number in range(40):
        rank = 1 + number % 4
        shape, dim = g.shape(rank), g.integer(-rank, rank)
        first, second = sorted((g.integer(0, shape[dim] + 1), g.integer(0, shape[dim] + 1)))
        yield {"x": g.normal(*shape)}, {"dim": dim, "sizes": f"{first},{second - first},{shape[dim] - second}"}


@operator("split", split_cases, SELF)
def split(t, a):
    return dict(zip("abc", t["x"].split([int(size) for size in a["sizes"].split(",")], a["dim"])))


def transpose_cases(g):
    for number in range(40):
        rank = 1 + number % 5
        yield {"x": g.normal(*g.shape(rank))}, {"a": g.integer(-rank, rank), "b": g.integer(-rank, rank)}


operator("transpose", transpose_cases, SELF)(lambda t, a: {"y": t["x"].transpose(a["a"], a["b"])})


def word(sizes):
    return ",".join(str(n) for n in sizes)


def permute_cases(g):
    for number in range(40):
        rank = number % 5
        yield {"x": g.normal(*g.shape(rank))}, {"order": word(g.choice(n, n - rank) for n in g.rng.permutation(rank))}


operator("permute", permute_cases, SELF)(
    lambda t, a: {"y": t["x"].permute([int(n) for n in a["order"].split(",") if n])})


def select_index_cases(g):
    for number in range(40):
        rank = 1 + number % 4
        shape, dim = g.shape(rank, least=1), g.integer(-rank, rank)
        yield {"x": g.normal(*shape)}, {"dim": dim, "index": g.integer(-shape[dim], shape[dim])}


operator("select_index", select_index_cases, SELF)(lambda t, a: {"y": t["x"].select(a["dim"], a["index"])})


def unsqueeze_cases(g):
    for number in range(20):
        rank = number % 5
        yield {"x": g.normal(*g.shape(rank))}, {"dim": g.integer(-rank - 1, rank + 1)}


def squeeze_cases(g):
    for number in range(20):
        rank = 1 + number % 4
        shape, dim = list(g.shape(rank)), g.integer(-rank, rank)
        shape[dim] = 1
        yield {"x": g.normal(*shape)}, {"dim": dim}


operator("unsqueeze", unsqueeze_cases, SELF)(lambda t, a: {"y": t["x"].unsqueeze(a["dim"])})
operator("squeeze", squeeze_cases, SELF)(lambda t, a: {"y": t["x"].squeeze(a["dim"])})


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
