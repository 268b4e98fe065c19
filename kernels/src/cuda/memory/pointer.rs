//! Addresses of device memory, with the type of what lies there.

use std::marker::PhantomData;

use cudarc::driver::sys::CUdeviceptr;

/// The address of elements of type `T` in a [`DeviceBuffer`](super::DeviceBuffer), or null. `u8` stands for elements
/// whose type a value names, such as the weights of a checkpoint.
///
/// Only a buffer makes a pointer that is not null. The pointer does not hold the buffer, and it does not know where the
/// buffer ends: an operation checks the shapes of its operands before it takes their addresses.
#[repr(transparent)]
pub(in crate::cuda) struct DevicePointer<T> {
    address: CUdeviceptr,
    elements: PhantomData<fn() -> T>,
}

impl<T> DevicePointer<T> {
    /// The pointer to nothing.
    pub(in crate::cuda) const NULL: Self = Self::new(0);

    pub(super) const fn new(address: CUdeviceptr) -> Self {
        Self { address, elements: PhantomData }
    }

    /// The address, for the libraries beside the driver.
    pub(in crate::cuda) fn address(self) -> CUdeviceptr {
        self.address
    }

    /// The pointer to the element that is `elements` further.
    pub(in crate::cuda) fn add(self, elements: usize) -> Self {
        self.add_bytes(elements * size_of::<T>())
    }

    /// The pointer that is `bytes` bytes further.
    pub(in crate::cuda) fn add_bytes(self, bytes: usize) -> Self {
        Self::new(self.address + bytes as u64)
    }

    /// Returns this address, of elements of another type.
    pub(in crate::cuda) fn cast<U>(self) -> DevicePointer<U> {
        DevicePointer::new(self.address)
    }
}

// Derived implementations would ask the same of `T`.
impl<T> Clone for DevicePointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePointer<T> {}

impl<T> Default for DevicePointer<T> {
    fn default() -> Self {
        Self::NULL
    }
}

impl<T> std::fmt::Debug for DevicePointer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.address)
    }
}
