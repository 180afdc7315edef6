/* An honest engine of one operation, without last_error and workspace: a subset is fine. Its profile has every kind of field. */
#include <string.h>

#include "minimal.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

paritree_status paritree_describe(paritree_description *description) {
  static const paritree_param profile[] = {
      {"height_block", 0, 0, {.i = 128}}, {"exp_ulp", 1, 0, {.d = 2.5}}, {"batch_invariant", 0, 0, {.i = 1}}};
  describe_as(description, "run_op", "add, argmax", "");
  description->profile_name = "tf32";
  description->profile.items = profile;
  description->profile.count = 3;
  return PARITREE_OK;
}

paritree_status paritree_run_op(const paritree_op_call *call) {
  int64_t count = 1;
  if (strcmp(call->op, "argmax") == 0) return 9; /* not a status */
  if (strcmp(call->op, "add") != 0) return PARITREE_UNSUPPORTED;
  for (int32_t i = 0; i < call->outputs[0].tensor.ndim; ++i) count *= call->outputs[0].tensor.shape[i];
  for (int64_t i = 0; i < count; ++i) {
    ((float *)call->outputs[0].tensor.data)[i] =
        ((float *)call->inputs[0].tensor.data)[i] + ((float *)call->inputs[1].tensor.data)[i];
  }
  return PARITREE_OK;
}
