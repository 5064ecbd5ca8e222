#include "bench/ffn_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "autograd/tape.h"
#include "eval/activation_sparsity.h"
#include "ops/gemm/gemm.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_activation.h"
#include "ops/linear/linear_swiglu.h"
#include "ops/mlp/mlp.h"
#include "ops/random/random.h"
#include "ops/sum_dtype.h"
#include "ops/variant.h"
#include "report/facts.h"

namespace tessera::bench {
namespace {

using ops::Along24;
using ops::Gemm24;

/// Where half of a normal distribution's mass lies `share` to the left.
double normal_quantile(double share) {
  double low = -9, high = 9;
  for (int i = 0; i < 80; ++i) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < share ? low : high) = middle;
  }
  return low;
}

/// Operands of one problem. With weights of N(0, 1 / width) the hidden features are N(bias, 1); biases of
/// N(-z, 0.5) make columns of different density, as trained networks have them, and the share of zeros is
/// that of N(-z, 1.25).
struct Operands {
  Tensor x, up, down, up_bias, gate_up, gate_down, dy;

  Operands(const FfnShape& shape, double sparsity, DType dtype, Device device) {
    Rng rng(7);
    const auto normal = [&](const Shape& of, double mean, double deviation) {
      const Tensor made = Tensor::empty(of, dtype, device);
      ops::fill_normal(made, mean, deviation, rng);
      return made;
    };
    const double fan = 1 / std::sqrt(double(shape.width));
    // SwiGLU of as many parameters.
    const int64_t gated = std::max<int64_t>(8, shape.hidden * 2 / 3 / 8 * 8);
    x = normal({shape.tokens, shape.width}, 0, 1);
    up = normal({shape.hidden, shape.width}, 0, fan);
    down = normal({shape.width, shape.hidden}, 0, fan);
    up_bias = normal({shape.hidden}, -std::sqrt(1.25) * normal_quantile(sparsity), 0.5);
    gate_up = normal({2 * gated, shape.width}, 0, fan);
    gate_down = normal({shape.width, gated}, 0, fan);
    dy = normal({shape.tokens, shape.width}, 0, 1);
    for (Tensor* const leaf : {&x, &up, &down, &gate_up, &gate_down}) require_grad(*leaf);
  }
};

class Bench {
 public:
  Bench(const FfnBenchOptions& options, const FfnShape& shape, Precision precision, double sparsity)
      : options_(options),
        shape_(shape),
        precision_(precision),
        sparsity_(sparsity),
        in_(shape, sparsity, precision.dtype, options.device),
        how_(options.how) {
    const ops::ActivatedLinear hidden =
        ops::linear_activation(in_.x.detach(), in_.up.detach(), how_.activation, in_.up_bias);
    a_ = hidden.y;
    how_.previous = hidden.counts;
    const int64_t some = std::min<int64_t>(shape.tokens, 2048);  // measured on the host
    const Tensor sample = a_.slice(0, 0, some);
    if (options.most_dropped > 0 && how_.splits()) {
      const int64_t columns = eval::dense_columns_for(sample, options.most_dropped);
      how_.dense_share = std::max(1.0, double(columns)) / double(shape.hidden);
    }
    const eval::ActivationSparsity measured =
        eval::activation_sparsity(sample, how_.splits() ? how_.dense_share : 0);
    attrs_ = {{"zeros", fmt::format("{:.3f}", measured.zeros())},
              {"dense_share", fmt::format("{:.3f}", how_.splits() ? how_.dense_share : 0)},
              {"dropped", fmt::format("{:.1e}", measured.dropped_both_split)}};
    // A record without them is of the usual forms.
    const Gemm24 usual = how_.splits() ? Gemm24::split : Gemm24::sparse;
    for (const auto& [name, form] : {std::pair("y", how_.y), std::pair("dx", how_.dx),
                                     std::pair("dup", how_.dup), std::pair("ddown", how_.ddown)})
      if (form != usual) attrs_[name] = ops::name_of(form);
  }

  std::vector<Record> networks() {
    const F32MathScope math(precision_.math);
    std::vector<Record> list;
    const auto& [x, up, down, up_bias, gate_up, gate_down, dy] = in_;
    const int64_t gated = gate_down.size(1);
    list.push_back(network("swiglu", double(gated) * 3,
                           [&] { return ops::linear(ops::linear_swiglu(x, gate_up), gate_down); }));
    list.push_back(network("relu2", double(shape_.hidden) * 2,
                           [&] { return ops::mlp(x, up, down, how_.activation, up_bias); }));
    ops::MlpSparse24 dense = how_;
    dense.y = dense.dx = dense.dup = dense.ddown = Gemm24::dense;
    list.push_back(network("relu2 counted", double(shape_.hidden) * 2,
                           [&] { return ops::mlp_sparse24(x, up, down, dense, up_bias).y; }));
    list.push_back(network("sparse24", double(shape_.hidden) * 2,
                           [&] { return ops::mlp_sparse24(x, up, down, how_, up_bias).y; }));
    list.back().attrs.insert(attrs_.begin(), attrs_.end());
    for (const std::string& variant : options_.variants) {
      const ops::ForceVariant force("mlp_sparse24", variant);
      list.push_back(network(("sparse24 " + variant).c_str(), double(shape_.hidden) * 2,
                             [&] { return ops::mlp_sparse24(x, up, down, how_, up_bias).y; }));
      list.back().variant = variant;
      list.back().attrs.insert(attrs_.begin(), attrs_.end());
    }
    return list;
  }

  std::vector<Record> parts() {
    const F32MathScope math(precision_.math);
    std::vector<Record> list;
    const Tensor x = in_.x.detach(), up = in_.up.detach(), down = in_.down.detach(), dy = in_.dy;
    const DType dtype = precision_.dtype, wide = ops::sum_dtype(dtype);
    const auto matrix = [&](int64_t rows, int64_t columns, DType of) {
      return Tensor::empty({rows, columns}, of, options_.device);
    };
    const int64_t t = shape_.tokens, d = shape_.width, f = shape_.hidden;
    const Tensor h = matrix(t, f, dtype), y = matrix(t, d, dtype), dup = matrix(f, d, wide),
                 ddown = matrix(d, f, wide);
    const auto gemm = [&](const char* name, const Tensor& to, const Tensor& a, const Tensor& b) {
      list.push_back(gemm_record(std::string(name) + " dense", [&] { ops::multiply(to, a, b); }));
    };
    const auto gemm24 = [&](const char* name, const Tensor& to, const ops::Sparse24& a, const Tensor& b) {
      list.push_back(gemm_record(std::string(name) + " sparse", [&] { ops::multiply24(to, a, b); }));
      list.back().variant = options_.device.is_cpu() ? "" : ops::multiply24_variant(to, a, b);
    };
    const auto part = [&](const char* name, double bytes, const auto& work) {
      list.push_back(record("ffn part", name, "fwd"));
      list.back().ms = measure(options_.device, work, options_.timer);
      list.back().bytes = bytes;
    };
    gemm("h", h, x, up.transpose(0, 1));
    part("up with activation and counts", 0,
         [&] { ops::linear_activation(x, up, how_.activation, in_.up_bias); });
    gemm("y", y, a_, down.transpose(0, 1));
    const double elements = double(t) * double(f), size = double(size_of(dtype));
    part("compress features", elements * (1.5 * size + 0.125),
         [&] { ops::compress24(a_, Along24::features); });
    part("compress tokens", elements * (1.5 * size + 0.125), [&] { ops::compress24(a_, Along24::tokens); });
    part("compress both", elements * (2 * size + 0.25), [&] { ops::compress24_both(a_); });
    const ops::Sparse24 features = ops::compress24(a_, Along24::features),
                        tokens = ops::compress24(ops::decompress24(features), Along24::tokens);
    part("compress like", elements * (1.5 * size + 0.25), [&] { ops::compress24_like(a_, features); });
    part("decompress", elements * (1.5 * size + 0.125), [&] { ops::decompress24(features); });
    gemm24("y", y, features, down.transpose(0, 1));
    gemm("da", h, dy, down);
    gemm("dx", y, a_, up);
    gemm24("dx", y, features, up);
    gemm("dup", dup, a_.transpose(0, 1), x);
    gemm24("dup", dup, tokens, x);
    gemm("ddown", ddown, dy.transpose(0, 1), a_);
    gemm24("ddown", ddown.transpose(0, 1), tokens, dy);
    return list;
  }

 private:
  Record record(const char* op, const std::string& what, const char* mode) const {
    Record made;
    made.op = op;
    made.attrs["what"] = what;
    made.mode = mode;
    made.shape = {{"T", shape_.tokens}, {"D", shape_.width}, {"F", shape_.hidden}};
    made.dtype = name_of(precision_);
    made.device = options_.device.name();
    made.gpu = options_.device.info().name;
    made.build = report::kRevision;
    made.time = report::utc_now();
    return made;
  }
  template <class Work>
  Record gemm_record(const std::string& what, const Work& work) const {
    Record made = record("ffn gemm", what, "fwd");
    made.flops = 2 * double(shape_.tokens) * double(shape_.width) * double(shape_.hidden);
    made.ms = measure(options_.device, work, options_.timer);
    return made;
  }
  /// `rows`: of D elements, that its weights have.
  template <class Run>
  Record network(const char* what, double rows, const Run& run) const {
    Record made = record("ffn", what, "fwd+bwd");
    made.flops = 6 * double(shape_.tokens) * double(shape_.width) * rows;
    made.ms = measure(
        options_.device,
        [&] {
          Tape tape;
          const std::vector<Tensor> y{run()}, dy{in_.dy};
          tape.backward(y, dy);
          for (const Tensor* const leaf : {&in_.x, &in_.up, &in_.down, &in_.gate_up, &in_.gate_down})
            zero_grad(*leaf);
        },
        options_.timer);
    return made;
  }

  const FfnBenchOptions& options_;
  const FfnShape shape_;
  const Precision precision_;
  const double sparsity_;
  Operands in_;
  ops::MlpSparse24 how_;
  Tensor a_;
  std::map<std::string, std::string> attrs_;
};

}  // namespace

std::vector<Record> bench_ffn(const FfnBenchOptions& options) {
  std::vector<Record> records;
  const std::vector<Precision> precisions =
      options.precisions.empty() ? std::vector{default_precision(options.device)} : options.precisions;
  for (const Precision precision : precisions)
    for (const FfnShape& shape : options.shapes) {
      bool first = true;
      for (const double sparsity : options.sparsities) {
        Bench bench(options, shape, precision, sparsity);
        for (Record& one : bench.networks())
          if (first || one.attrs.at("what").starts_with("sparse24")) records.push_back(std::move(one));
        if (first && options.gemms)
          for (Record& one : bench.parts()) records.push_back(std::move(one));
        first = false;  // dense networks and GEMMs do not depend on the zeros
      }
    }
  return records;
}

}  // namespace tessera::bench
