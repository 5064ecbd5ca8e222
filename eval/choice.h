#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "autograd/tape.h"
#include "models/gpt.h"
#include "nn/attention.h"

/// Multiple choice by log-likelihood: the choice that a language model finds the most likely after its
/// context.

namespace tessera::eval {

struct ChoiceItem {
  std::string context;
  std::vector<std::string> choices;  // two or more
  int64_t answer = 0;                // of them
};

/// Reads a file with a JSON object per line, {"context": "...", "choices": ["...", "..."], "answer": 0};
/// other fields are ignored, empty lines skipped. Throws, naming file and line, for anything else.
std::vector<ChoiceItem> read_choices(const std::string& path);

/// A text of which the tokens from `first` on are a choice. It refers to its tokens.
struct ChoiceText {
  std::vector<int64_t> tokens;
  int64_t first = 0;
  int64_t bytes = 0;  // of the choice
};

/// Context and choice as one text. White space at the end of the context belongs to the choice, as tokenizers
/// join it with what follows; the choice begins where the tokens of context and choice together differ from
/// those of the context, at its end at the latest. `most`: tokens that the model takes; the beginning of
/// longer texts is cut off. `begin`: put before an empty context. Throws if a choice has no tokens, if it
/// does not leave room for a token before it, and for an empty context without `begin`.
ChoiceText choice_text(const ChoiceItem& item, size_t choice,
                       const std::function<std::vector<int64_t>(const std::string&)>& encode, int64_t most,
                       std::optional<int64_t> begin);

/// A model's result for one item: log-likelihoods in nats, by text.
struct ChoiceScores {
  std::vector<double> sums, per_byte;
};
/// The highest, ties to the first.
inline int64_t best_choice(const std::vector<double>& scores) {
  return std::max_element(scores.begin(), scores.end()) - scores.begin();
}

struct Accuracy {
  int64_t items = 0, right = 0;
  double share() const { return items ? double(right) / double(items) : 0; }
  /// Wilson's interval at 95 % (E. B. Wilson, Journal of the American Statistical Association 22, 1927).
  double low() const;
  double high() const;
};

/// Scores all texts in one pass, packed one after the other; each sees itself alone. The LM head runs on the
/// choices' tokens only. Model: Gpt or Llama.
template <class Model>
ChoiceScores score_choices(const Model& model, std::span<const ChoiceText> texts, Device device) {
  const NoTape no_tape;
  std::vector<int64_t> inputs, targets;
  nn::Sequences sequences;
  for (const ChoiceText& text : texts) {
    inputs.insert(inputs.end(), text.tokens.begin(), text.tokens.end() - 1);
    targets.insert(targets.end(), text.tokens.begin() + 1, text.tokens.end());
    sequences.lengths.push_back(int64_t(text.tokens.size()) - 1);
  }
  const Shape shape{int64_t(inputs.size())};
  const Tensor tokens = Tensor::from(inputs, shape, device), next = Tensor::from(targets, shape, device);
  const nn::AttentionPass pass = model.begin(tokens, sequences);
  models::Residual x = model.embed(tokens, pass);
  for (int64_t i = 0; i < model.config.layers; ++i) x = model.block(i, x, pass);
  std::vector<Tensor> losses;
  int64_t end = 0;
  for (const ChoiceText& text : texts) {
    const int64_t begin = end + text.first - 1;  // the row that predicts the choice's first token
    end += int64_t(text.tokens.size()) - 1;
    losses.push_back(
        model.finish({x.sum.slice(0, begin, end), x.branch.slice(0, begin, end)}, next.slice(0, begin, end)));
  }
  ChoiceScores scores;
  for (size_t i = 0; i < texts.size(); ++i) {
    const double nats = losses[i].item();
    check(std::isfinite(nats),
          "eval choice: the log-likelihood of a choice is not finite; the model's "
          "weights are damaged, or its activations overflow");
    scores.sums.push_back(-nats * double(int64_t(texts[i].tokens.size()) - texts[i].first));
    scores.per_byte.push_back(scores.sums.back() / double(std::max<int64_t>(1, texts[i].bytes)));
  }
  return scores;
}

}  // namespace tessera::eval
