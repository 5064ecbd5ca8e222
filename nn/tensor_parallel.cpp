#include "nn/tensor_parallel.h"

#include "ops/embedding/embedding.h"
#include "runtime/integers.h"

namespace tessera::nn {

int64_t TensorParallel::vocabulary_rows(int64_t vocabulary, int ranks) {
  constexpr int64_t kMultiple = 8;
  return round_up(ceil_div(vocabulary, ranks), kMultiple);
}

Tensor TensorParallel::embed(const Embedding& token, const Tensor& tokens, int64_t vocabulary,
                             Site site) const {
  const LayerCall call(token, site);
  return ops::embedding_share(token.weight, tokens, rank() * token.weight.size(0), vocabulary);
}

ops::AddNorm TensorParallel::add(const RmsNorm& norm, const Tensor& x, const Tensor& share, Site site) const {
  const LayerCall call(norm, site);
  return ops::all_reduce_rmsnorm(ranks_, x, share, norm.weight, norm.eps);
}

Tensor TensorParallel::gather(const Tensor& logits, int64_t vocabulary, Site site) const {
  const CallScope call(site);
  return ops::all_gather_columns(ranks_, logits, vocabulary);
}

}  // namespace tessera::nn
