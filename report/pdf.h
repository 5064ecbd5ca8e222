#pragma once

#include <string>

#include "report/image.h"

namespace tessera::report {

/// The bytes of a PDF file of one page with the picture on it, 144 pixels per inch. The picture is compressed
/// as in a PNG file; the same picture gives the same bytes. Throws if the build has no libpng.
std::string encode_pdf(const Image& image);

}  // namespace tessera::report
