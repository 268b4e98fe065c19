//! Quantisation of a checkpoint on disk.

use std::path::PathBuf;

use crate::Invalid;

choices! {
    /// The form of quantised matrices in a checkpoint.
    pub enum CheckpointScheme {
        /// Four bits per weight with a scale for each group of inputs.
        Int4 = "int4",
        /// Eight bits per weight with a scale per output, as integers.
        Int8 = "int8",
        /// Eight bits per weight with a scale per output, as floats of type e4m3.
        Fp8 = "fp8",
    }
}

settings! {
    /// The checkpoint that is read, the one that is written, and its form.
    pub struct QuantizeSettings {
        "Model" => {
            /// Folder of the checkpoint, in safetensors that are not quantised
            model: Option<PathBuf> = None, unit "DIR";
            /// Form of the matrices of layers
            scheme: CheckpointScheme = CheckpointScheme::Int4, unit "SCHEME";
            /// Number of inputs that share a scale, with int4: 32, 64 or 128
            group_size: u32 = 32, unit "INPUTS";
            /// Folder that receives the quantised checkpoint; it must not exist, or must be empty
            out: Option<PathBuf> = None, unit "DIR";
        }
    }
}

process! {
    /// Settings of `conductor quantize`.
    pub struct QuantizeProcessSettings {
        /// The two checkpoints.
        quantize: QuantizeSettings,
        tables:
    }
}

impl QuantizeSettings {
    /// Refuses settings that are missing, and groups that readers of checkpoints do not know.
    pub fn validate(&self) -> Result<(), Invalid> {
        let missing = |name| Err(Invalid::new(name, "is missing"));
        match self {
            Self { model: None, .. } => missing("model"),
            Self { out: None, .. } => missing("out"),
            Self { group_size: 32 | 64 | 128, .. } => Ok(()),
            Self { group_size, .. } => {
                Err(Invalid::new("group_size", format!("is {group_size}, but can be 32, 64 or 128")))
            }
        }
    }
}
