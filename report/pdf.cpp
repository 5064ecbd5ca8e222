#include "report/pdf.h"

#include <fmt/format.h>

#include <vector>

#include "runtime/error.h"

/// PDF 1.4 (ISO 32000-1): a catalogue, a tree of one page, the page's content, which draws the image, and the
/// image. A PNG file's IDAT chunks hold one zlib stream of filtered rows, which is what FlateDecode with
/// predictor 15 reads (7.4.4.4), so that nothing is compressed here.

namespace tessera::report {
namespace {

uint32_t big_endian(const std::string& bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | uint8_t(bytes[at + i]);
  return value;
}

/// The zlib stream of a PNG file: the contents of its IDAT chunks, one after the other.
std::string compressed_rows(const std::string& png) {
  constexpr size_t kSignature = 8, kHead = 8, kCheck = 4, kDepth = kSignature + kHead + 8;
  check(png.size() > kDepth + 4 && png[kDepth] == 8 && png[kDepth + 1] == 2 && png[kDepth + 4] == 0,
        "pdf: libpng wrote a picture of another kind than 8-bit RGB without interlacing");
  std::string rows;
  for (size_t at = kSignature; at + kHead <= png.size();) {
    const size_t length = big_endian(png, at);
    if (png.compare(at + 4, 4, "IDAT") == 0) rows.append(png, at + kHead, length);
    at += kHead + length + kCheck;
  }
  return rows;
}

}  // namespace

std::string encode_pdf(const Image& image) {
  const std::string rows = compressed_rows(encode_png(image));
  const double width = image.width / 2.0, height = image.height / 2.0;  // in points, 72 per inch
  const std::string content = fmt::format("q {} 0 0 {} 0 0 cm /Picture Do Q", width, height);
  const std::vector<std::string> objects{
      "<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
      fmt::format("<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {} {}] /Contents 4 0 R /Resources << /XObject "
                  "<< /Picture 5 0 R >> >> >>",
                  width, height),
      fmt::format("<< /Length {} >>\nstream\n{}\nendstream", content.size(), content),
      fmt::format("<< /Type /XObject /Subtype /Image /Width {0} /Height {1} /ColorSpace /DeviceRGB "
                  "/BitsPerComponent 8 /Filter /FlateDecode /DecodeParms << /Predictor 15 /Colors 3 "
                  "/BitsPerComponent 8 /Columns {0} >> /Length {2} >>\nstream\n",
                  image.width, image.height, rows.size()) +
          rows + "\nendstream"};
  std::string file = "%PDF-1.4\n", offsets;
  for (size_t i = 0; i < objects.size(); ++i) {
    offsets += fmt::format("{:010} 00000 n \n", file.size());
    file += fmt::format("{} 0 obj\n", i + 1) + objects[i] + "\nendobj\n";
  }
  const size_t table = file.size(), count = objects.size() + 1;
  return file + fmt::format(
                    "xref\n0 {0}\n0000000000 65535 f \n{1}trailer\n<< /Size {0} /Root 1 0 R "
                    ">>\nstartxref\n{2}\n%%EOF\n",
                    count, offsets, table);
}

}  // namespace tessera::report
