#include "nn/load.h"

#include <algorithm>

#include "nn/narrowed.h"
#include "runtime/text.h"
#include "tensor/equal.h"

namespace tessera::nn {
namespace {

/// "f32[2, 3]"
std::string type_of(const Tensor& tensor) {
  MessageStream text;
  text << tensor.dtype() << tensor.shape();
  return text.str();
}

/// A tensor of the model under all its names, and the weights for it.
struct Target {
  std::string name;  // the first one
  Tensor tensor;
  std::vector<const NamedParameter*> weights;  // at most one per name
};

void add_misfit(Misfits& misfits, const Target& target, const std::string& own, const NamedParameter& given) {
  const Tensor& tensor = target.tensor;
  const std::string name = own + (own == given.name ? "" : ", here '" + shown(given.name) + "'");
  if (!given.tensor.defined()) return misfits.add("undefined", name);
  const std::string types = name + ": " + type_of(given.tensor) + ", expected " + type_of(tensor);
  if (given.tensor.shape() != tensor.shape()) return misfits.add("mis-shaped", types);
  if (given.tensor.dtype() != tensor.dtype() &&
      !(is_floating(given.tensor.dtype()) && is_floating(tensor.dtype())))
    return misfits.add("mis-typed", types);
  for (const NamedParameter* const other : target.weights)
    if (!equal_bits(other->tensor, given.tensor))
      return misfits.add("different", name + ": is tied to " + target.name + ", but has other values than '" +
                                          shown(other->name) + "'");
}

}  // namespace

std::string Misfits::lines() const {
  constexpr size_t kMost = 10, kWidth = 12;  // lines of a kind, characters of its name
  std::string text;
  for (const auto& [kind, unsorted] : kinds_) {
    std::vector<std::string> list = unsorted;
    std::sort(list.begin(), list.end());
    const std::string begin = "\n  " + kind + std::string(kWidth - kind.size(), ' ');
    for (size_t i = 0; i < std::min(list.size(), kMost); ++i) text += begin + list[i];
    if (list.size() > kMost) text += begin + "and " + std::to_string(list.size() - kMost) + " more";
  }
  return text;
}

namespace detail {

LoadReport load_tensors(const std::vector<NamedParameter>& tensors,
                        const std::vector<NamedParameter>& weights, const LoadOptions& options) {
  Misfits misfits;
  std::vector<Target> targets;
  std::map<std::string, size_t> target_of;        // by each name in the model
  std::multimap<const void*, size_t> of_storage;  // indices of targets
  for (const auto& [name, tensor] : tensors) {
    auto [at, end] = of_storage.equal_range(tensor.storage().get());
    while (at != end && !are_tied(targets[at->second].tensor, tensor)) ++at;
    if (at == end) {
      at = of_storage.emplace(tensor.storage().get(), targets.size());
      targets.push_back({name, tensor, {}});
      if (tensor.grad_state() && tensor.grad_state()->tape != 0)
        misfits.add("read-only", name + ": a result of a tape; detach() it");
      else if (tensor.layout().is_expanded())
        misfits.add("read-only", name + ": expanded; clone() it");
    }
    target_of.emplace(name, at->second);
  }

  LoadReport report;
  std::map<std::string, const NamedParameter*> taken;  // by name in the model
  for (const NamedParameter& given : weights) {
    const std::string own = options.rename ? options.rename(given.name) : given.name;
    if (options.rename && own.empty()) continue;
    const auto found = target_of.find(own);
    if (found == target_of.end()) {
      report.unexpected.push_back(given.name);
      if (options.strict)
        misfits.add("unexpected",
                    shown(given.name) + (own == given.name ? "" : ", here '" + shown(own) + "'"));
      continue;
    }
    Target& target = targets[found->second];
    const auto [first, is_first] = taken.emplace(own, &given);
    if (is_first)
      add_misfit(misfits, target, own, given);
    else
      misfits.add("twice", own + ": as '" + shown(first->second->name) + "' and '" + shown(given.name) + "'");
    target.weights.push_back(&given);
  }
  for (const Target& target : targets) {
    if (!target.weights.empty()) continue;
    report.missing.push_back(target.name);
    if (options.strict) misfits.add("missing", target.name + ": " + type_of(target.tensor));
  }
  check(misfits.empty(), "nn::load: the weights do not fit the model, which is unchanged:", misfits.lines());

  std::vector<Tensor> values;  // all of them before one is copied
  for (const Target& target : targets)
    values.push_back(target.weights.empty() ? Tensor()
                                            : narrowed(target.weights[0]->tensor, target.tensor.dtype(),
                                                       target.weights[0]->name));
  for (size_t i = 0; i < targets.size(); ++i)
    if (values[i].defined()) targets[i].tensor.copy_from(values[i]);
  std::sort(report.missing.begin(), report.missing.end());
  std::sort(report.unexpected.begin(), report.unexpected.end());
  return report;
}

}  // namespace detail
}  // namespace tessera::nn
