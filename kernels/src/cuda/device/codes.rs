//! Matrix products with weights that are codes, and embeddings from tables of codes.
//!
//! A kernel converts the codes of a tile where it multiplies them. Tiles of few and of many rows add in the same order,
//! so a row has the same bits in any batch. cuBLASLt on dequantised weights would have other bits, because it adds in
//! another order.

use super::CudaDevice;
use crate::cuda::arguments::{EmbedCodes, MultiplyCodes, MultiplyExpertCodes, SumSplits};
use crate::cuda::gemm::{Accumulate, Product};
use crate::cuda::kernels::Grid;
use crate::cuda::memory::grown;
use crate::cuda::sources::{Kernel, kernel};
use crate::cuda::tensor::{CodesLayout, Matrix, Tensor};
use crate::{DeviceError, QuantizedType, VocabularyShard};

/// Threads per block.
pub(super) const THREADS: u32 = 128;
/// Threads per block of the sums of splits.
const SUM_THREADS: u32 = 256;
/// Number of inputs of a split: `SPLIT` in `sources/codes_tiles.cuh`.
const SPLIT: usize = 512;

/// The size of a tile of rows and columns, as in `sources/codes_tiles.cuh`. Both sizes give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tile {
    Narrow,
    Wide,
}

impl Tile {
    /// Number of columns of a tile.
    pub(super) const COLUMNS: usize = 64;

    /// Returns the size of tiles for so many rows.
    pub(super) fn of_rows(rows: usize) -> Self {
        if rows <= Self::Narrow.rows() { Self::Narrow } else { Self::Wide }
    }

    /// Number of rows of a tile.
    pub(super) fn rows(self) -> usize {
        match self {
            Self::Narrow => 16,
            Self::Wide => 64,
        }
    }

    /// Number of tiles from which on a product has enough blocks without splits.
    fn enough(self) -> usize {
        match self {
            Self::Narrow => 512,
            Self::Wide => 128,
        }
    }

    fn kernel(self, element: QuantizedType) -> Kernel<MultiplyCodes> {
        use QuantizedType::{E2m1, E4m3, Int4, Int8};
        match (self, element) {
            (Self::Narrow, Int4) => kernel::multiply_narrow_int4,
            (Self::Narrow, Int8) => kernel::multiply_narrow_int8,
            (Self::Narrow, E4m3) => kernel::multiply_narrow_e4m3,
            (Self::Narrow, E2m1) => kernel::multiply_narrow_e2m1,
            (Self::Wide, Int4) => kernel::multiply_wide_int4,
            (Self::Wide, Int8) => kernel::multiply_wide_int8,
            (Self::Wide, E4m3) => kernel::multiply_wide_e4m3,
            (Self::Wide, E2m1) => kernel::multiply_wide_e2m1,
        }
    }

    pub(super) fn experts_kernel(self, element: QuantizedType) -> Kernel<MultiplyExpertCodes> {
        use QuantizedType::{E2m1, E4m3, Int4, Int8};
        match (self, element) {
            (Self::Narrow, Int4) => kernel::experts_narrow_int4,
            (Self::Narrow, Int8) => kernel::experts_narrow_int8,
            (Self::Narrow, E4m3) => kernel::experts_narrow_e4m3,
            (Self::Narrow, E2m1) => kernel::experts_narrow_e2m1,
            (Self::Wide, Int4) => kernel::experts_wide_int4,
            (Self::Wide, Int8) => kernel::experts_wide_int8,
            (Self::Wide, E4m3) => kernel::experts_wide_e4m3,
            (Self::Wide, E2m1) => kernel::experts_wide_e2m1,
        }
    }
}

/// The blocks of a product.
struct Blocks {
    tile: Tile,
    /// Tiles along columns, and along rows.
    tiles: (usize, usize),
    /// Number of splits that blocks compute one each, or 1.
    splits: usize,
}

impl Blocks {
    /// Returns the blocks of a product of `rows` rows with a matrix of `[outputs, inputs]`. `enough` replaces the
    /// [default](Tile::enough).
    fn of(rows: usize, [outputs, inputs]: [usize; 2], enough: Option<usize>) -> Self {
        let tile = Tile::of_rows(rows);
        let enough = enough.unwrap_or(tile.enough());
        let tiles = (outputs.div_ceil(Tile::COLUMNS), rows.div_ceil(tile.rows()));
        let splits = if tiles.0 * tiles.1 < enough { inputs.div_ceil(SPLIT) } else { 1 };
        Self { tile, tiles, splits }
    }
}

/// Number of bytes of the sums of splits of products of at most `rows` rows.
fn most_part_bytes(rows: usize, shape: [usize; 2], enough: Option<usize>) -> usize {
    let of_rows = |rows: usize| match Blocks::of(rows, shape, enough).splits {
        1 => 0,
        splits => splits * rows * shape[0] * size_of::<f32>(),
    };
    let wide = Tile::Wide;
    // The largest number of rows that is divided into splits is a multiple of a tile's rows.
    let tiles = (enough.unwrap_or(wide.enough()).max(1) - 1) / shape[0].div_ceil(Tile::COLUMNS).max(1);
    of_rows(rows.min(Tile::Narrow.rows())).max(of_rows(rows.min(tiles * wide.rows())))
}

impl CudaDevice {
    /// Enqueues a product with weights that are codes. The input has at most `capacity` rows in any step.
    pub(super) fn codes_product(
        &mut self,
        product: &Product<'_>,
        layout: CodesLayout,
        capacity: usize,
    ) -> Result<(), DeviceError> {
        let Product { x, rows, matrix, accumulate, out } = *product;
        if rows == 0 || matrix.outputs == 0 {
            return Ok(());
        }
        let shape = [matrix.outputs, matrix.inputs];
        let Blocks { tile, tiles, splits } = Blocks::of(rows, shape, self.enough_tiles);
        let bytes = most_part_bytes(capacity.max(rows), shape, self.enough_tiles);
        let parts = match bytes {
            0 => out,
            bytes => grown(&mut self.scratch.splits, &self.gpu, bytes, "sums of splits")?.at(),
        };
        let [codes, scales, offsets] = layout.addresses(matrix);
        let is_added = u32::from(accumulate == Accumulate::Add);
        let operands = MultiplyCodes {
            x,
            codes,
            scales,
            offsets,
            out: if splits > 1 { parts } else { out },
            rows: rows as u32,
            inputs: matrix.inputs as u32,
            outputs: matrix.outputs as u32,
            stride: layout.stride as u32,
            groups: layout.groups as u32,
            shift: layout.shift,
            kinds: layout.kinds(),
            splits: splits as u32,
            accumulate: if splits > 1 { 0 } else { is_added },
        };
        let grid = Grid { blocks: (tiles.0 * splits, tiles.1), threads: THREADS, shared_bytes: 0 };
        self.kernels.launch(tile.kernel(layout.element), grid, operands)?;
        if splits == 1 {
            return Ok(());
        }
        let count = rows * matrix.outputs;
        let operands =
            SumSplits { parts, splits: splits as u32, count: count as u64, accumulate: is_added, out };
        self.kernels.launch(kernel::sum_splits, Grid::over(count, SUM_THREADS), operands)
    }

    /// Enqueues the embedding of the step's rows from a table of codes.
    pub(super) fn embed_codes(
        &mut self,
        table: &Matrix,
        layout: CodesLayout,
        shard: VocabularyShard,
        out: &Tensor,
    ) -> Result<(), DeviceError> {
        let kernel = match layout.element {
            QuantizedType::Int4 => kernel::embed_int4,
            QuantizedType::Int8 => kernel::embed_int8,
            QuantizedType::E4m3 => kernel::embed_e4m3,
            QuantizedType::E2m1 => kernel::embed_e2m1,
        };
        let [codes, scales, offsets] = layout.addresses(table);
        let operands = EmbedCodes {
            codes,
            scales,
            offsets,
            stride: layout.stride as u32,
            groups: layout.groups as u32,
            shift: layout.shift,
            kinds: layout.kinds(),
            ids: self.step.at.ids,
            last_tokens: self.last_tokens.at(),
            first: shard.first as u32,
            held: table.outputs as u32,
            width: table.inputs as u32,
            out: out.at(),
        };
        self.kernels.launch(kernel, Grid::of(self.step.token_rows, THREADS), operands)
    }
}

#[cfg(test)]
mod tests;
