#pragma once

/// Named ranges on the time line of NVIDIA's profilers (NVTX); they cost next to nothing when no profiler is
/// attached and nothing in a CPU-only build.

namespace tessera {

class ProfileRange {
 public:
  explicit ProfileRange(const char* name);
  ~ProfileRange();
  ProfileRange(const ProfileRange&) = delete;
};

}  // namespace tessera
