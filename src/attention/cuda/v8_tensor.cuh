// FP8 value tiles for FlashInfer's FA2 paged kernel with 16-bit keys.
//
// The kernel keeps its own shared-memory layout: a value row is a run of 16-byte slots of eight
// 16-bit elements, permuted by row. Here each thread copies its codes asynchronously into slots
// that it owns, and widens them in place once its own copies have landed, before the barrier that
// lets others read the tile. No other thread sees the codes, so no barrier is added.
//
// The second product is in half, which holds both FP8 formats exactly; one instruction widens two
// codes. A scale of every (token, head) is folded into P relative to a power of two not below the
// largest that the warp has met, so that P stays in half's range; the power is put back at the end.
// What splits leave for the merge is float32: rounded twice, outputs would be off by twice as much.
//
// KVHOLD_WIDEN_ROWS: rows that a thread widens at a time.
// KVHOLD_V_FORMAT: __NV_E4M3 or __NV_E5M2.
// KVHOLD_TOKEN_SCALE: 1 when every (token, head) has a scale.
#ifndef KVHOLD_V8_TENSOR_CUH_
#define KVHOLD_V8_TENSOR_CUH_

#include <cuda_fp8.h>

namespace flashinfer {
namespace kvhold {

template <typename KTraits>
struct ValueTile {
  static_assert(sizeof(typename KTraits::DTypeKV) == 2, "keys are 16-bit");
  static_assert(KTraits::SWIZZLE_MODE_KV == SwizzleMode::k128B, "16-bit rows are swizzled by 8");
  static_assert(!KTraits::USE_KV_SHARED_SMEM && !KTraits::USE_VO_SPLIT, "head_dim up to 256");
  static constexpr uint32_t ROWS = KTraits::NUM_MMA_KV * 4 / KTraits::NUM_WARPS_Q;
  static constexpr uint32_t STRIDE = KTraits::UPCAST_STRIDE_V;
  static constexpr uint32_t SLOTS = KTraits::HEAD_DIM_VO / 8;
  // 16 codes a copy where a row is whole groups of 16 slots, else 8 codes a copy.
  static constexpr bool WIDE = SLOTS % 16 == 0;
  static constexpr uint32_t COPIES = WIDE ? SLOTS / 16 : SLOTS / 8;
};

// Where a warp's keys begin in the tile's scales, and the power of two that its sums lack.
template <typename KTraits>
struct TokenScales {
#if KVHOLD_TOKEN_SCALE
  uint32_t first;
  float unit = 0.f;
  __device__ __forceinline__ explicit TokenScales(uint32_t warp_kv)
      : first(warp_kv * KTraits::NUM_MMA_KV * 16) {}
#else
  __device__ __forceinline__ explicit TokenScales(uint32_t) {}
#endif
};

#if KVHOLD_TOKEN_SCALE
template <typename KTraits>
__device__ __forceinline__ float* scale_tile() {
  __shared__ alignas(8) float scales[ValueTile<KTraits>::ROWS * KTraits::NUM_WARPS * 4];
  return scales;
}

__device__ __forceinline__ void copy_scale(float* slot, const float* scale, bool live) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(slot));
  const int bytes = live ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(address), "l"(scale),
               "r"(bytes));
}
#endif

// The first of a thread's two slots in a group of 16. Alternating between the even and the odd one
// keeps the eight threads of a row in eight different banks.
__device__ __forceinline__ uint32_t first_slot(uint32_t column) {
  return 2 * column + (column >> 2);
}

template <typename KTraits>
__device__ __forceinline__ uint32_t slot_offset(uint32_t row, uint32_t slot) {
  return get_permuted_offset<SwizzleMode::k128B, ValueTile<KTraits>::STRIDE>(row, slot);
}

__device__ __forceinline__ void copy_8_codes(b128_t* slot, const uint8_t* codes, bool live) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(slot));
  const int bytes = live ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(address), "l"(codes),
               "r"(bytes));
}

template <typename KTraits, typename SmemStorage, typename Params>
__device__ __forceinline__ void produce_v(SmemStorage* storage, const Params& params,
                                          typename KTraits::DTypeKV* v_data,
                                          const uint32_t kv_idx_base, const size_t* offsets,
                                          const uint32_t kv_len, const uint32_t warp_idx,
                                          const uint32_t lane_idx) {
  using Tile = ValueTile<KTraits>;
  b128_t* base = reinterpret_cast<b128_t*>(storage->v_smem);
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(v_data);
  const uint32_t column = lane_idx % 8;
  const uint32_t first_row = warp_idx * 4 + lane_idx / 8;
#pragma unroll
  for (uint32_t i = 0; i < Tile::ROWS; ++i) {
    const uint32_t row = first_row + i * KTraits::NUM_WARPS * 4;
    const bool live = kv_idx_base + row < kv_len;
    // An offset addresses element 8 * column of its row.
    const uint8_t* source = codes + offsets[i];
#pragma unroll
    for (uint32_t j = 0; j < Tile::COPIES; ++j) {
      if constexpr (Tile::WIDE) {
        b128_t* slot = base + slot_offset<KTraits>(row, 16 * j + first_slot(column));
        cp_async::pred_load_128b<cp_async::PrefetchMode::kPrefetch,
                                 cp_async::SharedMemFillMode::kFillZero>(
            slot, reinterpret_cast<const b128_t*>(source + 8 * column + 128 * j), live);
      } else {
        copy_8_codes(base + slot_offset<KTraits>(row, 8 * j + column), source + 64 * j, live);
      }
    }
#if KVHOLD_TOKEN_SCALE
    if (column == 0) {
      copy_scale(scale_tile<KTraits>() + row,
                 params.token_scale + offsets[i] / KTraits::HEAD_DIM_VO, live);
    }
#endif
  }
}

__device__ __forceinline__ uint32_t widen_2(uint32_t pair) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair),
                                                     KVHOLD_V_FORMAT);
  return *reinterpret_cast<const uint32_t*>(&raw);
}

__device__ __forceinline__ b128_t widen_8(uint32_t low, uint32_t high) {
  return make_uint4(widen_2(low & 0xffff), widen_2(low >> 16), widen_2(high & 0xffff),
                    widen_2(high >> 16));
}

// Call between waiting for the thread's own copies of the tile and the barrier before its use.
template <typename KTraits, typename SmemStorage>
__device__ __forceinline__ void widen_v(SmemStorage* storage, const uint32_t warp_idx,
                                        const uint32_t lane_idx) {
  using Tile = ValueTile<KTraits>;
  b128_t* base = reinterpret_cast<b128_t*>(storage->v_smem);
  const uint32_t column = lane_idx % 8;
  const uint32_t first_row = warp_idx * 4 + lane_idx / 8;
  // Few rows at a time keep registers free.
  constexpr uint32_t AT_ONCE = KVHOLD_WIDEN_ROWS;
#pragma unroll AT_ONCE
  for (uint32_t i = 0; i < Tile::ROWS; ++i) {
    const uint32_t row = first_row + i * KTraits::NUM_WARPS * 4;
#pragma unroll
    for (uint32_t j = 0; j < Tile::COPIES; ++j) {
      if constexpr (Tile::WIDE) {
        const uint32_t odd = column >> 2;
        b128_t* first = base + slot_offset<KTraits>(row, 16 * j + 2 * column + odd);
        b128_t* second = base + slot_offset<KTraits>(row, 16 * j + 2 * column + 1 - odd);
        const b128_t codes = *first;
        const b128_t even_slot = widen_8(codes.x, codes.y);
        const b128_t odd_slot = widen_8(codes.z, codes.w);
        *first = odd ? odd_slot : even_slot;
        *second = odd ? even_slot : odd_slot;
      } else {
        b128_t* slot = base + slot_offset<KTraits>(row, 8 * j + column);
        const uint2 codes = *reinterpret_cast<const uint2*>(slot);
        *slot = widen_8(codes.x, codes.y);
      }
    }
  }
}

// Call once the row sums have their share of P, before P meets V.
template <typename KTraits>
__device__ __forceinline__ void fold_scales(
    uint8_t* state, const uint32_t lane_idx,
    typename KTraits::DTypeQKAccum (*s_frag)[KTraits::NUM_MMA_KV][8],
    half (*p_frag)[KTraits::NUM_MMA_KV][8], float (*o_frag)[KTraits::NUM_MMA_D_VO_TILE][8]) {
#if KVHOLD_TOKEN_SCALE
  TokenScales<KTraits>& scales = *reinterpret_cast<TokenScales<KTraits>*>(state);
  // A thread has columns 2 * (lane % 4) + {0, 1, 8, 9} of each 16.
  const float* mine = scale_tile<KTraits>() + scales.first + 2 * (lane_idx % 4);
  float largest = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < 2 * KTraits::NUM_MMA_KV; ++i) {
    const float2 pair = *reinterpret_cast<const float2*>(mine + 8 * i);
    largest = max(largest, max(fabsf(pair.x), fabsf(pair.y)));
  }
  largest = max(largest, math::shfl_xor_sync(largest, 0x2));
  largest = max(largest, math::shfl_xor_sync(largest, 0x1));
  if (largest > scales.unit) {
    const float unit = __uint_as_float((__float_as_uint(largest) & 0x7f800000u) + 0x00800000u);
    const float fade = scales.unit / unit;
    scales.unit = unit;
#pragma unroll
    for (uint32_t mma_q = 0; mma_q < KTraits::NUM_MMA_Q; ++mma_q) {
#pragma unroll
      for (uint32_t mma_d = 0; mma_d < KTraits::NUM_MMA_D_VO_TILE; ++mma_d) {
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) o_frag[mma_q][mma_d][i] *= fade;
      }
    }
  }
  const float inverse = scales.unit > 0.f ? 1.f / scales.unit : 0.f;
#pragma unroll
  for (uint32_t mma_kv = 0; mma_kv < KTraits::NUM_MMA_KV; ++mma_kv) {
#pragma unroll
    for (uint32_t side = 0; side < 2; ++side) {
      float2 pair = *reinterpret_cast<const float2*>(mine + 16 * mma_kv + 8 * side);
      pair.x *= inverse;
      pair.y *= inverse;
#pragma unroll
      for (uint32_t mma_q = 0; mma_q < KTraits::NUM_MMA_Q; ++mma_q) {
#pragma unroll
        for (uint32_t i = 4 * side; i < 4 * side + 4; i += 2) {
          p_frag[mma_q][mma_kv][i] = __float2half_rn(s_frag[mma_q][mma_kv][i] * pair.x);
          p_frag[mma_q][mma_kv][i + 1] = __float2half_rn(s_frag[mma_q][mma_kv][i + 1] * pair.y);
        }
      }
    }
  }
#endif
}

// Call before the warps' sums are added up.
template <typename KTraits>
__device__ __forceinline__ void restore_scales(
    const TokenScales<KTraits>& scales, float (*o_frag)[KTraits::NUM_MMA_D_VO_TILE][8]) {
#if KVHOLD_TOKEN_SCALE
#pragma unroll
  for (uint32_t mma_q = 0; mma_q < KTraits::NUM_MMA_Q; ++mma_q) {
#pragma unroll
    for (uint32_t mma_d = 0; mma_d < KTraits::NUM_MMA_D_VO_TILE; ++mma_d) {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) o_frag[mma_q][mma_d][i] *= scales.unit;
    }
  }
#endif
}

// What a split leaves for the merge, in float32; the warps that share rows take turns.
template <typename KTraits>
__device__ __forceinline__ void write_partial(
    float (*o_frag)[KTraits::NUM_MMA_D_VO_TILE][8], float* partial, const uint32_t packed_base,
    const uint32_t rows, const uint32_t stride_n, const uint32_t stride_h,
    const uint_fastdiv group_size, const uint32_t lane_idx, const uint32_t warp_kv) {
  const uint32_t base = packed_base + lane_idx / 4;
#pragma unroll
  for (uint32_t mma_q = 0; mma_q < KTraits::NUM_MMA_Q; ++mma_q) {
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      uint32_t q, r;
      group_size.divmod(base + mma_q * 16 + j * 8, q, r);
      if (q >= rows) continue;
      float* place = partial + q * stride_n + r * stride_h + (lane_idx % 4) * 2;
#pragma unroll
      for (uint32_t mma_d = 0; mma_d < KTraits::NUM_MMA_D_VO_TILE; ++mma_d) {
        if (mma_d % KTraits::NUM_WARPS_KV != warp_kv) continue;
        const float* found = &o_frag[mma_q][mma_d][j * 2];
        *reinterpret_cast<float2*>(place + mma_d * 16) = make_float2(found[0], found[1]);
        *reinterpret_cast<float2*>(place + mma_d * 16 + 8) = make_float2(found[4], found[5]);
      }
    }
  }
}

}  // namespace kvhold
}  // namespace flashinfer

#endif  // KVHOLD_V8_TENSOR_CUH_
