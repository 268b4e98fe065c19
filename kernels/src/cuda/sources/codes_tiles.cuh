// Tiles of matrix products with weights that are codes, on tensor cores. The inputs are bf16. Codes are copied to
// shared memory as they are stored, and each weight is rounded to bf16 once, where it is multiplied.
//
// A narrow tile has 16 rows and 64 columns, a wide tile 64 rows and 64 columns. The four warps of a thread block divide
// the columns. The inputs of a sum are divided into splits of SPLIT. Within a split, they are added in ascending order,
// sixteen per instruction, and the splits are then added in ascending order. So the bits of a row depend neither on the
// size of its tile nor on its neighbours, and splits can be computed by different blocks.
//
// Inputs are in slabs of 32. A lane with the index 4 * g + t in its warp takes the inputs 8 * t to 8 * t + 7 of a slab,
// for row g and for column g. Thus one load of 16 bytes gives a row's part of two instructions, and one word of eight
// codes gives a column's part. Within an instruction, inputs then have another order than the PTX manual names, but the
// same one in both operands.
constexpr u32 THREADS = 128, SLAB = 32, DEPTH = 64, SPLIT = 512, STEPS_PER_SPLIT = SPLIT / DEPTH;
constexpr u32 MOST_GROUPS = SPLIT / 16;  // the smallest groups have 16 inputs
constexpr u32 CHUNK = 16;                // bytes per copy

template <u32 ROW_TILES_, u32 STAGES_>
struct Shape {
  static constexpr u32 ROW_TILES = ROW_TILES_, COLUMN_TILES = 2, STAGES = STAGES_;
  static constexpr u32 ROWS = ROW_TILES * 16, COLUMNS = 64, HALF = COLUMNS / 2;
};
typedef Shape<1, 4> Narrow;
typedef Shape<4, 2> Wide;

// Returns the first column of a warp's tile of 8. Each warp has a tile in the first half of the columns and one in the
// second half, with the same indices there.
template <class S>
DEVICE u32 first_column(u32 warp, u32 tile) {
  return tile * S::HALF + warp * 8;
}

// The rows and columns of a step, slab by slab, and the groups of a split. The padding avoids bank conflicts of copies.
template <class Code, class S>
struct Shared {
  static constexpr u32 ROW_BYTES = SLAB * 2, COLUMN_BYTES = SLAB * Code::BITS / 8, PADDING = 64;
  u8 rows[S::STAGES][DEPTH / SLAB][S::ROWS * ROW_BYTES + PADDING];
  u8 columns[S::STAGES][DEPTH / SLAB][S::COLUMNS * COLUMN_BYTES + PADDING];
  Group groups[MOST_GROUPS][S::COLUMNS + 1];
};

// Computes a tile's sums over the steps from `first` on and before `end`. `first` begins a split. `row(i)` returns the
// address of the tile's row i, or null if there is none. `column(i)` returns the matrix's row of the tile's column i, or
// ALL_LANES. `rows` is the number of rows.
template <class Code, bool HAS_MINIMA, class S, class RowOf, class ColumnOf>
DEVICE void add_steps(Shared<Code, S>& shared, const Codes& codes, u32 inputs, u32 first, u32 end, u32 rows, RowOf row,
                      ColumnOf column, float (&totals)[S::ROW_TILES][S::COLUMN_TILES][4]) {
  typedef Shared<Code, S> Memory;
  typedef typename Code::Word Word;
  constexpr u32 ROW_CHUNKS = DEPTH * 2 / CHUNK, COLUMN_CHUNKS = DEPTH * Code::BITS / 8 / CHUNK;
  constexpr u32 ROW_SHARE = S::ROWS * ROW_CHUNKS / THREADS, COLUMN_SHARE = S::COLUMNS * COLUMN_CHUNKS / THREADS;

  // In every step, a thread copies the same chunk of the same rows and columns.
  const u32 row_chunk = threadIdx.x % ROW_CHUNKS, column_chunk = threadIdx.x % COLUMN_CHUNKS;
  const u16* row_from[ROW_SHARE];
  const u8* column_from[COLUMN_SHARE];
#pragma unroll
  for (u32 i = 0; i < ROW_SHARE; i++) row_from[i] = row((i * THREADS + threadIdx.x) / ROW_CHUNKS);
#pragma unroll
  for (u32 i = 0; i < COLUMN_SHARE; i++) {
    const u32 of = column((i * THREADS + threadIdx.x) / COLUMN_CHUNKS);
    column_from[i] = of == ALL_LANES ? nullptr : codes.codes + (size_t)of * codes.stride;
  }
  const bool is_aligned = inputs % 8 == 0;
  auto fetch = [&](u32 step) {
    const u32 stage = step % S::STAGES, slab = row_chunk / 4, input = step * DEPTH + row_chunk * 8;
#pragma unroll
    for (u32 i = 0; i < ROW_SHARE; i++) {
      const u32 line = (i * THREADS + threadIdx.x) / ROW_CHUNKS;
      u8* to = &shared.rows[stage][slab][line * Memory::ROW_BYTES + row_chunk % 4 * CHUNK];
      if (is_aligned) {
        const bool is_there = row_from[i] && input < inputs;
        copy16(shared_address(to), is_there ? (const void*)(row_from[i] + input) : codes.codes, is_there);
      } else {
#pragma unroll 1
        for (u32 j = 0; j < 8; j++) {
          const bool is_there = row_from[i] && input + j < inputs;
          reinterpret_cast<u16*>(to)[j] = is_there ? row_from[i][input + j] : 0;
        }
      }
    }
    constexpr u32 SLAB_CHUNKS = Memory::COLUMN_BYTES / CHUNK;
    const u32 byte = (step * COLUMN_CHUNKS + column_chunk) * CHUNK;
#pragma unroll
    for (u32 i = 0; i < COLUMN_SHARE; i++) {
      const u32 line = (i * THREADS + threadIdx.x) / COLUMN_CHUNKS;
      u8* to = &shared.columns[stage][column_chunk / SLAB_CHUNKS][line * Memory::COLUMN_BYTES + column_chunk % SLAB_CHUNKS * CHUNK];
      const bool is_there = column_from[i] && byte < codes.stride;
      copy16(shared_address(to), is_there ? column_from[i] + byte : codes.codes, is_there);
    }
  };
#pragma unroll
  for (u32 i = 0; i + 1 < S::STAGES; i++) {
    if (first + i < end) fetch(first + i);
    commit_copies();
  }

  // The number of groups of a split is a power of two.
  const u32 log_groups = codes.shift >= 9 ? 0 : 9 - codes.shift;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  float sums[S::ROW_TILES][S::COLUMN_TILES][4] = {};
#pragma unroll 1
  for (u32 step = first; step < end; step++) {
    if (step % STEPS_PER_SPLIT == 0) {
      if (step > first) __syncthreads();  // no warp reads the groups of the split before any more
      const u32 first_group = codes.shift == WHOLE_ROWS ? 0 : step * DEPTH >> codes.shift;
      for (u32 i = threadIdx.x; i < S::COLUMNS << log_groups; i += THREADS) {
        const u32 index = i & ((1u << log_groups) - 1), line = i >> log_groups, of = column(line);
        const bool is_there = of != ALL_LANES && first_group + index < codes.groups;
        shared.groups[index][line] = is_there ? group_of<Code>(codes, of, first_group + index) : Group{0.f, Code::BIAS};
      }
    }
    wait_for_copies_but<S::STAGES - 2>();
    __syncthreads();  // the step is there, and no warp reads the one before any more
    if (step + S::STAGES - 1 < end) fetch(step + S::STAGES - 1);
    commit_copies();
#pragma unroll
    for (u32 slab = 0; slab < DEPTH / SLAB; slab++) {
      const u8* row_slab = shared.rows[step % S::STAGES][slab];
      const u8* column_slab = shared.columns[step % S::STAGES][slab];
      uint4 a[S::ROW_TILES][2];
#pragma unroll
      for (u32 r = 0; r < S::ROW_TILES; r++) {
        if (r * 16 >= rows) break;
#pragma unroll
        for (u32 h = 0; h < 2; h++)
          a[r][h] = *reinterpret_cast<const uint4*>(row_slab + (r * 16 + h * 8 + g) * Memory::ROW_BYTES + t * CHUNK);
      }
      const u32 input = step % STEPS_PER_SPLIT * DEPTH + slab * SLAB + t * 8, index = input >> codes.shift;
#pragma unroll
      for (u32 c = 0; c < S::COLUMN_TILES; c++) {
        const u32 line = first_column<S>(warp, c) + g;
        const Word word = reinterpret_cast<const Word*>(column_slab + line * Memory::COLUMN_BYTES)[t];
        const Group group = shared.groups[index][line];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          float w[4];
          weights_of<Code, HAS_MINIMA>(word, half, group, w);
          const u32 b0 = Tensor<Bf16>::pair(w[0], w[1]), b1 = Tensor<Bf16>::pair(w[2], w[3]);
#pragma unroll
          for (u32 r = 0; r < S::ROW_TILES; r++) {
            if (r * 16 >= rows) break;
            const uint4 low = a[r][0], high = a[r][1];
            const u32 fragment[4] = {half ? low.z : low.x, half ? high.z : high.x, half ? low.w : low.y, half ? high.w : high.y};
            Tensor<Bf16>::multiply_add(sums[r][c], fragment, b0, b1);
          }
        }
      }
    }
    if ((step + 1) % STEPS_PER_SPLIT != 0 && step + 1 < end) continue;
#pragma unroll
    for (u32 i = 0; i < S::ROW_TILES * S::COLUMN_TILES * 4; i++) {
      float& sum = sums[i / 4 / S::COLUMN_TILES][i / 4 % S::COLUMN_TILES][i % 4];
      float& total = totals[i / 4 / S::COLUMN_TILES][i / 4 % S::COLUMN_TILES][i % 4];
      total = __fadd_rn(total, sum), sum = 0.f;
    }
  }
}
