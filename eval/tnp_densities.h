#pragma once

#include "datasets/prior.h"
#include "models/tnp.h"
#include "report/page.h"

namespace tessera::eval {

/// Adds pictures of the predictive density to the page: of the model's mixture next to the exact posterior's,
/// for the first three tasks of a prior whose batches are of one task each; `device`: that of the model.
/// Priors of more than one feature have none.
void add_densities(report::Page& page, const models::Tnp& model, const datasets::Prior& prior, Device device);

}  // namespace tessera::eval
