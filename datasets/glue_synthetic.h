#pragma once

#include <cstdint>
#include <string>

#include "datasets/glue.h"

/// Small GLUE-like tasks, for tests and demonstrations without a download.
///
/// Each is made from little scenes (who did what to what, where, how) in simple English, so that it cannot be
/// solved by single words: negation turns a judgement, passive voice keeps a meaning, a swapped agent changes
/// it, a hypernym follows from its hyponym and not the other way round. A model that attends to pairs of
/// words reaches well above the most frequent class; one in thirty-two labels of classes is wrong on purpose,
/// so nothing reaches 1.

namespace tessera::datasets {

struct SyntheticGlueOptions {
  int64_t train = 2000, dev = 400, test = 400;  // examples
  uint64_t seed = 0;                            // random seed; the three parts differ
};

/// Writes train.tsv, dev.tsv and test.tsv (of MNLI the matched and mismatched parts) into `folder`/<task's
/// folder>, in the layout of the official files; test files have no labels. Throws, before it writes, if one
/// of them is there with another content.
void write_synthetic_glue(GlueTask task, const std::string& folder, const SyntheticGlueOptions& options = {});

}  // namespace tessera::datasets
