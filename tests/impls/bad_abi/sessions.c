/* A session without a model, whose behaviour is chosen by the token of the first row (forward), the sequence (cache_rows), or
 * max_new (generate): each is one way to break the contract, and 0 is an honest answer. */
#include <stdlib.h>
#include <string.h>

#include "minimal.h"

struct paritree_session {
  const float *kept; /* a pointer into the weight callback's tensor, which the contract forbids to keep */
};

static const char *message = "none";

int32_t paritree_abi_version(void) { return PARITREE_ABI_VERSION; }
const char *paritree_last_error(void) { return message; }

paritree_status paritree_describe(paritree_description *description) {
  describe_as(description, "forward,taps,cache_rows,generate,generate_tree", "", "embed,attn_norm,q");
  return PARITREE_OK;
}

paritree_status paritree_open(const paritree_open_args *args, paritree_session **session) {
  DLTensor embed;
  const char *name = "embed";
  for (int64_t i = 0; i < args->config.count; ++i) {
    if (strcmp(args->config.items[i].key, "ask_for_unknown") == 0) name = "embedding";
    if (strcmp(args->config.items[i].key, "no_session") == 0) return PARITREE_OK;
  }
  if (args->weight(args->weight_user, name, &embed) != PARITREE_OK) {
    message = "a weight is missing";
    return PARITREE_FAILED;
  }
  *session = malloc(sizeof **session);
  (*session)->kept = embed.data;
  return PARITREE_OK;
}

void paritree_close(paritree_session *session) { free(session); }

paritree_status paritree_forward(paritree_session *session, const paritree_forward_args *args) {
  float values[6] = {0, 1, 2, 3, 4, 5};
  int64_t shape[2] = {2, 3}, strides[2] = {1, 2};
  paritree_tap tap;
  memset(&tap, 0, sizeof tap);
  tap.struct_size = sizeof tap;
  tap.name = "embed";
  tap.tensor.data = values;
  tap.tensor.device.device_type = 1;
  tap.tensor.ndim = 2;
  tap.tensor.dtype.code = 2;
  tap.tensor.dtype.bits = 32;
  tap.tensor.dtype.lanes = 1;
  tap.tensor.shape = shape;
  tap.shard_axis = -1;
  tap.shard_of = 1;
  switch (args->token[0]) {
    case 1: tap.name = "o_heads"; break;            /* was not asked for */
    case 2: tap.struct_size = 8; break;             /* of an older header */
    case 3: tap.tensor.dtype.bits = 64; break;      /* float64 */
    case 4: tap.tensor.strides = strides; break;    /* column-major: legal */
    case 5: tap.handoff = 1; break;                 /* not what the next operation consumed */
    case 6: tap.shard_axis = 0, tap.shard_of = 2; break;
    case 7: tap.tensor.data = NULL; break;
    case 8: tap.tensor.byte_offset = 4, shape[0] = 1; break;
    case 9: shape[0] = -1; break;
    default: break;
  }
  if (args->logits->shape[0] > 0) ((float *)args->logits->data)[0] = session->kept[0];
  if (args->tap != NULL && args->taps[0] != 0 && args->tap(args->tap_user, &tap) != PARITREE_OK) {
    args->tap(args->tap_user, &tap); /* goes on although it was told to stop */
    message = "the tap callback said stop";
    return PARITREE_FAILED;
  }
  return PARITREE_OK;
}

paritree_status paritree_cache_rows(paritree_session *session, int32_t sequence, int64_t layer, DLTensor *rows, int64_t *row_count) {
  (void)session;
  (void)layer;
  if (sequence == 1) return PARITREE_OK; /* never sets row_count */
  *row_count = sequence == 2 && rows != NULL ? 3 : 2;
  return PARITREE_OK;
}

paritree_status paritree_generate(paritree_session *session, const paritree_generate_args *args) {
  int32_t tokens[2] = {4, 5};
  float draft[1024];
  paritree_emission emission;
  (void)session;
  memset(&emission, 0, sizeof emission);
  emission.struct_size = sizeof emission;
  emission.tokens = tokens;
  emission.token_count = 2;
  switch (args->max_new) {
    case 1: emission.sequence = (int32_t)args->prompt_count; break;
    case 2: emission.token_count = -1; break;
    case 3: emission.struct_size = 4; break;
    default: break;
  }
  if (args->draft != NULL && args->draft(args->draft_user, 0, args->prompts[0], args->prompt_lengths[0], draft) != PARITREE_OK) {
    message = "the draft callback said stop";
    return PARITREE_FAILED;
  }
  if (args->emit(args->emit_user, &emission) != PARITREE_OK) {
    message = "the emit callback said stop";
    return PARITREE_FAILED;
  }
  return PARITREE_OK;
}
