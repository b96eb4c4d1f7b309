      // Part of a skinny GEMM's epilogue (skinny_gemm_finish.cuh): element j of a fragment times its scales.
      // Uses v, j, m, column, by and scale.
#if X8
      v[j] *= scale[m].y;
#endif
#if SCALES_EARLY
      v[j] *= by[j];
#elif SCALES_ROWS
      v[j] *= weight_scale[column];
#endif
      if (NORM == 1) v[j] *= scale[m].y;
