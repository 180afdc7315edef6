/* Speaks another ABI. */
#include "minimal.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION + 1; }

paritree_status paritree_describe(paritree_description *description) {
  describe_as(description, "", "", "");
  return PARITREE_OK;
}
