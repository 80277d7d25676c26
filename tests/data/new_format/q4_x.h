// Q4_X: Q4_0's nibbles, and behind every f16 d the int8 scales of its 16 weights each.
struct Q4_X : Packed<kQ4_X, 16, 8> {
  static JAX_Q4K_INLINE Floats scales(const uint8_t* const* p) {
    float values[16];
    for (int block = 0; block < 8; ++block) {
      uint16_t d;
      std::memcpy(&d, p[1] + 4 * block, 2);
      for (int s = 0; s < 2; ++s) values[2 * block + s] = half(d) * static_cast<int8_t>(p[1][4 * block + 2 + s]);
    }
    return Floats::load(values);
  }
  template <int i>
  static JAX_Q4K_INLINE Bytes quants(const uint8_t* const* p) { return Q4_0::quants<i>(p); }
};

