"""Trains the same small TNP in PyTorch as dump_tnp did in tessera, from its weights on its batches, and compares.

usage: python tnp_parity.py DUMP_TNP

PyTorch runs in f64, as the truth, and in f32, to show what rounding alone does. Limits: the loss of each of the 20 steps 1e-5
relative, gradients of the first step and final parameters 1e-4 of the parameter's largest. Post-norm and pre-norm; dump_tnp
itself checks that activation checkpointing changes no bit. Exit status 77: no PyTorch here, skipped.
"""
import math
import os
import subprocess
import sys
import tempfile

from needs import needs

with needs("torch, numpy and safetensors"):
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file

HEADS, STEPS, LEARNING_RATE, DECAY = 3, 20, 1e-3, 0.1  # those of dump_tnp.cpp
LIMITS = {"loss": 1e-5, "gradient": 1e-4, "final": 1e-4}
torch.set_num_threads(1)


def norm(x, weight):
    return F.layer_norm(x, x.shape[-1:], weight, None, 1e-5)


def attention(x, context, p, at):
    """Batch-major [B, L, d]: queries from all tokens, keys and values from the context."""
    def heads(rows):
        return rows.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    memory = x[:, :context]
    keys, values = F.linear(memory, p[at + "kv.weight"]).chunk(2, -1)
    mixed = F.scaled_dot_product_attention(heads(F.linear(x, p[at + "q.weight"])), heads(keys), heads(values))
    return F.linear(mixed.transpose(1, 2).flatten(2), p[at + "out.weight"])


def loss_of(p, xc, yc, xt, yt, pre_norm):
    context = xc.size(1)
    x = torch.cat([torch.cat([xc, yc], -1), torch.cat([xt, torch.zeros_like(yt)], -1)], 1)
    x = F.linear(F.silu(F.linear(x, p["embed_in.weight"])), p["embed_out.weight"])
    for block in range(1 + max(int(name.split(".")[1]) for name in p if name.startswith("blocks."))):
        at = f"blocks.{block}."

        def mlp(h):
            return F.linear(F.silu(F.linear(h, p[at + "mlp.up.weight"])), p[at + "mlp.down.weight"])

        norm1, norm2 = p[at + "norm1.weight"], p[at + "norm2.weight"]
        if pre_norm:
            x = x + attention(norm(x, norm1), context, p, at + "attention.")
            x = x + mlp(norm(x, norm2))
        else:
            x = norm(x + attention(x, context, p, at + "attention."), norm1)
            x = norm(x + mlp(x), norm2)
    x = x[:, context:]
    if pre_norm:
        x = norm(x, p["norm.weight"])
    # one network a component, as K separate products
    heads = [F.linear(F.silu(F.linear(x, up)), down) for up, down in zip(p["head_in.weight"], p["head_out.weight"])]
    logit, mu, log_sigma = torch.stack(heads, -2).unbind(-1)
    parts = torch.distributions.Normal(mu, log_sigma.exp()).log_prob(yt)
    return -torch.logsumexp(F.log_softmax(logit, -1) + parts, -1).mean()


def train(dump, dtype, pre_norm):
    p = {name[8:]: x.to(dtype, copy=True).requires_grad_() for name, x in dump.items() if name.startswith("initial.")}
    flat = [x for x in p.values() if x.dim() < 2]  # the weights of norms: no decay
    optimizer = torch.optim.AdamW([{"params": [x for x in p.values() if x.dim() >= 2], "weight_decay": DECAY},
                                   {"params": flat, "weight_decay": 0.0}], lr=LEARNING_RATE)
    results, losses = {}, []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(p, *(dump[f"batch.{step}.{name}"].to(dtype) for name in ("xc", "yc", "xt", "yt")), pre_norm)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            results |= {"gradient." + name: x.grad.clone() for name, x in p.items()}
        optimizer.step()
    results |= {"final." + name: x.detach() for name, x in p.items()}
    return results | {f"loss.{step}": torch.tensor(loss, dtype=torch.float64) for step, loss in enumerate(losses)}


def relative(got, want):
    return float((got.detach().double() - want.double()).abs().max() / want.double().abs().max())


passed = failed = 0
print(f"{'model':<10}{'what':<10}{'compared':>9}{'limit':>9}{'tessera':>10}{'torch f32':>10}  the worst")
for kind in ("post", "pre"):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "dump.safetensors")
        subprocess.run([sys.argv[1], path, kind], check=True)
        dump = load_file(path)
    truth, baseline = (train(dump, dtype, kind == "pre") for dtype in (torch.float64, torch.float32))
    ours = dump | {f"loss.{step}": loss for step, loss in enumerate(dump["loss"])}
    assert all(math.isfinite(float(truth[f"loss.{step}"])) for step in range(STEPS))
    for what, limit in LIMITS.items():
        errors = {name: relative(ours[name], x) for name, x in truth.items() if name.startswith(what)}
        theirs = max(relative(baseline[name], truth[name]) for name in errors)
        worst = max(errors, key=errors.get)
        print(f"{kind + '-norm':<10}{what:<10}{len(errors):>9}{limit:>9.0e}{errors[worst]:>10.1e}{theirs:>10.1e}  {worst}")
        bad = [name for name, e in errors.items() if not e <= limit]
        for name in bad:
            print(f"FAILED {kind}-norm {name}: {errors[name]:.3g}, limit {limit:g}")
        passed, failed = passed + len(errors) - len(bad), failed + len(bad)
    moved = max(relative(dump["initial." + n[6:]], x) for n, x in truth.items() if n.startswith("final."))
    if moved < 100 * LIMITS["final"]:
        failed += 1
        print(f"FAILED {kind}-norm: parameters moved by {moved:.2g} only; agreement says nothing")
print(f"{passed} passed, {failed} failed")
sys.exit(1 if failed else 0)
