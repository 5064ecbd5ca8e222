#include "cli/tnp_flags.h"

#include <nlohmann/json.hpp>

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

train::TnpSettings TnpFlags::job() const {
  train::TnpSettings job = job_;
  if (!given_flags(*command_).contains("--features")) job.model.features = train::default_features(job.prior);
  try {
    job.validate();
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  return job;
}

train::TnpSettings read_job(const std::string& path, const nlohmann::json& settings) {
  check(settings.contains("job"), path, ": it has no \"job\"; not a run of `train tnp`");
  try {
    return train::tnp_settings_from_json(settings["job"]);
  } catch (const Error& error) {
    fail_at(Site::here(), path, ": ", error.what());
  }
}

}  // namespace tessera::cli
