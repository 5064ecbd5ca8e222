#include "sparsity/prune.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "nn/observe.h"
#include "pretrained/fingerprint.h"
#include "runtime/parallel.h"
#include "sparsity/model_matrices.h"
#include "sparsity/targets.h"
#include "tests/io/files.h"
#include "tests/sparsity/small.h"

namespace tessera::sparsity {
namespace {

using io::test::same;
using io::test::throws;
using namespace test;

/// By the name in transformers.
template <class Model>
std::map<std::string, std::vector<double>> weights_of(Model& model) {
  std::map<std::string, std::vector<double>> weights;
  for (const pretrained::LinearModule& module : block_modules(model))
    weights[module.name] = weight_of(module).clone().to_vector<double>();
  return weights;
}

/// Sum of squares of each input of every linear layer, by our names, in the plain loops of a test.
template <class Model>
std::map<std::string, std::vector<double>> squares_of(const Model& model, const Samples& samples) {
  std::map<std::string, std::vector<double>> squares;
  const NoTape no_tape;
  const nn::Observe scope(model, {.forward = [&](const nn::LinearCall& call) {
                            const int64_t in = call.input.size(-1);
                            const std::vector<float> x = call.input.clone().to_vector<float>();
                            std::vector<double>& sums = squares[call.name];
                            sums.resize(size_t(in));
                            for (size_t i = 0; i < x.size(); ++i)
                              sums[i % size_t(in)] += double(x[i]) * double(x[i]);
                          }});
  model(Tensor::from(samples.tokens, {samples.count(), samples.length}));
  return squares;
}

/// Wanda by hand: which elements of a row [in] stay.
std::vector<double> wanda_row(const std::vector<double>& row, const std::vector<double>& squares,
                              int64_t zeros) {
  std::vector<size_t> order(row.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::abs(row[a]) * std::sqrt(squares[a]) < std::abs(row[b]) * std::sqrt(squares[b]);
  });
  std::vector<double> pruned = row;
  for (int64_t i = 0; i < zeros; ++i) pruned[order[size_t(i)]] = 0;
  return pruned;
}

/// Dense weights of the blocks from `block` on; the others as they are.
template <class Model>
void restore_from(Model& model, Model& dense, int64_t block) {
  const auto to = block_modules(model), from = block_modules(dense);
  for (size_t i = 0; i < to.size(); ++i)
    if (block_of(to[i]) >= block) weight_of(to[i]).copy_from(weight_of(from[i]));
}

template <class Small>
void expect_wanda(double sparsity, Pattern pattern) {
  const Samples samples = small_samples();
  Small pruned, half, dense;
  const Pruned result = prune(pruned.model, samples, {.pattern = pattern, .sparsity = sparsity, .batch = 4});
  const auto before = weights_of(dense.model), after = weights_of(pruned.model);
  ASSERT_EQ(result.matrices.size(), before.size());
  for (int64_t block = 0; block < 2; ++block) {
    // Inputs of the second block are those that the pruned first one makes.
    restore_from(half.model, pruned.model, 0);
    restore_from(half.model, dense.model, block);
    const auto squares = squares_of(half.model, samples);
    for (const Target& target : targets_of(dense.model, {})) {
      if (target.block != block) continue;
      const std::string& name = target.module.name;
      const size_t in = size_t(target.module.layer->in),
                   group = pattern.structured() ? size_t(pattern.group) : in;
      const int64_t zeros = pattern.structured() ? pattern.zeros : int64_t(double(in) * sparsity);
      const std::vector<double>&w = before.at(name), &sums = squares.at(target.module.ours);
      std::vector<double> expected;
      for (size_t begin = 0; begin < w.size(); begin += group) {
        const std::vector<double> row(w.begin() + int64_t(begin), w.begin() + int64_t(begin + group)),
            norms(sums.begin() + int64_t(begin % in), sums.begin() + int64_t(begin % in + group));
        std::ranges::copy(wanda_row(row, norms, zeros), std::back_inserter(expected));
      }
      EXPECT_EQ(after.at(name), expected) << name;
      EXPECT_EQ(result.masks.at(name).ones(), int64_t(w.size() / group) * (int64_t(group) - zeros)) << name;
    }
  }
}

/// The weights of modules whose names end so, as a share of all in the blocks.
double weight_share(models::Gpt& model, const std::string& end) {
  double own = 0, all = 0;
  for (const pretrained::LinearModule& module : block_modules(model)) {
    const double count = double(weight_of(module).count());
    all += count, own += module.name.ends_with(end) ? count : 0;
  }
  return own / all;
}

TEST(Prune, WandaDropsTheLowestOfEachRow) {
  expect_wanda<SmallGpt>(0.5, {});
  expect_wanda<SmallLlama>(0.4, {});
  expect_wanda<SmallGpt>(0.5, {2, 4});
  expect_wanda<SmallLlama>(0.25, {1, 4});
}

TEST(Prune, MagnitudeDropsTheLowestOfEachMatrix) {
  SmallLlama pruned, dense;
  const Pruned result = prune(pruned.model, {}, {.score = Score::magnitude, .sparsity = 0.6});
  const auto before = weights_of(dense.model), after = weights_of(pruned.model);
  for (const PrunedMatrix& matrix : result.matrices) {
    std::vector<double> sizes;
    for (const double w : before.at(matrix.name)) sizes.push_back(std::abs(w));
    std::sort(sizes.begin(), sizes.end());
    const auto zeros = int64_t(double(sizes.size()) * 0.6);
    EXPECT_EQ(matrix.zeros, zeros) << matrix.name;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const double w = before.at(matrix.name)[i];
      EXPECT_EQ(after.at(matrix.name)[i], std::abs(w) > sizes[size_t(zeros - 1)] ? w : 0) << matrix.name;
    }
    EXPECT_FALSE(std::signbit(after.at(matrix.name)[0]) && after.at(matrix.name)[0] == 0);
  }
  EXPECT_NEAR(result.sparsity(), 0.6, 0.01);
}

TEST(Prune, EveryScoreAndUpdateGivesThePatternItIsAskedFor) {
  const Samples samples = small_samples();
  for (const Score score : {Score::magnitude, Score::wanda, Score::ria, Score::sparsegpt})
    for (const Update update : {Update::none, Update::obs, Update::admm})
      for (const Pattern pattern : {Pattern{}, Pattern{2, 4}, Pattern{1, 2}}) {
        SmallLlama small;
        const Pruned result = prune(small.model, samples,
                                    {.score = score, .update = update, .pattern = pattern, .block_size = 8});
        const std::string what = std::string(name_of(score)) + " " + name_of(update) + " " + pattern.name();
        EXPECT_NEAR(result.sparsity(), 0.5, 1e-9) << what;
        for (const auto& [name, mask] : result.masks.layers) {
          if (!pattern.structured()) continue;
          for (int64_t r = 0; r < mask.rows(); ++r)
            for (int64_t c = 0; c < mask.columns; c += pattern.group) {
              int64_t ones = 0;
              for (int64_t j = 0; j < pattern.group; ++j) ones += mask.at(r, c + j);
              ASSERT_EQ(ones, pattern.group - pattern.zeros) << what << " " << name;
            }
        }
        for (const PrunedMatrix& matrix : result.matrices) {
          EXPECT_EQ(matrix.error.has_value(), score == Score::sparsegpt || update != Update::none) << what;
          if (matrix.error) EXPECT_TRUE(0 <= *matrix.error && *matrix.error < 1) << what << *matrix.error;
        }
      }
}

/// Its weights do nothing, however large they are: they leave the share to the others.
TEST(Prune, SparseGptDropsTheWeightsOfADeadInputFirst) {
  const Samples samples = small_samples();
  for (const Update update : {Update::none, Update::obs, Update::admm})
    for (const Pattern pattern : {Pattern{}, Pattern{2, 4}}) {
      SmallLlama small;
      const auto weight = [&](const std::string& end) {
        for (const pretrained::LinearModule& module : block_modules(small.model))
          if (module.name == "model.layers.0.mlp." + end) return weight_of(module);
        ADD_FAILURE() << end;
        return Tensor();
      };
      weight("gate_proj").slice(0, 5, 6).fill(0);  // silu(0) = 0
      weight("down_proj").slice(1, 5, 6).fill(3);
      const double share = pattern.structured() ? 0.5 : 0.25;
      const Pruned result = prune(small.model, samples,
                                  {.score = Score::sparsegpt,
                                   .update = update,
                                   .pattern = pattern,
                                   .sparsity = share,
                                   .block_size = 8});
      const std::string what = std::string(name_of(update)) + " " + pattern.name();
      for (const double value : weight("down_proj").slice(1, 5, 6).clone().to_vector<double>())
        EXPECT_EQ(value, 0) << what;
      const auto down =
          std::ranges::find(result.matrices, "model.layers.0.mlp.down_proj", &PrunedMatrix::name);
      ASSERT_NE(down, result.matrices.end());
      EXPECT_EQ(down->dead, 1) << what;
      EXPECT_EQ(double(down->zeros), share * double(down->rows * down->columns)) << what;
    }
}

TEST(Prune, UpdatesOfAMaskLowerTheErrorOfTheOutputs) {
  const Samples samples = small_samples(12);
  const auto error = [&](Update update) {
    SmallGpt small;
    // Block 0 alone, so that all see the same inputs. A Hessian is asked for without an update by its own
    // score.
    PruneOptions options{.score = Score::sparsegpt, .update = update, .last_block = 1, .iterations = 50};
    double sum = 0;
    for (const PrunedMatrix& matrix : prune(small.model, samples, options).matrices) sum += *matrix.error;
    return sum;
  };
  const double none = error(Update::none), obs = error(Update::obs), admm = error(Update::admm);
  EXPECT_LT(obs, 0.8 * none);
  EXPECT_LT(admm, 0.8 * none);
}

TEST(Prune, DoesNotDependOnThreadsAndLittleOnTheBatch) {
  const Samples samples = small_samples();
  const int before = cpu_threads();
  const auto masks = [&](int threads, int64_t batch, Score score) {
    set_cpu_threads(threads);
    SmallLlama small;
    Pruned result = prune(
        small.model, samples,
        {.score = score, .update = score == Score::sparsegpt ? Update::obs : Update::none, .batch = batch});
    set_cpu_threads(before);
    return std::pair(result.masks, weights_of(small.model));
  };
  for (const Score score : {Score::wanda, Score::sparsegpt}) {
    const auto [one, weights] = masks(1, 2, score);
    EXPECT_EQ(masks(5, 2, score).second, weights);
    const auto [other, ignored] = masks(1, 6, score);
    for (const auto& [name, mask] : one.layers) EXPECT_TRUE(same(mask.words, other.at(name).words)) << name;
  }
}

TEST(Prune, ChoosesMatricesByNameAndBlock) {
  const auto names = [](const PruneOptions& options) {
    SmallLlama small;
    std::vector<std::string> list;
    for (const Target& target : targets_of(small.model, options)) list.push_back(target.module.name);
    return list;
  };
  EXPECT_EQ(names({}).size(), 14u);
  EXPECT_EQ(names({.only = {"k_proj"}}),
            (std::vector<std::string>{"model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.k_proj"}));
  EXPECT_EQ(names({.only = {"model.layers.1.mlp.*"}, .except = {"up_proj"}}),
            (std::vector<std::string>{"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"}));
  EXPECT_EQ(names({.first_block = 1, .last_block = 2}).size(), 7u);
  EXPECT_EQ(names({.only = {"k_proj"}, .invert = true}).size(), 12u);
  EXPECT_TRUE(throws([&] { names({.only = {"nothing"}}); }, "fits '**.nothing'"));
  EXPECT_TRUE(throws([&] { names({.except = {"**"}}); }, "no matrix of the model's blocks is chosen"));
  EXPECT_TRUE(throws([&] { names({.first_block = 2}); }, "the model has 2"));
  // The head is never pruned: to ask for it alone is a mistake, to except it is not.
  EXPECT_EQ(names({.except = {"lm_head"}}).size(), 14u);
  EXPECT_EQ(names({.assigned = {{"**", 0.3}}}).size(), 14u);
  for (const PruneOptions& options :
       {PruneOptions{.only = {"lm_head", "k_proj"}}, PruneOptions{.assigned = {{"lm_head", 0.3}}}})
    EXPECT_TRUE(throws([&] { names(options); }, "'lm_head' fits the LM head alone, which stays dense"));
  EXPECT_TRUE(throws(
      [&] {
        names({.pattern = {1, 3}, .sparsity = 1.0 / 3, .only = {"down_proj"}});
      },
      "down_proj has 20 columns, which groups of 3 do not divide"));
  // Rows of a fused weight that are not chosen stay as they are.
  SmallLlama small, dense;
  prune(small.model, {}, {.score = Score::magnitude, .only = {"k_proj"}});
  const auto before = weights_of(dense.model), after = weights_of(small.model);
  for (const auto& [name, weights] : after)
    EXPECT_EQ(weights == before.at(name), !name.ends_with("k_proj")) << name;
}

TEST(Prune, AssignedSparsitiesReplaceTheCommonOne) {
  SmallLlama small;
  const Pruned result =
      prune(small.model, small_samples(),
            {.sparsity = 0.5, .assigned = {{"**", 0.25}, {"down_proj", 0.75}, {"q_proj", 0}}});
  for (const PrunedMatrix& matrix : result.matrices)
    EXPECT_DOUBLE_EQ(matrix.sparsity(), matrix.name.ends_with("down_proj") ? 0.75
                                        : matrix.name.ends_with("q_proj")  ? 0
                                                                           : 0.25)
        << matrix.name;
}

TEST(Prune, GoesOnAfterFinishedBlocks) {
  const Samples samples = small_samples();
  for (const Update update : {Update::none, Update::obs}) {
    const TemporaryFolder folder;
    PruneOptions options{.update = update, .progress = folder / "p"};
    SmallGpt whole;
    const Pruned expected = prune(whole.model, samples, {.update = update});
    options.on_block = [](int64_t, const auto&) { fail_at(Site::here(), "killed"); };
    SmallGpt killed;
    EXPECT_EQ(message_of([&] { prune(killed.model, samples, options); }), "killed");
    EXPECT_EQ(std::filesystem::exists(folder / "p/block-00000.safetensors"), true);
    options.on_block = {};
    SmallGpt resumed;
    const Pruned result = prune(resumed.model, samples, options);
    EXPECT_EQ(result.resumed, 1);
    EXPECT_EQ(weights_of(resumed.model), weights_of(whole.model));
    ASSERT_EQ(result.matrices.size(), expected.matrices.size());
    for (size_t i = 0; i < expected.matrices.size(); ++i) {
      EXPECT_EQ(result.matrices[i].name, expected.matrices[i].name);
      EXPECT_EQ(result.matrices[i].zeros, expected.matrices[i].zeros);
      EXPECT_TRUE(same(result.matrices[i].input_norms, expected.matrices[i].input_norms));
      EXPECT_EQ(result.matrices[i].error, expected.matrices[i].error);
    }
    // Blocks of another request are not taken for its own.
    SmallGpt other;
    EXPECT_TRUE(throws([&] { prune(other.model, small_samples(6, 4), options); },
                       "of a pruning of another model, text"));
    options.sparsity = 0.6;
    EXPECT_TRUE(throws([&] { prune(other.model, samples, options); }, "remove it to start over"));
  }
}

TEST(Prune, WeightsAreThoseThatTheFileWillHold) {
  SmallGpt small;
  prune(small.model, small_samples(), {.update = Update::obs, .dtype = DType::bf16});
  for (const pretrained::LinearModule& module : block_modules(small.model))
    EXPECT_TRUE(same(weight_of(module).to(DType::bf16).to(DType::f32), weight_of(module).clone()))
        << module.name;
}

TEST(Prune, OtherWeightsAreThoseOfTheFileToo) {
  const TemporaryFolder folder;
  SmallGpt small;
  const Pruned pruned =
      prune(small.model, {},
            {.score = Score::magnitude, .only = {"transformer.h.*.attn.c_proj"}, .dtype = DType::bf16});
  for (const auto& [name, parameter] : nn::parameters(small.model)) {
    const Tensor values = parameter.detach();
    EXPECT_TRUE(same(values.to(DType::bf16).to(DType::f32), values.clone())) << name;
  }
  EXPECT_EQ(pruned.fingerprint, pretrained::fingerprint_of(small.model));
  pretrained::save(small.model, folder / "p", {.dtype = DType::bf16});
  EXPECT_EQ(ModelMatrices(folder / "p").fingerprint(), pruned.fingerprint);
  EXPECT_EQ(pruned.matrices.size(), 2u);
  EXPECT_EQ(pruned.block_matrices, 8);
  EXPECT_NEAR(pruned.block_sparsity, 0.5 * weight_share(small.model, "attn.c_proj"), 1e-12);
}

TEST(Prune, NoWeightBecomesInfinite) {
  SmallGpt small;
  small.model.token.weight.detach().slice(0, 3, 4).fill(70000);
  const PruneOptions options{.score = Score::magnitude, .dtype = DType::f16};
  EXPECT_TRUE(throws([&] { prune(small.model, {}, options); },
                     "'token.weight' has " + std::to_string(small.model.token.weight.size(1)) +
                         " finite values that f16 would make infinite, such as 70000"));
}

TEST(Prune, SequentialCalibrationSeesPrunedLayersOfItsBlock) {
  const Samples samples = small_samples();
  SmallGpt parallel, sequential, dense;
  prune(parallel.model, samples, {});
  prune(sequential.model, samples, {.sequential = true});
  const auto a = weights_of(parallel.model), b = weights_of(sequential.model);
  EXPECT_EQ(a.at("transformer.h.0.attn.c_attn"), b.at("transformer.h.0.attn.c_attn"));
  // The last layer by hand, from the inputs that the pruned layers before it make.
  restore_from(sequential.model, dense.model, 1);
  weight_of(block_modules(sequential.model)[3]).copy_from(weight_of(block_modules(dense.model)[3]));
  const auto squares = squares_of(sequential.model, samples).at("blocks.0.mlp.down");
  const auto w = weights_of(dense.model).at("transformer.h.0.mlp.c_proj");
  std::vector<double> expected;
  for (size_t begin = 0; begin < w.size(); begin += 20)
    std::ranges::copy(wanda_row({w.begin() + int64_t(begin), w.begin() + int64_t(begin) + 20}, squares, 10),
                      std::back_inserter(expected));
  EXPECT_EQ(b.at("transformer.h.0.mlp.c_proj"), expected);
}

TEST(Prune, RefusesDamagedModels) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float bad : {nan, inf, -inf}) {
    SmallLlama small;
    small.model.blocks[1].attention.qkv.weight.detach().slice(0, 40, 41).fill(double(bad));
    const auto before = weights_of(small.model);
    EXPECT_TRUE(throws([&] { prune(small.model, small_samples(), {}); },
                       "the weights of model.layers.1.self_attn.v_proj are not finite"));
    EXPECT_EQ(message_of([&] { weights_of(small.model); }), "");
    SmallLlama activations;
    activations.model.token.weight.detach().slice(0, 3, 4).fill(double(bad));
    EXPECT_TRUE(throws([&] { prune(activations.model, small_samples(), {}); },
                       "the inputs of model.layers.0.self_attn.q_proj are not finite"));
  }
}

TEST(Prune, RefusesOptionsThatDoNotFit) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Samples samples = small_samples();
  const auto expect = [&](const PruneOptions& options, const char* says) {
    SmallGpt small, dense;
    EXPECT_TRUE(throws([&] { prune(small.model, samples, options); }, says));
    EXPECT_EQ(weights_of(small.model), weights_of(dense.model)) << says;
  };
  for (const double sparsity : {0.0, 1.0, -0.5, 1.5, double(nan)})
    expect({.sparsity = sparsity}, "expected more than 0 and less than 1");
  expect({.pattern = {4, 2}}, "expected n:m with 0 < n < m");
  expect({.pattern = {2, 4}, .sparsity = 0.6}, "drops a share of 0.5, not 0.6");
  expect({.pattern = {2, 4}, .within = ops::KeepWithin::row}, "leave out --within");
  expect({.pattern = {2, 4}, .allocation = Allocation::owl}, "needs the unstructured pattern");
  expect({.pattern = {2, 4}, .assigned = {{"**", 0.5}}}, "needs the unstructured pattern");
  expect({.pattern = {3, 6}, .variant = true}, "is unstructured");
  expect({.pattern = {5, 10}}, "groups of 10 do not divide");
  expect({.within = ops::KeepWithin::group}, "what a pattern n:m means");
  expect({.assigned = {{"**", 1}}}, "expected 0 or more and less than 1");
  expect({.score = Score::ria, .variant = true}, "belongs to the score wanda");
  expect({.first_block = 3, .last_block = 2}, "expected the second to be larger");
  expect({.batch = 0}, "0 samples at a time");
  expect({.damping = 0}, "a damping of 0");
  expect({.damping = double(nan)}, "a damping of nan");
  expect({.block_size = 0}, "blocks of 0 columns");
  expect({.update = Update::obs, .pattern = {2, 4}, .block_size = 6}, "cut groups of 4");
  expect({.score = Score::sparsegpt, .update = Update::admm, .pattern = {2, 4}, .block_size = 6},
         "cut groups of 4; give a multiple of 4 (--block-size), such as 4");
  expect({.score = Score::sparsegpt, .pattern = {3, 6}}, "give a multiple of 6 (--block-size), such as 126");
  expect({.update = Update::obs, .bits = 1}, "expected 2 to 8");
  expect({.bits = 4}, "rounding to bits is part of the update obs");
  expect({.update = Update::admm, .iterations = 0}, "0 iterations");
  expect({.update = Update::admm, .rho = -1}, "a penalty rho of -1");
  expect({.sparsity = 0.95, .allocation = Allocation::owl}, "expected all of it to lie between 0 and 1");
  expect({.allocation = Allocation::owl, .owl_outlier = 0}, "outliers of 0 times the mean");
  for (const double sparsity : {0.02, 0.98})
    PruneOptions{.sparsity = sparsity}.validate();  // OWL's range is no matter
  SmallGpt small;
  EXPECT_TRUE(throws([&] { prune(small.model, {}, {}); }, "need samples of a text"));
}

TEST(Prune, SaysWhatAGpuCannotUpdate) {
  const PruneOptions obs{.update = Update::obs, .block_size = 512};
  EXPECT_TRUE(throws([&] { obs.check_gpu("blocks.0.q_proj", 4096); },
                     "blocks.0.q_proj in blocks of 512 columns; a GPU takes at most 256"));
  obs.check_gpu("blocks.0.q_proj", 256);  // one block
  PruneOptions{.update = Update::obs, .block_size = 256}.check_gpu("blocks.0.q_proj", 4096);
  PruneOptions{.score = Score::sparsegpt, .update = Update::admm, .block_size = 512}.check_gpu("k", 4096);
}

TEST(Prune, FilesComeBackWithTheirMasks) {
  const TemporaryFolder folder;
  SmallLlama small;
  const Pruned pruned = prune(small.model, small_samples(), {.pattern = {2, 4}});
  save_pruned(small.model, pruned, "{}\n", folder / "out");
  const Masks written = load_masks(folder / "out/masks.safetensors"), read = read_masks(folder / "out");
  EXPECT_EQ(written.info.method, "wanda");
  EXPECT_EQ(written.info.pattern, "2:4");
  EXPECT_EQ(written.info.sparsity, "0.5");
  EXPECT_EQ(written.info.seed, "3");
  EXPECT_EQ(written.info.fingerprint.size(), 32u);
  check_same_model(written, read);
  for (const auto& [name, mask] : written.layers) EXPECT_TRUE(same(mask.words, read.at(name).words)) << name;
  EXPECT_TRUE(throws([&] { save_pruned(small.model, pruned, "{}\n", folder / "out"); },
                     "out has model.safetensors already"));
}

TEST(Prune, ThePlanKnowsTheWork) {
  SmallLlama small;
  const PrunePlan plan =
      plan_pruning(small.model, small_samples(), {.score = Score::sparsegpt, .update = Update::obs});
  EXPECT_EQ(plan.matrices, 14);
  EXPECT_EQ(plan.weights, 2 * (12 * 24 + 2 * 12 * 12 + 24 * 12 + 3 * 12 * 20));
  EXPECT_EQ(plan.sample_bytes, 2 * 6 * 12 * 12 * 4);
  EXPECT_EQ(plan.statistics_bytes, 8 * (12 + 144 + 24 + 24 * 24 + 12 + 144 + 20 + 400));
  EXPECT_GT(plan.flops, 0);
  EXPECT_GT(plan.seconds, 0);
}

TEST(Samples, AreDifferentPlacesOfTheText) {
  const std::vector<int64_t> text = small_text(30);
  const Samples all = choose_samples(text, {.count = 19, .length = 12, .seed = 1});
  std::vector<int64_t> begins = all.begins;
  std::sort(begins.begin(), begins.end());
  for (int64_t i = 0; i < 19; ++i) EXPECT_EQ(begins[size_t(i)], i);
  for (int64_t i = 0; i < 19; ++i)
    for (int64_t j = 0; j < 12; ++j)
      EXPECT_EQ(all.sample(i)[size_t(j)], text[size_t(all.begins[size_t(i)] + j)]);
  const Samples few = choose_samples(text, {.count = 5, .length = 12, .seed = 1});
  EXPECT_EQ(few.begins, std::vector<int64_t>(all.begins.begin(), all.begins.begin() + 5));
  EXPECT_NE(choose_samples(text, {.count = 5, .length = 12, .seed = 2}).begins, few.begins);
  EXPECT_TRUE(
      throws([&] { choose_samples(text, {.count = 20, .length = 12}); }, "only 19 different samples"));
  EXPECT_TRUE(
      throws([&] { choose_samples(text, {.count = 1, .length = 31}); }, "fewer than one sample of 31"));
  EXPECT_TRUE(throws([&] { choose_samples(text, {.count = 0, .length = 3}); }, "0 samples"));
  EXPECT_TRUE(throws([&] { choose_samples(text, {.count = 1, .length = 0}); }, "samples of 0 tokens"));
}

}  // namespace
}  // namespace tessera::sparsity
