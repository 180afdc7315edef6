/* Lists a capability whose functions it does not export. */
#include "minimal.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

paritree_status paritree_describe(paritree_description *description) {
  describe_as(description, "forward", "", "");
  return PARITREE_OK;
}
