//! Writes the shell completions and man pages of all executables, from their command-line definitions.
//!
//! This is an example and not a flag of the executables, so that the servers do not contain the generators.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use tutti_runtime::command_line::{
    command,
    processes::{CONDUCTOR, DRAIN, KERNELS, QUANTIZE, ROUTER, STATUS, TRACE, WORKER},
};
use tutti_settings::{
    ConductorSettings, DrainProcessSettings, KernelsProcessSettings, QuantizeProcessSettings,
    RouterProcessSettings, StatusProcessSettings, TraceProcessSettings, WorkerProcessSettings,
};

fn main() -> ExitCode {
    let Some(directory) = env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("manuals: name the directory to write to");
        return ExitCode::from(64);
    };
    match commands().into_iter().try_for_each(|command| write(&directory, command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("manuals: {}: {error}", directory.display());
            ExitCode::from(70)
        }
    }
}

fn commands() -> [Command; 4] {
    let conductor = command::<ConductorSettings>(CONDUCTOR).subcommands([
        command::<StatusProcessSettings>(STATUS).name("status"),
        command::<DrainProcessSettings>(DRAIN).name("drain"),
        command::<TraceProcessSettings>(TRACE).name("trace"),
        command::<QuantizeProcessSettings>(QUANTIZE).name("quantize"),
        command::<KernelsProcessSettings>(KERNELS).name("kernels"),
    ]);
    [
        conductor,
        command::<RouterProcessSettings>(ROUTER),
        command::<WorkerProcessSettings>(WORKER),
        tutti_bench::arguments::Arguments::command(),
    ]
}

/// Writes a command's completions and man pages below `directory`, under the folder and file names of an installed
/// system.
fn write(directory: &Path, mut command: Command) -> io::Result<()> {
    let name = command.get_name().to_owned();
    let completions = [
        (Shell::Bash, "bash-completion/completions", name.clone()),
        (Shell::Zsh, "zsh/site-functions", format!("_{name}")),
        (Shell::Fish, "fish/vendor_completions.d", format!("{name}.fish")),
    ];
    for (shell, folder, file) in completions {
        let folder = directory.join(folder);
        fs::create_dir_all(&folder)?;
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command, &name, &mut script);
        fs::write(folder.join(file), script)?;
    }
    let pages = directory.join("man/man1");
    fs::create_dir_all(&pages)?;
    // The subcommand `help` gets no man page, because its page would repeat `--help`.
    clap_mangen::generate_to(command.disable_help_subcommand(true), pages)
}
