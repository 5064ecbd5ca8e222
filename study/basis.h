#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tessera::study {

/// What runs must have in common for a figure of one to be compared with that of another: facts by name,
/// such as "tokenizer" and "length".
using Basis = std::map<std::string, std::string>;

/// The basis of a value of metrics.jsonl, by run.json. Losses of language models and of masked tokens are per
/// token: those of training ("loss") depend on the tokenizer and the length of sequences, those of an
/// evaluation ("eval_nll", ...) on the tokenizer and on all facts of the evaluation; bits per byte do not
/// depend on the tokenizer, nor on the tokens that it makes of the same text. Losses of TNPs depend on the
/// prior and the numbers of features and points of its tasks, those of an evaluation on how many tasks it
/// has. Empty for the tasks of GLUE, whose texts and scores are the same for all runs.
Basis basis_of(const nlohmann::json& run, const std::string& metric);

/// The facts in which two runs differ, "tokenizer, length (64, 128)"; "" if their figures can be compared. A
/// fact that only one of them has, as runs of another version do, is one in which they differ.
std::string difference_of(const Basis& a, const Basis& b);

}  // namespace tessera::study
