//! The macro that declares a family of operations.

/// Declares a family's trait and its [`Recorder`](crate::Recorder).
///
/// Every operation is [`Unsupported`](crate::DeviceError::Unsupported) unless a device overrides it. The expression
/// after `=>` computes the record of a call ([`Operation`](crate::Operation)) from the recorder and the operands. So
/// one declaration serves devices, models and recorders.
macro_rules! family {
    (
        $(#[$family_doc:meta])*
        pub trait $Family:ident {
            $(
                $(#[$doc:meta])*
                fn $operation:ident(&mut self $(, $operand:ident: $Operand:ty)* $(,)?)
                    => |$recorder:ident| $record:expr;
            )*
        }
    ) => {
        $(#[$family_doc])*
        pub trait $Family: Device {
            /// True if the device supports this family. If a model needs a family that its device lacks, loading the
            /// model fails.
            const IMPLEMENTED: bool;
            $(
                $(#[$doc])*
                fn $operation(&mut self $(, $operand: $Operand)*) -> Result<(), DeviceError> {
                    $(let _ = $operand;)*
                    let name = concat!(stringify!($Family), "::", stringify!($operation));
                    Err(DeviceError::Unsupported(format!("{name}, on {}", self.describe())))
                }
            )*
        }

        impl<D: $Family, O: $crate::Observer> $Family for $crate::Recorder<D, O> {
            const IMPLEMENTED: bool = D::IMPLEMENTED;

            $(
                fn $operation(&mut self $(, $operand: $Operand)*) -> Result<(), DeviceError> {
                    let $recorder = &*self;
                    let operation = $crate::Operation { name: stringify!($operation), ..$record };
                    self.observe(&operation, |device| device.$operation($($operand),*))
                }
            )*
        }
    };
}

pub(super) use family;

#[cfg(test)]
mod tests;
