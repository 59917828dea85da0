"""The changes to FlashInfer's header: each place exactly as often as expected, or nothing."""

import re

import pytest

from attention._errors import Unsupported
from attention._patch import (
    HEAD,
    PAGED,
    TAIL,
    Anchor,
    cuda_source,
    digest,
    kernel_source,
    tensor_header,
)

NAMES = ("cp_async", "fastdiv", "fp16", "layout", "math", "mma", "page", "smem", "pos", "utils")
SAMPLE = (
    "".join(f'#include "../{name}.cuh"\n' for name in NAMES)
    + """#include "cascade.cuh"
#include "mask.cuh"
#include "variants.cuh"
template <typename KTraits, bool REPACK_BF16 = false>
__device__ __forceinline__ void compute_sfm_v(
  typename KTraits::DTypeQ s_frag_f16[KTraits::NUM_MMA_Q][1][8];
  vec_cast<typename KTraits::DTypeQ, float>::cast<8>(s_frag_f16[0], s_frag[0]);
          mma::m16k16_rowsum_f16f16f32(d[mma_q], s_frag[mma_q][mma_kv]);
        }
      }
    }
  }

#pragma unroll
  for (uint32_t mma_kv = 0; mma_kv < KTraits::NUM_MMA_KV; ++mma_kv) {
  mma::mma_sync_m16n16k16_row_col_f16f16f32<typename KTraits::DTypeQ>(
      o_frag[mma_q][mma_d_local], (uint32_t*)s_frag_f16[mma_q], b_frag);
  mma::mma_sync_m16n16k16_row_col_f16f16f32<typename KTraits::DTypeQ>(
      o_frag[mma_q][mma_d_local], (uint32_t*)s_frag[mma_q], b_frag);
page_produce_kv<true, KTraits>(the ragged kernel is left alone);
compute_sfm_v<KTraits>(of the ragged kernel);
"""
    + PAGED
    + """
  [[maybe_unused]] size_t
      thr_local_kv_offset_v[1];
  page_produce_kv<true, KTraits>(&smem_storage, &v_smem_offset_w, paged_kv.v_data, 0,
                                 thr_local_kv_offset_v, chunk_size, warp_idx, lane_idx);
          cp_async::wait_group<1>();
        }
        block.sync();

        // compute attention score
          cp_async::wait_group<1>();
        }
        block.sync();

        // compute sfm*v
  compute_sfm_v<KTraits>(
      &v_smem, &v_smem_offset_r,
      smem_storage.v_sf_smem_ptr(get_warp_idx_kv<KTraits>(tid.z) * KTraits::NUM_MMA_KV *
                                 16 * KTraits::NUM_MMA_D_VO),
      lane_idx, s_frag, o_frag, d, d_base);
  page_produce_kv<true, KTraits>(&smem_storage, &v_smem_offset_w, paged_kv.v_data,
                                 (iter + 1) * CTA_TILE_KV, thr_local_kv_offset_v,
                                 chunk_size, warp_idx, lane_idx);
  threadblock_sync_mdo_states<KTraits>(o_frag, &smem_storage, m, d, warp_idx, lane_idx, tid);
  write_o_reg_gmem<KTraits>(o_frag, &qo_smem, o_ptr_base + d_base * 16, qo_packed_idx_base,
                            qo_len,
                            /*o_stride_n=*/
                            partition_kv ? num_kv_chunks * o_stride_n : o_stride_n,
                            /*o_stride_h=*/o_stride_h, group_size, tid);
  FLASHINFER_CUDA_CALL(VariableLengthMergeStates(of the ragged kernel));
cudaError_t BatchPrefillWithPagedKVCacheDispatched(Params params) {
  FLASHINFER_CUDA_CALL(VariableLengthMergeStates(
      tmp_v, tmp_s, params.merge_indptr, o, lse, params.max_total_num_rows,
      params.total_num_rows, num_qo_heads, HEAD_DIM_VO, enable_pdl, stream));
}
"""
)


def test_the_paged_kernel_is_changed_and_the_ragged_one_is_not() -> None:
    text = tensor_header(SAMPLE)
    ragged, paged = text.split(PAGED)
    assert "page_produce_kv<true, KTraits>(the ragged kernel" in ragged
    assert "compute_sfm_v<KTraits>(of the ragged" in ragged
    assert "page_produce_kv<true" not in paged
    assert paged.count("kvhold::produce_v<KTraits>") == 2
    assert "paged_kv.v_data, 0,\n" in paged
    assert "paged_kv.v_data, (iter + 1) * CTA_TILE_KV,\n" in paged
    # Widened once, between the wait for V and the barrier before its use; not at the wait for K.
    assert paged.count("kvhold::widen_v<KTraits>") == 1
    assert paged.index("compute attention score") < paged.index("kvhold::widen_v")
    assert re.search(r"widen_v<KTraits>\([^;]*;\s*block\.sync\(\);\n\n\s*// compute sfm", paged)
    # What splits leave is float32, and is merged from float32; of the ragged kernel it is not.
    assert paged.index("kvhold::write_partial<KTraits>") < paged.index("write_o_reg_gmem<KTraits>")
    assert "VariableLengthMergeStates(of the ragged" in paged
    assert paged.count("kvhold_merge_partials<HEAD_DIM_VO>(") == 1
    # Scales per token meet P behind the row sums; the power of two is put back before the merge.
    assert ragged.index("rowsum") < ragged.index("kvhold::fold_scales") < ragged.index("b_frag);")
    assert paged.index("kvhold::restore_scales") < paged.index("threadblock_sync_mdo_states")
    assert '#include "../' not in text
    assert text.index('variants.cuh"') < text.index('#include "v8_tensor.cuh"')
    assert "f16f16f32<DTypePV>(\n      o_frag[mma_q][mma_d_local], (uint32_t*)s_frag_f16" in text
    assert (
        "f16f16f32<typename KTraits::DTypeQ>(\n      o_frag[mma_q][mma_d_local], (uint32_t*)s_frag["
        in text
    )


# One anchor looks for what another one has just written; it stands or falls with that one.
@pytest.mark.parametrize(
    "anchor", [a for a in (*HEAD, *TAIL) if a.what != "end of the headers"], ids=lambda a: a.what
)
def test_a_place_that_moved_stops_the_build(anchor: Anchor) -> None:
    """Control for every anchor: without one of its matches, and with one more, it is refused."""
    pattern, what = anchor.pattern, anchor.what
    head, tail = SAMPLE.split(PAGED)
    inside = head if anchor in HEAD else tail
    found = re.search(pattern, inside)
    assert found is not None
    for changed in (
        inside.replace(found.group(), "moved", 1),
        inside + found.group(),
    ):
        text = changed + PAGED + tail if anchor in HEAD else head + PAGED + changed
        with pytest.raises(
            Unsupported, match=rf"{re.escape(what)} found \d+ times, .* use the Triton"
        ):
            tensor_header(text)


def test_a_header_without_the_paged_kernel_is_refused() -> None:
    with pytest.raises(Unsupported, match="no paged kernel"):
        tensor_header("nothing here")


def test_kernel_sources_include_the_changed_header_once() -> None:
    include = "#include <flashinfer/attention/prefill.cuh>\n"
    assert kernel_source(include + "rest") == '#include "kvhold_prefill.cuh"\nrest'
    for wrong in ("rest", include * 2):
        with pytest.raises(Unsupported, match="no longer once"):
            kernel_source(wrong)


def test_own_sources_are_there_and_name_their_modules() -> None:
    for name in ("variant.cuh", "merge.cuh", "v8_tensor.cuh", "v8_cores.cuh"):
        assert len(cuda_source(name)) > 500
    assert digest("a", "b") != digest("ab") != digest("a", "c")
    assert digest("a", "b") == digest("a", "b")
