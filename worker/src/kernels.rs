//! `conductor kernels`: compiles the kernels for GPUs ahead of time, on a machine that needs no GPU.

use std::{ffi::OsString, io::Write, process::ExitCode};

use tutti_kernels::cuda;
use tutti_runtime::{Error, ErrorKind, command_line::processes::KERNELS, config, exit};
use tutti_settings::{KernelSettings, KernelsProcessSettings};

/// The command's name in `--help`.
pub const NAME: &str = KERNELS.name;

/// `main` of the command. The first argument is the command's name.
pub fn compile(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    exit::run(NAME, || {
        let settings: KernelsProcessSettings = config::load(KERNELS, arguments)?.settings;
        let KernelSettings { arch, out } = settings.kernels;
        let out = out.ok_or_else(|| Error::invalid("out", "is missing"))?;
        if arch.is_empty() {
            return Err(Error::invalid("arch", "is missing"));
        }
        for name in arch {
            let architecture = cuda::virtual_architecture(&name)
                .ok_or_else(|| Error::invalid("arch", format!("is {name}, but has a form such as sm_90a")))?;
            let files = cuda::compile_all(&out, &architecture)
                .map_err(|why| Error::new(ErrorKind::Unsupported, format!("{name}: {why}")))?;
            writeln!(std::io::stdout(), "{name}: {} files of kernels in {}", files, out.display())
                .map_err(|error| Error::internal(format!("cannot print: {error}")))?;
        }
        Ok(())
    })
}
