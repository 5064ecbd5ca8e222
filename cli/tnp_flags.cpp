#include "cli/tnp_flags.h"

#include "cli/setting_flags.h"
#include "runtime/error.h"

namespace tessera::cli {

void TnpFlags::add_to(CLI::App& command, bool training) {
  command_ = &command;
  train::SettingList sizes;
  job_.add_sizes(sizes);
  add_flags(command, training ? job_.list() : sizes);
  precision.add_to(command);
}

train::TnpSettings TnpFlags::job(std::optional<Device> device) const {
  train::TnpSettings job = job_;
  if (device) job.set_precision(precision.on(*device));
  if (!given_flags(*command_).contains("--features")) job.model.features = train::default_features(job.prior);
  try {
    job.validate();
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  return job;
}

void ContextFlags::add_to(CLI::App& command) {
  command
      .add_option("--context-parallel", ranks,
                  "Consecutive ranks that share the points of each task; must divide the ranks")
      ->check(whole(1, 1 << 16));
  command
      .add_option("--context-split", split,
                  "How such ranks divide attention: rows of queries, or heads, which they must divide")
      ->check(CLI::IsMember({"rows", "heads"}));
}

void ContextFlags::set(train::TnpSettings& settings) const {
  settings.split = {ranks, nn::parse_attention_split(split)};
  try {
    settings.check_split();
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

}  // namespace tessera::cli
