//! Why a checkpoint does not load.

use std::{io, path::PathBuf};

use tutti_kernels::DeviceError;
use tutti_proto::declaration::DeclarationError;
use tutti_runtime::{Error, ErrorKind};

/// Why a checkpoint does not load. Every message names the file, and the key or tensor in it.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file that is needed cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A JSON file does not say what it must.
    #[error("{}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Which key has which value, and what is taken.
        problem: String,
    },
    /// The checkpoint is of a family that is not implemented.
    #[error("{}: unsupported architecture: architectures {architectures:?}, model_type {model_type:?}; supported: {supported}", path.display())]
    Architecture {
        /// The config file.
        path: PathBuf,
        /// `architectures` as found.
        architectures: Vec<String>,
        /// `model_type` as found.
        model_type: Option<String>,
        /// What would load.
        supported: String,
    },
    /// A weight file is damaged as a whole.
    #[error("{}: {problem}", path.display())]
    Weights {
        /// The file, or the directory that lacks one.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A tensor is missing or not what the config says it is.
    #[error("{}: tensor {name:?} {problem}", path.display())]
    Tensor {
        /// The file that holds it, or the directory where it is in none.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong, with what was expected and what was found.
        problem: String,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A family declares walks that do not hold together: a fault of ours.
    #[error(transparent)]
    Declaration(#[from] DeclarationError),
}

impl From<LoadError> for Error {
    fn from(error: LoadError) -> Self {
        let kind = match &error {
            // A shape that the device cannot run is the checkpoint's; everything else a device reports is not.
            LoadError::Device(DeviceError::Unsupported(_)) => ErrorKind::InvalidArgument,
            LoadError::Device(_) | LoadError::Declaration(_) => ErrorKind::Internal,
            _ => ErrorKind::InvalidArgument,
        };
        Self::new(kind, error.to_string()).with_field("model")
    }
}
