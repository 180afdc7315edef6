/* Lists a capability that does not exist. */
#include "minimal.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

paritree_status paritree_describe(paritree_description *description) {
  describe_as(description, "teleport", "", "");
  return PARITREE_OK;
}
