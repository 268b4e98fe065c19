//! The types of tensors.

macro_rules! types {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $label:literal: $elements:literal elements in $bytes:literal bytes;)*) => {
        /// The type of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum TensorType {
            $($(#[$doc])* $name,)*
        }

        impl TensorType {
            /// Returns the type with a number in the file.
            pub(super) fn of(code: u32) -> Result<Self, String> {
                match code {
                    $($code => Ok(Self::$name),)*
                    other => {
                        let supported = [$($label),*].join(", ");
                        Err(format!("is of GGUF's type {other}, which is not supported; supported: {supported}"))
                    }
                }
            }

            /// Number of elements of a block.
            pub fn block_elements(self) -> u64 {
                match self { $(Self::$name => $elements,)* }
            }

            /// Number of bytes of a block.
            pub fn block_bytes(self) -> u64 {
                match self { $(Self::$name => $bytes,)* }
            }
        }
    };
}

types! {
    /// Floats of 32 bits.
    F32 = 0, "F32": 1 elements in 4 bytes;
    /// Floats of 16 bits.
    F16 = 1, "F16": 1 elements in 2 bytes;
    /// The upper halves of floats of 32 bits.
    Bf16 = 30, "BF16": 1 elements in 2 bytes;
    /// 4 bits and a scale.
    Q4_0 = 2, "Q4_0": 32 elements in 18 bytes;
    /// 4 bits, a scale and a minimum.
    Q4_1 = 3, "Q4_1": 32 elements in 20 bytes;
    /// 5 bits and a scale.
    Q5_0 = 6, "Q5_0": 32 elements in 22 bytes;
    /// 8 bits and a scale.
    Q8_0 = 8, "Q8_0": 32 elements in 34 bytes;
    /// 4 bits with two levels of scales and minima.
    Q4K = 12, "Q4_K": 256 elements in 144 bytes;
    /// 5 bits with two levels of scales and minima.
    Q5K = 13, "Q5_K": 256 elements in 176 bytes;
    /// 6 bits with two levels of scales.
    Q6K = 14, "Q6_K": 256 elements in 210 bytes;
}
