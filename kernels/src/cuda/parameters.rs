//! Parameters of kernels: the widths of its parameters, which are compared with the arguments that it is declared with.
//!
//! PTX says it as text. A cubin is no text, and the driver answers for its kernels.

use std::collections::HashMap;
use std::iter;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys;

use super::sources::DeclaredKernel;

/// The widths in bytes of a kernel's parameters, in their order.
pub(super) type Widths = Vec<usize>;

/// Reads the parameters of all kernels of PTX. The error is the parameter that is not understood.
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

/// The width of a parameter such as `.param .u64 .ptr .align 1 x` or `.param .align 8 .b8 x[24]`.
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

/// Asks the driver for the parameters of a kernel. `None` if the driver lacks the call, as those before CUDA 12.4 do.
///
/// # Safety
///
/// The function belongs to a loaded module.
pub(super) unsafe fn of_function(function: sys::CUfunction) -> Option<Result<Widths, DriverError>> {
    // The call of cudarc panics if the driver lacks it.
    // SAFETY: the library has been opened, as there is a function.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuFuncGetParamInfo\0") }.ok()?;
    let widths = (0..).map(|index| {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the caller's function is loaded, and both results are good for writes.
        let answer = unsafe { sys::cuFuncGetParamInfo(function, index, &mut offset, &mut bytes) };
        match answer {
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => None,
            answer => Some(answer.result().map(|()| bytes)),
        }
    });
    // The first index without a parameter ends them.
    Some(widths.map_while(|width| width).collect())
}

/// Compares what a kernel takes with what it is declared with. The error names the first difference.
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
