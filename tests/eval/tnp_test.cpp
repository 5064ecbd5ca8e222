#include "eval/tnp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "autograd/tape.h"
#include "datasets/posterior.h"
#include "tests/tensors.h"

namespace tessera::eval {
namespace {

models::Tnp small_tnp(Rng& rng) {
  return {{.features = 1,
           .d_model = 8,
           .d_ff = 12,
           .heads = 2,
           .layers = 1,
           .components = 2,
           .embed_hidden = 8,
           .dtype = DType::f64},
          rng,
          kCpu};
}

const datasets::PriorOptions kPrior = {
    .kind = datasets::PriorKind::rbf, .batch = 2, .context = 5, .targets = 4, .seed = 3};

// The last batch has a task more than is asked for, which must not count.
TEST(EvaluateTnp, ComparesWithTheExactPosteriorOnThatManyTasks) {
  Rng rng(1);
  const models::Tnp model = small_tnp(rng);
  const datasets::Prior prior(kPrior);
  std::vector<double> gaps;
  double nll = 0;
  {
    const NoTape off;
    for (uint64_t index = 0; index < 2; ++index) {
      const datasets::RegressionBatch batch = prior.batch(index);
      const auto losses = model.point_losses({batch.xc, batch.yc, batch.xt, batch.yt}).to_vector<double>();
      const auto exact = datasets::predict(kPrior, batch).log_density.to_vector<double>();
      for (size_t task = 0; task < 2 && gaps.size() < 3; ++task) {
        double gap = 0;
        for (size_t at = 4 * task; at < 4 * task + 4; ++at)
          nll += losses[at] / 12, gap += (losses[at] + exact[at]) / 4;
        gaps.push_back(gap);
      }
    }
  }
  const TnpEvaluation found = evaluate_tnp(model, prior, 3);
  EXPECT_EQ(found.tasks, 3);
  EXPECT_EQ(found.points, 12);
  EXPECT_NEAR(found.nll, nll, 1e-12);
  const double mean = std::accumulate(gaps.begin(), gaps.end(), 0.0) / 3;
  EXPECT_NEAR(found.gap, mean, 1e-12);
  EXPECT_NEAR(found.nll - found.optimal_nll, mean, 1e-12);
  double squares = 0;
  for (const double gap : gaps) squares += (gap - mean) * (gap - mean);
  EXPECT_NEAR(found.gap_error, std::sqrt(squares / 6), 1e-12);
}

}  // namespace
}  // namespace tessera::eval
