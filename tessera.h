#pragma once

/// All of tessera for a program that uses it. The folders are the layers, each standing on those above it.

#include "runtime/allocator.h"
#include "runtime/capture.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/parallel.h"
#include "runtime/philox.h"
#include "runtime/profile.h"
#include "runtime/rng.h"
#include "runtime/tuning.h"

#include "tensor/dtype.h"
#include "tensor/fields.h"
#include "tensor/finite.h"
#include "tensor/layout.h"
#include "tensor/print.h"
#include "tensor/tensor.h"
#include "tensor/transfer.h"

#include "autograd/checkpoint.h"
#include "autograd/gradcheck.h"
#include "autograd/tape.h"

#include "ops/activation/activation.h"
#include "ops/op.h"
