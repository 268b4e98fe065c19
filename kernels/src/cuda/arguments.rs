//! The arguments of the kernels: a struct for each list of parameters, a field per parameter in the kernel's order.
//!
//! The structs say what Tutti passes. What a kernel takes is read when it is loaded, and compared: see
//! [`parameters`](super::parameters).

use super::memory::DevicePointer;

/// One argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Argument {
    /// Name of the field.
    pub(super) name: &'static str,
    /// Offset in the struct of the arguments, in bytes.
    pub(super) offset: usize,
    /// Width in bytes.
    pub(super) bytes: usize,
}

/// Largest number of arguments of a kernel.
pub(super) const MOST_ARGUMENTS: usize = 18;

/// The arguments of a kernel.
///
/// # Safety
///
/// `LIST` names offset and width of each field, in the order of the fields.
pub(super) unsafe trait Arguments: Copy {
    const LIST: &'static [Argument];
}

/// Types of single arguments: what the sources call `u32` or `int`, `u64`, `float`, and a pointer.
trait Scalar: Copy {}

impl Scalar for u32 {}
impl Scalar for u64 {}
impl Scalar for f32 {}
impl<T> Scalar for DevicePointer<T> {}

/// The width of an argument in bytes. Types that a kernel does not take one by one have none.
const fn width_of<T: Scalar>() -> usize {
    size_of::<T>()
}

/// Declares structs of arguments.
macro_rules! arguments {
    ($($(#[$of_struct:meta])* struct $name:ident { $($field:ident: $kind:ty,)+ })+) => {$(
        $(#[$of_struct])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub(in crate::cuda) struct $name {
            $(pub(in crate::cuda) $field: $kind,)+
        }

        // SAFETY: the list is made of the fields.
        unsafe impl Arguments for $name {
            const LIST: &'static [Argument] = &[$(Argument {
                name: stringify!($field),
                offset: std::mem::offset_of!($name, $field),
                bytes: width_of::<$kind>(),
            },)+];
        }

        const _: () = assert!($name::LIST.len() <= MOST_ARGUMENTS);
    )+};
}

mod lists;

pub(super) use lists::*;
