#include "io/torch_file.h"
#include "io/zip_internal.h"

/// Compiled where libzip is not: files of torch.save and .npz archives cannot be read.

namespace tessera::io {

struct ZipArchive::Handle {};

ZipArchive::ZipArchive(InputFile file, Entries) : handle_(nullptr) {
  fail_at(Site::here(), "read: ", file.path(),
          " is a zip archive (torch.save, .npz), which this build cannot read: it was made without libzip");
}
ZipArchive::~ZipArchive() = default;
const std::string& ZipArchive::path() const {
  static const std::string none;
  return none;
}
const ZipArchive::Entry* ZipArchive::find(const std::string&) const {
  return nullptr;
}
void ZipArchive::read(const Entry&, void*) const {}

bool has_torch_files() {
  return false;
}

}  // namespace tessera::io
