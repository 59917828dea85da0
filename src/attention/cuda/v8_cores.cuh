// Decode on CUDA cores with 16-bit keys and FP8 values, for FlashInfer's batch decode kernel.
//
// The stock kernel calls BatchDecodeWithPagedKVCacheDevice unqualified; the overload below is more
// specialised (its Params is the generated type of this module) and is found by argument-dependent
// lookup. It follows FlashInfer's own (Apache-2.0) step by step; only the value tile differs: codes
// are half as wide, and are loaded 8 at a time with the keys' element offsets, so K and V have
// equal strides in elements. Shared memory is laid out as the stock launch reserves it.
#ifdef FLASHINFER_DECODE_CUH_

using KvholdCode = KVHOLD_V_TYPE;

__device__ __forceinline__ void kvhold_copy_8_codes(KvholdCode* slot, const KvholdCode* codes,
                                                    bool live) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(slot));
  const int bytes = live ? 8 : 0;
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;\n" ::"r"(address),
               "l"(codes), "r"(bytes));
}

template <PosEncodingMode POS_ENCODING_MODE, uint32_t num_stages_smem, uint32_t tile_size_per_bdx,
          uint32_t vec_size, uint32_t bdx, uint32_t bdy, uint32_t bdz, typename AttentionVariant>
__device__ __inline__ void BatchDecodeWithPagedKVCacheDevice(
    const Params& params, uint8_t smem[], const uint32_t bx = blockIdx.x,
    const uint32_t by = blockIdx.y, const uint32_t tx = threadIdx.x,
    const uint32_t ty = threadIdx.y, const uint32_t tz = threadIdx.z) {
  static_assert(vec_size == 8, "eight codes are one 64-bit copy");
  static_assert(num_stages_smem <= bdx, "page offsets are fetched bdx rounds ahead");
  constexpr uint32_t head_dim = bdx * vec_size;
  constexpr uint32_t tile_rows = tile_size_per_bdx * bdy * bdz;
  constexpr uint32_t vec_bits = sizeof(DTypeKV) * vec_size * 8;
  auto block = cooperative_groups::this_thread_block();
  if (params.block_valid_mask && !params.block_valid_mask[bx]) return;

  const auto paged_kv = params.paged_kv;
  const uint32_t batch_idx = params.request_indices[bx];
  const uint32_t kv_tile_idx = params.kv_tile_indices[bx];
  const uint32_t kv_head_idx = by;
  const uint32_t qo_head_idx = kv_head_idx * bdy + ty;
  const uint32_t kv_len = paged_kv.get_length(batch_idx);
  const uint32_t chunk = params.partition_kv ? *(params.kv_chunk_size_ptr) : kv_len;
  const uint32_t chunk_start = params.partition_kv ? kv_tile_idx * chunk : 0;
  const uint32_t chunk_end =
      params.partition_kv ? min((kv_tile_idx + 1) * chunk, kv_len) : kv_len;
  const uint32_t chunk_size = chunk_end - chunk_start;

  AttentionVariant variant(params, batch_idx, smem);
  constexpr uint32_t stage_elements = num_stages_smem * tile_rows * head_dim;
  DTypeKV* k_smem = reinterpret_cast<DTypeKV*>(smem);
  KvholdCode* v_smem = reinterpret_cast<KvholdCode*>(smem + stage_elements * sizeof(DTypeKV));
  size_t* offset_smem = reinterpret_cast<size_t*>(smem + 2 * stage_elements * sizeof(DTypeKV));
  float* smem_md = reinterpret_cast<float*>(offset_smem);
  const KvholdCode* v_data = reinterpret_cast<const KvholdCode*>(paged_kv.v_data);

#if (__CUDACC_VER_MAJOR__ >= 12 && defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900))
  asm volatile("griddepcontrol.wait;");
#if defined(KVHOLD_EARLY_TRIGGER) && KVHOLD_EARLY_TRIGGER
  // Once all blocks run, the next kernel may take the places that are left, and waits there until
  // this one is done and its stores are seen: that is what its own griddepcontrol.wait is for.
  asm volatile("griddepcontrol.launch_dependents;");
#endif
#endif
  vec_t<float, vec_size> q_vec, freq;
  q_vec.cast_load(params.q + batch_idx * params.q_stride_n + qo_head_idx * params.q_stride_h +
                  tx * vec_size);

  const DTypeKV* k_data = paged_kv.k_data;
  const IdType last_indptr = paged_kv.indptr[paged_kv.batch_size];
  const uint32_t first_slot = paged_kv.indptr[batch_idx] * paged_kv.page_size + chunk_start;
  auto fetch_offsets = [&](uint32_t round) {
#pragma unroll
    for (uint32_t j = 0; j < tile_size_per_bdx; ++j) {
      const uint32_t place = ((j * bdz + tz) * bdy + ty) * bdx + tx;
      uint32_t page, entry;
      paged_kv.page_size.divmod(first_slot + round * tile_rows + place, page, entry);
      offset_smem[place] =
          paged_kv.protective_get_kv_offset(page, kv_head_idx, entry, 0, last_indptr);
    }
  };
  auto tile_row = [&](uint32_t round, uint32_t j) {
    return ((round * bdz + tz) * bdy + ty) * tile_size_per_bdx + j;
  };
  auto load_k = [&](uint32_t stage, uint32_t round, const size_t* offsets) {
#pragma unroll
    for (uint32_t j = 0; j < tile_size_per_bdx; ++j) {
      cp_async::pred_load<vec_bits, cp_async::PrefetchMode::kPrefetch,
                          cp_async::SharedMemFillMode::kNoFill>(
          k_smem + tile_row(stage, j) * head_dim + tx * vec_size, k_data + offsets[j],
          tile_row(round, j) < chunk_size);
    }
    cp_async::commit_group();
  };
  auto load_v = [&](uint32_t stage, uint32_t round, const size_t* offsets) {
#pragma unroll
    for (uint32_t j = 0; j < tile_size_per_bdx; ++j) {
      kvhold_copy_8_codes(v_smem + tile_row(stage, j) * head_dim + tx * vec_size,
                          v_data + offsets[j], tile_row(round, j) < chunk_size);
    }
    cp_async::commit_group();
  };
  size_t offsets[tile_size_per_bdx];
  auto take_offsets = [&](uint32_t round) {
#pragma unroll
    for (uint32_t j = 0; j < tile_size_per_bdx; ++j) {
      offsets[j] = offset_smem[tile_row(round % bdx, j)] + tx * vec_size;
    }
  };

  fetch_offsets(0);
  block.sync();
#pragma unroll
  for (uint32_t round = 0; round < num_stages_smem; ++round) {
    take_offsets(round);
    load_k(round, round, offsets);
    load_v(round, round, offsets);
  }

  state_t<vec_size> st;
  float s[bdy * tile_size_per_bdx];
  uint32_t stage = 0;
#pragma unroll 2
  for (uint32_t iter = 0; iter < ceil_div(chunk_size, tile_rows); ++iter) {
    if ((iter + num_stages_smem) % bdx == 0) fetch_offsets(iter + num_stages_smem);
    cp_async::wait_group<2 * num_stages_smem - 1>();
    block.sync();
    compute_qk<POS_ENCODING_MODE, vec_size, bdx, bdy * tile_size_per_bdx>(
        params, variant, batch_idx,
        k_smem + (stage * bdz + tz) * bdy * tile_size_per_bdx * head_dim, q_vec, freq,
        chunk_start + iter * tile_rows, iter * tile_rows, chunk_size, qo_head_idx, kv_head_idx, s,
        st, tx, ty, tz);
    block.sync();
    take_offsets(iter + num_stages_smem);
    load_k(stage, iter + num_stages_smem, offsets);
    cp_async::wait_group<2 * num_stages_smem - 1>();
    block.sync();
    update_local_state<vec_size, bdx, bdy * tile_size_per_bdx>(
        v_smem + (stage * bdz + tz) * bdy * tile_size_per_bdx * head_dim, s, stage, st, tx);
    block.sync();
    load_v(stage, iter + num_stages_smem, offsets);
    stage = (stage + 1) % num_stages_smem;
  }
  cp_async::wait_group<0>();
  block.sync();

  sync_state<vec_size, bdx, bdy, bdz>(variant, st, reinterpret_cast<float*>(smem), smem_md, tx, ty,
                                      tz);
#pragma unroll
  for (uint32_t i = 0; i < vec_size; ++i) {
    st.o[i] = variant.OutputTransform(params, st.o[i], bx, /*qo_idx=*/0, qo_head_idx, st.m, st.d,
                                      /*scale=*/1.0f);
  }
  if (tz == 0) {
    const uint32_t place = (bx * params.num_qo_heads + qo_head_idx) * head_dim + tx * vec_size;
    if (params.partition_kv) {
      st.o.store(reinterpret_cast<float*>(params.o) + place);
    } else {
      st.o.cast_store(params.o + place);
    }
    if (params.lse != nullptr) {
      params.lse[bx * params.num_qo_heads + qo_head_idx] = st.get_lse();
    }
  }
#if (__CUDACC_VER_MAJOR__ >= 12 && defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900)) && \
    !(defined(KVHOLD_EARLY_TRIGGER) && KVHOLD_EARLY_TRIGGER)
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The stock launch calls this one too: it fits better than FlashInfer's, which takes any pointer to
// the number of rows. What splits leave is float32, in space that the planner reserved as such:
// rounded twice, outputs would be off by twice as much.
inline cudaError_t VariableLengthMergeStates(DTypeO* space, float* sums, IdType* indptr,
                                             DTypeO* out, float* lse, uint32_t rows_max,
                                             std::nullptr_t, uint32_t heads, uint32_t dim,
                                             bool enable_pdl, cudaStream_t stream) {
  return kvhold_merge_partials<HEAD_DIM_VO>(space, sums, indptr, out, lse, rows_max,
                                            static_cast<uint32_t*>(nullptr), heads, enable_pdl,
                                            stream);
}

#endif  // FLASHINFER_DECODE_CUH_
