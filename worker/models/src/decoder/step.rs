//! The interface of a step for the layers of a family.

use tutti_kernels::{Device, DeviceError, Linear, PageId, SlotId};

use crate::{DecoderDevice, EmbeddedRows, PausedPages, StepHook};

/// The operands of a linear layer on device `D`.
pub(crate) type LinearOn<'a, D> =
    Linear<'a, <D as Device>::Tensor, <D as Device>::Matrix, <D as Device>::Vector>;

/// The device, the planes and the residual stream of a step that has begun.
pub(crate) struct LayerStep<'a, D: Device> {
    pub device: &'a mut D,
    pub planes: &'a mut D::Planes,
    /// The residual stream: one row per token or, after [`keep_logit_rows`](Self::keep_logit_rows), per logit row. In a
    /// step with a [shape](tutti_kernels::StepShape), rows of padding follow these rows.
    pub hidden: &'a mut D::Tensor,
    pub(super) partial: &'a mut Option<D::Tensor>,
    pub(super) step_hook: &'a mut Option<Box<dyn StepHook>>,
    /// The rows of media tokens.
    pub(super) embeddings: &'a [EmbeddedRows<'a>],
    /// Width of the residual stream.
    pub(super) hidden_size: usize,
    /// Number of rows of the residual stream that are not padding.
    pub(super) valid_rows: usize,
    /// Number of logit rows, without padding.
    pub(super) logit_rows: usize,
}

impl<D: DecoderDevice> LayerStep<'_, D> {
    /// Adds a sublayer's output to the residual stream. Each rank holds a share of the columns of the input and of the
    /// weight. If the group has several ranks, first sums the matrix product over the ranks.
    pub fn add(&mut self, output: LinearOn<'_, D>) -> Result<(), DeviceError> {
        let Some(partial) = self.partial else {
            return self.device.linear_add(output, self.hidden);
        };
        self.device.linear(output, partial)?;
        self.device.all_reduce_add(partial, self.hidden)
    }

    /// Replaces this rank's part of a sublayer's output by the sum over the ranks.
    pub fn sum(&mut self, output: &mut D::Tensor) -> Result<(), DeviceError> {
        if self.device.group_rank().is_alone() { Ok(()) } else { self.device.all_reduce(output) }
    }

    /// Adds a computed output of a sublayer to the residual stream. If the group has several ranks, `output` is this
    /// rank's part of the output, and is replaced by the sum over the ranks.
    pub fn add_sum(&mut self, output: &mut D::Tensor) -> Result<(), DeviceError> {
        self.device.all_reduce_add(output, self.hidden)
    }

    /// Adds the features of pictures that belong behind layer `layer` to the residual stream (*deepstack*). Every rank
    /// adds them, because every rank holds the whole residual stream. A family calls this method behind each layer but
    /// the last, whose residual stream has only logit rows.
    pub fn add_features(&mut self, layer: usize) -> Result<(), DeviceError> {
        for rows in self.embeddings.iter().filter(|rows| rows.parts(self.hidden_size) > layer + 1) {
            let features = rows.part(layer + 1, self.hidden_size);
            self.device.add_rows(self.hidden, rows.first_token, &features)?;
        }
        Ok(())
    }

    /// True if the step has logit rows. In a step without logit rows, the last layer only needs to write its planes.
    pub fn has_logit_rows(&self) -> bool {
        self.logit_rows > 0
    }

    /// Returns the number of rows of the residual stream that are not padding.
    pub fn valid_rows(&self) -> usize {
        self.valid_rows
    }

    /// Keeps only the logit rows of the residual stream and of `others`. The last layer calls this after the sublayer
    /// that mixes tokens. From there on, a row's result does not depend on other rows, so rows without logits are
    /// dropped.
    pub fn keep_logit_rows(&mut self, others: &mut [&mut D::Tensor]) -> Result<(), DeviceError> {
        self.valid_rows = self.logit_rows;
        others.iter_mut().try_for_each(|x| self.device.keep_logit_rows(x))?;
        self.device.keep_logit_rows(self.hidden)
    }

    /// Runs the step hook. Families call this method between layers.
    pub fn pause(&mut self) -> Result<(), DeviceError> {
        match self.step_hook {
            Some(hook) => hook.run(&mut Paused { device: self.device, planes: self.planes }),
            None => Ok(()),
        }
    }
}

/// Access to planes between two layers of a step, in a group of one rank.
struct Paused<'a, D: Device> {
    device: &'a mut D,
    planes: &'a mut D::Planes,
}

impl<D: Device> PausedPages for Paused<'_, D> {
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.device.read_pages(self.planes, pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.device.write_pages(self.planes, pages, data)
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.device.read_slot(self.planes, slot, out)
    }

    fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        self.device.write_slot(self.planes, slot, data)
    }
}
