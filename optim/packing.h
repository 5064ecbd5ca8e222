#pragma once

#include <cstring>

#include "nn/module.h"

/// How an optimizer sees its parameters: one arena for each kind of state and one table of chunks, so that a
/// step is one kernel launch whatever the number of parameters.

namespace tessera::optim {

/// One parameter as kernels see it. Element (r, c) of the weight is at weight + r * stride + c, and its state
/// at offset + r * arena_stride + c of each arena. Offsets are multiples of 64 elements. A weight that owns
/// its row padding is one long row, padding included; its values never reach an element.
struct Place {
  void* weight = nullptr;
  int64_t stride = 0;
  int64_t offset = 0;
  int64_t arena_stride = 0;
  int64_t master = -1;  // offset in the arena of masters (same stride); -1: the weight itself is the master
  double lr_scale = 1;
  double weight_decay = 0;
  DType dtype = DType::f32;
  bool aligned = false;  // four consecutive elements of the weight and of the arenas may be loaded at once
};

/// The unit of work of one block or CPU task: `rows` rows, `columns` wide, of one parameter. The first column
/// is a multiple of four.
struct Chunk {
  int64_t row = 0, column = 0;
  int32_t rows = 0, columns = 0;
  int32_t place = 0;
};

/// Consecutive elements of one parameter in the gradient arena, whose squares are summed as a unit for the
/// norm. Blocks start at a parameter's first element and are ordered by the parameters' definition, so the
/// norm does not depend on where parameters are in the arena.
struct NormBlock {
  int64_t offset = 0;    // in the arena; a multiple of 64
  int32_t elements = 0;  // a multiple of 64, with the zeros after a row and after the parameter
  int32_t slot = 0;      // index among all blocks, which fixes the order of summation
};

/// Of a norm block: 64 KiB of f32 gradients. Few enough that one block of threads adds up their sums in the
/// time of some reads, and enough to keep all SMs busy from some ten million parameters on.
inline constexpr int64_t kNormBlockElements = 16384;

/// Elements of a chunk, about: 16 KiB of each f32 state (see optim/elementwise.cuh). Twice as many have 16
/// KiB of each bf16 state.
inline constexpr int64_t kChunkElements = 4096;

/// Parameters that are adjacent in the arenas.
struct PackedRange {
  int64_t first = 0, elements = 0;  // of the arenas
  int64_t first_chunk = 0, chunks = 0;
};

class Packing {
 public:
  Packing() = default;
  /// `who` names the owner in messages. Throws unless the parameters have rows, are floating, lie on one
  /// device, and are all f64 (on the CPU) or none of them is; the list may be empty. `arrangement`: the order
  /// in which they are stored in the arenas, as indices into the list; empty: the order of the list.
  /// `short_states`: the states are bf16; then no parameter has a master, and chunks are twice as long.
  Packing(const char* who, std::vector<nn::NamedParameter> parameters, std::vector<size_t> arrangement = {},
          bool short_states = false);

  const std::vector<nn::NamedParameter>& parameters() const { return parameters_; }
  const std::vector<size_t>& arrangement() const { return arrangement_; }
  /// The position of parameters `begin` to `end` of the arrangement.
  PackedRange range(size_t begin, size_t end) const;
  Device device() const { return device_; }
  /// The dtype of the arenas: f64 for f64 parameters, else f32.
  DType compute_dtype() const { return compute_; }
  std::vector<Place>& places() { return places_; }
  const std::vector<Place>& places() const { return places_; }
  /// The arena of zeros for a state that every parameter has. Between rows and parameters those of gradients
  /// always stay zero, which the norm relies on; in other arenas the padding between rows is undefined.
  Tensor make_arena() const { return Tensor::zeros({size_}, compute_, device_); }
  /// The arena of masters: only bf16 and f16 parameters have a place in it.
  Tensor make_masters() const { return Tensor::zeros({master_size_}, compute_, device_); }
  bool has_master(size_t parameter) const { return places_[parameter].master >= 0; }
  /// A parameter's part of an arena, in the parameter's shape. An arena of a range begins at element `first`.
  Tensor view(const Tensor& arena, size_t parameter, int64_t first = 0) const;
  Tensor master_view(const Tensor& masters, size_t parameter) const;

  /// A table's bytes on the device, as u8. The host does not wait for the copy.
  template <class T>
  static Tensor table_on(Device device, const std::vector<T>& table) {
    const Tensor host = Tensor::empty_pinned({int64_t(table.size() * sizeof(T))}, DType::u8);
    if (!table.empty()) std::memcpy(host.raw(), table.data(), host.bytes());
    const Tensor bytes = Tensor::empty(host.shape(), DType::u8, device);
    bytes.copy_from(host);
    return bytes;
  }
  /// Copies the tables to the device, once the places are final.
  void upload();
  const Place* place_table() const;
  const Chunk* chunk_table() const;
  int64_t chunk_count() const { return int64_t(chunks_.size()); }
  const std::vector<NormBlock>& norm_blocks() const { return norm_blocks_; }
  const NormBlock* norm_block_table() const;

  // For states that are spread over ranks (optim/sharding.h).
  /// Where each chunk begins in arenas; rising.
  const std::vector<int64_t>& chunk_offsets() const { return chunk_offsets_; }
  /// The first chunk that begins at that element of an arena, or after it.
  int64_t chunk_from(int64_t element) const;
  /// How many elements of the arena of masters belong to parameters before that element of the others.
  int64_t masters_before(int64_t element) const;
  /// The weight's elements in memory, row padding included. Throws if it is in several pieces.
  int64_t weight_elements(size_t parameter) const;

 private:
  void check_parameter(const char* who, size_t parameter) const;
  void place(size_t parameter, bool short_states);
  int64_t elements_of(size_t parameter) const;  // of an arena, up to the next parameter
  Tensor view_at(const Tensor& arena, size_t parameter, int64_t offset) const;

  std::vector<nn::NamedParameter> parameters_;
  std::vector<size_t> arrangement_;
  std::vector<int64_t> first_chunks_;  // by position in the arrangement; one more entry for the end
  Device device_ = Device::cpu();
  DType compute_ = DType::f32;
  std::vector<Place> places_;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> chunk_offsets_;
  std::vector<NormBlock> norm_blocks_;
  int64_t size_ = 0, master_size_ = 0;
  Tensor place_table_, chunk_table_, norm_block_table_;  // u8, on the device
};

}  // namespace tessera::optim
