/* Refuses to describe itself, with a reason. */
#include <stddef.h>

#include "paritree.h"

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }

const char *paritree_last_error(void) { return "no licence found"; }

paritree_status paritree_describe(paritree_description *description) {
  (void)description;
  return PARITREE_FAILED;
}
