#include "sparsity/allocation.h"

#include <algorithm>
#include <numeric>

#include "ops/reduce/reduce.h"
#include "sparsity/scores.h"

namespace tessera::sparsity {

double outlier_share(const std::vector<Tensor>& scores, double factor) {
  double sum = 0;
  int64_t all = 0, outliers = 0;
  for (const Tensor& part : scores) sum += ops::sum(part).item(), all += part.count();
  const double limit = factor * sum / double(all);
  for (const Tensor& part : scores) {
    const std::vector<float> values = part.to_vector<float>();
    outliers +=
        std::count_if(values.begin(), values.end(), [&](float value) { return double(value) > limit; });
  }
  return double(outliers) / double(all);
}

std::vector<double> owl_sparsities(const std::vector<double>& outliers, double sparsity, double range) {
  const auto [least, most] = std::ranges::minmax_element(outliers);
  std::vector<double> result(outliers.size(), sparsity);
  if (*least == *most) return result;
  std::vector<double> kept;
  for (const double share : outliers) kept.push_back((share - *least) / (*most - *least) * 2 * range);
  const double mean = std::accumulate(kept.begin(), kept.end(), 0.0) / double(kept.size());
  for (size_t i = 0; i < kept.size(); ++i) result[i] = sparsity - (kept[i] - mean);
  for (const double value : result)
    check(value >= 0 && value < 1, "prune: owl gives a block a sparsity of ", value,
          ": the sparsities of all blocks span 2 x ", range, " around their mean of ", sparsity,
          "; give a smaller --owl-range");
  return result;
}

void allocate_owl(models::LanguageRef model, const Samples& samples, const PruneOptions& options,
                  std::vector<Target>& targets) {
  BlockWalk walk(model, samples, options.batch);
  PruneOptions wanda = options;
  wanda.score = Score::wanda;
  std::vector<double> outliers;
  std::vector<int64_t> blocks;
  for (int64_t block = 0; block <= targets.back().block; ++block) {
    const auto own = std::ranges::equal_range(targets, block, {}, &Target::block);
    if (!own.empty()) {
      const auto statistics =
          walk.collect(InputStatistics::Sums::squares, [](const std::string&) { return true; });
      std::vector<Tensor> scores;
      for (const Target& target : own) {
        const InputStatistics& inputs = statistics.at(target.module.ours);
        inputs.check_finite(target.module.name);
        scores.push_back(
            score_matrix(weight_of(target.module).to(DType::f32), &inputs, samples.count(), wanda));
      }
      outliers.push_back(outlier_share(scores, options.owl_outlier));
      blocks.push_back(block);
    }
    if (block < targets.back().block) walk.advance();
  }
  const std::vector<double> sparsities = owl_sparsities(outliers, options.sparsity, options.owl_range);
  std::set<std::string> assigned;
  const pretrained::LinearModules modules = pretrained::linear_modules(model);
  for (const auto& [pattern, share] : options.assigned) assigned.merge(names_fitting(modules, pattern));
  for (Target& target : targets) {
    const size_t i = size_t(std::ranges::lower_bound(blocks, target.block) - blocks.begin());
    if (!assigned.contains(target.module.name)) target.sparsity = sparsities[i];
  }
}

}  // namespace tessera::sparsity
