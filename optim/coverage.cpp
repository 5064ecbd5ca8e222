#include "optim/coverage.h"

#include <set>
#include <string>

namespace tessera::optim {

void check_covers(const Tape& tape, std::initializer_list<const Optimizer*> optimizers,
                  const std::vector<Tensor>& others, Site site) {
  const CallScope call(site);
  check(tape.size() > 0,
        "optim::check_covers: the tape has no entries; call it after the forward pass and before "
        "backward()");
  std::set<const GradState*> covered;
  for (const Optimizer* const optimizer : optimizers)
    for (const nn::NamedParameter& parameter : optimizer->parameters())
      covered.insert(parameter.tensor.grad_state().get());
  for (const Tensor& other : others) covered.insert(other.grad_state().get());
  constexpr int kMost = 10;  // lines
  MessageStream lines;
  int missing = 0;
  for (const Tape::UsedLeaf& leaf : tape.used_leaves()) {
    if (covered.contains(leaf.state.get()) || ++missing > kMost) continue;
    lines << "\n  " << leaf.state->shape << " on " << leaf.state->device.name() << ", first used by "
          << leaf.op << leaf.call.text();
  }
  check(missing == 0, "optim::check_covers: ", missing, missing == 1 ? " leaf gets" : " leaves get",
        " a gradient but ", missing == 1 ? "belongs" : "belong",
        " to no optimizer, and so is not trained; list it in fields(), give it to an optimizer, or name it "
        "among "
        "the others:",
        lines.str(), missing > kMost ? "\n  and more" : "");
}

}  // namespace tessera::optim
