#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "report/database.h"
#include "sparsity/picture_folder.h"

namespace tessera::sparsity {

struct PictureOptions {
  std::vector<std::string> only;   // matrices whose name contains one of these; empty: all
  std::optional<int64_t> feature;  // that gradients start from; nothing: the reference of the clustering
  PictureFormat format = PictureFormat::png;
};

/// Pictures of a sparsity.sqlite as files in `folder`, drawn from its tables alone;
/// docs/sparsity_patterns.md lists their names. All of them or none; the same database and options give the
/// same bytes. `tell` gets the name of each, and a line per matrix whose bits are not in the database, so
/// that it has no spy plots. Throws if the build has no libpng, if `only` leaves no matrix, and if `feature`
/// is not among the clustered features of one of the matrices.
void export_pictures(report::Database& database, const std::string& folder, const PictureOptions& options,
                     const std::function<void(const std::string&)>& tell);

}  // namespace tessera::sparsity
