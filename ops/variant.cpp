#include "ops/variant.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/text.h"

namespace tessera::ops {

namespace {

/// Whether the name of a GPU has that word: a GH200 is no H200.
bool has_word(std::string_view name, std::string_view word) {
  const size_t at = name.find(word);
  return at != std::string_view::npos && (at == 0 || name[at - 1] == ' ');
}

}  // namespace

Gpu::Gpu(const DeviceInfo& info, int multiprocessors)
    : name(info.name), major(info.major), minor(info.minor), multiprocessors(multiprocessors) {
  const bool h100 = has_word(name, "H100");
  model = h100 ? GpuModel::h100 : GpuModel::h200;
  fitted = h100 || has_word(name, "H200");
}

Gpu::Gpu(Device device)
    : name(device.info().name),
      major(device.info().major),
      minor(device.info().minor),
      multiprocessors(device.multiprocessors()) {
  thread_local const DeviceInfo* known =
      nullptr;  // a device's is immortal, and its name need not be read again
  thread_local GpuModel known_model{};
  thread_local bool known_fitted = false;
  if (const DeviceInfo* const info = &device.info(); info != known) {
    const Gpu read(*info, multiprocessors);
    known = info, known_model = read.model, known_fitted = read.fitted;
  }
  model = known_model, fitted = known_fitted;
}

const std::string* ForceVariant::find(std::string_view op) {
  for (const ForceVariant* scope = innermost_; scope; scope = scope->scope_.outer())
    if (scope->op_ == op) return &scope->variant_;
  return nullptr;
}

void ChoiceLog::add(std::string line) {
  if (std::find(lines_.begin(), lines_.end(), line) == lines_.end()) lines_.push_back(std::move(line));
}

namespace variant_internal {
namespace {

std::string microseconds(double seconds) {
  return decimals(seconds * 1e6, 1) + " us";
}

/// What is known of its time, as in "variant wgmma (29.8 us modelled)".
std::string time_of(const Estimate& estimate) {
  const bool slower = std::isinf(estimate.compared);
  if (estimate.seconds > 0)
    return microseconds(estimate.seconds) + " modelled" + (slower ? ", but measured to be slower" : "");
  return estimate.compared == 0 ? "measured to be the fastest where it can run"
         : slower               ? "measured to be slower here"
                                : "no model";
}

}  // namespace

bool has_part(const char* const* parts, std::string_view name) {
  for (; parts && *parts; ++parts)
    if (name == *parts) return true;
  return false;
}

void refuse(const char* op, const std::string& forced, const std::vector<Candidate>& allowed,
            const std::vector<const char*>& names, const std::string& problem) {
  check(!allowed.empty(), op, ": variant ", forced, " does not exist; expected one of ", joined(names));
  fail_at(Site::here(), op, ": variant ", forced.empty() ? std::string(allowed[0].name) : forced, " needs ",
          allowed[0].lacks, ", not ", problem);
}

void log(const char* op, const std::string& problem, const std::vector<Candidate>& allowed, size_t chosen,
         bool forced, const Gpu& gpu) {
  ChoiceLog* const log = ChoiceLog::current();
  if (!log) return;
  std::string line = std::string(op) + " of " + problem + ": " + allowed[chosen].name + " (" +
                     (forced ? "forced; " : "") + time_of(allowed[chosen].estimate) + ")";
  bool modelled = allowed[chosen].estimate.seconds > 0;
  for (size_t i = 0; i < allowed.size(); ++i) {
    if (i == chosen) continue;
    const Candidate& other = allowed[i];
    line += std::string(", not ") + other.name +
            (other.lacks.empty() ? " (" + time_of(other.estimate) + ")" : ", which needs " + other.lacks);
    modelled = modelled || other.estimate.seconds > 0;
  }
  if (modelled && !gpu.fitted)
    line += std::string("; costs of ") + (gpu.model == GpuModel::h100 ? "an H100" : "an H200") +
            ", the nearest to " + std::string(gpu.name);
  log->add(std::move(line));
}

}  // namespace variant_internal
}  // namespace tessera::ops
