#pragma once

#include <span>
#include <string>

#include "tensor/tensor.h"

namespace tessera::datasets {

/// Reads an IDX file (LeCun, Cortes, Burges: the MNIST database, "the IDX file format"): two zero bytes, a
/// type, a rank, that many big-endian 32-bit sizes, then the elements, big-endian, in row-major order. The
/// result is packed, on the host: u8 for unsigned bytes, i32 for signed bytes and 16- and 32-bit integers,
/// f32, f64. Throws, naming the file, for anything else, for a rank above 8, and unless the file is exactly
/// as long as its header says.
Tensor read_idx(const std::string& path);
/// The same from memory; `name` is what messages call it.
Tensor parse_idx(std::span<const char> bytes, const std::string& name);

struct LabelledImages {
  Tensor images;  // f32 [B, rows * columns], 0 ... 1
  Tensor labels;  // i64 [B]
  void fields(auto&& visit) { visit("images", images), visit("labels", labels); }
};

/// Images with labels from two IDX files, "<prefix>-images.idx" and "<prefix>-labels.idx", or under the
/// names that MNIST gave them: "<prefix>-images-idx3-ubyte" and "<prefix>-labels-idx1-ubyte".
class Idx {
 public:
  explicit Idx(const std::string& prefix);
  /// From tensors: images u8 [items, ...], labels u8 or i32 [items].
  Idx(Tensor images, Tensor labels);
  int64_t size() const { return images_.size(0); }
  LabelledImages batch(std::span<const int64_t> indices) const;

 private:
  Tensor images_, labels_;
};

}  // namespace tessera::datasets
