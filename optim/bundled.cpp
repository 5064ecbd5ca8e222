#include "optim/bundled.h"

#include <type_traits>

#include "runtime/text.h"

namespace tessera::optim {
namespace {

/// f with a std::type_identity of each bundled optimizer.
template <class F>
void for_each_bundled(F&& f) {
  [&]<class... O>(std::type_identity<std::tuple<O...>>) {
    (f(std::type_identity<O>()), ...);
  }(std::type_identity<Bundled>());
}

}  // namespace

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for_each_bundled([&]<class O>(std::type_identity<O>) { names.push_back(O::kName); });
  return names;
}

Optimizer make_optimizer(const std::string& name, std::vector<nn::NamedParameter> parameters,
                         const BundledOptions& options) {
  std::optional<Optimizer> made;
  for_each_bundled([&]<class O>(std::type_identity<O>) {
    if (name == O::kName) made.emplace(O::from(std::move(parameters), options));
  });
  check(!made || made->sharding().parts == options.sharding.parts, "optimizer ", name,
        ": its states cannot be spread over ranks; use adamw or sgd, or --zero 0");
  check(!made || made->missing() == options.missing, "optimizer ", name,
        ": it takes missing gradients as zero; use adamw or sgd, or --missing-grad zero");
  check(!made || options.states == DType::f32 || made->states() == options.states, "optimizer ", name,
        ": its states are ", made ? made->states() : DType::f32,
        "; use adamw or sgd, or --optimizer-states f32");
  if (made) return std::move(*made);
  fail_at(Site::here(), "optimizer: there is no \"", name, "\"; expected one of ", joined(optimizer_names()));
}

}  // namespace tessera::optim
