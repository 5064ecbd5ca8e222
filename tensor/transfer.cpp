#include "tensor/transfer.h"

#if defined(TESSERA_WITH_CUDA)
#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/capture.h"
#include "runtime/cuda.h"
#endif

namespace tessera {

#if defined(TESSERA_WITH_CUDA)

Allocator& pinned_allocator() {
  if (Device::cuda_count() == 0) return Device::cpu().allocator();
  static Allocator& allocator = *new Allocator(MemorySource{
      .name = "page-locked host memory",
      .allocate = [](size_t bytes) -> void* {
        void* data = nullptr;
        if (cudaMallocHost(&data, bytes) == cudaSuccess) return data;
        cudaGetLastError();
        return nullptr;
      },
      .release = [](void* data) { cudaFreeHost(data); },
      .usage = [] { return Device::cpu().allocator().usage(); },
      .fill = [](void* data, int byte, size_t bytes) { std::memset(data, byte, bytes); },
      .read = [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); },
  });
  return allocator;
}

namespace {

bool is_pinned(const Tensor& tensor) {
  return Device::cuda_count() > 0 && tensor.storage()->allocator == &pinned_allocator();
}

/// Same shape and dtype, both with rows: one copy, plain or strided; row by row where a pitch is more than
/// the runtime takes.
void copy_rows(const Tensor& y, const Tensor& x, cudaMemcpyKind kind, StreamHandle stream) {
  constexpr size_t kLargestPitch = (size_t(1) << 31) - 1;  // cudaDeviceProp::memPitch
  const size_t size = size_of(y.dtype()), width = size_t(x.row_length()) * size, rows = size_t(x.rows());
  const size_t to_pitch = rows == 1 ? width : size_t(y.row_stride()) * size,
               from_pitch = rows == 1 ? width : size_t(x.row_stride()) * size;
  if (to_pitch == width && from_pitch == width) {
    check(cudaMemcpyAsync(y.raw(), x.raw(), width * rows, kind, stream));
  } else if (std::max(to_pitch, from_pitch) <= kLargestPitch) {
    check(cudaMemcpy2DAsync(y.raw(), to_pitch, x.raw(), from_pitch, width, rows, kind, stream));
  } else {
    for (size_t row = 0; row < rows; ++row)
      check(cudaMemcpyAsync(static_cast<char*>(y.raw()) + row * to_pitch,
                            static_cast<const char*>(x.raw()) + row * from_pitch, width, kind, stream));
  }
}

bool plain_rows(const Tensor& tensor) {
  return tensor.has_rows() && (tensor.rows() == 1 || tensor.row_stride() >= tensor.row_length());
}

}  // namespace

void keep_until_done(const Tensor& host, Device gpu) {
  if (!is_pinned(host)) return;
  if (CaptureSession* const session = CaptureSession::current(); session && session->device() == gpu) {
    session->keep(host.storage());
  } else if (auto fence = gpu.fence()) {  // null: another program's capture, which leaves that to the caller
    const Storage& storage = *host.storage();
    storage.allocator->hold(storage.block, gpu.stream(), std::move(fence));
  }
}

void transfer(const Tensor& y, const Tensor& x) {
  const bool down = y.device().is_cpu();
  const Device gpu = down ? x.device() : y.device();
  check(down || x.device().is_cpu(), "copy from ", x.device().name(), " to ", y.device().name(),
        ": copies between GPUs go through the communicator");
  check(!gpu.capturing() || (!down && is_pinned(x)), "copy from ", x.device().name(), " to ",
        y.device().name(),
        " while a graph is being captured; move it out of the captured step (item() and host copies wait for "
        "the device)");
  gpu.activate();
  // Convert where the source lives if that makes it smaller or the layout needs it; the bus carries plain
  // rows.
  Tensor from = x;
  if (x.shape() != y.shape()) from = from.expand(y.shape());
  if (from.dtype() != y.dtype() && size_of(y.dtype()) <= size_of(from.dtype())) from = from.to(y.dtype());
  if (!plain_rows(from)) from = from.clone();
  check(!gpu.capturing() || from.shares_storage(x), "copy from ", describe(x), " to ", describe(y),
        " while a graph is being captured: converting on the host would leave the graph with a temporary; "
        "convert before the captured step");
  Tensor to = y;
  if (from.dtype() != y.dtype() || !plain_rows(y)) to = Tensor::empty(y.shape(), from.dtype(), y.device());
  // To pageable memory the driver would wait by itself.
  if (down && !is_pinned(to)) gpu.synchronize();
  copy_rows(to, from, down ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, gpu.stream());
  keep_until_done(down ? to : from, gpu);
  if (down || (!gpu.capturing() && !is_pinned(from) && !from.shares_storage(x)))
    gpu.synchronize();  // the host reads `to`, or a temporary is about to go
  if (!to.shares_storage(y)) y.copy_from(to);
}

#else

Allocator& pinned_allocator() {
  return Device::cpu().allocator();
}

void keep_until_done(const Tensor&, Device) {}

void transfer(const Tensor& y, const Tensor& x) {
  y.copy_from(x);  // there is one device
}

#endif

}  // namespace tessera
