//! Fixtures that run single instructions and small kernels.

use tutti_emulated_gpu::{Checks, DeviceMemory, Fault, Grid, Module, launch};

pub const HEADER: &str = ".version 9.0\n.target sm_90\n.address_size 64\n";

/// Returns the register type for a number of bits. One bit means a predicate.
fn register(bits: u32) -> String {
    if bits == 1 { ".pred".to_owned() } else { format!(".b{bits}") }
}

/// Returns a kernel that loads up to four values per thread to `%a` to `%d`, runs `body` and stores `%o`. `from` and
/// `into` are the widths of these registers in bits.
fn kernel(body: &str, into: u32, from: &[u32]) -> String {
    let mut text = format!(
        "{HEADER}.visible .entry k(.param .u64 input, .param .u64 output)\n{{\n\
         .reg .pred %p<4>; .reg .b32 %t<8>; .reg .b64 %x<12>;\n.reg {} %o;\n\
         mov.u32 %t0, %tid.x;\nld.param.u64 %x0, [input];\nld.param.u64 %x1, [output];\n\
         mad.wide.u32 %x2, %t0, 32, %x0;\nmad.wide.u32 %x3, %t0, 8, %x1;\n",
        register(into)
    );
    for (index, &bits) in from.iter().enumerate() {
        let (name, at) = (["a", "b", "c", "d"][index], 8 * index);
        text += &format!(".reg {} %{name};\nld.global.u64 %x4, [%x2+{at}];\n", register(bits));
        text += &match bits {
            1 => format!("setp.ne.u64 %{name}, %x4, 0;\n"),
            64 => format!("mov.b64 %{name}, %x4;\n"),
            bits => format!("cvt.u{bits}.u64 %{name}, %x4;\n"),
        };
    }
    text += body;
    text += &match into {
        1 => "selp.u64 %x5, 1, 0, %o;\n".to_owned(),
        64 => "mov.b64 %x5, %o;\n".to_owned(),
        bits => format!("cvt.u64.u{bits} %x5, %o;\n"),
    };
    text + "st.global.u64 [%x3], %x5;\nret;\n}\n"
}

/// Runs each case in one lane of the kernel with `body`. Returns the results.
pub fn results(body: &str, into: u32, from: &[u32], cases: &[&[u64]]) -> Vec<u64> {
    let text = kernel(body, into, from);
    let module = Module::decode(&text).unwrap();
    let kernel = &module.kernels["k"];
    assert_eq!(kernel.error, None, "{body}");
    let memory = DeviceMemory::watched(1 << 20);
    let lanes = cases.len();
    let (input, output) =
        (memory.allocate(lanes as u64 * 32).unwrap(), memory.allocate(lanes as u64 * 8).unwrap());
    let mut bytes = Vec::new();
    for case in cases {
        assert_eq!(case.len(), from.len(), "{body}");
        let padded = case.iter().copied().chain([0; 4]).take(4);
        bytes.extend(padded.flat_map(u64::to_le_bytes));
    }
    memory.copy_in(input, &bytes).unwrap();
    let parameters = [input.to_le_bytes(), output.to_le_bytes()].concat();
    let grid = Grid { blocks: [1; 3], threads: [lanes as u32, 1, 1], dynamic_shared_bytes: 0 };
    launch(&module, kernel, &grid, &parameters, &memory, &Checks::all(1)).unwrap();
    let mut out = vec![0; lanes * 8];
    memory.copy_out(output, &mut out).unwrap();
    out.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect()
}

/// Checks one instruction. `into` and `from` are the widths of its operands in bits. The last element of a case is the
/// expected result.
pub fn check(instruction: &str, into: u32, from: &[u32], cases: &[&[u64]]) {
    let names = ["%a", "%b", "%c", "%d"];
    let body = format!("{instruction} %o, {};\n", names[..from.len()].join(", "));
    check_body(&body, into, from, cases);
}

/// Checks a body of several instructions, with cases like those of [`check`].
pub fn check_body(body: &str, into: u32, from: &[u32], cases: &[&[u64]]) {
    let inputs: Vec<&[u64]> = cases.iter().map(|c| &c[..c.len() - 1]).collect();
    let found = results(body, into, from, &inputs);
    for (case, found) in cases.iter().zip(found) {
        let expected = case[case.len() - 1];
        assert_eq!(
            found,
            expected,
            "{body} of {:#x?}: {found:#x}, not {expected:#x}",
            &case[..case.len() - 1]
        );
    }
}

/// Returns the bits of an f32.
pub fn f(value: f32) -> u64 {
    u64::from(value.to_bits())
}

/// A module with one kernel, and the device memory that the kernel uses.
pub struct Bench {
    pub module: Module,
    pub memory: DeviceMemory,
}

impl Bench {
    /// Adds the PTX header to a text that has the kernel `k`, and decodes it.
    pub fn new(text: &str) -> Self {
        let memory = DeviceMemory::watched(1 << 26);
        let mut module = Module::decode(&format!("{HEADER}{text}")).unwrap();
        module.load(&memory).unwrap();
        Bench { module, memory }
    }

    /// Allocates memory with this content.
    pub fn words(&self, content: &[u32]) -> u64 {
        let bytes: Vec<u8> = content.iter().flat_map(|w| w.to_le_bytes()).collect();
        let address = self.memory.allocate(bytes.len() as u64).unwrap();
        self.memory.copy_in(address, &bytes).unwrap();
        address
    }

    pub fn read(&self, address: u64, count: usize) -> Vec<u32> {
        let mut bytes = vec![0; 4 * count];
        self.memory.copy_out(address, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect()
    }

    /// Launches `k` with 64-bit parameters.
    pub fn run(
        &self,
        blocks: u32,
        threads: u32,
        parameters: &[u64],
        checks: &Checks,
    ) -> Result<(), Box<Fault>> {
        let kernel = &self.module.kernels["k"];
        assert_eq!(kernel.error, None);
        let grid = Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], dynamic_shared_bytes: 0 };
        let bytes: Vec<u8> = parameters.iter().flat_map(|p| p.to_le_bytes()).collect();
        launch(&self.module, kernel, &grid, &bytes, &self.memory, checks)
    }
}
