    // Part of the attention kernel's body (attention.cu), for windows of tokens: their queries, keys and
    // values. Uses item, rank, warp, lane and the kernel's arguments; declares row_head, out_head
    // and takes_new (this CTA attends to the new tokens).
    const int item_head = item.head * SHARES + item.share;
    const size_t row_head = (size_t)item.row * ITEM_HEADS + item_head;
    const size_t out_head = (size_t)item.row * WINDOW * ITEM_HEADS + item_head;
    const bool takes_new = rank == CLUSTER - 1 && item.split == item.splits - 1;
    const int row = item.row;
#if E4M3
    const float key_scale = scales[item.head], value_factor = 1.f / scales[KV_HEADS + item.head];
#endif
    auto read = [&](const u16* from, float (&a)[STEPS], float (&b)[STEPS]) {
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        int i = lane + 32 * j;
        bool in = i < D / 2;
        a[j] = in ? widen(load_l2(from + i)) : 0.f;
        b[j] = in ? widen(load_l2(from + i + D / 2)) : 0.f;
      }
    };
    auto norm = [&](const u16* weight, float (&a)[STEPS], float (&b)[STEPS]) {
      float squares = 0.f;
#pragma unroll
      for (int j = 0; j < STEPS; j++) squares += a[j] * a[j] + b[j] * b[j];
#pragma unroll
      for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
      const float factor = 1.f / sqrtf(squares / D + eps);
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        int i = lane + 32 * j;
        if (i >= D / 2) continue;
        a[j] = widen(narrow(a[j] * factor * widen(weight[i])));
        b[j] = widen(narrow(b[j] * factor * widen(weight[i + D / 2])));
      }
    };
    auto rotate = [&](int i, int position, float a, float b, u16& x, u16& y) {
      float c = cos_sin[(size_t)position * D + i], s = cos_sin[(size_t)position * D + D / 2 + i];
      x = narrow(a * c - b * s);
      y = narrow(b * c + a * s);
    };
    auto store_query = [&](int query, int i, u16 x, u16 y) {
      u16* q = (u16*)(shared + Q_AT + query * Q_ROW);
      q[i] = x, q[i + D / 2] = y;
    };
    auto store_new = [&](int at, int token, int i, u16 x, u16 y) {
      char* tile = shared + at;
      *(u16*)(tile + place(token, i / 8) + i % 8 * 2) = x;
      *(u16*)(tile + place(token, (i + D / 2) / 8) + (i + D / 2) % 8 * 2) = y;
    };
    // Several vectors on their way at once: queries, then keys, then values, token by token.
    const int vectors = QUERIES + (takes_new ? 2 * WINDOW : 0);
    auto token_of = [](int vector) {
      return vector < QUERIES ? vector / HEADS : (vector - QUERIES) % WINDOW;
    };
    for (int before = warp; before < vectors; before += WARPS * AHEAD) {
      float a[AHEAD][STEPS], b[AHEAD][STEPS];
#pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        const int vector = min(before + n * WARPS, vectors - 1);  // all loads without a branch
        const int which = vector < QUERIES ? item.share * HEADS + vector % HEADS
                                           : GROUP + (vector - QUERIES) / WINDOW;
        const size_t from = ((size_t)row * WINDOW + token_of(vector)) * KV_HEADS + item.head;
        read(qkv + (from * (GROUP + 2) + which) * D, a[n], b[n]);
      }
#pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        const int vector = before + n * WARPS, token = token_of(vector);
        if (vector >= vectors) break;
        const bool is_query = vector < QUERIES, is_value = vector >= QUERIES + WINDOW;
        const int own_position = __shfl_sync(~0u, item.own_position, token);
        const i64 own_slot = __shfl_sync(~0u, item.own_slot, token);
        bool is_broken = false;
        if (is_value) {
#pragma unroll
          for (int j = 0; j < STEPS; j++) is_broken |= !(IS_SOUND(a[n][j]) && IS_SOUND(b[n][j]));
          is_broken = __any_sync(~0u, is_broken);
          if (lane == 0) *(u32*)(shared + BROKEN_AT + token * 4) = is_broken;
        } else if (NORM) {
          norm(is_query ? q_weight : k_weight, a[n], b[n]);
        }
        KEPT* into = (is_value ? values : keys) + ((size_t)own_slot * KV_HEADS + item.head) * D;
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
          int i = lane + 32 * j;
          if (i >= D / 2) continue;
          u16 x = narrow(a[n][j]), y = narrow(b[n][j]);
          if (ROPE && !is_value) rotate(i, own_position, a[n][j], b[n][j], x, y);
#if E4M3
          a[n][j] = widen(x), b[n][j] = widen(y);
          if (is_query) continue;
          const float by = is_value ? value_factor : 1.f / key_scale;
          u32 pair = narrow_e4m3(a[n][j] * by, b[n][j] * by);
          if (item.share == 0) into[i] = (u8)pair, into[i + D / 2] = (u8)(pair >> 8);
          if (is_broken) pair = 0;
          const int tile = is_value ? NEW_VALUES_AT : NEW_AT;
          kept_at(tile, token, i) = (u8)pair, kept_at(tile, token, i + D / 2) = (u8)(pair >> 8);
          continue;
#endif
          if (is_query) {
            store_query(vector, i, x, y);
            continue;
          }
          if (item.share == 0) into[i] = x, into[i + D / 2] = y;
          if (is_broken) x = y = 0;
          store_new(is_value ? NEW_VALUES_AT : NEW_AT, token, i, x, y);
        }
#if E4M3
        if (is_query) store_query_half(vector, a[n], b[n], scale_log2 * key_scale);
#endif
      }
    }
