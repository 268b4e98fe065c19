//! An observer that sums the time and the amount of work of each operation.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tutti_kernels::{DeviceError, Observer, Operation};

use super::limits::{Clock, Limits};

/// Sums over all operations with one name, since the table was last emptied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    pub calls: usize,
    pub time: Duration,
    /// Floating-point operations, without matrix products with weights. A multiply-add counts as two.
    pub flops: f64,
    /// Operations of matrix products with weights, of any type.
    pub products: f64,
    /// Bytes of weights, keys and values that are read from memory.
    pub bytes: f64,
}

impl Work {
    /// Returns the least time in seconds that the machine's limits allow.
    pub fn least(&self, limits: &Limits) -> f64 {
        let computing = self.flops / limits.flops + self.products / limits.products;
        computing.max(self.bytes / limits.bytes)
    }
}

/// Operations by name.
pub type Table = Arc<Mutex<BTreeMap<String, Work>>>;

/// Sums the time and the work of each operation in `table`.
pub struct Timing {
    pub table: Table,
    clock: Clock,
}

impl Timing {
    pub fn new(clock: Clock) -> Self {
        Self { table: Table::default(), clock }
    }
}

impl Observer for Timing {
    fn observe<T>(
        &mut self,
        operation: &Operation,
        run: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let began = self.clock.now();
        let result = run();
        let time = self.clock.now() - began;
        let name = match operation.matrix {
            Some([outputs, inputs]) => format!("product {inputs} to {outputs}"),
            None => operation.name.to_owned(),
        };
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let work = table.entry(name).or_default();
        work.calls += 1;
        work.time += time;
        work.flops += operation.flops;
        work.products += operation.product_operations;
        work.bytes += operation.bytes;
        result
    }
}
