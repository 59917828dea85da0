// The attention variant of every kvhold module: softmax over sm_scale * q.k, and the scale of the
// FP8 values applied to the finished sum, per query head, inside the kernel.
struct KvholdV8 : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ KvholdV8(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  // A row that saw no key has m = -inf: its output is zero, not 0/0.
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    float d_rcp = (m != -math::inf) ? math::ptx_rcp(d) : 0.f;
    return output * d_rcp * __ldg(params.head_scale + qo_head_idx);
  })
};
