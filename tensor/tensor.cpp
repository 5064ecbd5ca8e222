#include "tensor/tensor.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "runtime/call_site.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"
#include "tensor/kernels.h"
#include "tensor/transfer.h"

namespace tessera {
namespace {

constexpr int64_t kRowAlign = 16;  // bytes: the unit of vector loads and of TMA strides
// TMA loads rows of a tile in 128 bytes; a row that straddles two 128-byte lines takes 2.5 times as long
// (docs/ops/gemm_attempts.md). So rows start on 128-byte lines if that adds at most a quarter: never below
// 103 bytes, always from 512 on.
constexpr int64_t kLine = 128;

/// Pitched rows and rounding at most double the bytes: below that no arithmetic on a layout overflows.
void check_bytes(const Shape& shape, DType dtype) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= std::max<int64_t>(size, 1);
  check(elements <= INT64_MAX / 4 / int64_t(size_of(dtype)), "tensor ", dtype, shape,
        ": the number of bytes overflows");
}

/// Uninitialised; the padding of the last row is allocated, too.
Tensor allocate(const Shape& shape, DType dtype, Device device, Allocator& allocator, bool pitched) {
  check_bytes(shape, dtype);
  const int64_t size = int64_t(size_of(dtype)), width = shape.rank() ? shape[-1] : 1;
  const int64_t pitch = pitched && shape.rank() >= 2 ? row_pitch(width, dtype) : width;
  const Layout layout = Layout::pitched(shape, pitch);
  const int64_t extent = layout.extent(), bytes = extent > 0 ? (extent + pitch - width) * size : 0;
  // Rounded up to 16 bytes, so that a vector load of the tail of the last row stays inside.
  auto storage = std::make_shared<Storage>(device, allocator, size_t(round_up(bytes, kRowAlign)));
  if (pitch > width) storage->row_bytes = width * size, storage->pitch_bytes = pitch * size;
  return Tensor::view_of(std::move(storage), layout, dtype);
}

}  // namespace

Storage::Storage(Device device, Allocator& allocator, size_t bytes)
    : device(device), allocator(&allocator), block(allocator.allocate(bytes)), bytes(bytes) {}

Storage::~Storage() {
  allocator->free(block);
}

int64_t row_pitch(int64_t width, DType dtype) {
  const int64_t size = int64_t(size_of(dtype));
  const int64_t unit = kRowAlign / size;
  if (width < unit) return width;
  const auto up = [&](int64_t to) { return round_up(width, to); };
  const int64_t lines = up(kLine / size);
  return lines - width <= width / 4 ? lines : up(unit);
}

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  return allocate(shape, dtype, device, device.allocator(), true);
}

Tensor Tensor::empty_packed(const Shape& shape, DType dtype, Device device) {
  return allocate(shape, dtype, device, device.allocator(), false);
}

Tensor Tensor::empty_pinned(const Shape& shape, DType dtype) {
  return allocate(shape, dtype, Device::cpu(), pinned_allocator(), false);
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, Device device) {
  return full(shape, 0, dtype, device);
}

Tensor Tensor::ones(const Shape& shape, DType dtype, Device device) {
  return full(shape, 1, dtype, device);
}

Tensor Tensor::full(const Shape& shape, double value, DType dtype, Device device) {
  Tensor tensor = empty(shape, dtype, device);
  tensor.fill(value);
  return tensor;
}

template <class T>
Tensor Tensor::from(std::span<const T> values, const Shape& shape, Device device) {
  check(int64_t(values.size()) == shape.count(), "Tensor::from: ", values.size(), " values for shape ", shape,
        " of ", shape.count(), " elements");
  Tensor host = empty_packed(shape, dtype_of<T>, Device::cpu());
  std::copy(values.begin(), values.end(), host.data<T>());
  Tensor tensor = empty(shape, dtype_of<T>, device);
  tensor.copy_from(host);
  return tensor;
}

Tensor Tensor::from_bools(const std::vector<bool>& values, const Shape& shape, Device device) {
  const auto plain = std::make_unique<bool[]>(values.size());
  std::copy(values.begin(), values.end(), plain.get());
  return from(std::span<const bool>(plain.get(), values.size()), shape, device);
}

Tensor Tensor::range_of_integers(int64_t begin, int64_t end, int64_t step, DType dtype, Device device) {
  check(step != 0 && (begin == end || (begin < end) == (step > 0)), "Tensor::arange: steps of ", step,
        " never lead from ", begin, " to ", end);
  // Unsigned numbers wrap around where signed ones would overflow.
  const uint64_t distance = step > 0 ? uint64_t(end) - uint64_t(begin) : uint64_t(begin) - uint64_t(end);
  const uint64_t length = step > 0 ? uint64_t(step) : -uint64_t(step);
  const uint64_t count = distance / length + (distance % length != 0);
  check(count <= uint64_t(INT64_MAX), "Tensor::arange: from ", begin, " to ", end, " are ", count,
        " elements, more than 63 bits");
  const Tensor host = empty_packed({int64_t(count)}, DType::i64);
  auto* const values = host.data<int64_t>();
  for (int64_t i = 0; i < host.count(); ++i)
    values[i] = int64_t(uint64_t(begin) + uint64_t(i) * uint64_t(step));
  return host.to(dtype).to(device);
}

Tensor Tensor::range_of_numbers(double begin, double end, double step, DType dtype, Device device) {
  const double count = begin == end ? 0.0 : std::ceil((end - begin) / step);
  check(std::isfinite(begin) && std::isfinite(end) && std::isfinite(step) && step != 0 && count >= 0,
        "Tensor::arange: steps of ", step, " never lead from ", begin, " to ", end);
  check(count < 0x1p63, "Tensor::arange: from ", begin, " to ", end, " are ", count,
        " elements, more than 63 bits");
  const Tensor host = empty_packed({int64_t(count)}, DType::f64);
  auto* const values = host.data<double>();
  for (int64_t i = 0; i < host.count(); ++i) values[i] = begin + double(i) * step;
  return host.to(dtype).to(device);
}

Tensor Tensor::with_rows() const {
  if (has_rows()) return *this;
  check_copy("with_rows");
  return detach().clone();
}

Tensor Tensor::with_layout(const Layout& layout, const char* what, const char* instead) const {
  check(defined(), what, ": the tensor is undefined");
  check(!grad_, what, ": ", describe(*this), is_result_ ? " is a result of the tape" : " requires a gradient",
        ", which a plain view would lose; use ", instead, " (or detach() first)");
  Tensor view;
  view.storage_ = storage_;
  view.layout_ = layout;
  view.dtype_ = dtype_;
  return view;
}

void Tensor::fail_undefined(const char* what) {
  fail_at(Site::here(), what,
          ": the tensor is undefined, as is the gradient of a leaf that has received none");
}

void Tensor::check_copy(const char* what, const char* instead) const {
  check(defined(), what, ": the tensor is undefined");
  const bool loses = is_result_ || (grad_ && TapeOfThread::innermost);
  check(!loses || CallScope::current().site.file, what, ": ", describe(*this),
        is_result_ ? " is a result of the tape" : " requires a gradient and there is a tape",
        ", and a copy would lose its gradient; use an operator, such as ", instead, " (or detach() first)");
}

void Tensor::check_elements(bool writes) const {
  if (writes) check_writable("elements");
  check(device().is_cpu(), "elements: ", describe(*this),
        " is not in the host's memory; use to_vector(), or to(Device::cpu()) first");
  check(layout_.is_packed(), "elements: the elements of ", describe(*this),
        " do not lie one after the other, since its rows are padded or it is a view; use packed() first, "
        "Tensor::empty_packed to make it, or to_vector() to read");
  if (writes) bump_version();
}

void Tensor::check_writable(const char* writer) const {
  check(defined(), writer, ": the tensor is undefined");
  check(!is_result_, writer, ": ", describe(*this),
        " is a result of the tape, whose gradient would still be that of the values before; write into a new "
        "tensor (or detach() first)");
}

Tensor Tensor::slice(int dim, int64_t begin, int64_t end, int64_t step) const {
  check(defined(), "slice: the tensor is undefined");
  const int d = shape().resolve(dim);
  const int64_t size = shape()[d];
  const int64_t from = begin < 0 ? begin + size : begin, to = end < 0 ? end + size : end;
  check(step >= 1, "slice: step ", step, " must be at least 1");
  check(0 <= from && from <= to && to <= size, "slice: [", begin, ", ", end, ") is not inside dimension ",
        dim, " of ", shape());
  Layout layout = layout_;
  const int64_t left = to == from ? 0 : (to - from - 1) / step + 1;
  layout.shape = shape().with(d, left);
  if (left > 1) layout.strides[size_t(d)] *= step;
  if (layout.shape.count() > 0) layout.offset += from * layout_.strides[size_t(d)];
  return with_layout(layout, "slice", "ops::slice");
}

Tensor Tensor::select(int dim, int64_t index) const {
  check(defined(), "select: the tensor is undefined");
  const int d = shape().resolve(dim);
  const int64_t size = shape()[d], at = index < 0 ? index + size : index;
  check(0 <= at && at < size, "select: index ", index, " is outside dimension ", dim, " of ", shape());
  Layout layout;
  layout.shape = shape().without(d);
  layout.offset = layout_.offset + at * layout_.strides[size_t(d)];
  for (int from = 0, to = 0; from < rank(); ++from)
    if (from != d) layout.strides[size_t(to++)] = layout_.strides[size_t(from)];
  return with_layout(layout, "select", "ops::select");
}

Tensor Tensor::at(std::initializer_list<int64_t> indices) const {
  check(defined(), "at: the tensor is undefined");
  check(int(indices.size()) == rank(), "at: ", indices.size(), " indices for ", describe(*this));
  check(!grad_ || !TapeOfThread::innermost, "at: ", describe(*this),
        is_result_ ? " is a result of the tape" : " requires a gradient and there is a tape",
        ", and an element of it would lose its gradient; to read it, use detach().at(...); ops::slice is "
        "recorded");
  Layout layout;
  layout.offset = layout_.offset;
  int dim = 0;
  for (const int64_t index : indices) {
    const int64_t size = shape()[dim], place = index < 0 ? index + size : index;
    check(0 <= place && place < size, "at: index ", index, " is outside dimension ", dim, " of ", shape());
    layout.offset += place * layout_.strides[size_t(dim++)];
  }
  return detach().with_layout(layout, "at", "");
}

Tensor Tensor::transpose(int a, int b) const {
  check(defined(), "transpose: the tensor is undefined");
  const int da = shape().resolve(a), db = shape().resolve(b);
  std::array<int64_t, kMaxRank> sizes{};
  std::ranges::copy(shape(), sizes.begin());
  std::swap(sizes[size_t(da)], sizes[size_t(db)]);
  Layout layout = layout_;
  layout.shape = Shape(std::span<const int64_t>(sizes.data(), size_t(rank())));
  std::swap(layout.strides[size_t(da)], layout.strides[size_t(db)]);
  return with_layout(layout, "transpose", "ops::transpose");
}

Tensor Tensor::permute(const std::vector<int>& order) const {
  check(int(order.size()) == rank(), "permute: ", order.size(), " dimensions named for ", describe(*this));
  Layout layout = layout_;
  std::array<int64_t, kMaxRank> sizes{};
  unsigned seen = 0;
  int to = 0;
  for (const int dim : order) {
    const int from = shape().resolve(dim);
    check(!(seen >> from & 1u), "permute: dimension ", dim, " is named twice");
    seen |= 1u << from;
    sizes[size_t(to)] = shape()[from];
    layout.strides[size_t(to++)] = layout_.strides[size_t(from)];
  }
  layout.shape = Shape(std::span<const int64_t>(sizes.data(), size_t(rank())));
  return with_layout(layout, "permute", "ops::permute");
}

namespace {

/// Strides that give `to` the elements of `from` in row-major order; false if no strides can.
bool reshape_layout(const Layout& from, const Shape& to, Layout& result) {
  result.shape = to;
  result.offset = from.offset;
  if (to.count() == 0) {
    result.strides = Layout::packed(to).strides;
    return true;
  }
  // Groups of dimensions with equal products on both sides; within a group the old dimensions must be
  // adjacent.
  int f = from.rank() - 1, t = to.rank() - 1;
  while (f >= 0 || t >= 0) {
    while (f >= 0 && from.shape[f] == 1) --f;
    if (f < 0) {
      for (; t >= 0; --t) result.strides[size_t(t)] = 1;  // sizes of 1
      break;
    }
    int64_t stride = from.strides[size_t(f)], have = from.shape[f], need = 1;
    while (t >= 0 && (need < have || to[t] == 1)) {
      result.strides[size_t(t)] = stride * need;
      need *= to[t--];
      while (need > have) {
        do {
          if (--f < 0) return false;
        } while (from.shape[f] == 1);
        if (from.strides[size_t(f)] != stride * have) return false;
        have *= from.shape[f];
      }
    }
    if (need != have) return false;
    --f;
  }
  return true;
}

}  // namespace

Tensor Tensor::reshaped(const Shape& shape) const {
  if (can_reshape(shape)) return reshape(shape);
  check_copy("reshaped");
  Tensor copy = empty(shape, dtype(), device());
  if (!copy.can_reshape(layout_.shape)) return packed().reshape(shape);
  copy.reshape(layout_.shape).copy_from(*this);
  return copy;
}

bool Tensor::can_reshape(const Shape& shape) const {
  Layout layout;
  return shape.count() == count() && reshape_layout(layout_, shape, layout);
}

Tensor Tensor::reshape(const Shape& shape) const {
  check(shape.count() == count(), "reshape: ", this->shape(), " has ", count(), " elements, ", shape, " has ",
        shape.count());
  Layout layout;
  check(reshape_layout(layout_, shape, layout), "reshape: no view of ", this->shape(),
        " with its strides has shape ", shape, "; clone() or packed() first");
  return with_layout(layout, "reshape", "ops::reshape");
}

Tensor Tensor::reshape_with(std::initializer_list<int64_t> sizes) const {
  return reshape(complete_shape(std::span(sizes.begin(), sizes.size()), count()));
}

Tensor Tensor::expand(const Shape& shape) const {
  check(broadcast(this->shape(), shape, "expand") == shape, "expand: ", this->shape(),
        " does not broadcast to ", shape);
  Layout layout;
  layout.shape = shape;
  layout.offset = layout_.offset;
  for (int dim = 0; dim < shape.rank(); ++dim) {
    const int own = dim - (shape.rank() - rank());
    layout.strides[size_t(dim)] =
        own < 0 || this->shape()[own] != shape[dim] ? 0 : layout_.strides[size_t(own)];
  }
  return with_layout(layout, "expand", "ops::expand");
}

Tensor Tensor::clone() const {
  check_copy("clone");
  Tensor copy = empty_like(*this);
  copy.copy_from(*this);
  return copy;
}

Tensor Tensor::to(Device device) const {
  check(defined(), "to: the tensor is undefined");
  if (device == this->device()) return *this;
  check(!grad_, "to: ", describe(*this), " has a gradient, which its copy on ", device.name(),
        " would not; move it before it gets one (nn::to moves models), or detach() first");
  Tensor copy = empty(shape(), dtype_, device);
  copy.copy_from(*this);
  return copy;
}

Tensor Tensor::to(DType dtype) const {
  check(defined(), "to: the tensor is undefined");
  if (dtype == dtype_) return *this;
  check(!grad_, "to: ", describe(*this), " has a gradient, which a plain conversion to ", dtype,
        " would lose; use ops::cast (or detach() first)");
  Tensor copy = empty(shape(), dtype, device());
  copy.copy_from(*this);
  return copy;
}

Tensor Tensor::packed() const {
  check(defined(), "packed: the tensor is undefined");
  if (layout_.is_packed()) return *this;
  check_copy("packed");
  Tensor copy = empty_packed(shape(), dtype_, device());
  copy.copy_from(*this);
  return copy;
}

template <class T>
T Tensor::item() const {
  check(defined(), "item: the tensor is undefined");
  check(count() == 1, "item: ", describe(*this), " has ", count(), " elements, not one");
  return to_vector<T>()[0];
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  check(defined(), "to_vector: the tensor is undefined");
  Tensor host = empty_packed(shape(), dtype_of<T>, Device::cpu());
  host.copy_from(detach());
  // std::vector<bool> has no contiguous data: copy element by element.
  return std::vector<T>(host.data<T>(), host.data<T>() + count());
}

void Tensor::fill(double value) const {
  check_writable("fill");
  bump_version();
  if (device().is_cpu()) return fill_cpu(*this, value);
  if constexpr (kCuda) fill_cuda(*this, value);
}

bool Tensor::same_elements(const Tensor& other) const {
  return shares_storage(other) && (!defined() || (dtype_ == other.dtype_ && layout_ == other.layout_));
}

namespace {

/// Whether one may reach memory of the other; conservative: interleaved views count as overlapping.
bool overlap(const Tensor& a, const Tensor& b) {
  if (!a.shares_storage(b) || a.count() == 0 || b.count() == 0) return false;
  const auto begin = [](const Tensor& t) { return static_cast<const char*>(t.raw()); };
  const auto end = [&](const Tensor& t) {
    return begin(t) + t.layout().extent() * int64_t(size_of(t.dtype()));
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

}  // namespace

void Tensor::copy_from(const Tensor& source) const {
  check(defined() && source.defined(), "copy_from: ", defined() ? "the source" : "the destination",
        " is undefined");
  check_writable("copy_from");
  source.check_copy("copy_from", "ops::concat, which makes a new tensor of parts");
  check(broadcast(shape(), source.shape(), "copy_from") == shape(), "copy_from: ", source.shape(),
        " does not broadcast to ", shape());
  bump_version();
  if (count() == 0) return;
  check(!layout_.is_expanded(), "copy_from: the destination ", describe(*this),
        " is expanded: several of its elements share memory");
  if (device() == source.device()) {
    if (overlap(*this, source)) return copy_from(source.detach().clone());
    if (device().is_cpu()) return copy_cpu(*this, source.detach());
    if constexpr (kCuda) copy_cuda(*this, source.detach());
    return;
  }
  if constexpr (kCuda) transfer(detach(), source.detach());
}

Tensor Tensor::view_of(std::shared_ptr<Storage> storage, const Layout& layout, DType dtype) {
  const int64_t end = layout.shape.count() == 0 ? 0 : layout.offset + layout.extent();
  check(layout.offset >= 0 && size_t(end) * size_of(dtype) <= storage->bytes, "view_of: ", dtype,
        layout.shape, " reaches past its storage of ", storage->bytes, " bytes");
  Tensor view;
  view.storage_ = std::move(storage);
  view.layout_ = layout;
  view.dtype_ = dtype;
  return view;
}

void accumulate(const Tensor& y, const Tensor& x) {
  check(y.shape() == x.shape(), "accumulate: ", y.shape(), " += ", x.shape());
  check(y.device() == x.device(), "accumulate: ", describe(y), " += ", describe(x));
  if (y.count() == 0) return;
  check(!y.layout().is_expanded(), "accumulate: ", describe(y),
        " is expanded: several of its elements share memory");
  y.bump_version();
  if (y.device().is_cpu()) return accumulate_cpu(y, x);
  if constexpr (kCuda) accumulate_cuda(y, x);
}

std::ostream& operator<<(std::ostream& out, const Describe& describe) {
  const Tensor& tensor = describe.tensor;
  if (!tensor.defined()) return out << "(undefined)";
  return out << tensor.dtype() << tensor.shape() << " on " << tensor.device().name();
}

#define TESSERA_INSTANTIATE(T)                                               \
  template Tensor Tensor::from<T>(std::span<const T>, const Shape&, Device); \
  template T Tensor::item<T>() const;                                        \
  template std::vector<T> Tensor::to_vector<T>() const;
TESSERA_INSTANTIATE(double)
TESSERA_INSTANTIATE(float)
TESSERA_INSTANTIATE(bf16)
TESSERA_INSTANTIATE(f16)
TESSERA_INSTANTIATE(f8e4m3)
TESSERA_INSTANTIATE(int64_t)
TESSERA_INSTANTIATE(int32_t)
TESSERA_INSTANTIATE(uint8_t)
TESSERA_INSTANTIATE(bool)
#undef TESSERA_INSTANTIATE

}  // namespace tessera
