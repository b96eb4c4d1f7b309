    // Part of the attention kernel's body (attention.cu), for one token a row: what a warp loads of an
    // item's token. Uses item, position, row_head, takes_new, warp, lane and the kernel's arguments.
    const i64 own_slot = load_l2(slot_mapping + item.row);
#if !EARLY_TOKEN
    const size_t append_at = ((size_t)own_slot * KV_HEADS + item.head) * D;
#if E4M3
    const float key_scale = scales[item.head], value_factor = 1.f / scales[KV_HEADS + item.head];
#endif
#endif
    const u16* packed = qkv + row_head * (GROUP + 2) * D;
    const int vectors = takes_new ? GROUP + 2 : GROUP;
    // All loads of a warp are on their way at once: elements i and i + D / 2 of its vectors, and what
    // these are multiplied with.
    LOADED a[EACH][STEPS], b[EACH][STEPS];
    Vec value{0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int vector = warp + n * WARPS;
      const u16* from = packed + vector * D;
      if (vector == GROUP + 1 && takes_new && lane < D / 8) value = load_l2_vec(from + lane * 8);
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        const int i = lane + 32 * j;
        const bool in = i < D / 2 && vector < vectors && vector <= GROUP;
        a[n][j] = in ? AS_LOADED(load_l2(from + i)) : LOADED(0);
        b[n][j] = in ? AS_LOADED(load_l2(from + i + D / 2)) : LOADED(0);
      }
    }
    float cosines[STEPS], sines[STEPS];
    LOADED low_weights[STEPS], high_weights[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const int i = min(lane + 32 * j, D / 2 - 1);
      if (ROPE) cosines[j] = cos_sin[(size_t)position * D + i];
      if (ROPE) sines[j] = cos_sin[(size_t)position * D + D / 2 + i];
      if (NORM) low_weights[j] = AS_LOADED(q_weight[i]), high_weights[j] = AS_LOADED(q_weight[i + D / 2]);
    }
