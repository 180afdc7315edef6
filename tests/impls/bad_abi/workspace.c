/* Asks for 16 bytes of workspace. "add": reports whether it was full of poison; "matmul": writes past its end. */
#include <string.h>

#include "minimal.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

paritree_status paritree_describe(paritree_description *description) {
  describe_as(description, "run_op", "add,matmul", "");
  return PARITREE_OK;
}

paritree_status paritree_run_op_workspace(const paritree_op_call *call, uint64_t *bytes) {
  (void)call;
  *bytes = 16;
  return PARITREE_OK;
}

paritree_status paritree_run_op(const paritree_op_call *call) {
  unsigned char *workspace = call->workspace;
  float *out = call->outputs[0].tensor.data;
  if (call->workspace_bytes != 16 || (uintptr_t)workspace % 64 != 0) return PARITREE_INVALID;
  if (strcmp(call->op, "matmul") == 0) {
    workspace[16] = 0;
    return PARITREE_OK;
  }
  out[0] = 1.0f;
  for (int i = 0; i < 16; ++i) {
    if (workspace[i] != 0xff) out[0] = 0.0f;
    workspace[i] = 0;
  }
  return PARITREE_OK;
}
