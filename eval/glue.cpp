#include "eval/glue.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "eval/bert_batch.h"
#include "runtime/interrupt.h"

namespace tessera::eval {

GluePredictions predict_glue(const models::Bert& model, const datasets::GlueItems& items, int64_t batch_size,
                             Device device) {
  const NoTape off;
  GluePredictions result;
  double loss = 0;
  for (int64_t first = 0; first < items.size(); first += batch_size) {
    check_interrupt();
    std::vector<int64_t> indices;
    for (int64_t i = first; i < std::min(first + batch_size, items.size()); ++i) indices.push_back(i);
    const datasets::GlueBatch batch = items.batch(indices);
    const Tensor y = model(bert_batch(batch, model.config, 0, device));
    const auto logits = y.to(DType::f64).to_vector<double>();
    const auto width = size_t(y.size(1));
    for (size_t row = 0; row < indices.size(); ++row) {
      const auto begin = logits.begin() + ptrdiff_t(row * width), end = begin + ptrdiff_t(width);
      const auto best = std::max_element(begin, end);
      const double label = items.has_labels() ? items.label(indices[row]) : 0;
      if (items.info().labels.empty()) {
        result.values.push_back(*begin);
        loss += (*begin - label) * (*begin - label);
      } else {
        // NaN is above no other value, so that the first class would be the largest.
        const bool is_nan = std::any_of(begin, end, [](double logit) { return std::isnan(logit); });
        result.values.push_back(is_nan ? std::numeric_limits<double>::quiet_NaN() : double(best - begin));
        double sum = 0;
        for (auto at = begin; at != end; ++at) sum += std::exp(*at - *best);
        loss += *best + std::log(sum) - begin[ptrdiff_t(label)];
      }
    }
  }
  result.loss = items.has_labels() ? loss / double(items.size()) : std::numeric_limits<double>::quiet_NaN();
  return result;
}

std::map<std::string, double> evaluate_glue(const models::Bert& model, datasets::GlueTask task,
                                            const std::vector<GluePart>& parts, int64_t batch_size,
                                            Device device) {
  std::map<std::string, double> values;
  double score = 0, loss = 0;
  for (const GluePart& part : parts) {
    const GluePredictions predicted = predict_glue(model, part.items, batch_size, device);
    std::vector<double> labels;
    for (int64_t i = 0; i < part.items.size(); ++i) labels.push_back(part.items.label(i));
    for (const auto& [name, value] : datasets::glue_metrics(task, predicted.values, labels)) {
      if (name == "score")
        score += value / double(parts.size());
      else
        values["eval_" + name + part.suffix] = value;
    }
    loss += predicted.loss / double(parts.size());
  }
  values["eval_score"] = score;
  values["eval_loss"] = loss;
  return values;
}

}  // namespace tessera::eval
