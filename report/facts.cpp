#include "report/facts.h"

#include <sys/utsname.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "runtime/device.h"
#include "runtime/parallel.h"

namespace tessera::report {

nlohmann::json build_facts() {
  utsname system{};
  uname(&system);
  nlohmann::json facts = {
      {"version", kVersion},
      {"revision", kRevision},
      {"compiler", kCompiler},
      {"cpu_flags", kCpuFlags},
      {"cuda", kCudaVersion},
      {"blas", kBlas},
      {"system", std::string(system.sysname) + " " + system.release + " " + system.machine},
      {"cpu_threads", cpu_threads()}};
  for (int i = 0; i < Device::cuda_count(); ++i) facts["gpus"].push_back(Device::gpu_info(i).name);
  return facts;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace tessera::report
