//! Compilation of GPU kernels ahead of time.

use std::path::PathBuf;

settings! {
    /// Architectures that kernels are compiled for, and the folder that receives them.
    pub struct KernelSettings {
        "Device and memory" => {
            /// Architecture of the GPUs, such as sm_90a; may be repeated
            arch: Vec<String> = Vec::new(), unit "SM";
            /// Folder that receives the kernels; workers find them there with --compiled-kernels
            out: Option<PathBuf> = None, unit "DIR";
        }
    }
}

process! {
    /// Settings of `conductor kernels`.
    pub struct KernelsProcessSettings {
        /// The architectures and the folder of the kernels.
        kernels: KernelSettings,
        tables:
    }
}
