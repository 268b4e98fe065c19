//! Chooses the instruction set that a worker computes with.

use tutti_kernels::cpu::Isa;
use tutti_runtime::Error;
use tutti_settings::CpuIsa;

/// Returns the instruction set that the setting names. If this machine lacks it, the error lists the instruction sets
/// that this machine has.
pub fn resolve(setting: CpuIsa) -> Result<Isa, Error> {
    resolve_among(setting, &Isa::supported().collect::<Vec<_>>())
}

fn resolve_among(setting: CpuIsa, available: &[Isa]) -> Result<Isa, Error> {
    let isa = match setting {
        // `available` is ordered from the plainest instruction set to the best.
        CpuIsa::Auto => available.last().copied().unwrap_or(Isa::Portable),
        CpuIsa::Portable => Isa::Portable,
        CpuIsa::Avx2 => Isa::Avx2,
        CpuIsa::Avx512 => Isa::Avx512,
        CpuIsa::Avx512Vnni => Isa::Avx512Vnni,
        CpuIsa::Avx512Bf16 => Isa::Avx512Bf16,
    };
    if available.contains(&isa) {
        return Ok(isa);
    }
    let there: Vec<String> = available.iter().map(Isa::to_string).collect();
    let message = format!("this machine has no {isa} instructions; it has {}", there.join(", "));
    Err(Error::invalid("cpu_isa", message))
}

#[cfg(test)]
mod tests;
