// Expert choice: answers spec/ops/route.py (M8, N5). scores [rows, experts], bias [experts] or null -> ids, weights [rows, top_k].
//
// choice = fl32(score + bias); the top_groups best of `groups` groups stay in the race (a group counts by its best choice, or by fl32 of
// the sum of its two best), the others' choices count as -inf, or as 0 with group_fill_zero; the top_k best choices win, the lower index
// among equals. Weights come from the scores alone, summed in float32 in order of choice; a clamp above 0 bounds the sum from below. Every comparison is on exact integers (common.cuh, `ranked`).
#pragma once
#include "common.cuh"

// grid (rows), block 32; dynamic shared memory: experts + groups + top_k words
extern "C" __global__ void route_f32(const float* scores, const float* bias, int* ids, float* weights, int experts, int top_k, int groups,
                                     int top_groups, int group_score_max, int norm_top_k, float routed_scale, float denominator_eps,
                                     int group_fill_zero, float denominator_clamp) {
    using namespace paritree;
    PARITREE_SHARED(unsigned, keys);            // [experts], 0: out of the race
    unsigned* group_keys = keys + experts;      // [groups], 0: kept
    float* chosen = reinterpret_cast<float*>(group_keys + groups);  // [top_k]
    const int lane = threadIdx.x;
    const float* row = scores + static_cast<long long>(blockIdx.x) * experts;
    for (int e = lane; e < experts; e += 32) keys[e] = ordered(bias == nullptr ? row[e] : row[e] + bias[e]);
    __syncwarp();

    if (groups > 1) {
        const int members = experts / groups;
        for (int g = lane; g < groups; g += 32) {
            float best = minus_infinity(), second = minus_infinity();
            for (int e = g * members; e < (g + 1) * members; ++e) {
                const float value = unordered(keys[e]);
                if (value > best) {
                    second = best;
                    best = value;
                } else if (value > second) {
                    second = value;
                }
            }
            group_keys[g] = ordered(group_score_max ? best : best + second);
        }
        __syncwarp();
        for (int n = 0; n < top_groups; ++n) {
            unsigned long long best = 0;
            for (int g = lane; g < groups; g += 32) {
                const unsigned long long rank = group_keys[g] == 0 ? 0 : ranked(group_keys[g], g);
                best = rank > best ? rank : best;
            }
            best = warp_max(best);
            if (lane == 0) group_keys[index_of(best)] = 0;
            __syncwarp();
        }
        for (int e = lane; e < experts; e += 32)
            if (group_keys[e / members] != 0) keys[e] = group_fill_zero ? ordered(0.0f) : 0u;
        __syncwarp();
    }

    for (int k = 0; k < top_k; ++k) {
        unsigned long long best = 0;
        for (int e = lane; e < experts; e += 32) {
            const unsigned long long rank = keys[e] == 0 ? 0 : ranked(keys[e], e);
            best = rank > best ? rank : best;
        }
        best = warp_max(best);
        const int expert = index_of(best);
        if (lane == 0) {
            keys[expert] = 0;
            chosen[k] = row[expert];
            ids[static_cast<long long>(blockIdx.x) * top_k + k] = expert;
        }
        __syncwarp();
    }
    float total = 0.0f;
    for (int k = 0; k < top_k; ++k) total += chosen[k];
    total += denominator_eps;
    if (denominator_clamp > 0.0f) total = fmaxf(total, denominator_clamp);
    for (int k = lane; k < top_k; k += 32)
        weights[static_cast<long long>(blockIdx.x) * top_k + k] = norm_top_k ? chosen[k] / total * routed_scale : chosen[k] * routed_scale;
}
