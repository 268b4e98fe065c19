//! Packing of weights: which form a matrix takes, and where its packed bytes come from.

use super::CpuDevice;
use crate::cpu::memory::fused_matrices::FusedMatrices;
use crate::cpu::memory::matrix::Form;
use crate::cpu::memory::weights::Packing;
use crate::cpu::memory::{PackedWeights, Weights};
use crate::cpu::quant::block_float::Corrections;
use crate::cpu::quant::grouped::{self, FusedRows, GroupedMatrix};
use crate::cpu::quant::int8::Screen;
use crate::{DeviceError, HostMatrix, Quantize, QuantizedRows};

impl CpuDevice {
    pub(super) fn pack(
        &mut self,
        matrices: &[HostMatrix<'_>],
        paired: bool,
        quantize: Quantize,
    ) -> Result<Weights, DeviceError> {
        let (path, pool, source) = (self.path, &mut self.pool, FusedMatrices::new(matrices, paired)?);
        let packing = Packing::new(quantize, Form::of(source.dtype, path));
        let weights = pack(&self.packed, source, packing, || Weights::pack(path, pool, source, packing))?;
        self.fit(&weights)?;
        Ok(weights)
    }

    /// Packs a matrix that the checkpoint stores quantised.
    pub(super) fn pack_rows(
        &mut self,
        matrices: &[QuantizedRows<'_>],
        paired: bool,
    ) -> Result<Weights, DeviceError> {
        let (pool, source) = (&mut self.pool, FusedRows::new(matrices, paired)?);
        let mut pack = || Ok(Weights::Grouped(GroupedMatrix::pack(pool, source)?));
        let weights = match &self.packed {
            Some(packed) => packed.quantised(source, pack)?,
            None => pack()?,
        };
        self.fit(&weights)?;
        Ok(weights)
    }

    /// Makes room in the scratch memory for products with these weights.
    fn fit(&mut self, weights: &Weights) -> Result<(), DeviceError> {
        if let Weights::Grouped(matrix) = weights
            && grouped::is_widened(matrix.layout, self.activations)
        {
            self.quantised.fit_widened()?;
        }
        match weights {
            Weights::Int8(_) | Weights::Grouped(_) if weights.shape().paired => {
                self.quantised.fit_pair(weights.shape())
            }
            _ => Ok(()),
        }
    }

    /// Collects the exact values of the weights that the packed form of an embedding table rounds.
    pub(super) fn pack_corrections(
        &mut self,
        matrices: &[HostMatrix<'_>],
    ) -> Result<Corrections, DeviceError> {
        let (path, pool, source) = (self.path, &mut self.pool, FusedMatrices::new(matrices, false)?);
        match &self.packed {
            Some(packed) => packed.corrections(path, pool, source),
            None => Corrections::pack(path, pool, source),
        }
    }

    /// Packs the screen (int8 copy) of an LM head.
    pub(super) fn pack_screen(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Option<Screen>, DeviceError> {
        let (path, pool, source) = (self.path, &mut self.pool, FusedMatrices::new(matrices, false)?);
        let mut pack = || Screen::pack(path, pool, source, Form::of(source.dtype, path));
        match &self.packed {
            Some(packed) => packed.screen(source, pack),
            None => pack(),
        }
    }
}

/// Returns a packed matrix: from the cache file of packed weights, if there is one, else from `pack`.
pub(super) fn pack(
    packed: &Option<PackedWeights>,
    source: FusedMatrices<'_>,
    packing: Packing,
    pack: impl FnOnce() -> Result<Weights, DeviceError>,
) -> Result<Weights, DeviceError> {
    match packed {
        Some(packed) => packed.matrix(source, packing, pack),
        None => pack(),
    }
}
