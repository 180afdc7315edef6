/* Leaves the name NULL. */
#include "minimal.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

paritree_status paritree_describe(paritree_description *description) {
  describe_as(description, "", "", "");
  description->name = NULL;
  return PARITREE_OK;
}
