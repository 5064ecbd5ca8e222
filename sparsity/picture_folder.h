#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "io/file.h"
#include "report/image.h"

namespace tessera::sparsity {

enum class PictureFormat : uint8_t { png, pdf };

/// Pictures as files in one folder, all of them or none.
class PictureFolder {
 public:
  /// `tell` gets the name of each file. Throws if the build has no libpng, which both formats need.
  PictureFolder(const std::string& folder, PictureFormat format,
                std::function<void(const std::string&)> tell);
  /// `name`: without an extension.
  void write(const std::string& name, const report::Image& image);
  void publish() { files_.publish(); }

 private:
  PictureFormat format_;
  std::function<void(const std::string&)> tell_;
  io::AtomicFolder files_;
};

}  // namespace tessera::sparsity
