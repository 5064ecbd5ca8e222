#include "ops/attention/attention_variants.h"
#include "runtime/has_cuda.h"
#include "runtime/integers.h"

#include <algorithm>

namespace tessera::ops {
namespace {

/// Whether the kernels of decode_attention, which cut the keys into pieces, are the fastest forward. Queries
/// that share a key head read it once there; with one query head, 96 heads give other kernels work enough.
bool prefers_split_kv(const Tensor& q, const Tensor& k, const AttentionProblem& problem) {
  return attention_is_decoding(q, k, problem) && (q.size(2) > k.size(2) || q.size(0) * q.size(2) < 96);
}

/// Where variant mma, whose blocks are small, does better on compute capability 9.0
/// (docs/ops/attention_shapes.md).
bool mma_is_faster(bool forward, const Tensor& q, const Tensor& k, const AttentionProblem& problem) {
  const int64_t group = q.size(2) / k.size(2);
  if (problem.packed()) {
    if (!forward && attention_has_few_queries(q, k, problem)) return true;
    if (problem.drop.drops()) return false;
    // Many short sequences: tiles of 128 keys or 192 queries are empty but for a few rows.
    if (forward) return attention_is_many_short(q, k, problem);
    const int64_t count = std::max<int64_t>(1, problem.cu_seqlens_q.size(0) - 1);
    return group == 1 && q.size(1) / count <= 16 && k.size(1) / count <= 32;
  }
  if (forward) return prefers_split_kv(q, k, problem) || attention_is_many_short(q, k, problem);
  // Its kernel for few keys is as good for few queries, but for groups.
  const bool short_keys = k.size(1) <= kShortBackwardKeys && q.size(3) <= 64 && !problem.drop.drops();
  return attention_has_few_queries(q, k, problem) && (!short_keys || group > 1);
}

}  // namespace

bool attention_is_decoding(const Tensor& q, const Tensor& k, const AttentionProblem& problem) {
  return q.dtype() != DType::f32 && k.size(1) > 0 && !problem.packed() && !problem.drop.drops() &&
         !problem.bias.defined() && q.size(1) * (q.size(2) / k.size(2)) <= 16;
}

bool attention_is_many_short(const Tensor& q, const Tensor& k, const AttentionProblem& problem) {
  if (q.dtype() == DType::f32 || problem.drop.drops() || problem.bias.defined() || q.count() == 0)
    return false;
  const int64_t count = problem.packed() ? problem.cu_seqlens_q.size(0) - 1 : 1;
  if (problem.packed() ? count < 3 : prefers_split_kv(q, k, problem)) return false;
  const auto tiles = [&](int64_t rows) {  // of one of mean length
    return std::max<int64_t>(1, ceil_div(rows, 16 * count));
  };
  const int64_t queries = tiles(q.size(1));
  return queries <= (problem.packed() ? 4 : 3) && queries * tiles(k.size(1)) <= (q.size(3) <= 64 ? 16 : 5);
}

bool attention_has_few_queries(const Tensor& q, const Tensor& k, const AttentionProblem& problem) {
  const int64_t queries = problem.drop.drops() ? round_up(q.size(1), 16) : q.size(1);
  // Each sequence has a place in scratch memory for all rows.
  const bool many = problem.packed() && problem.cu_seqlens_q.size(0) > 512;
  return q.dtype() != DType::f32 && !many && !problem.bias.defined() && k.size(1) > 0 && queries > 0 &&
         queries * (q.size(2) / k.size(2)) <= 64;
}

namespace {

/// A forward or backward pass on a GPU.
struct Pass {
  bool forward;
  std::initializer_list<const Tensor*> heads;
  const AttentionProblem& problem;
  const Tensor& q() const { return *heads.begin()[0]; }
  const Tensor& k() const { return *heads.begin()[1]; }
};

std::string describe_problem(const Pass& pass) {
  MessageStream text;
  text << (pass.forward ? "forward" : "backward") << " q " << describe(pass.q()) << " and k "
       << describe(pass.k());
  if (pass.problem.causal) text << ", causal";
  if (pass.problem.drop.drops()) text << ", dropout";
  if (pass.problem.bias.defined()) text << ", a bias";
  if (pass.problem.packed()) text << ", " << pass.problem.cu_seqlens_q.size(0) - 1 << " sequences";
  return text.str();
}

Reason wgmma_lacks(const Pass& pass, const Gpu& gpu) {
  MessageStream needs;
  if (gpu.major != 9) {
    needs << "compute capability 9.0; " << gpu.name << " has " << gpu.major << "." << gpu.minor;
    return needs.str();
  }
  if (pass.problem.bias.defined()) return "no bias";
  for (const Tensor* head : pass.heads) {
    const Tensor& x = *head;
    if (!x.defined()) continue;
    if (x.dtype() != DType::bf16 && x.dtype() != DType::f16) return "bf16 or f16";
    if (x.count() == 0) return "at least one element";
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

/// Variant mma is preferred where it is faster, and otherwise runs what wgmma cannot.
constexpr Variant<Pass, void()> kVariants[] = {
    {"mma", lacks_nothing<Pass>,
     [](const Pass& pass, const Gpu&) {
       return mma_is_faster(pass.forward, pass.q(), pass.k(), pass.problem) ? Estimate::preferred()
                                                                            : Estimate::otherwise();
     },
     nullptr},
    {"wgmma", wgmma_lacks, is_preferred<Pass>, nullptr}};

}  // namespace

std::vector<std::string> attention_variants() {
  return names_of(kVariants);
}

std::string_view attention_variant(bool forward, std::initializer_list<const Tensor*> heads,
                                   const AttentionProblem& problem, const Gpu& gpu) {
  return choose("attention", kVariants, Pass{forward, heads, problem}, gpu).name;
}

void attention_forward_cuda(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k,
                            const Tensor& v, const AttentionProblem& problem) {
  if constexpr (kCuda) {
    const bool mma = attention_variant(true, {&q, &k, &v, &o}, problem, Gpu(q.device())) == "mma";
    (mma ? attention_forward_mma_cuda : attention_forward_wgmma_cuda)(o, lse, q, k, v, problem);
  }
}

void attention_backward_cuda(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                             const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                             const Tensor& lse, const AttentionProblem& problem) {
  if constexpr (kCuda) {
    if (problem.dbias.defined() && (q.count() == 0 || k.count() == 0)) problem.dbias.fill(0);
    const bool mma =
        attention_variant(false, {&q, &k, &v, &o, &dout, &dq, &dk, &dv}, problem, Gpu(q.device())) == "mma";
    (mma ? attention_backward_mma_cuda : attention_backward_wgmma_cuda)(dq, dk, dv, dout, q, k, v, o, lse,
                                                                        problem);
  }
}

}  // namespace tessera::ops
