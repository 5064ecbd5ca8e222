#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/language_data.h"

namespace tessera::train {

/// The held-out text, predicted in the same way by every model: the targets are the tokens of each stretch
/// from `first` on, and what stands before them is context.
struct HeldOut {
  struct Stretch {
    std::vector<int64_t> tokens;
    int64_t first = 1;
  };
  std::vector<Stretch> stretches;
  int64_t targets = 0;
  /// A stretch is a held-out document after the end of its training part, which serves as context only. Needs
  /// as many documents in both parts, as tokenize_files writes them. Otherwise a stretch is a document if
  /// they are kept apart, or else the whole part.
  bool continued = false;
};
/// The first targets of the validation part, at most `most`, and up to data.length() tokens in front of those
/// of a document that is continued. Empty if there is no such part.
HeldOut held_out(const LanguageData& data, int64_t most);

/// The held-out loss of an n-gram model (datasets::NgramModel) that is trained on the same tokens as the
/// model and predicts the same targets from the same context. Where documents are kept apart, its n-grams do
/// not cross documents.
struct NgramBaseline {
  int order = 0;         // 0: none was computed
  double nll = 0;        // nats per token
  uint64_t trained = 0;  // tokens; fewer than there are if `most` was less
  uint64_t ngrams = 0;   // different ones
};
NgramBaseline ngram_baseline(const LanguageData& data, int order, const HeldOut& held_out, uint64_t most);

/// The text of the targets. Its bytes are what nats per token are divided by to be nats per byte, times the
/// targets.
std::string target_text(const LanguageData& data, const HeldOut& held_out);

}  // namespace tessera::train
