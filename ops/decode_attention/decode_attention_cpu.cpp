#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/wide_row.h"
#include "runtime/parallel.h"

/// The specification: every score of one query, a stable softmax, P rounded where variant mma rounds it.

namespace tessera::ops {
namespace {

int64_t checked_length(const char* op, const Tensor& lengths, int64_t b, int64_t more, int64_t fewest,
                       int64_t capacity) {
  const int64_t length = Indices(lengths)[b] + more;
  check(fewest <= length && length <= capacity, op, ": length ", length, " of sequence ", b, " is outside ",
        fewest, " ... ", capacity, ", the new tokens and the capacity");
  return length;
}

template <class T>
const T* head_at(const Tensor& x, int64_t b, int64_t t, int64_t h) {
  const Layout& layout = x.layout();
  return x.data<T>() + b * layout.stride(0) + t * layout.stride(1) + h * layout.stride(2);
}

template <class T>
void attend(const DecodeProblem& p) {
  using C = Compute<T>;
  const int64_t batch = p.q.size(0), tokens = p.q.size(1), heads = p.q.size(2), dim = p.q.size(3);
  const int64_t capacity = p.keys.size(1), kv_heads = p.keys.size(2), group = heads / kv_heads;
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < batch; ++b)
    lengths.push_back(checked_length("decode_attention", p.lengths, b, p.more, tokens, capacity));
  const C lowest = -std::numeric_limits<C>::infinity();
  const int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, longest * dim));
  parallel_for(batch * tokens * heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<C> scores(static_cast<size_t>(capacity)), sums(static_cast<size_t>(dim));
    WideRow<T> queries(dim), keys(dim), values(dim), out(dim);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t h = row % heads, i = row / heads % tokens, b = row / heads / tokens;
      const int64_t seen = lengths[size_t(b)] - tokens + 1 + i;
      const C* const query = queries.read(head_at<T>(p.q, b, i, h));
      C top = lowest;
      for (int64_t j = 0; j < seen; ++j) {
        const C* const key = keys.read(head_at<T>(p.keys, b, j, h / group));
        C score = 0;
        for (int64_t d = 0; d < dim; ++d) score += query[d] * key[d];
        scores[size_t(j)] = score * C(p.scale);
        top = scores[size_t(j)] > top ? scores[size_t(j)] : top;
      }
      const C base = top == lowest ? C(0) : top;
      C sum = 0;
      sums.assign(sums.size(), C(0));
      for (int64_t j = 0; j < seen; ++j) {
        const C weight = std::exp(scores[size_t(j)] - base), rounded = C(T(weight));
        sum += weight;
        const C* const value = values.read(head_at<T>(p.values, b, j, h / group));
        for (int64_t d = 0; d < dim; ++d) sums[size_t(d)] += rounded * value[d];
      }
      const C inverse = sum == 0 ? C(0) : 1 / sum;
      T* const to = const_cast<T*>(head_at<T>(p.o, b, i, h));
      C* const wide = out.write(to);
      for (int64_t d = 0; d < dim; ++d) wide[d] = sums[size_t(d)] * inverse;
      out.written(to);
    }
  });
}

}  // namespace

void decode_attention_cpu(const DecodeProblem& problem) {
  dispatch_floating(problem.q.dtype(), "decode_attention", [&]<class T>() { attend<T>(problem); });
}

void append_to_cache_cpu(const AppendProblem& p) {
  const int64_t batch = p.x.size(0), tokens = p.x.size(1), capacity = p.cache.size(1);
  for (int64_t b = 0; b < batch; ++b)
    checked_length("append_to_cache", p.lengths, b, p.more, tokens, capacity);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = Indices(p.lengths)[b] + p.more;
    p.cache.select(0, b).slice(0, length - tokens, length).copy_from(p.x.select(0, b));
  }
}

}  // namespace tessera::ops
