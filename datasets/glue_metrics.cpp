#include <algorithm>
#include <cmath>
#include <limits>

#include "datasets/glue.h"
#include "runtime/error.h"
#include "runtime/statistics.h"

namespace tessera::datasets {
namespace {

using Values = std::span<const double>;

constexpr double kUndefined = std::numeric_limits<double>::quiet_NaN();

void check_sizes(const char* metric, Values predictions, Values labels) {
  check(predictions.size() == labels.size() && !labels.empty(), "glue: ", metric, " of ", predictions.size(),
        " predictions and ", labels.size(), " labels");
}

struct Table {
  double both = 0, only_predicted = 0, only_there = 0, neither = 0;
};

Table table_of(const char* metric, Values predictions, Values labels) {
  check_sizes(metric, predictions, labels);
  Table table;
  for (size_t i = 0; i < labels.size(); ++i) {
    check((predictions[i] == 0 || predictions[i] == 1) && (labels[i] == 0 || labels[i] == 1),
          "glue: ", metric, " has classes 0 and 1; number ", i, " is ", predictions[i], " for ", labels[i]);
    const bool p = predictions[i] == 1, t = labels[i] == 1;
    (p && t ? table.both : p ? table.only_predicted : t ? table.only_there : table.neither) += 1;
  }
  return table;
}

bool has_nan(Values values) {
  return std::ranges::any_of(values, [](double value) { return std::isnan(value); });
}

}  // namespace

double accuracy(Values predictions, Values labels) {
  check_sizes("accuracy", predictions, labels);
  if (has_nan(predictions)) return kUndefined;
  double right = 0;
  for (size_t i = 0; i < labels.size(); ++i) right += predictions[i] == labels[i] ? 1 : 0;
  return right / double(labels.size());
}

double f1(Values predictions, Values labels) {
  if (has_nan(predictions)) return kUndefined;
  const Table t = table_of("F1", predictions, labels);
  const double sum = 2 * t.both + t.only_predicted + t.only_there;
  return sum == 0 ? 0 : 2 * t.both / sum;
}

double matthews(Values predictions, Values labels) {
  if (has_nan(predictions)) return kUndefined;
  const Table t = table_of("the Matthews correlation", predictions, labels);
  const double product = (t.both + t.only_predicted) * (t.both + t.only_there) *
                         (t.neither + t.only_predicted) * (t.neither + t.only_there);
  return product == 0 ? 0 : (t.both * t.neither - t.only_predicted * t.only_there) / std::sqrt(product);
}

std::vector<std::pair<std::string, double>> glue_metrics(GlueTask task, Values predictions, Values labels) {
  std::vector<std::pair<std::string, double>> values;
  double sum = 0;
  for (const std::string name : glue_info(task).metrics) {
    const double value = name == "accuracy"   ? accuracy(predictions, labels)
                         : name == "f1"       ? f1(predictions, labels)
                         : name == "matthews" ? matthews(predictions, labels)
                         : name == "pearson"  ? pearson(predictions, labels)
                                              : spearman(predictions, labels);
    values.emplace_back(name, value);
    sum += value;
  }
  values.emplace_back("score", sum / double(values.size()));
  return values;
}

}  // namespace tessera::datasets
