#pragma once

#include <filesystem>

#include "io/checkpoint.h"
#include "optim/optimizer.h"
#include "train/job.h"

/// What the sessions of all jobs write into checkpoints and read back: their parts (io::named(...)), the step
/// and the job.

namespace tessera::train {

template <class... Parts>
io::Checkpoint checkpoint_of_session(const nlohmann::json& job, int64_t step, const Parts&... parts) {
  return io::Checkpoint::of(parts..., io::named("step", step), io::named("job", job.dump()));
}

/// Returns the step. Throws, leaving the parts as they are, if the file is of another job or does not fit
/// them. A file from before there was loss scaling leaves the loss scale as it is.
template <class... Parts>
int64_t restore_session(const std::filesystem::path& file, const nlohmann::json& job, const Parts&... parts) {
  io::Checkpoint stored = io::Checkpoint::read(file.string());
  int64_t step = 0;
  std::string written = stored.get<std::string>("job");
  check_same_job(file.string(), written, job);
  const auto complete = [&](const auto& part) {
    for_each_field(
        part.object,
        [&](const std::string& name, const auto& leaf) {
          for (const char* field : {optim::Optimizer::kScaleField, optim::Optimizer::kScaleCountsField})
            if (name == std::string("optimizer.") + field && !stored.find(name)) stored.add(name, leaf);
        },
        part.name);
  };
  (complete(parts), ...);
  stored.restore(parts..., io::named("step", step), io::named("job", written));
  return step;
}

}  // namespace tessera::train
