#pragma once

#include "ops/decode_attention/decode_attention_kernels.h"

/// How the rows of decode attention and their common second kernel find each other.

namespace tessera::ops::decode {

template <class T>
struct Args;

/// Adds the pieces that the first kernel left; nothing if there is one piece.
template <class T>
void join(Device device, const Args<T>& args);

template <class T>
void run_mma(const DecodeProblem& problem);

}  // namespace tessera::ops::decode
