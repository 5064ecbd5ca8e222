#include "sparsity/prune.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "io/file.h"
#include "nn/narrowed.h"
#include "ops/pointwise/pointwise.h"
#include "ops/reduce/reduce.h"
#include "pretrained/fingerprint.h"
#include "pretrained/load.h"
#include "runtime/interrupt.h"
#include "sparsity/allocation.h"
#include "sparsity/gate_aware.h"
#include "sparsity/input_norms.h"
#include "sparsity/prune_progress.h"
#include "sparsity/scores.h"
#include "sparsity/targets.h"
#include "sparsity/update.h"
#include "sparsity/walk.h"

namespace tessera::sparsity {
namespace {

/// 0 times an infinity or a NaN is a NaN.
bool is_finite(const Tensor& tensor) {
  return ops::sum(ops::scale(tensor, 0)).item() == 0;
}

void check_weights(const std::vector<Target>& targets) {
  for (const Target& target : targets) {
    check_interrupt();
    check(is_finite(weight_of(target.module)), "prune: the weights of ", target.module.name,
          " are not finite; the file of the model is damaged, or it was trained until it diverged");
  }
}

/// Before anything is computed with the model: only then is its file the same model.
void round_parameters(models::LanguageRef model, DType dtype) {
  for (const auto& [name, parameter] : parameters_of(model)) {
    check_interrupt();
    const Tensor values = parameter.detach();
    values.copy_from(nn::narrowed(values, dtype, name));
  }
}

/// The pruned matrix, f32. `u`: the factor of its Hessian, where score or update need it.
Tensor prune_matrix(const Tensor& start, const InputStatistics* inputs, int64_t samples, const Tensor& u,
                    const Target& target, const PruneOptions& options) {
  const bool by_hessian = options.score == Score::sparsegpt, obs = options.update == Update::obs;
  const Tensor weight = by_hessian ? without_dead_inputs(start, *inputs) : start;
  if (by_hessian && obs) return update_obs(weight, {}, u, target.sparsity, options);
  const Tensor keep = by_hessian ? keep_by_hessian(weight, u, target.sparsity, options)
                                 : keep_by_score(score_matrix(weight, inputs, samples, options),
                                                 target.sparsity, options, target.module.name);
  if (obs) return update_obs(weight, keep, u, target.sparsity, options);
  if (options.update == Update::admm) return update_admm(weight, keep, *inputs, options, target.module.name);
  return keep_elements(weight, keep);
}

/// The blocks that are kept so far. `fingerprint`: of the dense model.
PruneProgress progress_of(models::LanguageRef model, const Samples& samples, const PruneOptions& options,
                          const std::string& fingerprint) {
  return {options.progress, request_digest(options, samples, fingerprint, model.device(), model.dtype())};
}

class Pruner {
 public:
  Pruner(models::LanguageRef model, const Samples& samples, const PruneOptions& options)
      : model_(model), samples_(samples), options_(options), targets_(targets_of(model, options)) {
    check(!options.needs_samples() || samples.count() > 0, "prune: the score ", name_of(options.score),
          " and the update ", name_of(options.update), " need samples of a text; give some (--text)");
    check_weights(targets_);
  }

  Pruned run() {
    const NoTape no_tape;
    const std::string fingerprint = pretrained::fingerprint_of(model_);
    if (options_.gates) check_gates_fit(model_, *options_.gates);
    if (options_.dtype) round_parameters(model_, *options_.dtype);
    std::optional<PruneProgress> progress;
    if (!options_.progress.empty()) progress = progress_of(model_, samples_, options_, fingerprint);
    if (options_.allocation == Allocation::owl) allocate_owl(model_, samples_, options_, targets_);
    std::optional<BlockWalk> walk;
    std::optional<GatedWalk> gated;
    if (options_.gates)
      gated.emplace(model_, samples_, options_.batch, *options_.gates);
    else if (options_.needs_samples())
      walk.emplace(model_, samples_, options_.batch);
    const int64_t last = targets_.back().block;
    for (int64_t block = 0; block <= last; ++block) {
      check_interrupt();
      const auto [begin, end] = std::ranges::equal_range(targets_, block, {}, &Target::block);
      const std::span<const Target> own(begin, end);
      const bool restores = progress && progress->has(block);
      std::map<std::string, GatedStatistics> statistics;
      if (gated && !restores && !own.empty()) statistics = collect(*gated, own);
      if (gated && block < last) gated->advance_dense();  // before the block is changed
      std::vector<PrunedMatrix> matrices;
      if (restores) {
        matrices = progress->restore(block, own);
        ++pruned_.resumed;
      } else if (!own.empty()) {
        matrices = gated ? prune_gated_block(own, statistics) : prune_block(own, walk);
        if (progress) progress->keep(block, own, matrices);
      }
      if (gated && block < last) gated->advance();
      if (walk && block < last) walk->advance();
      for (const Target& target : own)
        pruned_.masks.layers.emplace_back(target.module.name, mask_of(weight_of(target.module)));
      if (options_.on_block && !matrices.empty()) options_.on_block(block, matrices);
      std::ranges::move(matrices, std::back_inserter(pruned_.matrices));
    }
    pruned_.fingerprint = pretrained::fingerprint_of(model_);
    count_blocks();
    pruned_.masks.info = {.fingerprint = fingerprint,
                          .model = "",
                          .method = options_.method(),
                          .pattern = options_.pattern.name(),
                          .sparsity = nlohmann::json(options_.sparsity).dump(),
                          .seed = options_.needs_samples() ? std::to_string(samples_.seed) : ""};
    return std::move(pruned_);
  }

 private:
  /// Matrices that were not pruned may have zeros from an earlier pruning.
  void count_blocks() {
    std::map<std::string, int64_t> counted;
    for (const PrunedMatrix& matrix : pruned_.matrices) counted.emplace(matrix.name, matrix.zeros);
    int64_t zeros = 0, all = 0;
    for (const pretrained::LinearModule& module : block_modules(model_)) {
      const Tensor weight = weight_of(module);
      const auto found = counted.find(module.name);
      if (found == counted.end()) {
        const Mask mask = mask_of(weight);
        zeros += mask.count() - mask.ones();
      } else {
        zeros += found->second;
      }
      all += weight.count(), ++pruned_.block_matrices;
    }
    pruned_.block_sparsity = all > 0 ? double(zeros) / double(all) : 0;
  }

  std::vector<PrunedMatrix> prune_block(std::span<const Target> own, const std::optional<BlockWalk>& walk) {
    std::vector<PrunedMatrix> matrices;
    std::map<std::string, InputStatistics> statistics;
    std::set<std::string> layers;
    for (const Target& target : own) layers.insert(target.module.ours);
    const auto sums =
        options_.needs_products() ? InputStatistics::Sums::products : InputStatistics::Sums::squares;
    if (walk && !options_.sequential)
      statistics = walk->collect(sums, [&](const std::string& name) { return layers.contains(name); });
    for (const Target& target : own) {
      check_interrupt();
      const std::string& layer = target.module.ours;
      if (walk && options_.sequential && !statistics.contains(layer))
        // Those of the layer alone: of the layers before it in this block nothing is needed any more.
        statistics = walk->collect(sums, [&](const std::string& name) { return name == layer; });
      const auto found = statistics.find(layer);
      const InputStatistics* const inputs = found == statistics.end() ? nullptr : &found->second;
      if (inputs) inputs->check_finite(target.module.name);
      matrices.push_back(prune_target(target, inputs));
    }
    return matrices;
  }

  static std::map<std::string, GatedStatistics> collect(GatedWalk& walk, std::span<const Target> own) {
    std::set<std::string> names;
    for (const Target& target : own) names.insert(target.module.name);
    return walk.collect([&](const std::string& name) { return names.contains(name); });
  }

  std::vector<PrunedMatrix> prune_gated_block(
      std::span<const Target> own, const std::map<std::string, GatedStatistics>& statistics) const {
    std::vector<PrunedMatrix> matrices;
    for (const Target& target : own) {
      check_interrupt();
      const GatedStatistics& sums = statistics.at(target.module.name);
      sums.inputs().check_finite(target.module.name);
      matrices.push_back(prune_target(target, &sums.inputs(), &sums));
    }
    return matrices;
  }

  PrunedMatrix prune_target(const Target& target, const InputStatistics* inputs,
                            const GatedStatistics* gated = nullptr) const {
    const Tensor stored = weight_of(target.module), weight = stored.to(DType::f32);
    PrunedMatrix matrix{.name = target.module.name,
                        .rows = stored.size(0),
                        .columns = stored.size(1),
                        .asked = target.sparsity,
                        .dead = inputs ? inputs->dead() : 0,
                        .error = {}};
    if (inputs) matrix.input_norms = input_norms(*inputs, samples_.count()).to(Device::cpu());
    // A copy: `weight` may be the stored one.
    const Tensor dense = weight.shares_storage(stored) ? weight.clone() : weight;
    const bool admm = options_.update == Update::admm;
    HessianFactor hessian{.u = {}, .wide = {}, .damping = admm ? options_.damping : 0};
    if (gated || options_.score == Score::sparsegpt || options_.update == Update::obs)
      hessian = factor_hessian(*inputs, samples_.count(), options_.damping, target.module.name);
    matrix.damping = hessian.damping, matrix.raised = hessian.raised;
    const Tensor start = gated ? correct_for_gates(dense, *gated, hessian) : dense;
    hessian.wide = Tensor();
    Tensor pruned = prune_matrix(start, inputs, samples_.count(), hessian.u, target, options_);
    if (options_.dtype) pruned = pruned.to(*options_.dtype);
    stored.copy_from(pruned);
    check(is_finite(stored), "prune: the pruned weights of ", target.module.name, " are not finite in ",
          options_.dtype.value_or(stored.dtype()), "; give --dtype bf16 or f32, or more --damping");
    const Mask mask = mask_of(stored);
    matrix.zeros = mask.count() - mask.ones();
    if (gated) {
      matrix.error = gated_output_error(dense, stored.to(DType::f32), *gated);
      matrix.gate_error = gated_output_error(dense, dense, *gated);
      matrix.corrected_error = gated_output_error(dense, start, *gated);
    } else if (inputs && options_.needs_products())
      matrix.error = relative_output_error(dense, stored.to(DType::f32), *inputs);
    return matrix;
  }

  models::LanguageRef model_;
  const Samples& samples_;
  const PruneOptions& options_;
  std::vector<Target> targets_;
  Pruned pruned_;
};

}  // namespace

double Pruned::sparsity() const {
  int64_t zeros = 0, all = 0;
  for (const PrunedMatrix& matrix : matrices) zeros += matrix.zeros, all += matrix.rows * matrix.columns;
  return all > 0 ? double(zeros) / double(all) : 0;
}

Pruned prune(models::LanguageRef model, const Samples& samples, const PruneOptions& options) {
  return Pruner(model, samples, options).run();
}

void check_progress(models::LanguageRef model, const Samples& samples, const PruneOptions& options) {
  progress_of(model, samples, options, pretrained::fingerprint_of(model));
}

void save_pruned(models::LanguageRef model, const Pruned& pruned, const std::string& report,
                 const std::string& folder, const pretrained::SaveOptions& options) {
  io::AtomicFolder files(folder, io::AtomicFolder::Existing::merge, io::check_no_weights);
  model.visit([&](const auto& held) { pretrained::save(held, files.path(), options); });
  save_masks(files.path() + "/" + kMasksFile, pruned.masks);
  InputNorms norms;
  for (const PrunedMatrix& matrix : pruned.matrices)
    if (matrix.input_norms.defined()) norms[matrix.name] = matrix.input_norms;
  if (!norms.empty()) save_input_norms(files.path() + "/" + kInputNormsFile, norms, pruned.masks.info);
  io::write_file(files.path() + "/" + kReportFile, report);
  files.publish();
}

}  // namespace tessera::sparsity
