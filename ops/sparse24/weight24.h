#pragma once

#include <optional>

#include "ops/sparse24/sparse24.h"

/// Training with 2:4 weights by transposable masks (Hu et al., arXiv:2404.01847).

namespace tessera::ops {

/// The transposable 2:4 mask of a weight [R, C], floating, of any layout: of every aligned 4 x 4 block two
/// elements per row and two per column are kept, so that both W and W^T are 2:4. Of the 90 patterns that of
/// the largest sum of magnitudes; of equal sums the lowest number. Patterns are numbered by the pairs of
/// columns that their rows keep, the first row first, pairs in the order 01, 02, 03, 12, 13, 23.
///
/// Exact: sums are of all 90 patterns, in f64 and in one order, so that all devices and any number of threads
/// give the same bits. NaN counts as infinity. Blocks at the edges are completed with zeros, and of a block
/// that has fewer than four rows or columns, fewer elements may be kept.
///
/// i32 [R, ceil(C / 32)], packed bits as of ops/bits. Not differentiable.
Tensor transposable24(const Tensor& weight, Site site = Site::here());

/// y = x (M . weight)^T + bias + residual, `.` the product element by element with a transposable mask M: x
/// [..., in], weight [out, in], mask i32 [out, ceil(in / 32)], bias [out] or undefined, residual [..., out]
/// or undefined -> y [..., out]. One floating dtype and device for all but the mask.
///   dx = dy (M . weight)
///   dweight = dy^T x          straight through: as if the weight had no mask, so that pruned elements train
///   dbias = column sums of dy in f32, dresidual = dy
/// y and dx are multiply24's GEMMs with the weight compressed along its inputs and along its outputs, which
/// chooses the variant: sparse tensor cores, or "decompressed", the masked weight multiplied as a dense one.
/// dweight is dense, unless there is a generator `mvue`: then it is S(dy)^T x, by multiply24 as well. S keeps
/// two of every four tokens of dy, drawn so that the mean over draws is dy (Method24::mvue), and each
/// recorded call takes a stream of the generator. The weight is compressed in each pass,
/// whose cost does not depend on the number of tokens.
///
/// Rounding: as multiply24, S(dy) to dy's dtype. Saves x, the weight and the mask; the weight and the mask
/// must not change before the backward pass. Throws where sizes, dtypes or devices disagree; a mask that is
/// not transposable throws no error: what of a group of four exceeds two elements is lost.
Tensor weight24_linear(const Tensor& x, const Tensor& weight, const Tensor& mask, const Tensor& bias = {},
                       const Tensor& residual = {}, const std::optional<Rng>& mvue = {},
                       Site site = Site::here());

/// Half the sum of the squares of the elements that the mask prunes: f32 (f64 for f64), of rank 0. As a part
/// of the loss, times a factor, it is that paper's masked decay: dweight += factor (1 - M) . weight. The
/// value and the gradient are f32 (f64). Saves the weight and the mask.
Tensor masked_decay24(const Tensor& weight, const Tensor& mask, Site site = Site::here());

}  // namespace tessera::ops
