/* paritree.h: what an inference engine offers to paritree, in C99. The same contract in Python: spec/engine.py.
 *
 * Build a shared library that exports paritree_abi_version and paritree_describe and any subset of the other functions: a
 * missing symbol means "I do not do this", as does PARITREE_UNSUPPORTED at run time. `paritree check ./libengine.so` does the rest.
 *
 * Conventions
 * - Every struct starts with struct_size, set by whoever makes it. Structs only grow at their end: read no field beyond
 *   struct_size, and refuse a struct smaller than the one below with PARITREE_INVALID.
 * - Every tensor is row-major float32, int32 or uint8 (booleans). strides == NULL means contiguous; an engine that takes
 *   contiguous tensors only answers PARITREE_UNSUPPORTED to others. Memory lives on the device of the DLTensor.
 * - The caller owns every buffer, output and workspace; all are full of poison before the call. Keep no pointer after it: the
 *   caller frees and overwrites its buffers.
 * - Every function is synchronised on return unless its struct says `synchronised = 0`; then work is ordered on `stream`.
 * - Weights are [in, out], y = x @ W. Names and shapes: spec/weights.py. Configuration keys: spec.config.as_parameters; a key that you
 *   do not know may change the function: answer PARITREE_UNSUPPORTED.
 * - A session is used by one thread at a time; two sessions may be used by two threads.
 */
#ifndef PARITREE_H_
#define PARITREE_H_

#include <stdint.h>

#define PARITREE_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

/* The layout of DLPack 0.x/1.x. If you use dlpack.h as well, include it before this file. */
#ifndef DLPACK_DLPACK_H_
typedef struct DLDevice {
  int32_t device_type; /* 1: CPU, 2: CUDA, 8: Metal, 10: ROCm, as in dlpack.h */
  int32_t device_id;
} DLDevice;

typedef struct DLDataType {
  uint8_t code; /* 0: signed integer, 1: unsigned integer, 2: float */
  uint8_t bits;
  uint16_t lanes; /* 1 */
} DLDataType;

typedef struct DLTensor {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* in elements; NULL: contiguous, row-major */
  uint64_t byte_offset;
} DLTensor;
#endif

typedef int32_t paritree_status;
enum {
  PARITREE_OK = 0,
  PARITREE_UNSUPPORTED = 1, /* "I do not do this": an answer, not a failure */
  PARITREE_INVALID = 2,     /* the arguments break the contract; last_error says argument, found, expected */
  PARITREE_FAILED = 3       /* anything else, also a callback that did not return PARITREE_OK */
};

typedef struct paritree_param {
  const char *key;
  int32_t kind; /* 0: value.i, 1: value.d */
  int32_t reserved;
  union {
    int64_t i;
    double d;
  } value;
} paritree_param;

typedef struct paritree_params {
  const paritree_param *items;
  int64_t count;
} paritree_params;

typedef struct paritree_named_tensor {
  const char *name;
  DLTensor tensor;
} paritree_named_tensor;

/* ---- who are you ---------------------------------------------------------------------------------------------------- */

typedef struct paritree_description { /* filled by the engine; all pointers stay valid while the library is loaded */
  uint32_t struct_size;
  uint32_t reserved;
  const char *name;
  const char *version;
  const char *profile_name; /* of spec.engine.PROFILES or your own; NULL: float32-any-order */
  /* fields of spec.engine.Profile that differ from it, "matmul.u_input" of one op or tap alone; int "height_block": B of "blocked:B", 0: any */
  paritree_params profile;
  const char *capabilities; /* comma-separated: run_op,forward,taps,commit,cache_rows,fork,evict,free_slots,generate,generate_tree,sampling */
  const char *ops;          /* comma-separated, of PARITREE_OP_NAMES */
  const char *taps;         /* comma-separated, of PARITREE_TAP_NAMES */
} paritree_description;

int32_t paritree_abi_version(void); /* required; returns PARITREE_ABI_VERSION */
paritree_status paritree_describe(paritree_description *description); /* required */
const char *paritree_last_error(void); /* of the last call on this thread that did not return OK; never NULL */

/* ---- one operation -------------------------------------------------------------------------------------------------- */

typedef struct paritree_op_call {
  uint32_t struct_size;
  int32_t synchronised; /* 1: the outputs are complete when the call returns */
  const char *op;
  const paritree_named_tensor *inputs;
  int64_t input_count;
  paritree_params params;
  const paritree_named_tensor *outputs; /* shapes are set by the caller */
  int64_t output_count;
  void *workspace; /* at least as large as paritree_run_op_workspace said, 64-byte aligned */
  uint64_t workspace_bytes;
  DLDevice device;
  void *stream; /* a CUDA stream and the like; NULL: the default one */
} paritree_op_call;

paritree_status paritree_run_op(const paritree_op_call *call);
/* Bytes for a call of these shapes and params; reads no tensor data. A missing symbol means 0 for every op. */
paritree_status paritree_run_op_workspace(const paritree_op_call *call, uint64_t *bytes);

/* ---- a model with its cache ------------------------------------------------------------------------------------------ */

typedef struct paritree_session paritree_session;

/* Fill *tensor with the weight `name`. Its data stay valid until the next call of the callback or the return of open. With the parameter
 * stream_experts = 1 experts are lent one at a time, as "3.expert_gate/17" [hidden, expert_dim], also during forward, until close. */
typedef paritree_status (*paritree_weight_fn)(void *user, const char *name, DLTensor *tensor);

typedef struct paritree_open_args {
  uint32_t struct_size;
  uint32_t reserved;
  paritree_params config;
  paritree_weight_fn weight; /* NULL: load from weights_path */
  void *weight_user;
  const char *weights_path; /* NULL: ask `weight` */
  DLDevice device;
  void *stream;
} paritree_open_args;

paritree_status paritree_open(const paritree_open_args *args, paritree_session **session);
void paritree_close(paritree_session *session);

typedef struct paritree_tap {
  uint32_t struct_size;
  int32_t layer; /* -1: embedding, number of layers: head */
  const char *name;
  DLTensor tensor;     /* valid during the callback only */
  int32_t handoff;     /* 0: the next op consumed exactly these values; 1: these are a rounded or recomputed copy */
  int32_t partial_sum; /* 1: the whole value is the sum over all shards */
  int32_t shard_axis;  /* -1: the tensor is whole; else it holds part shard_start of shard_of along this axis */
  int32_t shard_reserved;
  int64_t shard_start;
  int64_t shard_of;
} paritree_tap;

/* Called in data order, on the thread of forward. Not OK: stop and return PARITREE_FAILED. */
typedef paritree_status (*paritree_tap_fn)(void *user, const paritree_tap *tap);

/* Row i sees every committed row of its sequence and, inside the batch, itself and its ancestors by `parent`: the index of an
 * earlier row of this batch and of the same sequence; -1: the committed prefix. A sequence exists from its first row on. Its
 * rows of this batch are pending, in batch order, until paritree_commit; a new batch drops rows of its sequences that are still
 * pending. Committed rows never change, also when a forward fails. */
typedef struct paritree_forward_args {
  uint32_t struct_size;
  int32_t synchronised;
  int64_t row_count;
  const int32_t *sequence; /* host memory, [row_count], like the next three */
  const int32_t *token;
  const int32_t *position; /* absolute; the cache slot is another number */
  const int32_t *parent;
  const uint8_t *want_logits; /* host, [row_count] */
  DLTensor *logits;           /* float32 [wanted rows, vocab], in row order; NULL if none is wanted */
  const char *taps;           /* comma-separated tap names; NULL or "": none */
  paritree_tap_fn tap;
  void *tap_user;
  int64_t first_layer;    /* 0, or with `hidden`: start before this layer from the given residual stream */
  const DLTensor *hidden; /* NULL, or float32 [row_count, hidden] */
  void *stream;
} paritree_forward_args;

paritree_status paritree_forward(paritree_session *session, const paritree_forward_args *args);
/* Keep the pending rows of `sequence` named by path, a chain of parents from the prefix on (indices ascend); drop the others. */
paritree_status paritree_commit(paritree_session *session, int32_t sequence, const int32_t *path, int64_t path_count);
/* Committed rows in logical order, [latent | k_rope]: *row_count is always set; `rows` is NULL or float32 [row_count, width]. */
paritree_status paritree_cache_rows(paritree_session *session, int32_t sequence, int64_t layer, DLTensor *rows, int64_t *row_count);
paritree_status paritree_evict(paritree_session *session, int32_t sequence); /* drop all rows; unknown sequence: INVALID */
paritree_status paritree_fork(paritree_session *session, int32_t source, int32_t target); /* copy committed rows */
paritree_status paritree_free_slots(paritree_session *session, int64_t *slots); /* cache rows that can still be stored */

/* ---- the engine's own loop ------------------------------------------------------------------------------------------- */

/* Write float32 [block_len, vocab]; row d-1 is the distribution at depth d (rule T1). history: prompt and all emitted tokens. */
typedef paritree_status (*paritree_draft_fn)(void *user, int32_t sequence, const int32_t *history, int64_t history_count, float *logits);

typedef struct paritree_emission { /* what one sequence emitted in one step; a tree round has node_count > 0 */
  uint32_t struct_size;
  int32_t sequence;      /* index of the prompt */
  const int32_t *tokens; /* after the cut of rule A4 */
  int64_t token_count;
  const int32_t *node_tokens; /* [node_count], the root first, as the engine ran it */
  const int32_t *node_parents;
  int64_t node_count;
  const int32_t *path; /* accepted nodes, 0 first */
  int64_t path_count;
  int32_t bonus;
  int32_t reserved;
} paritree_emission;

typedef paritree_status (*paritree_emit_fn)(void *user, const paritree_emission *emission);

typedef struct paritree_generate_args {
  uint32_t struct_size;
  uint32_t reserved;
  int64_t prompt_count;
  const int32_t *const *prompts; /* host memory */
  const int64_t *prompt_lengths;
  paritree_draft_fn draft; /* NULL: one token at a time */
  void *draft_user;
  int64_t block_len; /* L, the maximum depth */
  int64_t budget;    /* nodes without the root (rule T5) */
  int64_t max_new;
  const int32_t *stop_tokens;
  int64_t stop_count;
  paritree_emit_fn emit;
  void *emit_user;
  void *stream;
  /* count 0: greedy; else draw by the rules S1-S3 and A6 with the prescribed noise (capability "sampling"): temperature, top_k, top_k_ties_all,
   * top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, and "logit_bias:17" for token 17 */
  paritree_params sampling;
} paritree_generate_args;

paritree_status paritree_generate(paritree_session *session, const paritree_generate_args *args);

/* BEGIN GENERATED by `python -m impls.native.header --write` from spec/ops and spec/taps.py; do not edit */
#define PARITREE_OP_NAMES \
  "embed,rms_norm,matmul,rope,q_absorb,scores,softmax,o_latent,o_heads,tree_attention,router_scores,route,swiglu,moe,int4_matmul," \
  "combine,add,argmax,sample,draft_table,best_first_tree,tree_mask,accept,compact"
#define PARITREE_TAP_NAMES \
  "embed,attn_norm,q_a,q_a_norm,q,kv_a,latent,q_rope,k_rope,q_absorb,scores,probs,o_latent,o_heads,attn_out,attn_residual,ffn_norm," \
  "gate,up,act,ffn_out,router_logits,router_scores,expert_ids,expert_weights,expert_gate,expert_up,expert_act,expert_out,shared_gate," \
  "shared_up,shared_act,shared_out,ffn_residual,final_norm,logits,argmax"
/* END GENERATED */

#ifdef __cplusplus
}
#endif
#endif /* PARITREE_H_ */
