/* Lacks paritree_abi_version. */
#include "minimal.h"

paritree_status paritree_describe(paritree_description *description) {
  describe_as(description, "", "", "");
  return PARITREE_OK;
}
