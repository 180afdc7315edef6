/* Believes in a larger description and writes past the caller's. */
#include <string.h>

#include "minimal.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

paritree_status paritree_describe(paritree_description *description) {
  describe_as(description, "", "", "");
  memset(description + 1, 0, 16);
  return PARITREE_OK;
}
