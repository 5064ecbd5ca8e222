#include "sparsity/gated_block.h"

namespace tessera::sparsity {

GatedBlock::GatedBlock(const std::vector<pretrained::LinearModule>& modules, bool column_norms,
                       double prefill) {
  for (const pretrained::LinearModule& module : modules) {
    if (changed_.empty() || changed_.back().layer != module.layer) {
      changed_.push_back({module.layer, module.layer->weight, module.layer->form, {}});
      changed_.back().gated.prefill = prefill;
    }
    std::vector<ops::SparsePart>& parts = changed_.back().gated.parts;
    parts.push_back({ops::compress(weight_of(module), ops::SparseFormat::dense_columns), {}});
    parts_.emplace_back(changed_.size() - 1, parts.size() - 1);
    if (column_norms)
      scales_.push_back(ops::column_norms(parts.back().weight).to(parts.back().weight.device()));
  }
  resume();
}

GatedBlock::~GatedBlock() {
  pause();
}

void GatedBlock::set(const std::vector<ops::Gate>& gates) {
  check(gates.size() == parts_.size(), "gates: ", gates.size(), " for ", parts_.size(), " modules");
  for (size_t i = 0; i < gates.size(); ++i) {
    ops::Gate gate = gates[i];
    if (!scales_.empty()) gate.scales = scales_[i];
    const auto [layer, part] = parts_[i];
    changed_[layer].gated.parts[part].gate = gate;
  }
  resume();
}

const ops::Gate& GatedBlock::gate(size_t i) const {
  const auto [layer, part] = parts_[i];
  return changed_[layer].gated.parts[part].gate;
}

void GatedBlock::pause() {
  for (const Changed& one : changed_) one.layer->weight = one.weight, one.layer->form = one.dense;
}

void GatedBlock::resume() {
  for (const Changed& one : changed_) one.layer->weight = Tensor(), one.layer->form = one.gated;
}

std::vector<ops::Gate> gates_of(const PruneGates& gates,
                                const std::vector<pretrained::LinearModule>& modules) {
  std::vector<ops::Gate> found;
  for (const pretrained::LinearModule& module : modules) {
    found.push_back(gates.gates.gates.at(module.name));
    found.back().validate("gates: layer " + module.name, module.layer->in);
  }
  return found;
}

}  // namespace tessera::sparsity
