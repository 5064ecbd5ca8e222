#include "sparsity/fingerprint.h"

#include "io/checksum.h"
#include "pretrained/layers.h"
#include "runtime/interrupt.h"
#include "sparsity/modules.h"

namespace tessera::sparsity {
namespace {

template <class Model>
std::string fingerprint(Model& model) {
  io::Xxh3 sum;
  for (const pretrained::LinearModule& module : block_modules(model)) {
    check_interrupt();
    const Tensor weight = weight_of(module).to(DType::f32).to(Device::cpu()).packed();
    sum.add(module.name + " " + std::to_string(weight.size(0)) + " " + std::to_string(weight.size(1)) + "\n");
    sum.add(weight.raw(), weight.bytes());
  }
  return sum.digits();
}

}  // namespace

std::string fingerprint_of(models::Gpt& model) {
  return fingerprint(model);
}
std::string fingerprint_of(models::Llama& model) {
  return fingerprint(model);
}

}  // namespace tessera::sparsity
