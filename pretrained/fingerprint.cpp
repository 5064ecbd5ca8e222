#include "pretrained/fingerprint.h"

#include "io/checksum.h"
#include "pretrained/layers.h"
#include "runtime/interrupt.h"

namespace tessera::pretrained {

std::string fingerprint_of(models::LanguageRef model) {
  io::Xxh3 sum;
  for (const LinearModule& module : linear_modules(model).all) {
    if (!module.ours.starts_with("blocks.")) continue;
    check_interrupt();
    check(module.layer->weight.defined(), "fingerprint: layer ", module.name, " is ",
          nn::name_of(module.layer->form), "; expected a dense one");
    add_to_fingerprint(sum, module.name,
                       module.layer->weight.detach().slice(0, module.first, module.first + module.rows));
  }
  return sum.digits();
}

void add_to_fingerprint(io::Xxh3& sum, const std::string& module, const Tensor& matrix) {
  const Tensor wide = matrix.to(DType::f32).to(Device::cpu()).clone().packed();
  float* const values = wide.data<float>();
  for (int64_t i = 0; i < wide.count(); ++i) values[i] += 0.0f;  // -0 becomes 0
  sum.add(module + " " + std::to_string(wide.size(0)) + " " + std::to_string(wide.size(1)) + "\n");
  sum.add(wide.raw(), wide.bytes());
}

}  // namespace tessera::pretrained
