// Launches that a session does not ask for, or only with taps or on bfloat16 operands; included by launch.cu, whose helpers they use.

namespace paritree::cuda {
namespace {

constexpr int64_t kNarrowKeys = 64;  // keys of a part are a multiple of the largest tile

std::pair<int64_t, int64_t> narrow_splits(int64_t query_rows, int64_t keys, int processors) {
  const int64_t wanted = std::max<int64_t>(1, processors / parts(query_rows, kTiledRows));
  const int64_t room = std::max<int64_t>(1, kWorkspaceMax / (4 * query_rows * (tiled_f32::RANK + 2)));
  const int64_t splits = std::max<int64_t>(1, std::min({wanted, room, parts(keys, 2 * kNarrowKeys)}));
  const int64_t each = round_up(parts(keys, splits), kNarrowKeys);
  return {std::max<int64_t>(1, parts(keys, each)), each};
}

}  // namespace

void Device::scores(const float* q, const float* keys, float* out, int64_t query_rows, int64_t width, int64_t key_count, float scale) {
  if (query_rows && key_count)
    LAUNCH(matmul_tiled_nt_f32, (Grid{parts(key_count, 64), parts(query_rows, 64), 1}), 256, 0, q, narrow(width), 0LL, keys, narrow(width), 0LL, out,
           narrow(key_count), 0LL, narrow(query_rows), narrow(key_count), narrow(width), scale);
}

void Device::softmax(const float* scores, const uint8_t* visible, float* out, int64_t rows, int64_t heads, int64_t keys) {
  if (rows && heads && keys)
    LAUNCH(softmax_f32, {rows * heads}, 128, 0, scores, visible, out, narrow(heads), narrow(keys), narrow(keys), narrow(keys));
}

void Device::o_latent(const float* probs, const float* latent, float* out, int64_t query_rows, int64_t keys, int64_t rank) {
  if (query_rows && rank)
    LAUNCH(o_latent_f32, {query_rows}, 128, 0, probs, narrow(keys), latent, static_cast<const int*>(nullptr), 1, narrow(rank), out, narrow(rank), narrow(keys),
           narrow(rank));
}

void Device::matmul_int4(const float* x, const int32_t* packed, const float* scales, float* out, int64_t rows, int64_t cols, int64_t inner) {
  if (rows && cols)
    LAUNCH(matmul_int4_rows, (Grid{parts(cols, 64), parts(rows, 8)}), 256, 0, x, reinterpret_cast<const unsigned*>(packed), scales, out, narrow(rows),
           narrow(cols), narrow(inner));
}

void Device::pack_mask(const uint8_t* visible, uint32_t* bits, uint32_t* seen, int64_t rows, int64_t keys) {
  fill(seen, 0, 4 * parts(keys, 32));
  if (rows && keys) LAUNCH(::pack_mask, {rows}, 128, 0, visible, bits, seen, narrow(keys));
}

void Device::cast_rows(const float* x, int64_t x_row, uint16_t* out, int64_t out_row, int64_t rows, int64_t width) {
  if (rows && out_row) LAUNCH(cast_rows_bf16, {rows}, 128, 0, x, narrow(x_row), out, narrow(out_row), narrow(width));
}

void Device::tree_mask_bytes(const int32_t* parents, int64_t rows, int64_t prefix_len, int32_t* positions, uint32_t* bits, uint8_t* visible, int32_t* status) {
  if (rows)
    LAUNCH(::tree_mask, {rows}, 128, 4 * parts(rows, 32), parents, static_cast<const int*>(nullptr), narrow(rows), narrow(prefix_len), positions, bits, visible,
           status, static_cast<const int*>(nullptr));
}

void Device::accept_checked(const int32_t* tokens, const int32_t* parents, const int32_t* target, int64_t rows, int32_t* path, int32_t* length, int32_t* bonus,
                            int32_t* status) {
  if (rows == 0) invalid("T6: a tree has a root, but this one has no rows");
  LAUNCH(accept_greedy, {1}, std::min(1024u, round_up(rows, 32)), 4 * rows, tokens, parents, target, static_cast<const int*>(nullptr), narrow(rows), 1, path,
         length, bonus, status);
}

void Device::add_bias(float* x, const float* bias, int64_t rows, int64_t width) {
  const int64_t count = rows * width;
  if (count) LAUNCH(add_bias_f32, {std::min<int64_t>(parts(count, 256), 32 * processors_)}, 256, 0, x, bias, static_cast<long long>(count), narrow(width));
}

void Device::round_cache(float* x, int64_t count, bool half) {
  if (count) LAUNCH(round_cache_f32, {std::min<int64_t>(parts(count, 256), 32 * processors_)}, 256, 0, x, static_cast<long long>(count), half ? 1 : 0);
}

void Device::window_mask(const uint32_t* tree_bits, int64_t tree_words, const int32_t* key_positions, const int32_t* positions, int64_t prefix_len,
                         const int32_t* prefix_at, int64_t rows, int64_t window, uint32_t* bits, int64_t words, uint32_t* seen) {
  fill(seen, 0, 4 * words);
  if (rows)
    LAUNCH(::window_mask, {rows}, 128, 0, tree_bits, narrow(tree_words), key_positions, positions, narrow(prefix_len), narrow(rows),
           narrow(std::min<int64_t>(window, 0x7fffffff)), bits, narrow(words), seen, prefix_at);
}

// ---- attention on bfloat16 operands ------------------------------------------------------------------------------------

int64_t Device::narrow_attention_workspace(int64_t rows, int64_t heads, int64_t kv_rank, int64_t width, int64_t keys) const {
  if (rows == 0) return 0;
  const int64_t splits = (is_tiled(kv_rank, width) ? narrow_splits(rows * heads, keys, processors_) : any_splits(rows * heads, kv_rank, keys, processors_)).first;
  return splits > 1 ? splits * rows * heads * (kv_rank + 2) : 0;
}

void Device::tree_attention(const NarrowAttention& a, float* workspace) {
  if (a.rows == 0) return;
  if (!is_tiled(a.kv_rank, a.width)) {
    launch_any("tree_attention_any_bf16", tree_attention_any_bf16, a, workspace, processors_, stream_);
    return;
  }
  const int64_t query_rows = a.rows * a.heads;
  const auto [splits, each] = narrow_splits(query_rows, a.keys, processors_);
  float* part_out = splits > 1 ? workspace : nullptr;
  float* part_stat = splits > 1 ? workspace + splits * query_rows * a.kv_rank : nullptr;
  const auto run = [&, splits = splits, each = each](const char* name, auto* kernel, int64_t shared_bytes) {
    launch(name, kernel, Grid{parts(query_rows, kTiledRows), splits}, 256u, shared_bytes, stream_, a.query, a.cache, a.pages.table, a.pages.size, a.bits,
           narrow(a.words), a.seen, narrow(a.heads), narrow(query_rows), narrow(a.prefix_len), narrow(a.keys), narrow(each), a.scale, a.out, part_out, part_stat,
           a.prefix_at);
  };
#if defined(PARITREE_SM90A)
  if (splits == 2) {
    run("tree_attention_wgmma_pair_bf16", tree_attention_wgmma_pair_bf16, wgmma_tile::BYTES);  // joins them itself
    return;
  }
#endif
#if defined(PARITREE_EMULATOR) || defined(PARITREE_SM90A)
  run("tree_attention_wgmma_bf16", tree_attention_wgmma_bf16, wgmma_tile::BYTES);
#else
  if (shared_bytes_of_a_block() >= mma_bf16_tile::Layout<32>::BYTES) run("tree_attention_mma32_bf16", tree_attention_mma32_bf16, mma_bf16_tile::Layout<32>::BYTES);
  else run("tree_attention_mma_bf16", tree_attention_mma_bf16, mma_bf16_tile::Layout<16>::BYTES);
#endif
  if (splits > 1)
    LAUNCH(tree_attention_merge_f32, {query_rows}, 128, 0, part_out, part_stat, narrow(splits), narrow(query_rows), narrow(a.kv_rank), a.out);
}

bool Device::shows_scores(int64_t kv_rank, int64_t width) { return !is_tiled(kv_rank, width); }

void Device::attention_scores(const Attention& a, float* out, int64_t out_row) {
  if (a.rows && out_row)
    LAUNCH(tree_attention_scores_f32, (Grid{a.rows * a.heads}), 128, 4 * a.width, a.query, a.cache, a.pages.table, a.pages.size, a.bits, narrow(a.words),
           narrow(a.heads), narrow(a.width), narrow(a.prefix_len), narrow(a.keys), a.scale, out, narrow(out_row), a.prefix_at);
}
void Device::attention_scores(const NarrowAttention& a, float* out, int64_t out_row) {
  if (a.rows && out_row)
    LAUNCH(tree_attention_scores_bf16, (Grid{a.rows * a.heads}), 128, 4 * a.width, a.query, a.cache, a.pages.table, a.pages.size, a.bits, narrow(a.words),
           narrow(a.heads), narrow(a.width), narrow(a.prefix_len), narrow(a.keys), a.scale, out, narrow(out_row), a.prefix_at);
}

int64_t Device::shared_bytes_of_a_block() {
#ifdef PARITREE_EMULATOR
  return 101376;  // of sm_120
#else
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes;
#endif
}

}  // namespace paritree::cuda
