    // Part of the attention kernel's body (attention.cu), for one token a row: its queries, key and value.
    // Uses item, position, rank, warp, lane, base and the kernel's arguments; declares row_head,
    // out_head and takes_new (this CTA attends to the new token).
    const size_t row_head = (size_t)item.row * ITEM_HEADS + item.head, out_head = row_head;
    const bool takes_new = rank == CLUSTER - 1 && item.split == item.splits - 1;
    const size_t append_at = ((size_t)load_l2(slot_mapping + item.row) * KV_HEADS + item.head) * D;
    const u16* packed = qkv + row_head * (GROUP + 2) * D;
    for (int vector = warp; vector < GROUP + 1 + takes_new; vector += WARPS) {
      if (vector == GROUP && !takes_new) continue;
      const u16* from = packed + vector * D;
      if (vector == GROUP + 1) {  // the value
        if (lane < CHUNKS) {
          Vec v = load_l2_vec(from + lane * 8);
          store_shared(base + NEW_VALUES_AT + place(0, lane), v);
          *(Vec*)(values + append_at + lane * 8) = v;
        }
        continue;
      }
      const int steps = (D / 2 + 31) / 32;
      float a[steps], b[steps], squares = 0.f;
#pragma unroll
      for (int j = 0; j < steps; j++) {
        int i = lane + 32 * j;
        bool in = i < D / 2;
        a[j] = in ? widen(load_l2(from + i)) : 0.f;
        b[j] = in ? widen(load_l2(from + i + D / 2)) : 0.f;
        squares += a[j] * a[j] + b[j] * b[j];
      }
      if (NORM) {
#pragma unroll
        for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
        const float factor = 1.f / sqrtf(squares / D + eps);
        const u16* weight = vector == GROUP ? k_weight : q_weight;
#pragma unroll
        for (int j = 0; j < steps; j++) {
          int i = lane + 32 * j;
          if (i >= D / 2) continue;
          a[j] = widen(narrow(a[j] * factor * widen(weight[i])));
          b[j] = widen(narrow(b[j] * factor * widen(weight[i + D / 2])));
        }
      }
#pragma unroll
      for (int j = 0; j < steps; j++) {
        int i = lane + 32 * j;
        if (i >= D / 2) continue;
        u16 x = narrow(a[j]), y = narrow(b[j]);
        if (ROPE) {
          float c = cos_sin[(size_t)position * D + i], s = cos_sin[(size_t)position * D + D / 2 + i];
          x = narrow(a[j] * c - b[j] * s);
          y = narrow(b[j] * c + a[j] * s);
        }
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
    }
