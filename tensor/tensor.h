#pragma once

#include <array>
#include <initializer_list>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/stream_scope.h"
#include "tensor/dtype.h"
#include "tensor/layout.h"

namespace tessera {

struct GradState;  // defined by autograd alone
class Tape;

/// The thread's innermost tape, or null: autograd sets it, copies of tensors look whether there is one.
struct TapeOfThread {
  static inline constinit thread_local Tape* innermost = nullptr;
};

/// Bytes on a device, returned to the device's pool when the last tensor that uses them is gone. In-place
/// writers bump `version`, which is how the tape notices that a tensor it saved was overwritten.
struct Storage {
  Storage(Device device, Allocator& allocator, size_t bytes);
  ~Storage();
  Storage(const Storage&) = delete;
  void* data() const { return block->data; }

  Device device;
  Allocator* allocator;
  MemoryBlock* block;
  size_t bytes;
  uint64_t version = 0;
  // Of rows that Tensor::empty pitched: row_bytes of elements and then padding, up to the next row after
  // pitch_bytes. 0: the storage has no such rows. No view may lay elements in the padding, and no code may
  // rely on its content. Code that writes the rows may overwrite it; code that reads them may not, unless
  // the tensor is an operator's own scratch (tensor/pads.h).
  int64_t row_bytes = 0, pitch_bytes = 0;
  bool is_scratch = false;
};

template <class... Numbers>
inline constexpr bool kAllIntegral = (std::is_integral_v<Numbers> && ...);

/// A handle to a strided view of a Storage: cheap to copy, and copies share the elements. A default tensor is
/// undefined.
///
/// `empty` pitches rows: in a tensor of rank 2 or more whose rows are 16 bytes or longer, each row starts on
/// a 16-byte boundary, and on a 128-byte boundary where that adds at most a quarter (from 103 bytes on), so
/// that no width is slow on a GPU; shorter rows stay dense. Kernels take a row stride. Data that leaves the
/// process (files) is packed.
///
/// The view functions (slice, select, transpose, permute, reshape, expand) do not record gradients: on a
/// tensor that is on the tape they throw and name the recorded operator to use instead (ops::slice, ...).
/// Assigning to a temporary view writes nothing, so it does not compile; write `x.slice(...).copy_from(y)`.
class Tensor {
 public:
  Tensor() = default;
  /// Uninitialised.
  static Tensor empty(const Shape& shape, DType dtype = DType::f32, Device device = Device::cpu());
  /// Uninitialised, with rows not pitched: for memory that leaves the process or is read as one array.
  static Tensor empty_packed(const Shape& shape, DType dtype = DType::f32, Device device = Device::cpu());
  /// Uninitialised page-locked host memory (device cpu), packed: copies from it to a GPU do not block the
  /// host. The tensor may be dropped while such a copy runs, but not written. Ordinary memory without a GPU.
  static Tensor empty_pinned(const Shape& shape, DType dtype = DType::f32);
  /// Uninitialised, with the shape, dtype and device of `like`.
  static Tensor empty_like(const Tensor& like) { return empty(like.shape(), like.dtype(), like.device()); }
  static Tensor zeros(const Shape& shape, DType dtype = DType::f32, Device device = Device::cpu());
  static Tensor ones(const Shape& shape, DType dtype = DType::f32, Device device = Device::cpu());
  static Tensor full(const Shape& shape, double value, DType dtype = DType::f32,
                     Device device = Device::cpu());
  /// begin, begin + step, ... up to `end`, which is left out; empty if begin is end. Integers give i64, and
  /// if one of the three is a floating number, f32, unless a dtype is given. Element i is begin + i step,
  /// computed in f64 (integers exactly) and rounded once. Throws if the step is 0 or leads away from `end`,
  /// or a number is not finite.
  template <class Begin, class End, class Step = int>
  requires std::is_arithmetic_v<Begin> && std::is_arithmetic_v<End> && std::is_arithmetic_v<Step>
  static Tensor arange(Begin begin, End end, Step step = 1,
                       DType dtype = kAllIntegral<Begin, End, Step> ? DType::i64 : DType::f32,
                       Device device = Device::cpu()) {
    if constexpr (kAllIntegral<Begin, End, Step>)
      return range_of_integers(int64_t(begin), int64_t(end), int64_t(step), dtype, device);
    else
      return range_of_numbers(double(begin), double(end), double(step), dtype, device);
  }
  /// A copy of host values in row-major order, in the dtype of their type: Tensor::from({1.f, 2.f}, {2}) is
  /// f32. Throws unless there are shape.count() of them.
  template <class T>
  static Tensor from(std::span<const T> values, const Shape& shape, Device device = Device::cpu());
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& shape, Device device = Device::cpu()) {
    if constexpr (std::is_same_v<T, bool>)
      return from_bools(values, shape, device);
    else
      return from(std::span<const T>(values), shape, device);
  }
  template <class T, size_t kSize>
  static Tensor from(const std::array<T, kSize>& values, const Shape& shape, Device device = Device::cpu()) {
    return from(std::span<const T>(values), shape, device);
  }
  template <class T>
  static Tensor from(std::initializer_list<T> values, const Shape& shape, Device device = Device::cpu()) {
    return from(std::span<const T>(values.begin(), values.size()), shape, device);
  }

  bool defined() const { return storage_ != nullptr; }
  const Shape& shape() const { return layout_.shape; }
  int64_t size(int dim) const { return layout_.shape[dim]; }
  int rank() const { return layout_.rank(); }
  int64_t count() const { return layout_.shape.count(); }
  const Layout& layout() const { return layout_; }
  DType dtype() const { return dtype_; }
  Device device() const { return stored("device").device; }
  size_t bytes() const { return size_t(count()) * size_of(dtype_); }  // of the elements, without pitch

  /// The first element. Throws unless the tensor is defined and T its element type. The elements need not lie
  /// one after the other: rows of `empty` may be padded (see there), and views have strides; elements()
  /// checks that, or use row_stride(). Writing through the pointer is not noticed by the tape, which then
  /// computes gradients with other values than the forward pass had, nor by optimizers with master weights,
  /// whose next step undoes it: call bump_version() after it, and for weights Optimizer::sync_masters().
  template <class T>
  T* data() const {
    stored("data");
    check(dtype_ == dtype_of<T>, "data: the tensor holds ", dtype_, ", not ", dtype_of<T>);
    return static_cast<T*>(raw());
  }
  /// The elements in row-major order, to read (elements<const float>()) or to read and write
  /// (elements<float>(), which counts as a write, as fill() does). Throws unless they lie one after the other
  /// in the host's memory and T is their type, and for a result of the tape that would be written.
  template <class T>
  std::span<T> elements() const {
    T* const first = data<std::remove_const_t<T>>();
    check_elements(!std::is_const_v<T>);
    return {first, size_t(count())};
  }
  void* raw() const {
    const Storage& storage = stored("raw");
    if (storage.block->stream != StreamOfThread::current()) [[unlikely]]
      use_block(storage.device, *storage.allocator, storage.block, storage_);
    return static_cast<char*>(storage.data()) + size_t(layout_.offset) * size_of(dtype_);
  }

  // Rows: see Layout::has_rows.
  bool has_rows() const { return layout_.has_rows(); }
  int64_t rows() const { return layout_.rows(); }
  int64_t row_length() const { return layout_.row_length(); }
  int64_t row_stride() const { return layout_.row_stride(); }
  /// This tensor if it has rows, else a copy that has; see the copies below.
  Tensor with_rows() const;

  // Views. Dimensions, and the bounds of a slice, count from the end when negative.
  Tensor slice(int dim, int64_t begin, int64_t end, int64_t step = 1) const;
  Tensor select(int dim, int64_t index) const;
  Tensor transpose(int a, int b) const;
  Tensor permute(const std::vector<int>& order) const;
  /// No size may be -1: use reshape_with for that. Throws if the strides allow no view of that shape (clone()
  /// first).
  Tensor reshape(const Shape& shape) const;
  Tensor reshape_with(std::initializer_list<int64_t> sizes) const;  // one size may be -1
  bool can_reshape(const Shape& shape) const;
  Tensor reshaped(const Shape& shape) const;  // a view where there is one, else a copy, its rows pitched if
                                              // one pass can write them so
  Tensor expand(const Shape& shape) const;    // broadcasting; the new dimensions have stride 0
  /// Access to single elements: x.at({i, j}) is a tensor of rank 0. For reading, and so off the tape: throws
  /// like the other views only while there is a tape.
  Tensor at(std::initializer_list<int64_t> indices) const;

  // Copies. They are not recorded, so a copy would silently lose the gradient: for a result of the tape, and
  // while there is a tape for a tensor that requires a gradient, they throw, except inside operators and
  // layers; so does copy_from() for such a source. detach() first if that is intended.
  Tensor clone() const;            // same dtype and device, own storage, pitched
  Tensor to(Device device) const;  // this tensor if it is there already
  Tensor to(DType dtype) const;    // likewise; values converted as in tensor/dtype.h
  Tensor packed() const;           // this tensor if it is packed already
  /// The value of a tensor of one element; waits for the device. Throws while a graph is being captured.
  template <class T = double>
  T item() const;
  /// All elements in row-major order; waits for the device.
  template <class T>
  std::vector<T> to_vector() const;

  // In-place writers. They throw for a result of the tape, whose gradient would still be that of the old
  // values. Parameters may be written.
  /// Copies the elements of `source`, which broadcasts to this shape; any dtypes, layouts and devices; the
  /// two may overlap. A copy to the host waits for the device, one from page-locked or device memory does
  /// not. Throws if this view is expanded, and for a source whose gradient the copy would lose.
  void copy_from(const Tensor& source) const;
  void fill(double value) const;
  void bump_version() const { ++stored("bump_version").version; }
  uint64_t version() const { return stored("version").version; }

  // Gradients. For autograd and what looks after leaves (optimizers, modules, checkpoints); others call
  // grad(), requires_grad() and their relatives.
  const std::shared_ptr<GradState>& grad_state() const { return grad_; }
  /// `is_result`: of an operation that the tape recorded, not a leaf.
  void set_grad_state(std::shared_ptr<GradState> state, bool is_result = false) {
    grad_ = std::move(state), is_result_ = is_result;
  }
  /// Throws if this is a result of the tape: writing it would not change its gradient. For in-place writers.
  void check_writable(const char* writer) const;
  /// The same elements, off the tape.
  Tensor detach() const {
    Tensor plain = *this;
    plain.set_grad_state(nullptr);
    return plain;
  }

  bool shares_storage(const Tensor& other) const { return storage_ == other.storage_; }
  /// Whether both have the same elements of one storage, of one dtype and in one layout, or are undefined.
  bool same_elements(const Tensor& other) const;
  const std::shared_ptr<Storage>& storage() const { return storage_; }
  /// A view of `storage` with any layout; throws if it reaches past the end.
  static Tensor view_of(std::shared_ptr<Storage> storage, const Layout& layout, DType dtype);

  Tensor(const Tensor&) = default;
  Tensor(Tensor&&) = default;
  Tensor& operator=(const Tensor&) & = default;
  Tensor& operator=(Tensor&&) & = default;

 private:
  /// Throws if the tensor is undefined.
  Storage& stored(const char* what) const {
    if (!storage_) [[unlikely]]
      fail_undefined(what);
    return *storage_;
  }
  [[noreturn]] static void fail_undefined(const char* what);
  static Tensor from_bools(const std::vector<bool>& values, const Shape& shape, Device device);
  static Tensor range_of_integers(int64_t begin, int64_t end, int64_t step, DType dtype, Device device);
  static Tensor range_of_numbers(double begin, double end, double step, DType dtype, Device device);
  Tensor with_layout(const Layout& layout, const char* what, const char* instead) const;
  void check_copy(const char* what, const char* instead = "ops::scale(x, 1)") const;
  void check_elements(bool writes) const;

  std::shared_ptr<Storage> storage_;
  std::shared_ptr<GradState> grad_;
  Layout layout_;
  DType dtype_ = DType::f32;
  bool is_result_ = false;  // of an operation on the tape
};

/// Elements between the starts of consecutive rows of `width` elements, as Tensor::empty chooses it.
int64_t row_pitch(int64_t width, DType dtype);

/// The name of a tensor in operators' messages: "f32[2, 3] on cuda:0".
struct Describe {
  const Tensor& tensor;
};
std::ostream& operator<<(std::ostream& out, const Describe& describe);
inline Describe describe(const Tensor& tensor) {
  return {tensor};
}

}  // namespace tessera
