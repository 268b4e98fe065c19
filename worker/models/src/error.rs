//! Errors of loading a checkpoint.

use std::{io, path::PathBuf};

use tutti_kernels::DeviceError;
use tutti_proto::declaration::DeclarationError;
use tutti_runtime::{Error, ErrorKind};

/// An error of loading a checkpoint. An error about a file contains the file's path, and the key or tensor at fault.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A required file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// Path of the file or folder.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// A JSON file is malformed, or a key in it is missing or unsupported.
    #[error("{}: {problem}", path.display())]
    Config {
        /// Path of the file.
        path: PathBuf,
        /// Description: the key, its value and the supported values, or the syntax error.
        problem: String,
    },
    /// The checkpoint is of a family that is not implemented.
    #[error("{}: unsupported architecture: architectures {architectures:?}, model_type {model_type:?}; {supported}", path.display())]
    Architecture {
        /// Path of the config file.
        path: PathBuf,
        /// Value of the config's `architectures`.
        architectures: Vec<String>,
        /// Value of the config's `model_type`.
        model_type: Option<String>,
        /// The supported architectures in words: the nearest, or all of them.
        supported: String,
    },
    /// The device lacks operations that the architecture's layers need.
    #[error("{}: {architecture} needs {operations}, which the device lacks: {device}", path.display())]
    Operations {
        /// Path of the config file.
        path: PathBuf,
        /// Name of the architecture.
        architecture: &'static str,
        /// Names of the families of operations.
        operations: String,
        /// Description of the device.
        device: String,
    },
    /// A weight file is damaged, or there is none.
    #[error("{}: {problem}", path.display())]
    Weights {
        /// The damaged file, or the directory that holds no weight file.
        path: PathBuf,
        /// Description of the damage.
        problem: String,
    },
    /// A tensor is missing or does not match the config.
    #[error("{}: tensor {name:?} {problem}", path.display())]
    Tensor {
        /// The file that holds the tensor, or the directory if no file does.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Description of the mismatch: the expected and the actual value.
        problem: String,
    },
    /// The device refused the model.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A family's declaration is inconsistent, which is an internal fault.
    #[error(transparent)]
    Declaration(#[from] DeclarationError),
}

impl From<LoadError> for Error {
    fn from(error: LoadError) -> Self {
        let kind = match &error {
            // `Unsupported` means that the device cannot run the shape of the model, which is a fault of the
            // checkpoint. All other device errors are internal.
            LoadError::Device(DeviceError::Unsupported(_)) => ErrorKind::InvalidArgument,
            LoadError::Device(_) | LoadError::Declaration(_) => ErrorKind::Internal,
            _ => ErrorKind::InvalidArgument,
        };
        let field = if matches!(error, LoadError::Write { .. }) { "out" } else { "model" };
        Self::new(kind, error.to_string()).with_field(field)
    }
}
