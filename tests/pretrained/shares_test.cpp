#include "pretrained/shares.h"

#include <map>

#include "autograd/tape.h"
#include "comm/threads.h"
#include "models/generate.h"
#include "tests/errors.h"
#include "tests/folder.h"
#include "tests/models/small_models.h"

// A llama that is shared out over ranks, which are threads: what each holds, and that all of them together
// are the model on one rank.

namespace tessera::pretrained {
namespace {

using comm::Communicator;
using models::Llama;
using models::LlamaConfig;
using models::LlamaFamily;
using Texts = models::Generator::Texts;

/// With sizes that 1, 2 and 4 ranks divide, but for the vocabulary, 19.
LlamaConfig divisible(LlamaFamily family) {
  LlamaConfig config = models::small_family(family);
  config.kv_heads = 4;
  config.heads = 8;
  return config;
}

std::vector<std::pair<std::string, LlamaConfig>> all_configs() {
  std::vector<std::pair<std::string, LlamaConfig>> configs;
  for (const LlamaFamily family : models::kFamilies) configs.emplace_back(name_of(family), divisible(family));
  LlamaConfig tied = divisible(LlamaFamily::llama);
  tied.tied = tied.attention_bias = tied.mlp_bias = true;
  configs.emplace_back("llama tied, with biases", tied);
  return configs;
}

/// A model whose biases and norms are no zeros and ones: a share that is added twice shows.
Llama whole_model(const LlamaConfig& config) {
  static Rng rng(5);
  Llama model(config, rng, kCpu);
  for (const auto& [name, parameter] : nn::parameters(model))
    if (parameter.rank() == 1) ops::fill_normal(parameter.detach(), 1, 0.2, rng);
  for (const auto& [name, parameter] : nn::parameters(model))  // files have no f64
    parameter.detach().copy_from(parameter.detach().to(DType::f32));
  nn::set_training(model, false);
  return model;
}

void put(const Llama& model, const std::string& folder) {
  save(model, folder, {.dtype = DType::f32});
}

/// main(the model of this rank, which it has read from the folder) on each rank.
void on_ranks(int size, const std::string& folder, DType dtype,
              const std::function<void(const Llama&, Communicator&)>& main) {
  comm::run_threads(size, [&](Communicator& c) {
    Rng rng(1);
    LoadOptions options;
    options.dtype = dtype;
    options.ranks = nn::TensorParallel(ops::RankGroup(c, c));
    main(load_llama(folder, rng, kCpu, options), c);
  });
}

/// All ranks have the bits of rank 0.
void expect_equal_on_all(Communicator& c, const Tensor& tensor) {
  const Tensor first = Tensor::empty_packed(tensor.shape(), tensor.dtype(), kCpu);
  first.copy_from(tensor);
  c.broadcast(first, 0);
  EXPECT_EQ(largest_difference(first, tensor), 0) << "rank " << c.rank();
}

TEST(Shares, LogitsAndLossAreThoseOfOneRank) {
  for (const auto& [what, config] : all_configs()) {
    const Llama whole = whole_model(config);
    const TemporaryFolder at;
    put(whole, at / "m");
    const Tensor tokens = models::small_tokens(), targets = models::small_targets();
    const Tensor expected = whole(tokens, models::kSmallSequences);
    const double loss = whole.loss(tokens, targets, models::kSmallSequences).item();
    for (const int size : {1, 2, 4})
      on_ranks(size, at / "m", DType::f64, [&, &what = what](const Llama& model, Communicator& c) {
        const Tensor logits = model(tokens, models::kSmallSequences);
        EXPECT_EQ(logits.shape(), expected.shape()) << what;
        // Sums of some 20 products, in another order: a thousand roundings of numbers below 10.
        EXPECT_LT(largest_difference(logits, expected), 1e-12) << what << " on " << size;
        EXPECT_NEAR(model.loss(tokens, targets, models::kSmallSequences).item(), loss, 1e-12) << what;
        expect_equal_on_all(c, logits);
      });
  }
}

TEST(Shares, TheTokensAreThoseOfOneRank) {
  const Texts prompts{{4, 7, 2}, {9, 5, 11, 3}};
  for (const auto& [what, config] : all_configs()) {
    const Llama whole = whole_model(config);
    const TemporaryFolder at;
    put(whole, at / "m");
    for (const bool greedy : {true, false}) {
      const models::GenerateOptions options{
          .most_tokens = 7, .sampling = {.temperature = greedy ? 0 : 0.9, .top_k = 7}, .seed = 3};
      models::Generator alone(whole, 2, 10);
      const Texts expected = alone(prompts, options);
      for (const int size : {2, 4})
        on_ranks(size, at / "m", DType::f64, [&, &what = what](const Llama& model, Communicator&) {
          models::Generator generator(model, 2, 10);
          EXPECT_EQ(generator(prompts, options), expected)
              << what << " on " << size << (greedy ? " greedy" : "");
          EXPECT_EQ(generator.variant(), "composed");
        });
    }
  }
}

TEST(Shares, TheRanksHaveEachElementOnceAndNoMoreMemory) {
  for (const auto& [what, config] : all_configs()) {
    Rng rng(1);
    const Llama whole(config, rng, kCpu, models::Start::blank);
    for (const int ranks : {2, 4}) {
      const LlamaConfig share = config.share(ranks);
      for (const auto& [name, parameter] : nn::parameters(whole)) {
        // How many ranks have an element.
        const int64_t rows = parameter.size(0), columns = parameter.rank() > 1 ? parameter.size(1) : 1;
        std::map<std::pair<int64_t, int64_t>, int> holders;
        for (int rank = 0; rank < ranks; ++rank) {
          const ParameterShare part = share_of(name, config, rank, ranks);
          const IndexRange all{0, columns}, kept = part.columns.value_or(all);
          for (const IndexRange& range : part.rows)
            for (int64_t r = range.begin; r < range.end; ++r)
              for (int64_t column = kept.begin; column < kept.end; ++column) ++holders[{r, column}];
        }
        const int expected = name.find("norm") != std::string::npos ? ranks : 1;
        EXPECT_EQ(int64_t(holders.size()), rows * columns) << what << " " << name;
        for (const auto& [element, count] : holders) EXPECT_EQ(count, expected) << what << " " << name;
      }
      EXPECT_EQ(share.heads * ranks, config.heads);
      EXPECT_EQ(share.kv_heads * ranks, config.kv_heads);
      EXPECT_EQ(share.d_ff * ranks, config.d_ff);
      EXPECT_EQ(share.effective_head_dim(), config.effective_head_dim());
    }
  }
  // Memory: a quarter of the weights and padding, and the whole of the norms.
  const LlamaConfig config = divisible(LlamaFamily::llama);
  Rng rng(1);
  const auto bytes = [](const Llama& model) {
    size_t sum = 0;
    for (const auto& [name, parameter] : nn::parameters(model))
      if (parameter.rank() == 2) sum += parameter.bytes();
    return sum;
  };
  const size_t all = bytes(Llama(config, rng, kCpu, models::Start::blank));
  comm::run_threads(4, [&](Communicator& c) {
    Rng own(1);
    const Llama model(config, own, kCpu, models::Start::blank, nn::TensorParallel(ops::RankGroup(c, c)));
    const size_t padding = 2 * (4 * 8 - 19) * size_t(config.d_model) * 8;  // of 32 rows for 19 tokens, twice
    EXPECT_EQ(bytes(model) * 4, all + padding);
    EXPECT_EQ(model.make_cache(1, 8).keys(0).size(2), config.kv_heads / 4);
  });
}

TEST(Shares, AreTheSameFromAFileAndFromAModel) {
  const Llama whole = whole_model(divisible(LlamaFamily::phi3));
  const TemporaryFolder at;
  put(whole, at / "m");
  on_ranks(2, at / "m", DType::f64, [&](const Llama& model, Communicator&) {
    Rng rng(1);
    Llama copy(whole.config, rng, kCpu, models::Start::blank, model.ranks);
    copy_shares(copy, whole);
    const auto read = nn::parameters(model), made = nn::parameters(copy);
    ASSERT_EQ(read.size(), made.size());
    for (size_t i = 0; i < read.size(); ++i)
      EXPECT_EQ(largest_difference(read[i].tensor, made[i].tensor), 0) << read[i].name;
  });
}

TEST(Shares, SayWhatCannotBeSharedOut) {
  const LlamaConfig two = models::small_llama();  // 4 heads, 2 kv_heads
  expect_error([&] { two.share(4); }, {"kv_heads is 2", "4 ranks do not divide", "4 heads"});
  expect_error([&] { two.share(3); }, {"heads is 4", "3 ranks"});
  LlamaConfig odd = two;
  odd.d_ff = 21;
  expect_error([&] { odd.share(2); }, {"d_ff is 21", "2 ranks"});

  const TemporaryFolder at;
  Rng rng(1);
  save(models::Gpt(models::small_gpt(), rng, kCpu), at / "gpt", {.dtype = DType::f32});
  put(Llama(two, rng, kCpu), at / "llama");
  comm::run_threads(2, [&](Communicator& c) {
    Rng own(1);
    const nn::TensorParallel ranks(ops::RankGroup(c, c));
    expect_error([&] { load_gpt(at / "gpt", own, kCpu, {.ranks = ranks}); },
                 {"gpt2", "2 ranks cannot share out", "qwen3"});
    expect_error([&] { Llama(two, own, kCpu, models::Start::drawn, ranks); }, {"2 ranks", "starts blank"});
    // Training.
    Llama model = load_llama(at / "llama", own, kCpu, {.ranks = ranks});
    const Tape tape;
    expect_error(
        [&] { model.loss(models::small_tokens(), models::small_targets(), models::kSmallSequences); },
        {"no gradient", "inference"});
  });
}

TEST(Shares, StepsOfSeveralTokensAreThoseOfOneRank) {
  const Llama whole = whole_model(divisible(LlamaFamily::llama));
  const TemporaryFolder at;
  put(whole, at / "m");
  nn::KvCache cache = whole.make_cache(1, 12);
  const Tensor first = models::tokens_of({4, 7, 2}, {1, 3}), next = models::tokens_of({9, 5, 11, 3}, {1, 4});
  whole.decode(first, cache);
  const Tensor expected = whole.decode(next, cache);
  on_ranks(2, at / "m", DType::f64, [&](const Llama& model, Communicator&) {
    nn::KvCache own = model.make_cache(1, 12);
    model.decode(first, own);
    EXPECT_LT(largest_difference(model.decode(next, own), expected), 1e-12);
    EXPECT_EQ(model.persistent_lacks(own), "the layers are shared out over 2 ranks");
  });
}

}  // namespace
}  // namespace tessera::pretrained
