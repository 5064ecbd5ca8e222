#pragma once

#include <functional>
#include <string>
#include <vector>

#include "report/database.h"
#include "report/page.h"
#include "sparsity/split_sweep.h"

/// What the page and the pictures of a sweep share.

namespace tessera::sparsity {

/// By weight sparsity, pruning, total and format.
std::vector<SplitResult> splits_in(report::Database& database);

/// A line per way to split, by name, over the total sparsity.
std::vector<report::Series> lines_of(const std::vector<SplitResult>& splits,
                                     const std::function<double(const SplitResult&)>& value);

}  // namespace tessera::sparsity
