#include "optim/packing.h"

#include <algorithm>

#include "runtime/integers.h"
#include "tensor/pads.h"

namespace tessera::optim {
namespace {

/// True if the weight's rows follow each other with their own row padding between them: then that may be read
/// and written like elements.
bool is_padded_throughout(const Tensor& tensor) {
  return tensor.count() > 0 &&
         tensor.row_stride() * int64_t(size_of(tensor.dtype())) == tensor.storage()->pitch_bytes &&
         owns_row_padding(tensor, tensor.row_stride());
}

/// The weight as rows: a packed one is a single row, and so is one with its pads, up to its last element.
struct Rows {
  int64_t rows, width;
};

Rows rows_of(const Tensor& tensor) {
  if (tensor.layout().is_packed()) return {1, tensor.count()};
  if (is_padded_throughout(tensor))
    return {1, (tensor.rows() - 1) * tensor.row_stride() + tensor.row_length()};
  return {tensor.rows(), tensor.row_length()};
}

}  // namespace

Packing::Packing(const char* who, std::vector<nn::NamedParameter> parameters, std::vector<size_t> arrangement,
                 bool short_states)
    : parameters_(std::move(parameters)), arrangement_(std::move(arrangement)) {
  if (!parameters_.empty()) {
    device_ = parameters_.front().tensor.device();
    compute_ = parameters_.front().tensor.dtype() == DType::f64 ? DType::f64 : DType::f32;
  }
  if (arrangement_.empty())
    for (size_t i = 0; i < parameters_.size(); ++i) arrangement_.push_back(i);
  places_.resize(parameters_.size());
  for (const size_t i : arrangement_) {
    check_parameter(who, i);
    first_chunks_.push_back(int64_t(chunks_.size()));
    place(i, short_states);
  }
  first_chunks_.push_back(int64_t(chunks_.size()));
  for (size_t i = 0; i < places_.size(); ++i) {
    const int64_t elements = elements_of(i);
    for (int64_t at = 0; at < elements; at += kNormBlockElements)
      norm_blocks_.push_back({places_[i].offset + at, int32_t(std::min(kNormBlockElements, elements - at)),
                              int32_t(norm_blocks_.size())});
  }
}

void Packing::check_parameter(const char* who, size_t parameter) const {
  const auto& [name, tensor] = parameters_[parameter];
  check(is_floating(tensor.dtype()) && tensor.dtype() != DType::f8e4m3, who, ": parameter ", name, " ",
        describe(tensor), " is not supported; expected f64, f32, bf16 or f16");
  check((tensor.dtype() == DType::f64) == (compute_ == DType::f64), who, ": parameter ", name, " ",
        describe(tensor), " beside ", parameters_.front().name, " ", describe(parameters_.front().tensor),
        "; all or none of the parameters must be f64");
  check(tensor.device() == device_, who, ": parameter ", name, " is on ", tensor.device().name(),
        ", the others on ", device_.name(), "; move the model with nn::to before making the optimizer");
  check(compute_ != DType::f64 || device_.is_cpu(), who, ": parameter ", name, ": dtype f64 is not ",
        "supported on device ", device_.name(), "; expected f32, bf16 or f16");
  check(tensor.has_rows() && !tensor.layout().is_expanded(), who, ": parameter ", name, " ", describe(tensor),
        " has no rows (it is transposed or expanded); clone() it");
}

int64_t Packing::elements_of(size_t parameter) const {
  const Rows rows = rows_of(parameters_[parameter].tensor);
  return round_up(rows.rows > 1 ? rows.rows * places_[parameter].arena_stride : rows.width, 64);
}

void Packing::place(size_t parameter, bool short_states) {
  const Tensor& tensor = parameters_[parameter].tensor;
  const Rows rows = rows_of(tensor);
  Place& place = places_[parameter];
  place.weight = tensor.raw();
  place.dtype = tensor.dtype();
  place.stride = tensor.layout().is_packed() ? rows.width : tensor.row_stride();
  place.arena_stride = rows.rows > 1 ? round_up(rows.width, 4) : place.stride;
  place.offset = size_;
  place.aligned = reinterpret_cast<uintptr_t>(place.weight) % (4 * size_of(place.dtype)) == 0 &&
                  (rows.rows == 1 || place.stride % 4 == 0);
  const int64_t elements = elements_of(parameter);
  size_ += elements;
  if (!short_states && size_of(place.dtype) == 2) {
    place.master = master_size_;
    master_size_ += elements;
  }
  const int64_t most = short_states ? 2 * kChunkElements : kChunkElements;
  const int64_t columns = std::min(rows.width, most);
  const int64_t rows_at_once = columns ? std::max<int64_t>(1, most / columns) : 1;
  for (int64_t row = 0; row < rows.rows; row += rows_at_once)
    for (int64_t column = 0; column < rows.width; column += columns) {
      chunks_.push_back({row, column, int32_t(std::min(rows_at_once, rows.rows - row)),
                         int32_t(std::min(columns, rows.width - column)), int32_t(parameter)});
      chunk_offsets_.push_back(place.offset + row * place.arena_stride + column);
    }
}

int64_t Packing::chunk_from(int64_t element) const {
  return std::ranges::lower_bound(chunk_offsets_, element) - chunk_offsets_.begin();
}

int64_t Packing::masters_before(int64_t element) const {
  // The parameters of the arenas follow each other, and so do those that have masters.
  for (const size_t i : arrangement_)
    if (has_master(i) && places_[i].offset + elements_of(i) > element)
      return places_[i].master + std::max<int64_t>(0, element - places_[i].offset);
  return master_size_;
}

int64_t Packing::weight_elements(size_t parameter) const {
  const auto& [name, tensor] = parameters_[parameter];
  const Rows rows = rows_of(tensor);
  check(rows.rows <= 1, "optimizer: ", name, " ", describe(tensor),
        " is part of a larger tensor; its states cannot be spread over ranks (clone() it, or --zero 0)");
  return rows.rows == 0 ? 0 : rows.width;
}

PackedRange Packing::range(size_t begin, size_t end) const {
  const auto offset = [&](size_t position) {
    return position < arrangement_.size() ? places_[arrangement_[position]].offset : size_;
  };
  return {offset(begin), offset(end) - offset(begin), first_chunks_[begin],
          first_chunks_[end] - first_chunks_[begin]};
}

Tensor Packing::view_at(const Tensor& arena, size_t parameter, int64_t offset) const {
  const Tensor& tensor = parameters_[parameter].tensor;
  Layout layout = tensor.layout().is_packed()
                      ? Layout::packed(tensor.shape())
                      : Layout::pitched(tensor.shape(), places_[parameter].arena_stride);
  layout.offset = offset;
  return Tensor::view_of(arena.storage(), layout, arena.dtype());
}

Tensor Packing::view(const Tensor& arena, size_t parameter, int64_t first) const {
  return view_at(arena, parameter, places_[parameter].offset - first);
}

Tensor Packing::master_view(const Tensor& masters, size_t parameter) const {
  return view_at(masters, parameter, places_[parameter].master);
}

void Packing::upload() {
  place_table_ = table_on(device_, places_);
  chunk_table_ = table_on(device_, chunks_);
  norm_block_table_ = table_on(device_, norm_blocks_);
}

const Place* Packing::place_table() const {
  return static_cast<const Place*>(place_table_.raw());
}

const Chunk* Packing::chunk_table() const {
  return static_cast<const Chunk*>(chunk_table_.raw());
}

const NormBlock* Packing::norm_block_table() const {
  return static_cast<const NormBlock*>(norm_block_table_.raw());
}

}  // namespace tessera::optim
