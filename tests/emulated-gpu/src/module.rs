//! Modules: what a driver loads.

use std::collections::BTreeMap;
use std::fmt;

use crate::{DeviceMemory, OutOfMemory};

/// Error in PTX text, or PTX that this emulator does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError {
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// What is wrong; an unknown opcode or modifier by its name.
    pub what: String,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for DecodeError {}

/// Place of a kernel's parameter in the block of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Bytes from the start of the block.
    pub offset: u32,
    /// Bytes of the parameter.
    pub bytes: u32,
    /// Alignment of the offset.
    pub align: u32,
}

/// A kernel of a module.
#[derive(Debug)]
pub struct Kernel {
    /// Name in the PTX.
    pub name: String,
    /// Parameters in their order.
    pub parameters: Vec<Parameter>,
    /// Bytes of shared memory that the kernel declares itself.
    pub static_shared_bytes: u32,
    /// Largest number of threads in a block, if the kernel states one (`__launch_bounds__`).
    pub max_threads_per_block: Option<u32>,
    /// Bytes of local memory per thread.
    pub local_bytes: u32,
    /// Why the kernel cannot run, if it holds what the emulator does not know. Other kernels of the module can.
    pub error: Option<DecodeError>,
}

impl Kernel {
    /// Bytes of the block of parameters.
    pub fn parameter_bytes(&self) -> u32 {
        self.parameters.last().map_or(0, |p| p.offset + p.bytes)
    }
}

/// A variable of a module in global or constant memory.
#[derive(Clone, Debug)]
pub struct Variable {
    /// Name in the PTX.
    pub name: String,
    /// Bytes of the variable.
    pub bytes: u64,
    /// Address, once the module is loaded.
    pub address: Option<u64>,
}

/// PTX, decoded.
#[derive(Debug)]
pub struct Module {
    /// Kernels by name.
    pub kernels: BTreeMap<String, Kernel>,
    /// Variables in global and constant memory.
    pub variables: Vec<Variable>,
}

impl Module {
    /// Decodes PTX text. A kernel with an unknown instruction has its `error` set; the module is usable.
    ///
    /// # Errors
    ///
    /// When the text is no PTX outside of the kernels' bodies.
    pub fn decode(ptx: &str) -> Result<Module, DecodeError> {
        let _ = ptx;
        Err(DecodeError { line: 1, what: "no decoder yet".to_owned() })
    }

    /// Gives the module's variables addresses and their first values. A module without variables needs no loading.
    ///
    /// # Errors
    ///
    /// When the variables do not fit into the device's memory; then none is allocated.
    pub fn load(&mut self, memory: &DeviceMemory) -> Result<(), OutOfMemory> {
        let _ = memory;
        Ok(())
    }

    /// Frees the module's variables.
    pub fn unload(&mut self, memory: &DeviceMemory) {
        for variable in &mut self.variables {
            if let Some(address) = variable.address.take() {
                // A reset of the device may have freed it already.
                drop(memory.free(address));
            }
        }
    }
}
