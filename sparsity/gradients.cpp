#include "sparsity/gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <set>
#include <sstream>

#include "ops/select/select.h"
#include "runtime/parallel.h"

namespace tessera::sparsity {

TopRows TopRows::parse(const std::string& text) {
  const auto wrong = [&] {
    fail_at(Site::here(), "gradients: --top: \"", text,
            "\"; expected a number of rows, as 50, or a share, as 10%");
  };
  TopRows top;
  const bool is_share = text.ends_with('%');
  const char *const begin = text.data(), *const end = begin + text.size() - (is_share ? 1 : 0);
  if (is_share) {
    const auto [stop, error] = std::from_chars(begin, end, top.share);
    if (error != std::errc{} || stop != end || !(top.share > 0 && top.share <= 100)) wrong();
    top.share /= 100;
  } else {
    const auto [stop, error] = std::from_chars(begin, end, top.count);
    if (error != std::errc{} || stop != end || top.count < 1) wrong();
  }
  return top;
}

std::string TopRows::text() const {
  return share > 0 ? fmt::format("{:g}%", 100 * share) : std::to_string(count);
}

int64_t TopRows::of(int64_t rows) const {
  if (rows == 0) return 0;
  return share > 0 ? ops::share_of_rows(rows, share) : std::min(rows, count);
}

void OverBatches::add(double value) {
  batches += 1, sum += value;
  least = std::min(least, value), largest = std::max(largest, value);
}

void OverBatches::add(const OverBatches& others) {
  batches += others.batches, sum += others.sum;
  least = std::min(least, others.least), largest = std::max(largest, others.largest);
}

double OverBatches::mean() const {
  return batches > 0 ? sum / double(batches) : std::numeric_limits<double>::quiet_NaN();
}

void Binades::add(double magnitude) {
  if (magnitude == 0) {
    ++zeros_;
    return;
  }
  const int exponent = std::clamp(std::ilogb(magnitude), kLowest, kHighest - 1);
  ++counts_[size_t(exponent - kLowest)];
}

void Binades::add(const Binades& others) {
  zeros_ += others.zeros_;
  for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += others.counts_[i];
}

int64_t Binades::all() const {
  int64_t sum = zeros_;
  for (const int64_t count : counts_) sum += count;
  return sum;
}

void GradientOptions::validate() const {
  check(std::isfinite(tolerance) && tolerance >= 0, "gradients: --tolerance is ", tolerance,
        "; expected a magnitude of at least 0, such as 0 or 1e-8");
}

namespace {

/// Of one row.
struct Row {
  int64_t zeros = 0;
  double square = 0;
  bool finite = true;
};

Row measure_row(const float* at, int64_t count, double tolerance) {
  Row row;
  for (int64_t j = 0; j < count; ++j) {
    const double value = at[j];
    row.zeros += std::abs(value) <= tolerance;
    row.square += value * value;
  }
  row.finite = std::isfinite(row.square);
  return row;
}

/// Of those rows; counts do not depend on how they are divided.
void count_magnitudes(const std::vector<float>& dy, const std::vector<int64_t>& rows, int64_t columns,
                      int64_t first, int64_t count, Binades& all) {
  const auto parts = std::clamp<int64_t>(int64_t(rows.size()) / 16, 1, 16);
  std::vector<Binades> counted(static_cast<size_t>(parts));
  parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      for (size_t i = rows.size() * size_t(part) / size_t(parts);
           i < rows.size() * size_t(part + 1) / size_t(parts); ++i)
        for (int64_t j = 0; j < count; ++j)
          counted[size_t(part)].add(std::abs(double(dy[size_t(rows[i] * columns + first + j)])));
  });
  for (const Binades& part : counted) all.add(part);
}

/// Shares of the energy in the rows of largest norm.
std::vector<double> energy_of(std::vector<double> squares, const std::vector<TopRows>& top) {
  std::ranges::sort(squares, std::greater<>());
  std::vector<double> sums{0};
  for (const double square : squares) sums.push_back(sums.back() + square);
  std::vector<double> shares;
  if (sums.back() > 0)
    for (const TopRows& each : top)
      shares.push_back(sums[size_t(each.of(int64_t(squares.size())))] / sums.back());
  return shares;
}

}  // namespace

GradientFigures gradient_figures(const std::string& name, const std::vector<float>& dy, int64_t columns,
                                 int64_t first, int64_t count, const std::vector<int64_t>* read,
                                 int64_t all_rows, const GradientOptions& options) {
  const int64_t rows = columns > 0 ? int64_t(dy.size()) / columns : 0;
  check(rows * columns == int64_t(dy.size()) && first >= 0 && count >= 1 && first + count <= columns, name,
        ": a gradient of ", dy.size(), " elements has no columns ", first, " to ", first + count, " of ",
        columns);
  check(rows <= all_rows, name, ": a gradient of ", rows, " rows in a batch of ", all_rows);
  std::vector<Row> measured(static_cast<size_t>(rows));
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      measured[size_t(r)] = measure_row(dy.data() + r * columns + first, count, options.tolerance);
  });
  GradientFigures figures{.all_rows = all_rows, .columns = count};
  int64_t zeros = 0, zeros_read = 0, empty = 0, empty_read = 0;
  std::vector<int64_t> taken;
  const auto take = [&](int64_t r) {
    const Row& row = measured.at(size_t(r));
    zeros_read += row.zeros, empty_read += row.zeros == count;
    figures.squares.push_back(row.square);
    taken.push_back(r);
  };
  for (int64_t r = 0; r < rows; ++r) {
    const Row& row = measured[size_t(r)];
    check(row.finite, name, ": row ", r,
          " of the output's gradient is not finite, and its zeros would mean nothing; "
          "take --dtype f32, or look for the operator with `train bert --check-finite`");
    zeros += row.zeros, empty += row.zeros == count;
    if (!read) take(r);
  }
  if (read)
    for (const int64_t r : *read) take(r);
  count_magnitudes(dy, taken, columns, first, count, figures.magnitudes);
  // Rows that were not computed are zeros that nothing had to write.
  zeros += (all_rows - rows) * count, empty += all_rows - rows;
  figures.read_rows = int64_t(figures.squares.size());
  const auto share = [](int64_t part, int64_t whole) { return whole > 0 ? double(part) / double(whole) : 0; };
  figures.zero_elements = share(zeros, all_rows * count);
  figures.zero_elements_read = share(zeros_read, figures.read_rows * count);
  figures.zero_rows = share(empty, all_rows), figures.zero_rows_read = share(empty_read, figures.read_rows);
  figures.energy = energy_of(figures.squares, options.top);
  return figures;
}

void ModuleGradient::add(const GradientFigures& figures) {
  columns = figures.columns;
  all_rows.add(double(figures.all_rows)), read_rows.add(double(figures.read_rows));
  zero_elements.add(figures.zero_elements), zero_elements_read.add(figures.zero_elements_read);
  zero_rows.add(figures.zero_rows), zero_rows_read.add(figures.zero_rows_read);
  energy.resize(std::max(energy.size(), figures.energy.size()));
  for (size_t i = 0; i < figures.energy.size(); ++i) energy[i].add(figures.energy[i]);
  magnitudes.add(figures.magnitudes);
}

void ModuleGradient::add(const ModuleGradient& others) {
  all_rows.add(others.all_rows), read_rows.add(others.read_rows);
  zero_elements.add(others.zero_elements), zero_elements_read.add(others.zero_elements_read);
  zero_rows.add(others.zero_rows), zero_rows_read.add(others.zero_rows_read);
  energy.resize(std::max(energy.size(), others.energy.size()));
  for (size_t i = 0; i < others.energy.size(); ++i) energy[i].add(others.energy[i]);
  magnitudes.add(others.magnitudes);
}

namespace {

std::vector<pretrained::LinearModule> chosen_modules(models::Bert& model, const std::string& patterns) {
  const pretrained::LinearModules modules = pretrained::linear_modules(model);
  std::set<std::string> named;
  std::istringstream list(patterns);
  for (std::string pattern; std::getline(list, pattern, ',');)
    for (const pretrained::LinearModule& module : modules.matching(pattern == "all" ? "**" : pattern))
      named.insert(module.name);
  std::vector<pretrained::LinearModule> chosen;
  for (const pretrained::LinearModule& module : modules.all)
    if (named.contains(module.name)) chosen.push_back(module);
  check(!chosen.empty(), "gradients: the list of layers is empty; give names such as '",
        modules.all.front().name, "', or all");
  return chosen;
}

}  // namespace

GradientMeter::GradientMeter(models::Bert& model, const std::string& patterns, GradientOptions options)
    : options_(std::move(options)),
      layers_(model.config.layers),
      modules_(chosen_modules(model, patterns)),
      observe_(model, {.backward = [this](const nn::LinearCall& call, const Tensor& dy) { see(call, dy); }}) {
  options_.validate();
  for (const pretrained::LinearModule& module : modules_) {
    figures_.push_back({.name = module.name, .columns = module.rows});
    figures_.back().energy.resize(options_.top.size());
  }
}

void GradientMeter::begin(GradientBatch batch) {
  check(batch.tokens >= 1 && batch.padded_rows >= batch.tokens, "gradients: a batch of ", batch.tokens,
        " tokens in ", batch.padded_rows, " rows");
  batch_ = std::move(batch);
}

void GradientMeter::see(const nn::LinearCall& call, const Tensor& dy) {
  check(batch_.tokens > 0, "gradients: GradientMeter::begin() was not called before the pass");
  std::vector<float> values;
  for (size_t i = 0; i < modules_.size(); ++i) {
    const pretrained::LinearModule& module = modules_[i];
    if (module.ours != call.name) continue;
    const int64_t columns = dy.size(-1), rows = dy.count() / columns;
    if (values.empty()) values = dy.to(Device::cpu()).to(DType::f32).to_vector<float>();
    const bool is_classifier = call.name.starts_with("classifier.");
    // In the last block the queries of other tokens are computed, too, and nothing reads what they find.
    const bool reads_some =
        call.name == "blocks." + std::to_string(layers_ - 1) + ".attention.qkv" && module.first == 0;
    const GradientFigures figures = gradient_figures(module.name, values, columns, module.first, module.rows,
                                                     reads_some ? &batch_.last_block : nullptr,
                                                     is_classifier ? rows : batch_.padded_rows, options_);
    ModuleGradient& all = figures_[i];
    if (all.read_rows.batches == 0 && !is_classifier) {
      all.first_norms.assign(size_t(batch_.tokens), std::numeric_limits<double>::quiet_NaN());
      const bool every_row = figures.read_rows == batch_.tokens;
      for (size_t r = 0; r < figures.squares.size(); ++r)
        all.first_norms.at(every_row ? r : size_t(batch_.last_block.at(r))) = std::sqrt(figures.squares[r]);
    }
    all.add(figures);
  }
}

}  // namespace tessera::sparsity
