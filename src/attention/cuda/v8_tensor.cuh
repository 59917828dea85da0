// FP8 value tiles for FlashInfer's FA2 paged kernel with 16-bit keys.
//
// The kernel keeps its own shared-memory layout: a value row is a run of 16-byte slots of eight
// 16-bit elements, permuted by row. Here each thread copies its codes asynchronously into slots
// that it owns, and widens them in place once its own copies have landed, before the barrier that
// lets others read the tile. No other thread sees the codes, so no barrier is added.
//
// KVHOLD_WIDEN_ROWS: rows that a thread widens at a time.
// KVHOLD_V_FORMAT: __NV_E4M3 or __NV_E5M2. KVHOLD_TOKEN_SCALE: 1 when every (token, head) has a
// scale, which is then folded into the value while it is widened. kvhold_pv_t is the type of P and
// V in the second product: half holds both FP8 formats exactly, and one instruction widens two
// codes; with token scales it is the query's type, whose range the scaled values have.
#ifndef KVHOLD_V8_TENSOR_CUH_
#define KVHOLD_V8_TENSOR_CUH_

#include <cuda_fp8.h>

namespace flashinfer {
namespace kvhold {

template <typename DTypeQ>
using kvhold_pv_t = std::conditional_t<KVHOLD_TOKEN_SCALE, DTypeQ, half>;

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

template <typename KTraits>
struct TokenScales {
#if KVHOLD_TOKEN_SCALE
  float row[ValueTile<KTraits>::ROWS];
#endif
};

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
                                          const uint32_t lane_idx, TokenScales<KTraits>& scales) {
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
    scales.row[i] = live ? __ldg(params.token_scale + offsets[i] / KTraits::HEAD_DIM_VO) : 0.f;
#endif
  }
}

template <typename T>
__device__ __forceinline__ uint32_t widen_2(uint32_t pair, float scale) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair),
                                                     KVHOLD_V_FORMAT);
  half2 value = *reinterpret_cast<const half2*>(&raw);
#if KVHOLD_TOKEN_SCALE
  float2 real = __half22float2(value);
  real.x *= scale;
  real.y *= scale;
  if constexpr (std::is_same_v<T, nv_bfloat16>) {
    const __nv_bfloat162 out = __float22bfloat162_rn(real);
    return *reinterpret_cast<const uint32_t*>(&out);
  } else {
    value = __float22half2_rn(real);
  }
#else
  static_assert(std::is_same_v<T, half>, "without token scales the second product is in half");
#endif
  return *reinterpret_cast<const uint32_t*>(&value);
}

template <typename T>
__device__ __forceinline__ b128_t widen_8(uint32_t low, uint32_t high, float scale) {
  return make_uint4(widen_2<T>(low & 0xffff, scale), widen_2<T>(low >> 16, scale),
                    widen_2<T>(high & 0xffff, scale), widen_2<T>(high >> 16, scale));
}

// Call between waiting for the thread's own copies of the tile and the barrier before its use.
template <typename KTraits, typename SmemStorage>
__device__ __forceinline__ void widen_v(SmemStorage* storage, const uint32_t warp_idx,
                                        const uint32_t lane_idx,
                                        const TokenScales<KTraits>& scales) {
  using Tile = ValueTile<KTraits>;
  using T = kvhold_pv_t<typename KTraits::DTypeQ>;
  // Few rows at a time keep registers free. Scales per token are in registers, which must be
  // indexed by constants.
  constexpr uint32_t AT_ONCE = KVHOLD_TOKEN_SCALE ? Tile::ROWS : KVHOLD_WIDEN_ROWS;
  b128_t* base = reinterpret_cast<b128_t*>(storage->v_smem);
  const uint32_t column = lane_idx % 8;
  const uint32_t first_row = warp_idx * 4 + lane_idx / 8;
#pragma unroll AT_ONCE
  for (uint32_t i = 0; i < Tile::ROWS; ++i) {
    const uint32_t row = first_row + i * KTraits::NUM_WARPS * 4;
#if KVHOLD_TOKEN_SCALE
    const float scale = scales.row[i];
#else
    const float scale = 1.f;
#endif
#pragma unroll
    for (uint32_t j = 0; j < Tile::COPIES; ++j) {
      if constexpr (Tile::WIDE) {
        const uint32_t odd = column >> 2;
        b128_t* first = base + slot_offset<KTraits>(row, 16 * j + 2 * column + odd);
        b128_t* second = base + slot_offset<KTraits>(row, 16 * j + 2 * column + 1 - odd);
        const b128_t codes = *first;
        const b128_t even_slot = widen_8<T>(codes.x, codes.y, scale);
        const b128_t odd_slot = widen_8<T>(codes.z, codes.w, scale);
        *first = odd ? odd_slot : even_slot;
        *second = odd ? even_slot : odd_slot;
      } else {
        b128_t* slot = base + slot_offset<KTraits>(row, 8 * j + column);
        const uint2 codes = *reinterpret_cast<const uint2*>(slot);
        *slot = widen_8<T>(codes.x, codes.y, scale);
      }
    }
  }
}

}  // namespace kvhold
}  // namespace flashinfer

#endif  // KVHOLD_V8_TENSOR_CUH_
