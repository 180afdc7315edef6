#pragma once

#include "common.hpp"

namespace paritree {

// Runs one operation of PARITREE_OP_NAMES; throws Error.
void run_op(const paritree_op_call& call);

// Bytes of workspace that run_op wants for these shapes; throws Error.
uint64_t run_op_workspace(const paritree_op_call& call);

}  // namespace paritree
