"""Sliced backward passes in PyTorch: what ops/linear/sliced_backward.h defines, by index_select, GEMMs of the chosen rows, and zeros.

No pass waits for the device, so each can be captured in a CUDA graph. Rows that are known before backward (first, random) are drawn
in forward, which then saves these rows only. Without a weight gradient x is not saved at all.
"""
import torch
import torch.nn.functional as F

aten = torch.ops.aten
ACTIVATION_GRADIENTS = {"silu": aten.silu_backward, "relu": lambda d, h: aten.threshold_backward(d, h, 0), "gelu": aten.gelu_backward,
                        "gelu_tanh": lambda d, h: aten.gelu_backward(d, h, approximate="tanh"),
                        "relu_squared": lambda d, h: 2 * F.relu(h) * d, "none": lambda d, h: d}


def gemm(a, b, out):
    torch.mm(a, b, out=out)


@torch.compiler.disable  # PyTorch 2.15 would put a draw into the forward and another one into the backward graph
def drawn(n, tokens, device):
    return torch.randperm(tokens, device=device)[:n]


class Slice:
    """Attributes of a sliced operator whose input has `tokens` rows. Rows are None for the first n, else indices."""

    def __init__(self, attrs, tokens):
        self.tokens, self.mode, self.weight_grad = tokens, attrs["slice"], attrs.get("weight_grad", "slice")
        self.n = min(int(attrs.get("rows", 0)) or max(int(float(attrs.get("share", 0)) * tokens * (1 + 1e-9)), 1), tokens)
        if self.n == tokens:
            self.mode = "first"

    def known_rows(self, x):
        return drawn(self.n, self.tokens, x.device) if self.mode == "random" and torch.is_grad_enabled() else None

    def rows_of(self, dy, known):
        """(rows, their scale or None)"""
        if self.mode == "first":
            return None, None
        if self.mode == "random":
            return known, self.tokens / self.n
        norms = torch.linalg.vector_norm(dy, dim=1, dtype=torch.float32)
        if self.mode == "top_norm":
            return torch.topk(norms, self.n, sorted=False).indices, None
        # importance: systematic sampling. A row whose norm is above the step is drawn several times.
        ends = norms.cumsum(0)
        step = ends[-1] / self.n
        points = (torch.arange(self.n, device=dy.device) + torch.rand(1, device=dy.device)) * step
        rows = torch.searchsorted(ends, points).clamp_(max=self.tokens - 1)
        return rows, (step / norms[rows]).to(dy.dtype)[:, None]

    def take(self, x, rows):
        return x[:self.n] if rows is None else x.index_select(0, rows)

    def keep(self, x, known):
        """What forward saves of x."""
        return self.take(x, known) if self.mode in ("first", "random") else x

    def take_kept(self, kept, rows):
        return kept if self.mode in ("first", "random") else self.take(kept, rows)

    def chosen(self, dy, rows, scale):
        part = self.take(dy, rows)
        return part if scale is None else part * scale

    def input_gradient(self, d, weight, rows, gemm=gemm):
        """d @ weight in the chosen rows, zeros in the others."""
        dx = d.new_empty(self.tokens, weight.size(1))
        if rows is None:
            gemm(d, weight, dx[:self.n])
            dx[self.n:].zero_()
            return dx
        dx.zero_()
        write = dx.index_add_ if self.mode == "importance" else dx.index_copy_
        return write(0, rows, d @ weight)


def linear(choice, gemm=gemm):
    """y = f(x, weight, bias=None). dx of the first rows is computed by `gemm(a, b, out)`."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, known):
            kept = {"none": lambda: None, "slice": lambda: choice.keep(x, known), "full": lambda: x}[choice.weight_grad]()
            ctx.save_for_backward(kept, weight, known)
            ctx.has_bias = bias is not None
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx, dy):
            kept, weight, known = ctx.saved_tensors
            rows, scale = choice.rows_of(dy, known)
            d = choice.chosen(dy, rows, scale)
            dx = choice.input_gradient(d, weight, rows, gemm)
            d_weight = None
            if choice.weight_grad == "slice":
                d_weight = d.T @ choice.take_kept(kept, rows)
            elif choice.weight_grad == "full":
                d_weight = dy.T @ kept
            return dx, d_weight, dy.sum(0) if ctx.has_bias else None, None
    return lambda x, weight, bias=None: Linear.apply(x, weight, bias, choice.known_rows(x))


def mlp(choice, kind, activation):
    """y = f(x, up, down, up_bias=None, down_bias=None). Rows are chosen once, by dy; the gradients of up and its bias are those of the
    rows that arrive there, also with weight_grad full."""

    class Mlp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, up, down, up_bias, down_bias, known):
            h = F.linear(x, up, up_bias)
            a = activation(h)
            x_kept = None if choice.weight_grad == "none" else choice.keep(x, known)
            ctx.save_for_backward(x_kept, choice.keep(h, known), a if choice.weight_grad == "full" else None, up, down, known)
            ctx.biases = up_bias is not None, down_bias is not None
            return F.linear(a, down, down_bias)

        @staticmethod
        def backward(ctx, dy):
            x_kept, h_kept, a, up, down, known = ctx.saved_tensors
            rows, scale = choice.rows_of(dy, known)
            d = choice.chosen(dy, rows, scale)
            h = choice.take_kept(h_kept, rows)
            dh = ACTIVATION_GRADIENTS[kind](d @ down, h)
            dx = choice.input_gradient(dh, up, rows)
            d_up = None if choice.weight_grad == "none" else dh.T @ choice.take_kept(x_kept, rows)
            d_down = {"none": lambda: None, "slice": lambda: d.T @ activation(h), "full": lambda: dy.T @ a}[choice.weight_grad]()
            return dx, d_up, d_down, dh.sum(0) if ctx.biases[0] else None, dy.sum(0) if ctx.biases[1] else None, None
    return lambda x, up, down, up_bias=None, down_bias=None: Mlp.apply(x, up, down, up_bias, down_bias, choice.known_rows(x))
