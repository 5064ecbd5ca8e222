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

  /// The networks; only the sparse ones unless it is the `first` sparsity, on which dense ones do not depend.
  void add_networks(bool first, std::vector<Record>& list) {
    const F32MathScope math(precision_.math);
    const auto& [x, up, down, up_bias, gate_up, gate_down, dy] = in_;
    const double gated = double(gate_down.size(1)), hidden = double(shape_.hidden);
    if (first) {
      add_network(
          "swiglu", gated * 3, [&] { return ops::linear(ops::linear_swiglu(x, gate_up), gate_down); }, list);
      add_network(
          "relu2", hidden * 2, [&] { return ops::mlp(x, up, down, how_.activation, up_bias); }, list);
      ops::MlpSparse24 dense = how_;
      dense.y = dense.dx = dense.dup = dense.ddown = Gemm24::dense;
      add_network(
          "relu2 counted", hidden * 2, [&] { return ops::mlp_sparse24(x, up, down, dense, up_bias).y; },
          list);
    }
    const auto sparse = [&] { return ops::mlp_sparse24(x, up, down, how_, up_bias).y; };
    add_network("sparse24", hidden * 2, sparse, list, attrs_);
    for (const std::string& variant : options_.variants) {
      const ops::ForceVariant force("mlp_sparse24", variant);
      add_network("sparse24 " + variant, hidden * 2, sparse, list, attrs_, variant);
    }
  }

  /// The GEMMs and compressions.
  void add_parts(std::vector<Record>& list) {
    const F32MathScope math(precision_.math);
    const Tensor x = in_.x.detach(), up = in_.up.detach(), down = in_.down.detach(), dy = in_.dy;
    const DType dtype = precision_.dtype, wide = ops::sum_dtype(dtype);
    const auto matrix = [&](int64_t rows, int64_t columns, DType of) {
      return Tensor::empty({rows, columns}, of, options_.device);
    };
    const int64_t t = shape_.tokens, d = shape_.width, f = shape_.hidden;
    const Tensor h = matrix(t, f, dtype), y = matrix(t, d, dtype), dup = matrix(f, d, wide),
                 ddown = matrix(d, f, wide);
    const auto gemm = [&](const char* name, const Tensor& to, const Tensor& a, const Tensor& b) {
      Record made = record("ffn gemm", std::string(name) + " dense", "fwd");
      made.flops = 2 * double(t) * double(d) * double(f);
      add(
          std::move(made), [&] { ops::multiply(to, a, b); }, list);
    };
    const auto gemm24 = [&](const char* name, const Tensor& to, const ops::Sparse24& a, const Tensor& b) {
      Record made = record("ffn gemm", std::string(name) + " sparse", "fwd");
      made.flops = 2 * double(t) * double(d) * double(f);
      made.variant = options_.device.is_cpu() ? "" : ops::multiply24_variant(to, a, b);
      add(
          std::move(made), [&] { ops::multiply24(to, a, b); }, list);
    };
    const auto part = [&](const char* name, double bytes, const auto& work) {
      Record made = record("ffn part", name, "fwd");
      made.bytes = bytes;
      add(std::move(made), work, list);
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
  /// Times the work that the record describes.
  void add(Record made, const std::function<void()>& work, std::vector<Record>& list) const {
    options_.listener.begin(work_text(made));
    made.ms = measure(options_.device, work, options_.timer);
    options_.listener.add(std::move(made), list);
  }
  /// `rows`: of D elements, that its weights have.
  void add_network(const std::string& what, double rows, const std::function<Tensor()>& run,
                   std::vector<Record>& list, const std::map<std::string, std::string>& attrs = {},
                   const std::string& variant = {}) const {
    Record made = record("ffn", what, "fwd+bwd");
    made.attrs.insert(attrs.begin(), attrs.end());
    made.variant = variant;
    made.flops = 6 * double(shape_.tokens) * double(shape_.width) * rows;
    add(
        std::move(made),
        [&] {
          Tape tape;
          const std::vector<Tensor> y{run()}, dy{in_.dy};
          tape.backward(y, dy);
          for (const Tensor* const leaf : {&in_.x, &in_.up, &in_.down, &in_.gate_up, &in_.gate_down})
            zero_grad(*leaf);
        },
        list);
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
  const std::vector<FfnShape> shapes =
      options.shapes.empty() ? default_ffn_shapes(options.device) : options.shapes;
  for (const Precision precision : precisions)
    for (const FfnShape& shape : shapes) {
      bool first = true;
      for (const double sparsity : options.sparsities) {
        Bench bench(options, shape, precision, sparsity);
        bench.add_networks(first, records);
        if (first && options.gemms) bench.add_parts(records);
        first = false;
      }
    }
  return records;
}

}  // namespace tessera::bench
