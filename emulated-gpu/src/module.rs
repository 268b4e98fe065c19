//! Modules: the units of PTX that a driver loads.

use std::collections::BTreeMap;
use std::fmt;

use crate::lower::{lower, parameters};
use crate::program::Program;
use crate::ptx::{self, VariableText};
use crate::{DeviceMemory, OutOfMemory};

/// An error in PTX text, or a construct that the emulator does not support.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError {
    /// Line of the PTX text, counted from 1.
    pub line: u32,
    /// Description of the error. It contains the name of an unknown opcode or modifier.
    pub what: String,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for DecodeError {}

/// Position of a parameter in the block of a kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Offset from the start of the block, in bytes.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
    /// Alignment of the offset, in bytes.
    pub align: u32,
}

/// A kernel of a module.
#[derive(Debug)]
pub struct Kernel {
    /// Name in the PTX.
    pub name: String,
    /// Parameters in the order of their declaration.
    pub parameters: Vec<Parameter>,
    /// Bytes of static shared memory.
    pub static_shared_bytes: u32,
    /// Largest number of threads in a block, if the kernel states one (`__launch_bounds__`).
    pub max_threads_per_block: Option<u32>,
    /// Bytes of local memory per thread.
    pub local_bytes: u32,
    /// The reason why the emulator cannot run this kernel; none if it can. Other kernels of the module can run.
    pub error: Option<DecodeError>,
    pub(crate) program: Program,
}

impl Kernel {
    /// Returns the size of the block of parameters, in bytes.
    pub fn parameter_bytes(&self) -> u32 {
        self.parameters.last().map_or(0, |p| p.offset + p.bytes)
    }
}

/// A variable of a module in global or constant memory.
#[derive(Clone, Debug)]
pub struct Variable {
    /// Name in the PTX.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Device address; none until the module is loaded.
    pub address: Option<u64>,
    initial: Vec<u8>,
}

/// A decoded PTX module.
#[derive(Debug)]
pub struct Module {
    /// Kernels by name.
    pub kernels: BTreeMap<String, Kernel>,
    /// Variables in global and constant memory.
    pub variables: Vec<Variable>,
}

impl Module {
    /// Decodes PTX text. An unsupported instruction sets the `error` of its kernel. The module's other kernels can run.
    ///
    /// # Errors
    ///
    /// If the text outside of the kernels' bodies is not PTX.
    pub fn decode(ptx: &str) -> Result<Module, DecodeError> {
        let text = ptx::parse(ptx)?;
        let in_memory = |v: &&VariableText<'_>| v.space != ".shared";
        let names: Vec<&str> = text.variables.iter().filter(in_memory).map(|v| v.name).collect();
        let variables = text.variables.iter().filter(in_memory).map(|v| Variable {
            name: v.name.to_owned(),
            bytes: v.bytes,
            address: None,
            initial: v.initial.clone(),
        });
        let variables = variables.collect();
        let mut kernels = BTreeMap::new();
        for function in text.functions.iter().filter(|f| f.is_kernel && f.body.is_some()) {
            let (program, error) = match lower(&text, function, &names) {
                Ok(program) => (program, None),
                Err(error) => (Program::default(), Some(error)),
            };
            let parameter = |(offset, bytes, align)| Parameter { offset, bytes, align };
            let kernel = Kernel {
                name: function.name.to_owned(),
                parameters: parameters(function).into_iter().map(parameter).collect(),
                static_shared_bytes: program.shared_bytes,
                max_threads_per_block: function.max_threads,
                local_bytes: program.local_bytes,
                error,
                program,
            };
            kernels.insert(kernel.name.clone(), kernel);
        }
        Ok(Module { kernels, variables })
    }

    /// Allocates the module's variables and sets their initial values. A module without variables needs no loading.
    ///
    /// # Errors
    ///
    /// If the variables do not fit into the device's memory. No variable is then allocated.
    pub fn load(&mut self, memory: &DeviceMemory) -> Result<(), OutOfMemory> {
        for index in 0..self.variables.len() {
            let address = match memory.allocate(self.variables[index].bytes.max(1)) {
                Ok(address) => address,
                Err(error) => {
                    self.unload(memory);
                    return Err(error);
                }
            };
            let variable = &mut self.variables[index];
            variable.address = Some(address);
            variable.initial.resize(variable.bytes as usize, 0);
            // The copy cannot fail, because the range was just allocated.
            drop(memory.copy_in(address, &variable.initial));
        }
        Ok(())
    }

    /// Frees the module's variables.
    pub fn unload(&mut self, memory: &DeviceMemory) {
        for variable in &mut self.variables {
            if let Some(address) = variable.address.take() {
                // A reset of the device may have freed the variable already.
                drop(memory.free(address));
            }
        }
    }
}
