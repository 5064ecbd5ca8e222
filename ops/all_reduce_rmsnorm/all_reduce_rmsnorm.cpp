#include "ops/all_reduce_rmsnorm/all_reduce_rmsnorm.h"

#include <algorithm>

#include "autograd/tape.h"
#include "ops/all_reduce_rmsnorm/all_reduce_rmsnorm_kernels.h"
#include "ops/variant.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"

namespace tessera::ops {
namespace {

struct RankProblem {
  int64_t rows, bytes;  // of a row
  DType dtype;
  bool aligned;  // rows begin on 16-byte boundaries
  const RankGroup* ranks;
  int64_t most_bytes;  // of a row, for the kernel
  int64_t sms;         // that its grid needs to run as a whole, in "peer"
};

std::string describe_problem(const RankProblem& problem) {
  return text_of(problem.rows, " rows of ", problem.bytes, " bytes in ", problem.dtype, " on ",
                 problem.ranks->size(), " ranks");
}

/// Of all kernels over peer memory.
Reason memory_lacks(const RankProblem& problem, const Gpu& gpu) {
  if (gpu.major < 7) return "a GPU of compute capability 7.0";  // the memory model of 64-bit accesses
  if (!problem.ranks->sum_channels()) return "RankExchange::peer";
  if (problem.dtype == DType::f64) return "f32, bf16 or f16";
  if (problem.bytes > problem.most_bytes) return "shorter rows";
  if (!problem.aligned) return "rows that begin on 16-byte boundaries";
  return {};
}

Reason peer_lacks(const RankProblem& problem, const Gpu& gpu) {
  if (problem.rows < 1 || problem.rows > kPeerRows) return "1 ... 8 rows";
  if (problem.sms > gpu.multiprocessors) return "more SMs: all blocks must run at once";
  return memory_lacks(problem, gpu);
}
Reason peer_rows_lacks(const RankProblem& problem, const Gpu& gpu) {
  if (problem.rows <= kPeerRows) return "more than 8 rows";
  return memory_lacks(problem, gpu);
}

constexpr Variant<RankProblem> kSumVariants[] = {
    {"peer", peer_lacks, is_preferred<RankProblem>, nullptr},
    {"peer rows", peer_rows_lacks, is_preferred<RankProblem>, nullptr},
    {"communicator", lacks_nothing<RankProblem>, is_otherwise<RankProblem>, nullptr}};
constexpr Variant<RankProblem> kColumnVariants[] = {
    {"peer", peer_lacks, is_preferred<RankProblem>, nullptr},
    {"communicator", lacks_nothing<RankProblem>, is_otherwise<RankProblem>, nullptr}};

/// On the CPU all is the communicator's.
template <size_t kCount>
bool takes(const char* op, const Variant<RankProblem> (&variants)[kCount], const RankProblem& problem,
           Device device) {
  return device.is_cuda() && choose_index(op, variants, problem, Gpu(device)) + 1 < kCount;
}

bool in_words(const Tensor& x) {
  return x.layout().stride(x.rank() - 1) == 1 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 &&
         (x.rows() == 1 || x.row_stride() * int64_t(size_of(x.dtype())) % 16 == 0);
}

void check_rows(const char* op, const char* name, const Tensor& tensor) {
  check(tensor.defined() && tensor.rank() == 2 && is_floating(tensor.dtype()) &&
            tensor.dtype() != DType::f8e4m3,
        op, ": ", name, " is ", describe(tensor), "; expected [N, d] of f64, f32, bf16 or f16");
}

}  // namespace

AddNorm all_reduce_rmsnorm(const RankGroup& ranks, const Tensor& x, const Tensor& share, const Tensor& weight,
                           double eps, Site site) {
  constexpr const char* kOp = "all_reduce_rmsnorm";
  const CallScope call(site);
  check_rows(kOp, "share", share);
  if (x.defined())
    check(x.shape() == share.shape() && x.dtype() == share.dtype() && x.device() == share.device(), kOp,
          ": x is ", describe(x), ", but share is ", describe(share), "; they must agree");
  check(weight.defined() && weight.shape() == Shape{share.size(1)} && weight.dtype() == share.dtype() &&
            weight.device() == share.device(),
        kOp, ": weight is ", describe(weight), "; expected ", share.dtype(), " [", share.size(1), "] on ",
        share.device().name());
  check(!Tape::recording(x, share, weight), kOp,
        ": has no gradient: a model that is shared out over ranks is for inference; run it without a tape");
  const Device device = share.device();
  const int64_t bytes = share.size(1) * int64_t(size_of(share.dtype()));
  AddNorm results;
  if (device.is_cuda()) results = {Tensor::empty_like(share), Tensor::empty_like(share)};
  const Tensor* const rows[] = {&share, &x, &weight, &results.y, &results.sum};
  const RankProblem problem{
      .rows = share.size(0),
      .bytes = bytes,
      .dtype = share.dtype(),
      .aligned = std::ranges::all_of(rows, [](const Tensor* t) { return !t->defined() || in_words(*t); }),
      .ranks = &ranks,
      .most_bytes = ranks.sum_channels() ? ranks.sum_channels()->words * 4 : 0,
      .sms = share.size(0)};
  if (takes(kOp, kSumVariants, problem, device)) {
    if constexpr (kCuda) {
      if (problem.rows <= kPeerRows)
        all_reduce_rmsnorm_cuda(*ranks.sum_channels(), results.y, results.sum, x, share, weight, eps);
      else
        all_reduce_rmsnorm_rows_cuda(*ranks.many_rows(), results.y, results.sum, x, share, weight, eps);
    }
    return results;
  }
  const Tensor total = share.detach().packed();
  ranks.data().all_reduce(total);
  if (x.defined()) return add_rmsnorm(x, total, weight, eps);
  return {total, rmsnorm(total, weight, eps)};
}

Tensor all_gather_columns(const RankGroup& ranks, const Tensor& part, int64_t columns, Site site) {
  constexpr const char* kOp = "all_gather_columns";
  const CallScope call(site);
  check_rows(kOp, "part", part);
  const int64_t rows = part.size(0), width = part.size(1), all = width * ranks.size();
  check(columns >= 1 && columns <= all, kOp, ": ", columns, " columns of ", ranks.size(), " ranks with ",
        width, " each; expected 1 ... ", all);
  check(!Tape::recording(part), kOp,
        ": has no gradient: a model that is shared out over ranks is for inference; run it without a tape");
  const Device device = part.device();
  const Tensor y = Tensor::empty({rows, columns}, part.dtype(), device);
  const int64_t bytes = width * int64_t(size_of(part.dtype()));
  const PeerChannels* const channels = ranks.column_channels();
  const RankProblem problem{
      .rows = rows,
      .bytes = bytes,
      .dtype = part.dtype(),
      .aligned = in_words(part) && in_words(y) && bytes % 16 == 0,
      .ranks = &ranks,
      .most_bytes = channels ? channels->channels / kPeerRows * int64_t(kPeerColumnBytes) : 0,
      .sms = ceil_div(rows * ceil_div(bytes, kPeerColumnBytes), kColumnBlocksPerSm)};
  if (takes(kOp, kColumnVariants, problem, device)) {
    if constexpr (kCuda) all_gather_columns_cuda(*channels, y, part);
    return y;
  }
  const Tensor gathered = Tensor::empty_packed({ranks.size() * rows, width}, part.dtype(), device);
  ranks.data().all_gather(part.detach().packed(), gathered);
  for (int r = 0; r < ranks.size(); ++r) {
    const int64_t begin = r * width, end = std::min(begin + width, columns);
    if (begin >= end) break;
    y.slice(1, begin, end).copy_from(gathered.slice(0, r * rows, (r + 1) * rows).slice(1, 0, end - begin));
  }
  return y;
}

}  // namespace tessera::ops
