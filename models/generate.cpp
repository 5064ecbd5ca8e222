#include "models/generate.h"

#include <algorithm>
#include <array>
#include <optional>

#include "runtime/capture.h"

namespace tessera::models {

using Texts = Generator::Texts;

struct Generator::State {
  explicit State(DecodingModel given)
      : model(std::move(given)),
        choices(model.cache.batch(), model.cache.capacity(), model.device),
        events{Event(model.device), Event(model.device)} {}
  ~State() {
    // The last step, which was not waited for, may still write to the host's memory.
    try {
      model.device.synchronize();
    } catch (const std::exception&) {  // an error of the device has been, or will be, met by others
    }
  }

  int64_t batch() const { return model.cache.batch(); }

  /// The work of a step on the device; what a graph repeats.
  void body(const Sampling& sampling) {
    ops::sample(choices, model.step(choices.next, model.cache), sampling);
  }

  int64_t prompt_length(const Texts& prompts, int64_t text) const {
    return int64_t(prompts[prompts.size() == 1 ? 0 : size_t(text)].size());
  }

  /// Makes token `number` of each text, 1 or more. Texts that have filled the cache have ended; they
  /// overwrite their last token while the others go on.
  void issue_step(const Texts& prompts, const GenerateOptions& options, int64_t number) {
    for (int64_t b = 0; b < batch(); ++b)
      if (prompt_length(prompts, b) + number > model.cache.capacity()) model.cache.reopen(b);
    const bool replays = options.graph && model.repeats && model.device.is_cuda();
    if (replays) {
      if (!captured || captured_sampling != options.sampling) {
        captured.emplace(model.device, [this, sampling = options.sampling] { body(sampling); });
        captured_sampling = options.sampling;
      }
      (*captured)();
      model.cache.advance(1);
    } else {
      captured.reset();
      if (model.cache.length() == model.restart_length) {
        run(texts_so_far(prompts, number), options.sampling);
      } else {
        body(options.sampling);
        model.cache.advance(1);
      }
    }
    events[size_t(number % 2)].record();
  }

  void prefill(const Texts& prompts, const GenerateOptions& options) {
    choices.restart(options.seed);
    run(prompts, options.sampling);
    events[0].record();
  }

  /// Whole texts through the model, and the choice of what follows each.
  void run(const Texts& texts, const Sampling& sampling) {
    nn::Sequences sequences;
    std::vector<int64_t> tokens;
    for (const auto& text : texts) {
      sequences.lengths.push_back(int64_t(text.size()));
      tokens.insert(tokens.end(), text.begin(), text.end());
    }
    model.cache.truncate(0);
    const Tensor flat = Tensor::from(tokens, {int64_t(tokens.size())}, model.device);
    const Tensor logits = model.prefill(flat, sequences, model.cache);
    ops::sample(choices, logits.expand({batch(), logits.size(1)}), sampling);
  }

  /// The prompts followed by the first `count` new tokens of each text.
  Texts texts_so_far(const Texts& prompts, int64_t count) {
    wait_for(count - 1);
    const int64_t most = choices.history.size(1);
    const int64_t* const history = choices.history.data<int64_t>();
    Texts texts;
    for (int64_t b = 0; b < batch(); ++b) {
      texts.push_back(prompts[prompts.size() == 1 ? 0 : size_t(b)]);
      const int64_t held = std::min(count, model.cache.capacity() - prompt_length(prompts, b));
      texts.back().insert(texts.back().end(), history + b * most, history + b * most + held);
    }
    return texts;
  }

  /// Token `number` of each text.
  std::vector<int64_t> wait_for(int64_t number) {
    events[size_t(number % 2)].wait();
    model.check_waits();
    std::vector<int64_t> tokens;
    const int64_t most = choices.history.size(1);
    for (int64_t b = 0; b < batch(); ++b) {
      tokens.push_back(choices.history.data<int64_t>()[b * most + number]);
      check(tokens.back() != ops::Choices::kNone, "generate: of the logits for token ", number, " of text ",
            b, " one is NaN, or all are -inf; are the weights whole, and does the dtype reach far enough?");
    }
    return tokens;
  }

  DecodingModel model;
  ops::Choices choices;
  std::array<Event, 2> events;  // after the choice of even and odd numbers
  std::optional<Captured> captured;
  Sampling captured_sampling;
};

Generator::Generator(DecodingModel model) : state_(std::make_unique<State>(std::move(model))) {}
Generator::~Generator() = default;
Generator::Generator(Generator&&) noexcept = default;

bool Generator::is_graph() const {
  return state_->captured && state_->captured->is_graph();
}

const std::string& Generator::variant() const {
  return state_->model.variant;
}

Texts Generator::operator()(const Texts& prompts, const GenerateOptions& options, const OnToken& on_token) {
  State& state = *state_;
  options.sampling.validate();
  check(options.most_tokens >= 0, "generate: most_tokens is ", options.most_tokens);
  check(prompts.size() == 1 || int64_t(prompts.size()) == state.batch(), "generate: ", prompts.size(),
        " prompts for ", state.batch(), " texts");
  int64_t given = 0;
  for (const auto& prompt : prompts) {
    check(!prompt.empty(), "generate: the prompt has no tokens; begin with the model's first token");
    given = std::max(given, int64_t(prompt.size()));
  }
  const int64_t capacity = state.model.cache.capacity();
  check(given <= capacity, "generate: the prompt has ", given, " tokens; there is room for ", capacity);
  std::vector<int64_t> new_token_limits;  // new tokens of each text
  for (int64_t b = 0; b < state.batch(); ++b)
    new_token_limits.push_back(std::min(options.most_tokens, capacity - state.prompt_length(prompts, b) + 1));
  const int64_t most_new_tokens = *std::ranges::max_element(new_token_limits);
  Texts texts(size_t(state.batch()));
  if (most_new_tokens == 0) return texts;
  std::vector<bool> ended(texts.size(), false);
  state.prefill(prompts, options);
  const bool ahead = state.model.device.is_cuda();
  for (int64_t number = 0; number < most_new_tokens; ++number) {
    const bool more = number + 1 < most_new_tokens;
    if (ahead && more) state.issue_step(prompts, options, number + 1);
    const std::vector<int64_t> tokens = state.wait_for(number);
    for (size_t b = 0; b < texts.size(); ++b) {
      if (ended[b]) continue;
      texts[b].push_back(tokens[b]);
      const bool goes_on = !on_token || on_token(int64_t(b), tokens[b]);
      ended[b] = !goes_on || int64_t(texts[b].size()) == new_token_limits[b] ||
                 std::find(options.stop_tokens.begin(), options.stop_tokens.end(), tokens[b]) !=
                     options.stop_tokens.end();
    }
    if (std::all_of(ended.begin(), ended.end(), [](bool end) { return end; })) break;
    if (!ahead && more) state.issue_step(prompts, options, number + 1);
  }
  return texts;
}

}  // namespace tessera::models
