#pragma once

#include "tensor/tensor.h"

namespace tessera::ops {

/// Rotary position embedding (Su et al., "RoFormer", arXiv:2104.09864, section 3.4), in the half-rotation
/// layout of LLaMA in transformers: element i is paired with element i + R / 2. Of the head at position p:
///   y[i]         = x[i] c[p, i] - x[i + R/2] s[p, i]
///   y[i + R/2]   = x[i + R/2] c[p, i] + x[i] s[p, i]        0 <= i < R / 2
///   y[j]         = x[j]                                     R <= j < D
/// x [B, T, H, D] -> y of that shape. `table` [P, R], R even and at most D, holds a position in a row: first
/// its R/2 cosines c, then its R/2 sines s; ops::rope_table makes it, with any scaling of the angles.
///
/// Token t of sequence b has position `offset` + t, or positions[b, t] if `positions` is given ([T], the same
/// for all sequences, or [B, T]; i64 or i32; then offset must be 0): a step that is replayed from a graph has
/// its positions on the device.
///
/// x has any layout; elements of a head that are not adjacent are copied first. The table is f32 (f64 for
/// f64), on x's device, and gets no gradient. Rounding: computed in f32 (f64), rounded once. Kept for
/// backward: table and positions; dx is the rotation by the opposite angle of dy, which is the transpose even
/// where c^2 + s^2 is not 1. A position outside [0, P): on the CPU an error that names it; on a GPU, where
/// the host does not wait to look, that token's y and dx are NaN. Throws for shapes, dtypes or devices that
/// do not fit, and if offset + T exceeds P.
Tensor rope(const Tensor& x, const Tensor& table, int64_t offset = 0, Site site = Site::here());
Tensor rope(const Tensor& x, const Tensor& table, const Tensor& positions, Site site = Site::here());

}  // namespace tessera::ops
