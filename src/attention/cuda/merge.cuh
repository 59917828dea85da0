// The merge of splits, by FlashInfer's kernel, from partial outputs in float32. FlashInfer's own
// launch takes no float of every head_dim that it dispatches on, and knows no head_dim of 192.
#if defined(FLASHINFER_CASCADE_CUH_) && !defined(KVHOLD_MERGE_CUH_)
#define KVHOLD_MERGE_CUH_

template <uint32_t HEAD_DIM, uint32_t THREADS, typename DTypeO, typename IdType>
inline cudaError_t kvhold_merge_with(DTypeO* space, float* sums, IdType* indptr, DTypeO* out,
                                     float* lse, uint32_t rows_max, uint32_t* rows, uint32_t heads,
                                     int processors, bool enable_pdl, cudaStream_t stream) {
  constexpr uint32_t vec = HEAD_DIM > 128 ? 8 : 4, bdx = HEAD_DIM / vec, bdy = THREADS / bdx;
  // A launch has 48 KiB of shared memory unless it asks for more.
  constexpr uint32_t stages = THREADS > 128 && HEAD_DIM > 128 ? 2 : 4, threads = bdx * bdy;
  constexpr uint32_t smem = (stages * bdy * HEAD_DIM + threads) * sizeof(float);
  static_assert(smem <= 48 * 1024 && bdy <= threads, "the kernel's own space");
  auto kernel = flashinfer::PersistentVariableLengthMergeStatesKernel<vec, bdx, bdy, stages, float,
                                                                      DTypeO, IdType>;
  int blocks = 0;
  FLASHINFER_CUDA_CALL(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, smem));
  const uint32_t most = static_cast<uint32_t>(blocks) * static_cast<uint32_t>(processors);
  const uint32_t wanted = rows_max * heads;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = enable_pdl ? 1 : 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(wanted < most ? (wanted ? wanted : 1) : most);
  config.blockDim = dim3(bdx, bdy);
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  FLASHINFER_CUDA_CALL(cudaLaunchKernelEx(&config, kernel, reinterpret_cast<float*>(space), sums,
                                          indptr, out, lse, rows_max, rows, heads));
  return cudaSuccess;
}

// A block joins one row and head, its rows of threads in turns. Where there are fewer of them than
// processors, as with one long request, wider blocks take as many turns less.
template <uint32_t HEAD_DIM, typename DTypeO, typename IdType>
inline cudaError_t kvhold_merge_partials(DTypeO* space, float* sums, IdType* indptr, DTypeO* out,
                                         float* lse, uint32_t rows_max, uint32_t* rows,
                                         uint32_t heads, bool enable_pdl, cudaStream_t stream) {
  int device = 0, processors = 0;
  FLASHINFER_CUDA_CALL(cudaGetDevice(&device));
  FLASHINFER_CUDA_CALL(
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
#if defined(KVHOLD_WIDE_MERGE) && KVHOLD_WIDE_MERGE
  if (rows_max * heads <= static_cast<uint32_t>(processors)) {
    return kvhold_merge_with<HEAD_DIM, 512>(space, sums, indptr, out, lse, rows_max, rows, heads,
                                            processors, enable_pdl, stream);
  }
#endif
  return kvhold_merge_with<HEAD_DIM, 128>(space, sums, indptr, out, lse, rows_max, rows, heads,
                                          processors, enable_pdl, stream);
}

#endif  // KVHOLD_MERGE_CUH_
