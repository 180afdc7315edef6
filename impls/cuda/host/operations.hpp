#pragma once

#include "launch.hpp"

namespace paritree::cuda {

// Runs one operation of PARITREE_OP_NAMES on the caller's host tensors: they go to the device, its kernels run, the outputs come back. Buffers are
// full of NaN before the call and guarded behind their end. Throws Error. Calls of several threads wait for each other.
void run_op(const paritree_op_call& call, Precision precision);

// Throws Error for an operation that does not exist; the caller's workspace is never needed.
void check_op(const paritree_op_call& call);

}  // namespace paritree::cuda
