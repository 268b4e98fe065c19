//! All planes of a model.

use crate::cpu::memory::kv::KvPool;
use crate::cpu::memory::slots::Slots;
use crate::cpu::threads::ThreadPool;
use crate::{DeviceError, PlanesShape};

/// The pages and slots of a model.
pub struct Planes {
    pub(in crate::cpu) kv: Option<KvPool>,
    pub(in crate::cpu) slots: Slots,
}

impl Planes {
    pub(in crate::cpu) fn zeroed(shape: &PlanesShape) -> Result<Self, DeviceError> {
        Ok(Self {
            kv: shape.kv.map(|kv| KvPool::zeroed(kv, &shape.kv_scales)).transpose()?,
            slots: Slots::zeroed(&shape.slot_bytes, shape.slots)?,
        })
    }

    /// Takes all memory of the planes from the operating system at once.
    pub(in crate::cpu) fn make_resident(&mut self, pool: &mut ThreadPool) -> Result<(), DeviceError> {
        if let Some(kv) = &mut self.kv {
            kv.data.make_resident(pool)?;
        }
        self.slots.make_resident(pool)
    }

    /// The plane of keys and values; an error in a model without one.
    pub(in crate::cpu) fn kv(&self) -> Result<&KvPool, DeviceError> {
        self.kv.as_ref().ok_or_else(no_pages)
    }

    /// The plane of keys and values, for writing; an error in a model without one.
    pub(in crate::cpu) fn kv_mut(&mut self) -> Result<&mut KvPool, DeviceError> {
        self.kv.as_mut().ok_or_else(no_pages)
    }
}

fn no_pages() -> DeviceError {
    DeviceError::Misuse("pages of planes that have none".to_owned())
}
