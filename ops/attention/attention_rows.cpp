#include "ops/attention/attention_rows.h"

#include <sstream>

#include "runtime/tuning.h"

namespace tessera::ops {
namespace {

std::string key_of(std::string_view pass, const Tensor& q, const Tensor& k, const AttentionOptions& options) {
  std::ostringstream key;
  key << pass << " " << name_of(q.dtype()) << " " << q.shape() << " x " << k.size(1);
  if (options.causal) key << " causal";
  return key.str();
}

}  // namespace

std::vector<std::string> attention_row_names() {
  return {"mma", "wgmma"};
}

std::string wgmma_needs(std::initializer_list<Tensor> heads) {
  std::ostringstream needs;
  for (const Tensor& x : heads) {
    if (!x.defined()) continue;
    const CardInfo& card = x.device().card();
    if (card.major != 9) {
      needs << "compute capability 9.0; " << card.name << " has " << card.major << "." << card.minor;
      return needs.str();
    }
    if (x.dtype() != DType::bf16 && x.dtype() != DType::f16) {
      needs << "bf16 or f16; got " << describe(x);
      return needs.str();
    }
    if (x.count() == 0) {
      needs << "at least one element; got " << describe(x);
      return needs.str();
    }
    constexpr int64_t kLongest = (int64_t{1} << 40) / 2;  // elements, of a tensor map's stride
    for (int dim = 0; dim < 3; ++dim) {
      const int64_t stride = x.layout().stride(dim);
      if (x.size(dim) > 1 && (stride <= 0 || stride >= kLongest)) {
        needs << "strides of 1 ... 2^39 - 1 elements; got " << stride << " along dimension " << dim << " of "
              << describe(x);
        return needs.str();
      }
    }
  }
  return {};
}

void check_wgmma(std::initializer_list<Tensor> heads) {
  const std::string needs = wgmma_needs(heads);
  check(needs.empty(), "attention: row wgmma needs ", needs);
}

AttentionRow attention_row(std::string_view pass, std::initializer_list<Tensor> heads,
                           const AttentionOptions& options) {
  const Tensor &q = heads.begin()[0], &k = heads.begin()[1];
  const std::string& card = q.device().card().name;
  auto row = tuning::ForceRow::forced("attention");
  // The key costs more than a launch; most cards have no entry.
  if (!row && tuning::entries(card) > 0) row = tuning::row(card, "attention", key_of(pass, q, k, options));
  if (row) {
    check(*row >= 0 && *row < int(attention_row_names().size()), "attention: row ", *row,
          " does not exist; expected 0 (mma) or 1 (wgmma)");
    return AttentionRow(*row);
  }
  return wgmma_needs(heads).empty() ? AttentionRow::wgmma : AttentionRow::mma;
}

void attention_forward_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                            const Tensor& v, const AttentionOptions& options) {
  if constexpr (kCuda) {
    switch (attention_row("forward", {q, k, v, o}, options)) {
      case AttentionRow::mma:
        return attention_forward_mma_cuda(o, lse, q, k, v, options);
      case AttentionRow::wgmma:
        return attention_forward_wgmma_cuda(o, lse, q, k, v, options);
    }
  }
}

void attention_backward_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                             const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                             const Tensor& lse, const AttentionOptions& options) {
  if constexpr (kCuda) {
    switch (attention_row("backward", {q, k, v, o, dout, dq, dk, dv}, options)) {
      case AttentionRow::mma:
        return attention_backward_mma_cuda(dq, dk, dv, dout, q, k, v, o, lse, options);
      case AttentionRow::wgmma:
        return attention_backward_wgmma_cuda(dq, dk, dv, dout, q, k, v, o, lse, options);
    }
  }
}

}  // namespace tessera::ops
