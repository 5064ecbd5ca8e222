#include "plan/plan.h"

#include "models/bert.h"

namespace tessera::plan {

double step_flops(const models::BertConfig& config, double tokens, double length) {
  const auto d = double(config.d_model), d_ff = double(config.d_ff);
  const double projections = 6 * d * d, attention = 4 * length * d,
               after_attention = 2 * d * d + 4 * d * d_ff;
  const bool first_alone =
      config.head == models::BertHead::classify || config.head == models::BertHead::regress;
  const double unread = first_alone ? tokens - tokens / length : 0;
  const double gemms =
      double(config.layers) * tokens * (projections + after_attention) - unread * after_attention;
  return Flops{.gemms = gemms, .attention = double(config.layers) * tokens * attention}.step();
}

double count_block_weights(const models::BertConfig& config, const Forms& forms) {
  const int64_t d = config.d_model;
  return double(config.layers) * (4 * nn::count_factors(forms.attention, d, d).parameters +
                                  nn::count_factors(forms.mlp, config.d_ff, d).parameters +
                                  nn::count_factors(forms.mlp, d, config.d_ff).parameters);
}

}  // namespace tessera::plan
