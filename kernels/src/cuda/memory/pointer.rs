//! Addresses of device memory, with the type of the elements there.

use std::marker::PhantomData;

use cudarc::driver::sys::CUdeviceptr;

/// The address of elements of type `T` in a [`DeviceBuffer`](super::DeviceBuffer), or null. `u8` stands for elements
/// whose type is only known at run time, such as the weights of a checkpoint.
///
/// A pointer that is not null comes from a buffer. The pointer neither keeps the buffer alive nor knows the buffer's
/// length. So an operation checks the shapes of its operands before it takes their addresses.
#[repr(transparent)]
pub(in crate::cuda) struct DevicePointer<T> {
    address: CUdeviceptr,
    elements: PhantomData<fn() -> T>,
}

impl<T> DevicePointer<T> {
    /// The null pointer.
    pub(in crate::cuda) const NULL: Self = Self::new(0);

    pub(super) const fn new(address: CUdeviceptr) -> Self {
        Self { address, elements: PhantomData }
    }

    /// Returns the address, for cuBLASLt and NCCL.
    pub(in crate::cuda) fn address(self) -> CUdeviceptr {
        self.address
    }

    /// Returns the pointer to the element that is `elements` further.
    pub(in crate::cuda) fn add(self, elements: usize) -> Self {
        self.add_bytes(elements * size_of::<T>())
    }

    /// Returns the pointer that is `bytes` bytes further.
    pub(in crate::cuda) fn add_bytes(self, bytes: usize) -> Self {
        Self::new(self.address + bytes as u64)
    }

    /// Returns the same address as a pointer to elements of another type.
    pub(in crate::cuda) fn cast<U>(self) -> DevicePointer<U> {
        DevicePointer::new(self.address)
    }
}

// Derived implementations would require the same traits of `T`.
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
