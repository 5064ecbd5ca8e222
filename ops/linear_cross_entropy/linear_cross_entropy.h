#pragma once

#include "ops/reduction.h"
#include "tensor/tensor.h"

namespace tessera::ops {

struct LinearCrossEntropyOptions {
  int64_t ignore_index = -100;  // tokens with this target have loss 0 and gradient 0
  double label_smoothing = 0;   // e in [0, 1]
  Reduction reduction = Reduction::mean;
  int64_t chunk = 0;  // tokens whose logits exist at once; 0: see linear_cross_entropy_chunk
};

/// The head of a language model and its loss, of which the logits never exist as a whole: of each row x of
/// x [..., d] with target t of targets [...] (i64 or i32),
///   l = x weight^T + bias,  p = softmax(l),  loss = -(1 - e) log p_t - (e / V) sum_v log p_v
/// with weight [V, d], bias [V] or undefined, e = label_smoothing; what mean, sum, none, ignore_index and
/// targets outside [0, V) mean is as in cross_entropy. One floating dtype for x, weight and bias. The loss is
/// f32 (f64 for f64), of the shape of targets for Reduction::none, else of rank 0.
///
/// Tokens are taken in chunks. For mean and sum, while a tape records, each chunk's gradients
///   dx = dl weight,  dweight += dl^T x,  dbias += column sums of dl
/// are made as soon as its logits are there, for the gradient of the loss that the tape's backward(loss)
/// begins with (1, or its loss scale: dl is multiplied by it before it is rounded); backward scales them if
/// another gradient arrives. That is three GEMMs of N V d instead of four. For none the logits are made
/// again in backward. Extra memory: a chunk (by default 1 GiB of logits; variant "composed" rounds 16-bit dl
/// to half as much again), dweight and dbias in f32, dx, and a chunk of x and of dx.
///
/// Rounding: logits and losses are f32 (f64), the losses summed in double. Variant "composed" rounds dl to
/// x's dtype, variant "wgmma" (compute capability 9.0, bf16, neither bias nor smoothing) exp(l - l_t)
/// instead, and for dweight x times its row's factor: see linear_cross_entropy_sm90.cu. dx has x's dtype,
/// dweight and dbias are handed over in f32 (f64). All sums have a fixed order. Saves the gradients, or for
/// none x, weight, bias and targets. Throws for shapes, dtypes or devices that do not fit, V = 0 with tokens,
/// and on the CPU for a target outside [0, V) that is not ignore_index.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const Tensor& bias = {}, const LinearCrossEntropyOptions& options = {},
                            Site site = Site::here());

/// Tokens of a chunk: the largest power of two whose logits, of that dtype, take at most 1 GiB; at least 128.
int64_t linear_cross_entropy_chunk(int64_t classes, DType dtype);

}  // namespace tessera::ops
