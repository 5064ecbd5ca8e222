#include "sparsity/model_matrices.h"

#include <algorithm>

#include "io/checksum.h"
#include "pretrained/fingerprint.h"
#include "pretrained/load.h"
#include "runtime/interrupt.h"

namespace tessera::sparsity {

ModelMatrices::ModelMatrices(const std::string& folder) : folder_(folder), source_(folder) {
  const pretrained::Config config = pretrained::read_config(folder);
  check(!std::holds_alternative<models::BertConfig>(config.model), "masks: ", folder, " holds a ",
        config.type, "; expected gpt2, opt, or a model of the LLaMA family");
  const pretrained::NameTable table =
      std::visit([](const auto& model) { return pretrained::name_table(model); }, config.model);
  const pretrained::Matched matched = pretrained::match_names(table, source_, true);
  constexpr std::string_view kBlocks = "blocks.", kWeight = ".weight";
  for (const pretrained::NameRule& rule : table.rules) {
    if (!rule.ours.starts_with(kBlocks)) continue;
    const std::string number =
        rule.ours.substr(kBlocks.size(), rule.ours.find('.', kBlocks.size()) - kBlocks.size());
    for (const pretrained::NameRule::Part& part : rule.parts) {
      if (part.shape.rank() != 2) continue;  // norms and biases
      Matrix& matrix = matrices_.emplace_back();
      matrix.name = part.theirs.substr(0, part.theirs.size() - kWeight.size());
      matrix.block = std::stoll(number);
      const std::string at = "." + number + ".";
      matrix.part = matrix.name.substr(matrix.name.find(at) + at.size());
      matrix.rows = part.shape[rule.transposed ? 1 : 0], matrix.columns = part.shape[rule.transposed ? 0 : 1];
      matrix.stored = matched.names.at(part.theirs), matrix.transposed = rule.transposed;
    }
  }
}

const ModelMatrices::Matrix* ModelMatrices::find(const std::string& name) const {
  const auto found = std::ranges::find(matrices_, name, &Matrix::name);
  return found == matrices_.end() ? nullptr : &*found;
}

Tensor ModelMatrices::load(const Matrix& matrix) const {
  const Tensor stored = source_.load(matrix.stored);
  return matrix.transposed ? stored.transpose(0, 1) : stored;
}

std::string ModelMatrices::fingerprint() const {
  io::Xxh3 sum;
  for (const Matrix& matrix : matrices_) {
    check_interrupt();
    pretrained::add_to_fingerprint(sum, matrix.name, load(matrix));
  }
  return sum.digits();
}

}  // namespace tessera::sparsity
