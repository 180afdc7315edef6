/* Misspells a field of the profile. */
#include "minimal.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

paritree_status paritree_describe(paritree_description *description) {
  static const paritree_param profile[] = {{"exp_upl", 1, 0, {.d = 2.0}}};
  describe_as(description, "", "", "");
  description->profile.items = profile;
  description->profile.count = 1;
  return PARITREE_OK;
}
