//! Parameters of kernels. The widths of a kernel's parameters are compared with the arguments in the kernel's
//! declaration.
//!
//! PTX text lists the parameters. A cubin has no text, so the driver is asked for the parameters of its kernels.

use std::collections::HashMap;
use std::iter;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys;

use super::sources::DeclaredKernel;

/// The widths in bytes of a kernel's parameters, in order.
pub(super) type Widths = Vec<usize>;

/// Reads the parameters of all kernels in PTX. The error is the first parameter that cannot be parsed.
pub(super) fn of_ptx(ptx: &str) -> Result<HashMap<&str, Widths>, String> {
    ptx.split(".entry").skip(1).map(entry).collect()
}

/// Reads a kernel's name and parameters from the text behind `.entry`.
fn entry(text: &str) -> Result<(&str, Widths), String> {
    let Some((name, (parameters, _))) =
        text.split_once('(').and_then(|(name, rest)| Some((name.trim(), rest.split_once(')')?)))
    else {
        return Err(format!("a kernel without parameters: {}", text.lines().next().unwrap_or_default()));
    };
    let parameters = parameters.split(',').map(str::trim).filter(|parameter| !parameter.is_empty());
    let width = |parameter: &str| {
        width(parameter)
            .ok_or_else(|| format!("the kernel {name} takes `{parameter}`, which is not understood"))
    };
    Ok((name, parameters.map(width).collect::<Result<_, _>>()?))
}

/// Returns the width of a parameter such as `.param .u64 .ptr .align 1 x` or `.param .align 8 .b8 x[24]`.
fn width(parameter: &str) -> Option<usize> {
    let mut words = parameter.strip_prefix(".param")?.split_whitespace();
    let bits = words.find_map(|word| {
        word.strip_prefix(['.'])?.strip_prefix(['b', 'u', 's', 'f'])?.parse::<usize>().ok()
    })?;
    let elements = match parameter.split_once('[') {
        None => 1,
        Some((_, count)) => count.strip_suffix(']')?.parse().ok()?,
    };
    (bits / 8).checked_mul(elements)
}

/// Asks the driver for the parameters of a kernel. Returns `None` if the driver lacks the call, as drivers before CUDA
/// 12.4 do.
///
/// # Safety
///
/// The function belongs to a loaded module.
pub(super) unsafe fn of_function(function: sys::CUfunction) -> Option<Result<Widths, DriverError>> {
    // cudarc's function panics if the driver lacks the call, so this is checked first.
    // SAFETY: the library has been opened, because it has returned `function`.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuFuncGetParamInfo\0") }.ok()?;
    let widths = (0..).map(|index| {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: by the caller's contract, the function belongs to a loaded module. Both results are valid for writes.
        let answer = unsafe { sys::cuFuncGetParamInfo(function, index, &mut offset, &mut bytes) };
        match answer {
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => None,
            answer => Some(answer.result().map(|()| bytes)),
        }
    });
    // The driver returns an error for the first index behind the last parameter.
    Some(widths.map_while(|width| width).collect())
}

/// Compares a kernel's parameters with its declared arguments. The error names the first difference.
pub(super) fn check(declared: &DeclaredKernel, taken: &[usize]) -> Result<(), String> {
    let name = declared.name;
    let expected = declared.arguments.iter().map(Some).chain(iter::repeat(None));
    let found = taken.iter().map(|&width| Some(width)).chain(iter::repeat(None));
    let count = declared.arguments.len().max(taken.len());
    for (index, (expected, found)) in expected.zip(found).take(count).enumerate() {
        let why = match (expected, found) {
            (Some(argument), Some(bytes)) if argument.bytes == bytes => continue,
            (Some(argument), Some(bytes)) => {
                format!("has {bytes} bytes, and {} are declared ({})", argument.bytes, argument.name)
            }
            (Some(argument), None) => {
                format!("is missing, and {} bytes are declared ({})", argument.bytes, argument.name)
            }
            (None, bytes) => format!("has {} bytes, and none is declared", bytes.unwrap_or_default()),
        };
        return Err(format!("argument {index} of the kernel {name} {why}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
