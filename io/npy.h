#pragma once

#include <map>
#include <string>

#include "io/file.h"
#include "tensor/tensor.h"

/// NumPy's .npy format (numpy/lib/format.py, versions 1.0, 2.0 and 3.0): one array per file, little-endian;
/// and .npz, a zip archive of such files.
///
/// f64 f32 f16 i64 i32 u8 bool are '<f8' '<f4' '<f2' '<i8' '<i4' '|u1' '|b1'. Other integers are read into a
/// wider dtype: '|i1', '<i2' and '<u2' as i32, '<u4' and '<u8' as i64; a '<u8' beyond that throws. bf16 and
/// f8e4m3 have no name in NumPy: writing them throws (convert with to(DType::f32), or use safetensors).
/// Writing gives the bytes that numpy.save writes.

namespace tessera::io {

/// Writes version 1.0, C order, as AtomicFile does. Any layout and device.
void save_npy(const std::string& path, const Tensor& tensor);

/// Reads any of the three versions, C or Fortran order. Throws on big-endian, structured, string and object
/// arrays (nothing in the file is ever executed), on more than eight dimensions, and on a file that is not
/// exactly header and elements.
Tensor load_npy(const std::string& path, Device device = Device::cpu());
Tensor load_npy(const InputFile& file, Device device = Device::cpu());

/// All arrays of an archive of numpy.savez or numpy.savez_compressed, by name. Throws as load_npy does, and
/// in a build without libzip.
std::map<std::string, Tensor> load_npz(const std::string& path, Device device = Device::cpu());

}  // namespace tessera::io
