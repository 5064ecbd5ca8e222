#pragma once

#include <string>
#include <vector>

#include "models/bert.h"
#include "models/gpt.h"
#include "models/llama.h"

/// How the parameters of our models are called in the files of transformers: one table per model, read in
/// both directions.

namespace tessera::pretrained {

/// Where one of our parameters comes from: it is stacked from several tensors of transformers (row ranges of
/// a fused weight), or is one tensor, transposed if it belongs to GPT-2's Conv1D.
struct NameRule {
  std::string ours;
  struct Part {
    std::string theirs;
    Shape shape;  // in their file
  };
  std::vector<Part> parts;
  bool transposed = false;
  bool is_head = false;  // of a head that weights of the bare encoder do not have
};

/// Calls `visit(const NameRule::Part&, int64_t row, int64_t rows)` for each of those tensors, with the rows
/// of our parameter that it is.
template <class Visit>
void for_each_part(const NameRule& rule, Visit&& visit) {
  int64_t row = 0;
  for (const NameRule::Part& part : rule.parts) {
    const int64_t rows = rule.transposed ? part.shape[1] : part.shape[0];
    visit(part, row, rows);
    row += rows;
  }
}

struct NameTable {
  std::vector<NameRule> rules;
  std::string prefix;  // files of the bare model leave it out: "transformer."
  std::vector<std::string>
      tied;  // theirs of what is the token embedding again, if a file has it all the same
  std::vector<std::string> buffers;  // ends of names that are no parameters: "attn.bias"
  std::vector<std::string> others;   // beginnings of names of heads that this model has not
};

NameTable name_table(const models::GptConfig& config);
NameTable name_table(const models::LlamaConfig& config);
NameTable name_table(const models::BertConfig& config);

}  // namespace tessera::pretrained
