#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nn/attention.h"
#include "ops/generation/sample.h"

namespace tessera::models {

using ops::choice_number;
using ops::sample;
using ops::Sampling;

struct GenerateOptions {
  int64_t most_tokens = 128;  // new tokens, at most
  Sampling sampling = {};
  uint64_t seed = 0;                      // random seed; choice i uses the i-th random number
  std::vector<int64_t> stop_tokens = {};  // end a text; included in it
  /// On a GPU: each step is the replay of one graph. The tokens are the same with and without.
  bool graph = true;
};

class LanguageModel;

/// The interface of a model for generation; made from Gpt, Llama, or any type with their functions.
struct DecodingModel {
  DecodingModel(const LanguageModel& model, int64_t batch, int64_t capacity);
  template <class Model>
  DecodingModel(const Model& model, int64_t batch, int64_t capacity)
      : device(model.token.weight.device()),
        longest(model.longest()),
        repeats(model.steps_repeat(capacity)),
        restart_length(model.restart_length()),
        cache(model.make_cache(batch, capacity)),
        variant(model.step_variant(cache)),
        prefill([&model](const Tensor& tokens, const nn::Sequences& sequences, nn::KvCache& to) {
          return model.prefill(tokens, sequences, to);
        }),
        step([&model](const Tensor& tokens, nn::KvCache& to) { return model.step(tokens, to); }) {
    if constexpr (requires { model.ranks.ranks(); })
      check_waits = [ranks = model.ranks.ranks()] { ranks.check_waits(); };
  }

  Device device;
  int64_t longest;
  bool repeats;            // every step is the same work, so that a graph can replay it
  int64_t restart_length;  // when the longest text outgrows it, all texts are re-run from their first token
  nn::KvCache cache;
  std::string variant;  // how a step of one token runs: "persistent" or "composed"
  std::function<Tensor(const Tensor&, const nn::Sequences&, nn::KvCache&)> prefill;
  std::function<Tensor(const Tensor&, nn::KvCache&)> step;
  std::function<void()> check_waits = [] {};  // throws if a finished step timed out waiting for a rank
};

/// Generates tokens after prompts, several texts at a time. The cache, the choices and the graph are made
/// once and reused by all calls; the model must outlive it.
///
/// Prefill runs all prompts packed; then each decode step runs one token of every text over the cache,
/// chooses the next one on the device and copies it to the host. On a GPU the host issues a step before it
/// has read the previous token, so that the GPU never waits; the step after the last token is wasted.
class Generator {
 public:
  /// Texts of up to `capacity` tokens, prompt included; the last token is never run and does not count.
  template <class Model>
  Generator(const Model& model, int64_t batch, int64_t capacity)
      : Generator(DecodingModel(model, batch, capacity)) {}
  explicit Generator(DecodingModel model);
  ~Generator();
  Generator(Generator&&) noexcept;

  using Texts = std::vector<std::vector<int64_t>>;
  /// Called with each new token in the order of the texts; false ends that text.
  using OnToken = std::function<bool(int64_t text, int64_t token)>;
  /// `prompts`: one for each text, or one for all. Returns the new tokens of each; text b draws with the
  /// numbers choice_number(seed, i, b). Throws for an empty prompt, one that is too long, and a logit that is
  /// NaN; a text ends early where its own tokens fill the capacity.
  Texts operator()(const Texts& prompts, const GenerateOptions& options, const OnToken& on_token = {});

  /// Whether the last call replayed a graph.
  bool is_graph() const;
  /// How a step runs: "persistent" (all layers in one kernel) or "composed" (an operator after the other).
  const std::string& variant() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// New tokens after one prompt. Model: Gpt, Llama, LanguageModel, or what has their functions. `on_token` is
/// called with each new token; false ends the text. Throws for an empty prompt; the text ends early where the
/// model has no more positions.
template <class Model>
std::vector<int64_t> generate(const Model& model, std::span<const int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<bool(int64_t token)>& on_token = {}) {
  options.sampling.validate();
  check(!prompt.empty(), "generate: the prompt has no tokens; begin with the model's first token");
  check(options.most_tokens >= 0, "generate: most_tokens is ", options.most_tokens);
  const int64_t given = int64_t(prompt.size());
  check(given <= model.longest(), "generate: the prompt has ", given, " tokens; the model has ",
        model.longest(), " positions");
  if (options.most_tokens == 0) return {};
  const int64_t room = std::min(options.most_tokens, model.longest() - given + 1);
  Generator generator(model, 1, given + room - 1);
  return generator({{prompt.begin(), prompt.end()}}, options,
                   [&](int64_t, int64_t token) { return !on_token || on_token(token); })[0];
}

}  // namespace tessera::models
