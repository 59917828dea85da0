"""How FlashInfer's paged prefill header becomes one that reads 16-bit keys and FP8 values.

The text is copied, changed at a few named places and written beside the generated sources of a
module; the installed header stays as it is. Every place must be there exactly as often as
expected, else nothing is built: a header that moved is a reason to look, not to guess.
"""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

from attention._errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable


class Anchor(NamedTuple):
    """One change: a regular expression, its replacement, and how often it must match."""

    what: str
    pattern: str
    replacement: str
    times: int


PAGED: Final = "__device__ __forceinline__ void BatchPrefillWithPagedKVCacheDevice("
"""Where the paged kernel begins: the ragged one before it is left alone."""

HEAD: Final = (
    Anchor("headers beside", r'#include "\.\./', '#include "flashinfer/', 10),
    Anchor(
        "attention headers",
        r'#include "(cascade|mask|variants)\.cuh"',
        r'#include "flashinfer/attention/\1.cuh"',
        3,
    ),
    Anchor(
        "end of the headers",
        r'(#include "flashinfer/attention/variants\.cuh"\n)',
        r'\1#include "v8_merge.cuh"\n#include "v8_tensor.cuh"\n',
        1,
    ),
    Anchor(
        "second product",
        r"template <typename KTraits, bool REPACK_BF16 = false>\n"
        r"(__device__ __forceinline__ void compute_sfm_v\()",
        r"template <typename KTraits, bool REPACK_BF16 = false,\n"
        r"          typename DTypePV = typename KTraits::DTypeQ>\n\1",
        1,
    ),
    Anchor(
        "type of P",
        r"typename KTraits::DTypeQ (s_frag_f16\[KTraits::NUM_MMA_Q\])",
        r"DTypePV \1",
        1,
    ),
    Anchor(
        "cast of P",
        r"vec_cast<typename KTraits::DTypeQ, float>::cast<8>\(s_frag_f16",
        "vec_cast<DTypePV, float>::cast<8>(s_frag_f16",
        1,
    ),
    Anchor(
        "product of P and V",
        r"mma_sync_m16n16k16_row_col_f16f16f32<typename KTraits::DTypeQ>\("
        r"(\s*o_frag\[mma_q\]\[mma_d_local\], \(uint32_t\*\)s_frag_f16)",
        r"mma_sync_m16n16k16_row_col_f16f16f32<DTypePV>(\1",
        1,
    ),
    Anchor(
        "end of the row sums",
        r"(mma::m16k16_rowsum_f16f16f32\(d\[mma_q\], s_frag\[mma_q\]\[mma_kv\]\);"
        r"\s*\}\s*\}\s*\}\s*\}\n)(\s*#pragma unroll\s*for \(uint32_t mma_kv)",
        r"\1  kvhold::fold_scales<KTraits>(v_sf_smem, lane_idx, s_frag, s_frag_f16, o_frag);\n\2",
        1,
    ),
)

TAIL: Final = (
    Anchor(
        "offsets of V",
        r"(\[\[maybe_unused\]\] size_t\s+thr_local_kv_offset_v\[)",
        r"kvhold::TokenScales<KTraits> v_scales(get_warp_idx_kv<KTraits>(tid.z));\n      \1",
        1,
    ),
    Anchor(
        "loads of V",
        r"page_produce_kv<true, KTraits>\(&smem_storage, &v_smem_offset_w, paged_kv\.v_data,\s*"
        r"(0|\(iter \+ 1\) \* CTA_TILE_KV),\s*thr_local_kv_offset_v,\s*chunk_size, warp_idx,"
        r"\s*lane_idx\);",
        r"kvhold::produce_v<KTraits>(&smem_storage, params, paged_kv.v_data, \1,\n"
        r"          thr_local_kv_offset_v, chunk_size, warp_idx, lane_idx);",
        2,
    ),
    Anchor(
        "wait for V",
        r"(cp_async::wait_group<1>\(\);\n\s*\}\n)(\s*block\.sync\(\);\n\n\s*// compute sfm\*v)",
        r"\1        kvhold::widen_v<KTraits>(&smem_storage, warp_idx, lane_idx);\n\2",
        1,
    ),
    Anchor(
        "use of V",
        r"compute_sfm_v<KTraits>\(\s*&v_smem, &v_smem_offset_r,\s*smem_storage\.v_sf_smem_ptr\("
        r"get_warp_idx_kv<KTraits>\(tid\.z\) \* KTraits::NUM_MMA_KV \*\s*16 \* "
        r"KTraits::NUM_MMA_D_VO\),",
        "compute_sfm_v<KTraits, false, half>(\n"
        "              &v_smem, &v_smem_offset_r, reinterpret_cast<uint8_t*>(&v_scales),",
        1,
    ),
    Anchor(
        "sums of the warps",
        r"(threadblock_sync_mdo_states<KTraits>\(o_frag)",
        r"kvhold::restore_scales<KTraits>(v_scales, o_frag);\n        \1",
        1,
    ),
    Anchor(
        "results of a split",
        r"write_o_reg_gmem<KTraits>\(o_frag, &qo_smem, o_ptr_base \+ d_base \* 16, "
        r"qo_packed_idx_base,\s*qo_len,\s*/\*o_stride_n=\*/\s*partition_kv \? num_kv_chunks \* "
        r"o_stride_n : o_stride_n,\s*/\*o_stride_h=\*/o_stride_h, group_size, tid\);",
        "if (partition_kv) {\n"
        "          kvhold::write_partial<KTraits>(\n"
        "              o_frag, reinterpret_cast<float*>(o) + (o_ptr_base - o) + d_base * 16,\n"
        "              qo_packed_idx_base, qo_len, num_kv_chunks * o_stride_n, o_stride_h,\n"
        "              group_size, lane_idx, get_warp_idx_kv<KTraits>(tid.z));\n"
        "        } else {\n"
        "          write_o_reg_gmem<KTraits>(o_frag, &qo_smem, o_ptr_base + d_base * 16,\n"
        "                                    qo_packed_idx_base, qo_len, o_stride_n, o_stride_h,\n"
        "                                    group_size, tid);\n"
        "        }",
        1,
    ),
    Anchor(
        "merge of the splits",
        r"(cudaError_t BatchPrefillWithPagedKVCacheDispatched\([\s\S]*?)"
        r"VariableLengthMergeStates\(\s*tmp_v, tmp_s, params\.merge_indptr, o, lse, "
        r"params\.max_total_num_rows,\s*params\.total_num_rows, num_qo_heads, HEAD_DIM_VO, "
        r"enable_pdl, stream\)",
        r"\1kvhold_merge_partials<HEAD_DIM_VO>(\n"
        "                  tmp_v, tmp_s, params.merge_indptr, o, lse, params.max_total_num_rows,\n"
        "                  params.total_num_rows, num_qo_heads, enable_pdl, stream)",
        1,
    ),
)


def tensor_header(prefill: str) -> str:
    """The patched text of FlashInfer's attention/prefill.cuh.

    Raises:
        Unsupported: a place is missing or there too often.
    """
    head, mark, tail = prefill.partition(PAGED)
    if not mark:
        raise Unsupported("FlashInfer's prefill.cuh has no paged kernel: use the Triton kernels")
    return _apply(head, HEAD) + mark + _apply(tail, TAIL)


def _apply(text: str, anchors: Iterable[Anchor]) -> str:
    for anchor in anchors:
        text, found = re.subn(anchor.pattern, anchor.replacement, text)
        if found != anchor.times:
            raise Unsupported(
                f"FlashInfer's prefill.cuh: {anchor.what} found {found} times, expected "
                f"{anchor.times}: this FlashInfer is not known, use the Triton kernels"
            )
    return text


def kernel_source(rendered: str) -> str:
    """A generated kernel file, made to include the patched header."""
    include = "#include <flashinfer/attention/prefill.cuh>"
    if rendered.count(include) != 1:
        raise Unsupported("FlashInfer's kernel template includes prefill.cuh no longer once")
    return rendered.replace(include, '#include "kvhold_prefill.cuh"')


def cuda_source(name: str) -> str:
    """One of this package's own CUDA files."""
    return files("attention").joinpath("cuda", name).read_text(encoding="utf-8")


def digest(*texts: str) -> str:
    """A short name for sources: another text builds another module."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
