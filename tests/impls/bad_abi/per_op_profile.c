/* Declares TF32 for its products alone, and blocks for its scores. With -DMISSPELT a field of an operation, with -DNOWHERE an operation is none. */
#include "minimal.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

paritree_status paritree_describe(paritree_description *description) {
  static const paritree_param profile[] = {
      {"exp_ulp", 1, 0, {.d = 2.0}},
      {"matmul.u_input", 1, 0, {.d = 0.0009765625}},
      {"scores.height_block", 0, 0, {.i = 8}},
#ifdef MISSPELT
      {"matmul.exp_upl", 1, 0, {.d = 2.0}},
#endif
#ifdef NOWHERE
      {"levitate.u_input", 1, 0, {.d = 2.0}},
#endif
  };
  describe_as(description, "", "", "");
  description->profile.items = profile;
  description->profile.count = sizeof profile / sizeof profile[0];
  return PARITREE_OK;
}
