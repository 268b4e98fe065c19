//! Computes steps on a model with reused input buffers.

use tutti_kernels::DeviceError;
use tutti_models::Model;
use tutti_runtime::Error;
use tutti_scheduler::Row;

use crate::{
    batch::{Batch, RowResult, RowResults},
    engine_core::Job,
    sequence::Sequence,
};

pub(crate) struct Runner {
    pub model: Box<dyn Model>,
    pub batch: Batch,
}

impl Runner {
    /// Runs a step. An error ends the worker; a row's own failure is part of the results.
    pub fn run(&mut self, job: &Job) -> Result<RowResults, Error> {
        let rows: Vec<(&Row, &Sequence)> = job.step.rows.iter().zip(&job.sequences).collect();
        match self.batch.run(&mut *self.model, &rows) {
            Ok(results) => Ok(results),
            Err(error @ DeviceError::Lost(_)) => Err(Error::internal(error.to_string())),
            Err(error) => {
                tracing::warn!(step = %job.step.number, rows = rows.len(), %error, "step failed; running its rows one by one");
                self.run_one_by_one(&rows)
            }
        }
    }

    /// Runs the rows of a failed step one by one, so that only rows at fault fail. Running a row twice is harmless: the
    /// second run writes the same keys and values to the same slots.
    fn run_one_by_one(&mut self, rows: &[(&Row, &Sequence)]) -> Result<RowResults, Error> {
        let mut results = Vec::with_capacity(rows.len());
        for row in rows {
            results.push(match self.batch.run(&mut *self.model, std::slice::from_ref(row)) {
                Ok(mut alone) => alone.pop().unwrap_or_else(|| Ok(RowResult::default())),
                Err(error @ DeviceError::Lost(_)) => return Err(Error::internal(error.to_string())),
                Err(error) => {
                    tracing::error!(key = %row.0.key, %error, "the request's row failed");
                    Err(error)
                }
            });
        }
        Ok(results)
    }
}
