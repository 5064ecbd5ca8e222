#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

/// Facts of the build and the machine.

namespace tessera::report {

/// Written by CMake (cmake/build_info.cmake).
extern const char* const kVersion;   // "0.1.0"
extern const char* const kRevision;  // git revision, "-dirty" if the tree had changes; "unknown" outside git
extern const char* const kCompiler;  // "GNU 12.2.0, Release"
extern const char* const kCpuFlags;  // "-march=x86-64-v3"
extern const char* const kCudaVersion;  // "13.0.88 sm_90a", or "none"
extern const char* const kBlas;         // path of the BLAS library
extern const char* const kChartJs;      // Chart.js, for the report page; "" if it was not found

/// The above (without Chart.js), operating system, CPU threads and GPUs, for run.json and `doctor --json`.
nlohmann::json build_facts();

/// "2026-01-31T12:34:56Z"
std::string utc_now();

}  // namespace tessera::report
