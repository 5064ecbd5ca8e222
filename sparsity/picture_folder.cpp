#include "sparsity/picture_folder.h"

#include "report/pdf.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"

namespace tessera::sparsity {
namespace {

const std::string& with_png(const std::string& folder) {
  check(report::has_png(),
        "export: --png, --pdf: this build has no libpng; install libpng-dev and build again");
  return folder;
}

}  // namespace

// All in one folder: a folder within it would take the place of one of that name, such as a model's.
PictureFolder::PictureFolder(const std::string& folder, PictureFormat format,
                             std::function<void(const std::string&)> tell)
    : format_(format), tell_(std::move(tell)), files_(with_png(folder), io::AtomicFolder::Existing::merge) {}

void PictureFolder::write(const std::string& name, const report::Image& image) {
  check_interrupt();
  const bool pdf = format_ == PictureFormat::pdf;
  const std::string file = name + (pdf ? ".pdf" : ".png");
  io::write_file(files_.path() + "/" + file, pdf ? report::encode_pdf(image) : report::encode_png(image));
  tell_(file);
}

}  // namespace tessera::sparsity
