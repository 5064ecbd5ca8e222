"""Two published methods' Triton kernels, written from their descriptions: dx of the first rows (fixed-slice backward), and a GEMM
whose epilogue applies an activation and counts the elements of each column that are not zero (2:4 activations).

On CPU tensors they run in Triton's interpreter (TRITON_INTERPRET=1), for tests.
"""
import torch
import triton
import triton.language as tl


def precision():
    return "tf32" if torch.get_float32_matmul_precision() == "high" else "ieee"


@triton.jit
def tile_of(rows, columns, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """This block's tile: GROUP tiles of rows share their columns in L2."""
    tile, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(rows, BM), tl.cdiv(columns, BN)
    first = tile // (GROUP * tiles_n) * GROUP
    group = min(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return first + within % group, within // group


@triton.jit
def accumulate(a, b, m, n, rows, columns, depth, b_k, b_n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
               PRECISION: tl.constexpr):
    """Rows m of a (row-major) times columns n of b, whose strides are b_k and b_n, in f32."""
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for begin in range(0, depth, BK):
        k = begin + tl.arange(0, BK)
        left = tl.load(a + m.to(tl.int64)[:, None] * depth + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < depth), other=0.0)
        right = tl.load(b + k.to(tl.int64)[:, None] * b_k + n.to(tl.int64)[None, :] * b_n,
                        mask=(k[:, None] < depth) & (n[None, :] < columns), other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    return sums


@triton.jit
def rows_kernel(a, b, out, rows, columns, depth, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                GROUP: tl.constexpr):
    tile_m, tile_n = tile_of(rows, columns, BM, BN, GROUP)
    m, n = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    sums = accumulate(a, b, m, n, rows, columns, depth, columns, 1, BM, BN, BK, PRECISION)
    tl.store(out + m.to(tl.int64)[:, None] * columns + n[None, :], sums.to(out.dtype.element_ty),
             mask=(m[:, None] < rows) & (n[None, :] < columns))


def config(bm, bn, bk, group, stages, warps):
    return triton.Config({"BM": bm, "BN": bn, "BK": bk, "GROUP": group}, num_stages=stages, num_warps=warps)


rows_tuned = triton.autotune(key=["rows", "columns", "depth"], configs=[
    config(128, 256, 64, 8, 3, 8), config(128, 128, 64, 8, 3, 8), config(64, 256, 32, 8, 4, 4), config(64, 128, 64, 8, 3, 4),
    config(64, 64, 128, 8, 3, 4), config(32, 128, 64, 8, 4, 4), config(32, 64, 128, 4, 3, 4), config(16, 128, 64, 4, 4, 4),
    config(16, 64, 128, 4, 4, 4)])(rows_kernel)


def multiply_rows(a, b, out):
    """out = a @ b for contiguous matrices."""
    assert a.is_contiguous() and b.is_contiguous() and out.is_contiguous()
    (rows, depth), columns = a.shape, b.size(1)
    grid = lambda meta: (triton.cdiv(rows, meta["BM"]) * triton.cdiv(columns, meta["BN"]),)
    if out.is_cuda:
        rows_tuned[grid](a, b, out, rows, columns, depth, PRECISION=precision())
    else:
        rows_kernel[grid](a, b, out, rows, columns, depth, PRECISION=precision(), BM=16, BN=64, BK=32, GROUP=4)


@triton.jit
def counts_kernel(x, weight, bias, y, counts, rows, columns, depth, HAS_BIAS: tl.constexpr, RELU: tl.constexpr, SQUARE: tl.constexpr,
                  PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    tile_m, tile_n = tile_of(rows, columns, BM, BN, GROUP)
    m, n = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    h = accumulate(x, weight, m, n, rows, columns, depth, 1, depth, BM, BN, BK, PRECISION)
    if HAS_BIAS:
        h += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if RELU:
        h = tl.maximum(h, 0.0)
    if SQUARE:
        h = h * h
    stored = h.to(y.dtype.element_ty)
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    tl.store(y + m.to(tl.int64)[:, None] * columns + n[None, :], stored, mask=inside)
    # Of what is stored, without the rows beyond the last.
    tl.atomic_add(counts + n, tl.sum(((stored != 0) & inside).to(tl.int32), 0), mask=n < columns)


PUBLISHED = {"BM": 64, "BN": 64, "BK": 32, "GROUP": 8}
counts_tuned = triton.autotune(key=["rows", "columns", "depth"], reset_to_zero=["counts"], configs=[
    config(128, 256, 64, 8, 3, 8), config(256, 128, 64, 8, 3, 8), config(128, 128, 64, 8, 4, 8), config(128, 128, 64, 8, 3, 4),
    config(128, 64, 64, 8, 4, 4), config(64, 128, 64, 8, 4, 4), config(64, 64, 32, 8, 4, 4)])(counts_kernel)


def activated(x, weight, bias, kind, tuned):
    """(y = kind(x weight^T + bias), elements of each column of y that are not zero)"""
    assert x.is_contiguous() and weight.is_contiguous()
    (rows, depth), columns = x.shape, weight.size(0)
    y, counts = x.new_empty(rows, columns), torch.zeros(columns, dtype=torch.int32, device=x.device)
    grid = lambda meta: (triton.cdiv(rows, meta["BM"]) * triton.cdiv(columns, meta["BN"]),)
    kernel, tiles = (counts_tuned, {}) if tuned else (counts_kernel, PUBLISHED)
    kernel[grid](x, weight, bias, y, counts, rows, columns, depth, HAS_BIAS=bias is not None, RELU=kind != "none",
                 SQUARE=kind == "relu_squared", PRECISION=precision(), **tiles)
    return y, counts


def linear_activation(kind, tuned):
    """f(x, weight, bias=None) as `activated`; backward by PyTorch's operators, from y alone."""

    class LinearActivation(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            y, counts = activated(x, weight, bias, kind, tuned)
            ctx.save_for_backward(x, weight, y)
            ctx.has_bias = bias is not None
            ctx.mark_non_differentiable(counts)
            return y, counts

        @staticmethod
        def backward(ctx, dy, _):
            x, weight, y = ctx.saved_tensors
            slope = {"none": lambda: None, "relu": lambda: y > 0, "relu_squared": lambda: y.sqrt().mul_(2)}[kind]()
            dh = dy if slope is None else dy * slope
            return dh @ weight, dh.T @ x, dh.sum(0) if ctx.has_bias else None
    return lambda x, weight, bias=None: LinearActivation.apply(x, weight, bias)
