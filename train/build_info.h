#pragma once

namespace tessera::train {

/// Facts of the build, written by CMake.
extern const char* const kVersion;  // "0.1.0"
extern const char* const
    kRevision;  // git revision, "-dirty" appended if the tree had changes; "unknown" outside git
extern const char* const kCompiler;     // "GNU 12.2.0, Release"
extern const char* const kCpuFlags;     // "-march=x86-64-v3"
extern const char* const kCudaVersion;  // "13.0.88 sm_90a", or "none"
extern const char* const kBlas;         // the BLAS library's path
extern const char* const kChartJs;      // Chart.js, for the report page; "" if it was not found

}  // namespace tessera::train
