#pragma once

#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace tessera::sparsity {

/// A histogram of numbers whose range is not known before: bins are the leading bits of a float (sign,
/// exponent, 12 bits of the mantissa), so that a bin is 2.4e-4 of its value wide. Magnitudes below 2^-32 are
/// one bin, those of 2^32 and more another. Counts are exact; numbers may come in any order and in any
/// pieces. 4 MiB.
class Histogram {
 public:
  Histogram();
  /// x [..., in], floating, on any device (counted on the host); with `scales`, f32 [in] on the CPU, x_j
  /// times scale_j in f32.
  void add(const Tensor& x, const Tensor& scales = {});

  int64_t count() const { return count_; }
  /// Numbers that were infinite or NaN. They are in no bin.
  int64_t not_finite() const { return not_finite_; }
  /// The x below which a share of the numbers lies, by linear interpolation within its bin; 0 if it is empty.
  double quantile(double share) const;
  /// The same of |x|.
  double magnitude_quantile(double share) const;
  double largest_magnitude() const { return largest_; }

  /// Shares of the numbers in `bars` intervals of equal width from -limit to limit; what lies outside counts
  /// in the outermost ones.
  std::vector<double> bars(int64_t bars, double limit) const;

 private:
  /// A bin with numbers in it.
  struct Bin {
    double lower, upper;
    int64_t count;
  };
  double quantile_in(const std::vector<Bin>& bins, double share) const;
  const std::vector<Bin>& bins() const;
  const std::vector<Bin>& magnitude_bins() const;

  int64_t count_ = 0, not_finite_ = 0;
  double largest_ = 0;
  std::vector<int64_t> negative_, positive_;        // by magnitude
  mutable std::vector<Bin> bins_, magnitude_bins_;  // made when they are asked for
};

}  // namespace tessera::sparsity
