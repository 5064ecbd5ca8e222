#include "train/drop_settings.h"

#include <fmt/format.h>

#include "ops/reduce/reduce.h"
#include "runtime/error.h"

namespace tessera::train {

void DropSettings::add_to(SettingList& list) {
  const DropSettings usual;
  list.group("Training");
  list.add("dropbp", share, "DropBP: share of the residual branches' FLOPs that backward drops, 0 to below 1")
      .shown_as("")
      .absent_means(usual.share);
  list.add("dropbp_rates", rates,
           "Rates of --dropbp: equal (fixed), or by sensitivity after a tenth of the steps")
      .one_of({"fixed", "sensitivity"})
      .absent_means(usual.rates);
}

void DropSettings::validate() const {
  check(share >= 0 && share < 1, "dropbp (--dropbp) is ", share,
        "; expected a share of the branches' FLOPs, 0 to below 1, such as 0.5");
  check(!calibrates() || share <= 0.9, "dropbp (--dropbp) is ", share,
        ", and rates by sensitivity are at most 0.9 each; give 0.9 or less, or --dropbp-rates fixed");
  check(drops() || rates == "fixed", "dropbp_rates (--dropbp-rates) is \"", rates,
        "\", but nothing is dropped; add --dropbp P");
}

void DropSettings::check_given(const Given& given) const {
  check_needs(given, {"--dropbp-rates"}, given.contains("--dropbp"), "--dropbp", "--dropbp P");
}

std::string DropSettings::description() const {
  return fmt::format("{:g} of the branches' FLOPs, {}", share,
                     calibrates() ? "rates by sensitivity after a tenth of the steps" : "equal rates");
}

std::vector<double> drop_sensitivities(nn::DropBP& drops, const optim::Optimizer& optimizer,
                                       const std::function<void()>& backward) {
  const auto norms_without = [&](std::vector<bool> dropped) {
    drops.set_dropped(std::move(dropped));
    optimizer.zero_grad();
    backward();
    std::vector<double> norms;
    for (const nn::NamedParameter& parameter : optimizer.parameters()) {
      const Tensor gradient = grad(parameter.tensor);
      norms.push_back(gradient.defined() ? ops::norm(gradient.to(DType::f32)).item<double>() : 0);
    }
    optimizer.zero_grad();
    return norms;
  };
  const std::vector<bool> none(drops.size(), false);
  const std::vector<double> whole = norms_without(none);
  std::vector<double> sensitivities;
  for (size_t branch = 0; branch < drops.size(); ++branch) {
    std::vector<bool> one = none;
    one[branch] = true;
    const std::vector<double> norms = norms_without(one);
    double sum = 0;
    for (size_t i = 0; i < norms.size(); ++i) sum += (whole[i] - norms[i]) * (whole[i] - norms[i]);
    sensitivities.push_back(sum);
  }
  drops.set_dropped(none);
  return sensitivities;
}

}  // namespace tessera::train
