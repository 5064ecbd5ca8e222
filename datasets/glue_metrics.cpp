#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "datasets/glue.h"
#include "runtime/error.h"

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

bool is_constant(Values values) {
  return std::ranges::adjacent_find(values, std::ranges::not_equal_to()) == values.end();
}

bool has_nan(Values values) {
  return std::ranges::any_of(values, [](double value) { return std::isnan(value); });
}

/// Ranks from 1; equal values share the mean of theirs.
std::vector<double> ranks_of(Values values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<double> ranks(values.size());
  for (size_t i = 0, end = 0; i < order.size(); i = end) {
    for (end = i + 1; end < order.size() && values[order[end]] == values[order[i]];) ++end;
    for (size_t k = i; k < end; ++k) ranks[order[k]] = double(i + end + 1) / 2;
  }
  return ranks;
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

double pearson(Values predictions, Values labels) {
  check_sizes("the Pearson correlation", predictions, labels);
  // Where the mean is rounded, equal values differ from it.
  if (is_constant(predictions) || is_constant(labels)) return kUndefined;
  const auto n = double(labels.size());
  const double mean_p = std::accumulate(predictions.begin(), predictions.end(), 0.0) / n,
               mean_t = std::accumulate(labels.begin(), labels.end(), 0.0) / n;
  double pp = 0, tt = 0, pt = 0;
  for (size_t i = 0; i < labels.size(); ++i) {
    const double p = predictions[i] - mean_p, t = labels[i] - mean_t;
    pp += p * p, tt += t * t, pt += p * t;
  }
  return pt / std::sqrt(pp * tt);
}

double spearman(Values predictions, Values labels) {
  check_sizes("the Spearman correlation", predictions, labels);
  if (has_nan(predictions) || has_nan(labels)) return kUndefined;  // they have no order
  return pearson(ranks_of(predictions), ranks_of(labels));
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
