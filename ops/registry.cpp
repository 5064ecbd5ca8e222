#include "ops/op.h"

/// The list of operators: each folder's declarations, in the order that `tessera op --list` shows.

namespace tessera::ops {

std::vector<OpSpec> activation_specs();
std::vector<OpSpec> pointwise_specs();
std::vector<OpSpec> reduce_specs();
std::vector<OpSpec> cumsum_specs();
std::vector<OpSpec> cumprod_specs();
std::vector<OpSpec> cast_specs();
std::vector<OpSpec> dropout_specs();
std::vector<OpSpec> softmax_specs();
std::vector<OpSpec> norm_specs();
std::vector<OpSpec> attention_specs();
std::vector<OpSpec> matmul_specs();
std::vector<OpSpec> linear_specs();
std::vector<OpSpec> linear_activation_specs();
std::vector<OpSpec> sparse_low_rank_specs();
std::vector<OpSpec> sparse_linear_specs();
std::vector<OpSpec> sparse24_specs();
std::vector<OpSpec> weight24_specs();
std::vector<OpSpec> grouped_linear_specs();
std::vector<OpSpec> mlp_specs();
std::vector<OpSpec> mlp_sparse24_specs();
std::vector<OpSpec> compressed24_specs();
std::vector<OpSpec> grouped_mlp_specs();
std::vector<OpSpec> gmm_nll_specs();
std::vector<OpSpec> gather_specs();
std::vector<OpSpec> take_along_specs();
std::vector<OpSpec> topk_specs();
std::vector<OpSpec> select_specs();
std::vector<OpSpec> bits_specs();
std::vector<OpSpec> keep_largest_specs();
std::vector<OpSpec> factor_specs();
std::vector<OpSpec> inverse_factor_specs();
std::vector<OpSpec> obs_columns_specs();
std::vector<OpSpec> shape_specs();
std::vector<OpSpec> triangle_specs();
std::vector<OpSpec> cross_entropy_specs();
std::vector<OpSpec> linear_cross_entropy_specs();
std::vector<OpSpec> embedding_specs();
std::vector<OpSpec> rope_specs();
std::vector<OpSpec> swiglu_specs();
std::vector<OpSpec> decode_attention_specs();
std::vector<OpSpec> linear_swiglu_specs();
std::vector<OpSpec> decoder_layers_specs();

namespace {

using Specs = std::vector<OpSpec> (*)();
// One a line, so that adding an operator adds lines and changes none.
// clang-format off
constexpr Specs kFolders[] = {
    activation_specs,
    pointwise_specs,
    reduce_specs,
    cumsum_specs,
    cumprod_specs,
    cast_specs,
    dropout_specs,
    softmax_specs,
    norm_specs,
    attention_specs,
    matmul_specs,
    linear_specs,
    linear_activation_specs,
    sparse_low_rank_specs,
    sparse_linear_specs,
    sparse24_specs,
    weight24_specs,
    grouped_linear_specs,
    mlp_specs,
    mlp_sparse24_specs,
    compressed24_specs,
    grouped_mlp_specs,
    gmm_nll_specs,
    gather_specs,
    take_along_specs,
    topk_specs,
    select_specs,
    bits_specs,
    keep_largest_specs,
    factor_specs,
    inverse_factor_specs,
    obs_columns_specs,
    shape_specs,
    triangle_specs,
    cross_entropy_specs,
    linear_cross_entropy_specs,
    embedding_specs,
    rope_specs,
    swiglu_specs,
    decode_attention_specs,
    linear_swiglu_specs,
    decoder_layers_specs,
};
// clang-format on

}  // namespace

const std::vector<OpSpec>& all_ops() {
  static const auto& all = *[] {
    auto* const list = new std::vector<OpSpec>;
    for (const Specs specs : kFolders)
      for (OpSpec& spec : specs()) list->push_back(std::move(spec));
    return list;
  }();
  return all;
}

}  // namespace tessera::ops
