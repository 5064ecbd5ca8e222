#include "gpu/launch.cuh"
#include "gpu/pack.cuh"
#include "ops/generation/sample_kernels.h"
#include "ops/generation/sample_math.h"

/// A block chooses the token of one sequence, so that nothing but the token has to leave the GPU and the
/// whole decode step can be one graph. Greedy reads the logits once (64 KB for 32,000 of f16: 3 us of a step
/// of 5 ms). Drawing writes the weight of each token (sample_math.h), whole numbers of 2^-40, to scratch;
/// then
///   top_k   the rank of the k-th largest logit, bit by bit from the top: how many logits rank as high as
///           the bits so far and a 1? f16 and bf16 have 19 and 16 bits that can differ
///   top_p   the same search over sums of weights instead of counts
///   draw    sums of 1024 stretches of tokens, a scan, and a walk through the stretch that holds the place
/// All of it stays in L1 and L2; every pass is a read by one SM, about 1 us for 32,000 tokens, so drawing
/// costs 10 us and each cut 20 to 30 us. Whole numbers add up to the same in any order: what is chosen is
/// what the host chooses.

namespace tessera::ops {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / gpu::kWarp;

struct Args {
  int64_t* next;
  int64_t* counts;
  int64_t* history;  // of the host
  const int64_t* seed;
  uint64_t* weights;  // [B, V]; null: greedy
  int64_t vocabulary, pitch, most, top_k;
  double temperature, top_p;
};

struct Larger {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Added {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};

/// Every thread gets the result of all; 0 is the identity of both operations.
template <class Op>
__device__ uint64_t of_block(uint64_t value, uint64_t* scratch, Op op) {
  const int lane = int(threadIdx.x) % gpu::kWarp, warp = int(threadIdx.x) / gpu::kWarp;
  for (int step = gpu::kWarp / 2; step > 0; step /= 2)
    value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  __syncthreads();  // threads may still read the last result
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = scratch[lane];
  for (int step = gpu::kWarp / 2; step > 0; step /= 2)
    value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

/// The sum of the values of the threads before this one.
__device__ uint64_t before(uint64_t value, uint64_t* scratch) {
  const int lane = int(threadIdx.x) % gpu::kWarp, warp = int(threadIdx.x) / gpu::kWarp;
  uint64_t sum = value;
  for (int step = 1; step < gpu::kWarp; step *= 2) {
    const uint64_t left = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += left;
  }
  __syncthreads();
  if (lane == gpu::kWarp - 1) scratch[warp] = sum;
  __syncthreads();
  uint64_t warps = 0;
  for (int i = 0; i < warp; ++i) warps += scratch[i];
  return warps + sum - value;
}

/// Bits of a rank that differ between two values of the type.
template <class T>
constexpr int kIdleBits = std::is_same_v<T, f16>    ? 13
                          : std::is_same_v<T, bf16> ? 16
                                                    : 0;

template <class T>
__global__ void __launch_bounds__(kThreads) choose(Args args, const T* logits) {
  __shared__ uint64_t scratch[kWarps];
  const int64_t sequence = blockIdx.x, vocabulary = args.vocabulary;
  const T* const row = logits + sequence * args.pitch;
  const auto each = [&](auto&& visit) {
    for (int64_t i = threadIdx.x; i < vocabulary; i += kThreads) visit(i, float(row[i]));
  };
  const auto sum_over = [&](auto&& value) {
    uint64_t sum = 0;
    each([&](int64_t i, float logit) { sum += value(i, logit_rank(logit)); });
    return of_block(sum, scratch, Added{});
  };

  bool is_nan = false;
  uint64_t best = 0;  // rank, then the smaller index
  each([&](int64_t i, float logit) {
    is_nan = is_nan || logit != logit;
    best = Larger{}(best, uint64_t(logit_rank(logit)) << 32 | (0xFFFFFFFFu - uint32_t(i)));
  });
  is_nan = __syncthreads_or(is_nan);
  best = of_block(best, scratch, Larger{});
  const bool none = is_nan || uint32_t(best >> 32) <= kRankOfNothing;

  const int64_t count = args.counts[sequence];
  const auto give = [&](int64_t token) {
    args.next[sequence] = none ? 0 : token;  // a token all the same: the step after this one looks it up
    args.counts[sequence] = count + 1;
    if (count < args.most) args.history[sequence * args.most + count] = none ? Choices::kNone : token;
  };
  const int64_t first = int64_t(0xFFFFFFFFu - uint32_t(best));
  __syncthreads();  // all have read the count
  if (none || args.weights == nullptr) {
    if (threadIdx.x == 0) give(first);
    return;
  }

  uint64_t* const weights = args.weights + sequence * vocabulary;
  const float top = float(row[first]);
  each([&](int64_t i, float logit) { weights[i] = logit_weight(logit, top, args.temperature); });
  __syncthreads();

  // Kept: what ranks above `bar`, and of those that rank as high the first `ties`.
  constexpr int kIdle = kIdleBits<T>;
  uint32_t bar = 0;
  uint64_t ties = uint64_t(vocabulary), above = 0, at_bar = 0;
  const auto weight_of = [&](int64_t i, uint32_t rank) { return rank > bar ? weights[i] : uint64_t{0}; };
  const auto weigh = [&] {  // what ranks above the bar, and one of those at it: they are equal
    above = sum_over(weight_of);
    uint64_t one = 0;
    each([&](int64_t i, float logit) {
      if (logit_rank(logit) == bar) one = weights[i];
    });
    at_bar = of_block(one, scratch, Larger{});
  };
  // The bits below `found` are equal in all that share those above.
  const auto lifted = [](uint32_t found) {
    return found & 0x80000000u ? found : found | (kIdleBits<T> ? (1u << kIdleBits<T>)-1 : 0);
  };
  if (args.top_k > 0 && args.top_k < vocabulary) {
    uint32_t found = 0;
    for (int bit = 31; bit >= kIdle; --bit) {
      const uint32_t tried = found | 1u << bit;
      if (sum_over([&](int64_t, uint32_t rank) { return uint64_t(rank >= tried); }) >= uint64_t(args.top_k))
        found = tried;
    }
    bar = lifted(found);
    ties = uint64_t(args.top_k) - sum_over([&](int64_t, uint32_t rank) { return uint64_t(rank > bar); });
    weigh();
  } else {
    above = sum_over(weight_of);
  }
  uint64_t total = above + ties * at_bar;
  if (args.top_p < 1) {
    const uint64_t need = needed_weight(args.top_p, total);
    const uint32_t old_bar = bar;
    const uint64_t old_ties = ties * at_bar;
    uint32_t found = 0;
    for (int bit = 31; bit >= kIdle; --bit) {
      const uint32_t tried = found | 1u << bit;
      uint64_t sum = sum_over([&](int64_t i, uint32_t rank) {
        return rank >= tried && rank > old_bar ? weights[i] : uint64_t{0};
      });
      if (old_bar >= tried) sum += old_ties;
      if (sum >= need) found = tried;
    }
    bar = max(lifted(found), old_bar);
    weigh();
    ties = (need - above + at_bar - 1) / at_bar;
    total = above + ties * at_bar;
  }

  const uint64_t place =
      place_of(choice_bits(uint64_t(*args.seed), uint64_t(sequence), uint64_t(count)), total);
  const int64_t stretch = gpu::ceil_div(vocabulary, kThreads);
  const int64_t begin = min(stretch * int64_t(threadIdx.x), vocabulary),
                end = min(begin + stretch, vocabulary);
  uint64_t equal = 0;
  for (int64_t i = begin; i < end; ++i) equal += logit_rank(float(row[i])) == bar;
  const uint64_t first_tie = before(equal, scratch);
  const auto walk = [&](auto&& visit) {
    uint64_t tie = first_tie;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t rank = logit_rank(float(row[i]));
      if (rank > bar || (rank == bar && tie++ < ties)) visit(i, weights[i]);
    }
  };
  uint64_t own = 0;
  walk([&](int64_t, uint64_t weight) { own += weight; });
  uint64_t sum = before(own, scratch);
  if (sum <= place && place < sum + own) {
    bool found = false;
    walk([&](int64_t i, uint64_t weight) {
      sum += weight;
      if (sum > place && !found) {
        found = true;
        give(i);
      }
    });
  }
}

__global__ void advance_kernel(int32_t* lengths, int32_t* positions, int64_t batch, int64_t n) {
  for (int64_t b = threadIdx.x; b < batch; b += blockDim.x) {
    const int32_t length = lengths[b];
    for (int64_t i = 0; i < n; ++i) positions[b * n + i] = length + int32_t(i);
    lengths[b] = length + int32_t(n);
  }
}

}  // namespace

void sample_cuda(const Choices& choices, const Tensor& logits, const Sampling& sampling) {
  const Device device = logits.device();
  const bool draws = sampling.temperature > 0;
  const Tensor weights = draws ? Tensor::empty_packed(logits.shape(), DType::i64, device) : Tensor();
  const Args args{.next = choices.next.data<int64_t>(),
                  .counts = choices.counts.data<int64_t>(),
                  .history = choices.history.data<int64_t>(),
                  .seed = choices.seed.data<int64_t>(),
                  .weights = draws ? reinterpret_cast<uint64_t*>(weights.data<int64_t>()) : nullptr,
                  .vocabulary = logits.size(1),
                  .pitch = logits.row_stride(),
                  .most = choices.history.size(1),
                  .top_k = sampling.top_k,
                  .temperature = sampling.temperature,
                  .top_p = sampling.top_p};
  dispatch_floating_cuda(logits.dtype(), "sample", [&]<class T>() {
    gpu::launch(device, {.grid = dim3(unsigned(logits.size(0))), .block = dim3(kThreads)}, choose<T>, args,
                logits.data<T>());
  });
}

void advance_cuda(const Tensor& lengths, const Tensor& positions) {
  gpu::launch(lengths.device(), {.grid = dim3(1), .block = dim3(128)}, advance_kernel,
              lengths.data<int32_t>(), positions.data<int32_t>(), lengths.size(0), positions.size(1));
}

}  // namespace tessera::ops
