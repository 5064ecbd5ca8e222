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

}  // namespace tessera::cli
