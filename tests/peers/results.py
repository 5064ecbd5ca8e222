"""results.py: the peers that are no operators of PyTorch do the work that their records name. Sliced backward passes, eager and
compiled, are dense ones of a dy with zeros in the other rows; Triton kernels, in its interpreter, agree with PyTorch; a step with
DropBP has the forward pass of one without it, and no gradients of dropped branches."""
import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import torch.nn.functional as F

import bert
import sliced
import works

TOKENS, N = 40, 9


def normal(*shape, grad=True):
    return torch.randn(*shape).requires_grad_(grad)


def close(got, want, what):
    assert (got is None) == (want is None), what
    if got is not None:
        assert (got - want).abs().max() <= 2e-5 * want.abs().max(), (what, (got - want).abs().max())


def check_rows(mode, factors, dy):
    """`factors` of the rows: 0, or the scale, as often as the row was drawn."""
    taken, norms = factors > 1e-3, dy.norm(dim=1).double()
    if mode == "importance":
        times = factors * N * norms / norms.sum()
        close(times, times.round(), "a row drawn a whole number of times")
        assert times.sum().round() == N and times.max() > 1.5, times
        return
    want = {"first": torch.arange(TOKENS) < N, "top_norm": norms >= norms.sort().values[-N], "random": taken}[mode]
    assert taken.sum() == N and torch.equal(taken, want), (mode, taken)
    scale = TOKENS / N if mode == "random" else 1.0
    close(factors[taken], torch.full((N,), scale, dtype=torch.float64), "scales")


def check_sliced(mode, weight_grad, compiled):
    choice = sliced.Slice({"slice": mode, "rows": str(N), "weight_grad": weight_grad}, TOKENS)
    trains = weight_grad != "none"
    x, up, down = normal(TOKENS, 6), normal(11, 6, grad=trains), normal(7, 11, grad=trains)
    up_bias, down_bias = normal(11), normal(7)
    for dense, run, inputs in (
            (F.linear, sliced.linear(choice), [x, up, up_bias]),
            (lambda x, u, w, b, c: F.linear(F.gelu(F.linear(x, u, b)), w, c), sliced.mlp(choice, "gelu", F.gelu),
             [x, up, down, up_bias, down_bias])):
        if compiled:
            run = torch.compile(run, backend="aot_eager")
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        y, want_y = run(*inputs), dense(*exact)
        close(y, want_y, "y")
        dy = torch.randn_like(y)
        dy[3] *= 100  # drawn several times by its importance
        got = dict(zip([i for i, tensor in enumerate(inputs) if tensor.requires_grad],
                       torch.autograd.grad(y, [tensor for tensor in inputs if tensor.requires_grad], dy)))
        whole = torch.autograd.grad(want_y, exact, dy.double(), retain_graph=True)
        factors = (got[0] * whole[0]).sum(1) / whole[0].square().sum(1)
        check_rows(mode, factors, dy)
        sliced_rows = torch.autograd.grad(want_y, exact, dy.double() * factors[:, None])
        last_weight = len(inputs) // 2  # of the layer that dy reaches; the last input is its bias
        for i, gradient in got.items():
            full = i == len(inputs) - 1 or (i == last_weight and weight_grad == "full")
            close(gradient, (whole if full else sliced_rows)[i], f"{mode} {weight_grad} gradient {i}")


def check_triton():
    import kernels
    for dtype in (torch.float32, torch.float16):
        x, weight, bias = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((67, 33), (70, 33), (70,)))
        choice = sliced.Slice({"slice": "first", "rows": "21", "weight_grad": "none"}, 67)
        frozen = [x, weight.detach(), bias]
        works.check_against(sliced.linear(choice, kernels.multiply_rows), sliced.linear(choice), frozen, "dx of the first rows")
        for kind in ("none", "relu", "relu_squared"):
            def expected(x, weight, bias=None):
                return works.ACTIVATIONS[kind](F.linear(x, weight, bias))
            for inputs in ([x, weight, bias], [x, weight]):
                works.check_counts(kernels.linear_activation(kind, tuned=False), expected, inputs)
    try:
        works.check_against(lambda x: x * 1.03, lambda x: x * 1.0, [x], "a wrong peer")
    except works.WrongPeer:
        return
    raise AssertionError("a wrong peer was not noticed")


def check_drops():
    flops = bert.DropBP(0.5, 12, 768, 3072, 512)
    for _ in range(200):
        gone = [f for f, drops in zip(flops.flops, (drop for drops in flops.draw() for drop in drops)) if drops]
        assert 0.5 <= sum(gone) / sum(flops.flops) < 1
    model = bert.Bert(32, 64, 2, 3, 50, 16, dropout=0.0, first=True)
    batch = torch.randint(50, (2, 8)), torch.randint(2, (2, 8)), torch.randint(2, (2,))
    undropped = model(*batch)
    model.drops = [(True, False), (False, True), (True, True)]
    loss = model(*batch)
    assert torch.equal(loss, undropped)
    loss.backward()
    for block, (attention, feed_forward) in zip(model.blocks, model.drops):
        for layer, dropped in ((block.qkv, attention), (block.out, attention), (block.up, feed_forward), (block.down, feed_forward)):
            assert (layer.weight.grad is None) == dropped
    assert model.token.weight.grad.abs().max() > 0


torch.manual_seed(0)
torch._dynamo.config.recompile_limit = 1000
torch._dynamo.config.fail_on_recompile_limit_hit = True
for compiled in (False, True):
    for mode in ("first", "random", "top_norm", "importance"):
        for weight_grad in ("none", "slice", "full"):
            check_sliced(mode, weight_grad, compiled)
check_drops()
if importlib.util.find_spec("triton"):
    check_triton()
