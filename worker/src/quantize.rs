//! `conductor quantize`: writes a checkpoint with quantised matrices.

use std::{
    ffi::OsString,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::Instant,
};

use tutti_models::{
    CodeError, LoadError, ModuleReport, Outcome, QuantiserScheme, Sizes, quantise_checkpoint,
};
use tutti_runtime::{Error, command_line::processes::QUANTIZE, config, exit};
use tutti_settings::{CheckpointScheme, QuantizeProcessSettings, QuantizeSettings};

/// The command's name in `--help`.
pub const NAME: &str = QUANTIZE.name;

/// `main` of the command. The first argument is the command's name.
pub fn quantise(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    exit::command(NAME, || read(arguments), run)
}

fn read(arguments: impl IntoIterator<Item = OsString>) -> Result<QuantizeSettings, Error> {
    let settings: QuantizeProcessSettings = config::load_command(QUANTIZE, arguments)?;
    settings.quantize.validate().map_err(|invalid| Error::invalid(invalid.field, invalid.message))?;
    Ok(settings.quantize)
}

fn run(settings: QuantizeSettings) -> Result<(), Error> {
    let QuantizeSettings { model, scheme, group_size, out } = settings;
    // `read` has refused settings without them.
    let (model, out) = (model.unwrap_or_default(), out.unwrap_or_default());
    if !model.is_dir() {
        return Err(Error::invalid("model", format!("is {}, which is no folder", model.display())));
    }
    let scheme = match scheme {
        CheckpointScheme::Int4 => QuantiserScheme::Int4 { group: group_size as usize },
        CheckpointScheme::Int8 => QuantiserScheme::Int8,
        CheckpointScheme::Fp8 => QuantiserScheme::Fp8,
    };
    let begin = Instant::now();
    let (mut sum, mut worst, mut kept) = (CodeError::default(), None::<(f64, String)>, 0);
    let sizes = quantise_checkpoint(&model, &out, scheme, &mut |module| {
        match &module.outcome {
            Outcome::Kept(_) => kept += 1,
            Outcome::Quantised(error) => {
                sum.add(*error);
                if worst.as_ref().is_none_or(|(most, _)| error.relative() > *most) {
                    worst = Some((error.relative(), module.module.clone()));
                }
            }
        }
        print(&line(&module))
    })?;
    let Sizes { before, after } = sizes;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    print(&format!(
        "{}: {:.1} MiB of {:.1} MiB, in {:.1} s",
        out.display(),
        mib(after),
        mib(before),
        begin.elapsed().as_secs_f64()
    ))?;
    match worst {
        Some((most, module)) => print(&format!(
            "error {:.2} % of the weights' root mean square, at most {:.2} % in {module}; {kept} matrices as they were",
            sum.relative() * 100.0,
            most * 100.0
        ))?,
        None => print(&format!("no matrix is quantised; {kept} matrices as they were"))?,
    }
    Ok(())
}

/// Describes one matrix.
fn line(report: &ModuleReport) -> String {
    let ModuleReport { module, shape: [outputs, inputs], outcome, done, total } = report;
    let width = total.to_string().len();
    let outcome = match outcome {
        Outcome::Quantised(error) => {
            format!("error {:.2} %, at most {:.1e}", error.relative() * 100.0, error.largest)
        }
        Outcome::Kept(reason) => format!("as it was: {reason}"),
    };
    format!("{done:width$}/{total} {module} [{outputs}, {inputs}] {outcome}")
}

fn print(line: &str) -> Result<(), LoadError> {
    writeln!(io::stdout(), "{line}")
        .map_err(|source| LoadError::Write { path: PathBuf::from("standard output"), source })
}
