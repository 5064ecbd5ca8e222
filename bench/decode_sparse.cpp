#include "bench/decode_sparse.h"

#include <algorithm>
#include <cmath>

#include "autograd/tape.h"
#include "nn/observe.h"
#include "ops/random/random.h"
#include "runtime/parallel.h"

namespace tessera::bench {
namespace {

/// The magnitude that a share of the elements does not exceed.
float quantile(std::vector<float> magnitudes, double share) {
  if (magnitudes.empty() || share <= 0) return 0;
  const size_t at = std::min(magnitudes.size() - 1, size_t(double(magnitudes.size()) * share));
  std::nth_element(magnitudes.begin(), magnitudes.begin() + std::ptrdiff_t(at), magnitudes.end());
  return magnitudes[at];
}

std::vector<float> magnitudes_of(const Tensor& values, int64_t most) {
  std::vector<float> all = values.to(DType::f32).to(Device::cpu()).to_vector<float>();
  const size_t step = std::max<size_t>(1, all.size() / size_t(most));
  std::vector<float> some;
  for (size_t i = 0; i < all.size(); i += step) some.push_back(std::fabs(all[i]));
  return some;
}

/// The rows of a module, compressed on its device, their smallest elements set to 0.
ops::SparseWeight pruned(const pretrained::LinearModule& module, ops::SparseFormat format, double sparsity) {
  const Tensor part = module.layer->weight.detach().slice(0, module.first, module.first + module.rows);
  const Tensor weight = part.to(Device::cpu()).clone();
  constexpr int64_t kSampled = 100'000;
  const float least =
      quantile(magnitudes_of(weight.slice(0, 0, std::min<int64_t>(weight.size(0), 64)), kSampled), sparsity);
  dispatch_floating(weight.dtype(), "decode", [&]<class T>() {
    parallel_for(weight.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* const row = weight.data<T>() + r * weight.layout().stride(0);
        for (int64_t c = 0; c < weight.size(1); ++c)
          if (sparsity > 0 && std::fabs(float(row[c])) < least) row[c] = T(0.0f);
      }
    });
  });
  return ops::compress(weight, format).to(part.device());
}

ops::SparseWeight copy_of(const ops::SparseWeight& weight) {
  ops::SparseWeight copy = weight;
  for (Tensor* const array : {&copy.values, &copy.bitmaps, &copy.gaps, &copy.offsets, &copy.info})
    if (array->defined()) *array = array->clone();
  copy.constant = false;
  copy.settle();
  return copy;
}

/// Compresses the matrices of the first block; the other blocks get copies of them.
void compress_layers(models::Llama& model, ops::SparseFormat format, double sparsity) {
  std::map<nn::Linear*, nn::Compressed> forms;
  std::vector<ops::SparseWeight> first;  // of the first block, module by module
  size_t next = 0;                       // of those, in the block at hand
  const pretrained::LinearModules modules = pretrained::linear_modules(model);
  for (const pretrained::LinearModule& module : modules.all) {
    if (!module.ours.starts_with("blocks.")) continue;
    const bool is_first = module.ours.starts_with("blocks.0.");
    if (is_first) first.push_back(pruned(module, format, sparsity));
    nn::Compressed& form = forms[module.layer];
    form.parts.push_back({is_first ? first.back() : copy_of(first.at(next++ % first.size())), {}});
    if (module.first + module.rows == module.layer->out) {
      module.layer->form = std::move(form);
      module.layer->weight = Tensor();
    }
  }
}

/// Thresholds that leave out that share of the inputs, by layer.
pretrained::Gates calibrated(models::Llama& model, double sparsity) {
  std::map<std::string, std::vector<pretrained::LinearModule>> modules;
  for (const pretrained::LinearModule& module : pretrained::linear_modules(model).all)
    if (module.ours.starts_with("blocks.")) modules[module.ours].push_back(module);
  pretrained::Gates gates;
  const nn::Observe scope(model, {.forward = [&](const nn::LinearCall& call) {
                            const auto found = modules.find(call.name);
                            if (found == modules.end()) return;
                            constexpr int64_t kSampled = 1'000'000;
                            const double t = quantile(magnitudes_of(call.input.detach(), kSampled), sparsity);
                            for (const pretrained::LinearModule& module : found->second)
                              gates.gates[module.name] = {.kind = ops::Gate::Kind::threshold, .threshold = t};
                          }});
  const NoTape no_tape;
  const Tensor tokens = Tensor::empty({1, 64}, DType::i64, Device::cpu());
  Rng rng(3);
  ops::fill_integers(tokens, model.config.vocabulary, rng);
  model(tokens.to(model.token.weight.device()));
  return gates;
}

}  // namespace

std::vector<pretrained::SparseModule> make_sparse(models::Llama& model, const DecodeSparse& sparse,
                                                  int64_t tokens) {
  if (sparse.format) compress_layers(model, *sparse.format, sparse.weight_sparsity);
  pretrained::SparseOptions options{.tokens = tokens};
  if (sparse.activation_sparsity > 0) options.gates = calibrated(model, sparse.activation_sparsity);
  return pretrained::make_sparse(model, options);
}

std::vector<Matmul> matmuls_of(models::LanguageRef model,
                               const std::vector<pretrained::SparseModule>& modules,
                               const std::vector<std::vector<int64_t>>& texts) {
  std::map<std::string, pretrained::GateCounts> counts;
  if (std::ranges::any_of(modules, [](const pretrained::SparseModule& module) {
        return module.gate.kind != ops::Gate::Kind::none;
      }))
    counts = pretrained::count_gates(model, texts);
  std::map<std::string, const pretrained::SparseModule*> by_name;
  for (const pretrained::SparseModule& module : modules) by_name[module.name] = &module;
  std::vector<Matmul> all;
  for (const pretrained::LinearModule& module : pretrained::linear_modules(model).all) {
    const double bytes = double(module.rows) * double(module.layer->in) * double(size_of(model.dtype()));
    Matmul& one = all.emplace_back(Matmul{
        .layer = module.name, .format = "dense", .variant = "dense", .bytes = bytes, .dense_bytes = bytes});
    const auto found = by_name.find(module.name);
    if (found == by_name.end()) continue;
    const pretrained::SparseModule& sparse = *found->second;
    one.format = sparse.format, one.variant = sparse.variant;
    one.bytes = double(sparse.bytes), one.dense_bytes = double(sparse.dense_bytes);
    one.weight_sparsity = sparse.sparsity;
    if (const auto count = counts.find(module.name); count != counts.end())
      one.activation_sparsity = count->second.sparsity();
  }
  return all;
}

double compressed_bytes(const std::vector<Matmul>& matmuls) {
  double bytes = 0;
  for (const Matmul& one : matmuls) {
    const bool skips = one.format == "dense-columns" || one.format == "tiled-cbc";
    if (one.format != "dense") bytes += one.bytes * (skips ? 1 - one.activation_sparsity : 1);
  }
  return bytes;
}

}  // namespace tessera::bench
