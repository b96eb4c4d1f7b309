    // Part of the attention kernel's body (attention.cu), for one token a row: its queries, key and value
    // from what attention_token_loads.cuh has loaded, or from `token` if that was early. Uses item, rank,
    // warp, lane, base and the kernel's arguments, and takes_new.
#if EARLY_TOKEN
    const size_t append_at = ((size_t)token.slot * KV_HEADS + item.head) * D;
    const Vec value = token.value;
    const int vectors = takes_new ? GROUP + 2 : GROUP;
    float a[EACH][STEPS], b[EACH][STEPS];
    float cosines[STEPS], sines[STEPS], low_weights[STEPS], high_weights[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
#pragma unroll
      for (int n = 0; n < EACH; n++) a[n][j] = widen(token.a[n][j]), b[n][j] = widen(token.b[n][j]);
      if (ROPE) cosines[j] = token.cosines[j], sines[j] = token.sines[j];
      if (NORM) low_weights[j] = widen(token.low_weights[j]);
      if (NORM) high_weights[j] = widen(token.high_weights[j]);
    }
#if E4M3
    const float key_scale = token.key_scale, value_factor = 1.f / token.value_scale;
#endif
#endif
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int vector = warp + n * WARPS;
      if (vector >= vectors) continue;
      if (vector == GROUP + 1) {
#if E4M3
        if (lane < D / 8) {
          auto pair = [&](u32 of) { return narrow_e4m3(low(of) * value_factor, high(of) * value_factor); };
          const u32 lower = pair(value.x) | pair(value.y) << 16;
          const u64 kept = (u64)(pair(value.z) | pair(value.w) << 16) << 32 | lower;
          *(u64*)&kept_at(NEW_VALUES_AT, 0, lane * 8) = kept;
          *(u64*)(values + append_at + lane * 8) = kept;
        }
        continue;
#endif
        if (lane < CHUNKS) {
          store_shared(base + NEW_VALUES_AT + place(0, lane), value);
          *(Vec*)(values + append_at + lane * 8) = value;
        }
        continue;
      }
      if (NORM) {
        float squares = 0.f;
#pragma unroll
        for (int j = 0; j < STEPS; j++) squares += a[n][j] * a[n][j] + b[n][j] * b[n][j];
#pragma unroll
        for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
        const float factor = 1.f / sqrtf(squares / D + eps);
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
          const int i = min(lane + 32 * j, D / 2 - 1);
          const float low = vector == GROUP ? widen(k_weight[i]) : low_weights[j];
          const float high = vector == GROUP ? widen(k_weight[i + D / 2]) : high_weights[j];
          a[n][j] = widen(narrow(a[n][j] * factor * low));
          b[n][j] = widen(narrow(b[n][j] * factor * high));
        }
      }
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        const int i = lane + 32 * j;
        if (i >= D / 2) continue;
        u16 x = narrow(a[n][j]), y = narrow(b[n][j]);
        if (ROPE) {
          x = narrow(a[n][j] * cosines[j] - b[n][j] * sines[j]);
          y = narrow(b[n][j] * cosines[j] + a[n][j] * sines[j]);
        }
#if E4M3
        a[n][j] = widen(x), b[n][j] = widen(y);
        if (vector == GROUP) {
          const u32 pair = narrow_e4m3(widen(x) / key_scale, widen(y) / key_scale);
          kept_at(NEW_AT, 0, i) = keys[append_at + i] = (u8)pair;
          kept_at(NEW_AT, 0, i + D / 2) = keys[append_at + i + D / 2] = (u8)(pair >> 8);
        }
        continue;
#endif
        if (vector < GROUP) {
          u16* q = (u16*)(shared + Q_AT + vector * Q_ROW);
          q[i] = x, q[i + D / 2] = y;
        } else {
          char* k = shared + NEW_AT;
          *(u16*)(k + place(0, i / 8) + i % 8 * 2) = x;
          *(u16*)(k + place(0, (i + D / 2) / 8) + (i + D / 2) % 8 * 2) = y;
          keys[append_at + i] = x;
          keys[append_at + i + D / 2] = y;
        }
      }
#if E4M3
      if (vector < GROUP) store_query_half(vector, a[n], b[n], scale_log2 * key_scale);
#endif
    }
