#pragma once

#include "report/database.h"
#include "sparsity/picture_folder.h"

namespace tessera::sparsity {

/// Pictures of a sweep's database (docs/sparse_inference.md lists their names), all of them or none; the same
/// database gives the same bytes. `tell` gets the name of each file. Throws if the build has no libpng, or
/// the sweep has no split yet.
void export_sweep_pictures(report::Database& database, const std::string& folder, PictureFormat format,
                           const std::function<void(const std::string&)>& tell);

}  // namespace tessera::sparsity
