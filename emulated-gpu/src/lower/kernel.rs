//! Lowers a kernel's statements to its program.

use std::collections::HashMap;

use crate::DecodeError;
use crate::ops;
use crate::program::{Control, Fill, Instruction, NONE, Program, Space, Width};
use crate::ptx::{Function, Kind, Operand, Source, Statement, Step, Text, VariableText};

use super::mnemonic::Mnemonic;
use super::names::{Scope, Symbol, place};

/// Deepest nesting of inlined calls.
const DEEPEST_CALL: u32 = 40;

/// State of the lowering of one kernel. Until [`registers`](super::registers) assigns rows, an instruction holds
/// numbers of virtual registers instead of rows.
pub(super) struct Lowering<'a> {
    pub text: &'a Text<'a>,
    /// Shared variables of the module.
    pub module_shared: Vec<&'a VariableText<'a>>,
    /// Names of the module's global and constant variables, by index.
    pub variable_names: &'a [&'a str],
    pub widths: Vec<Width>,
    pub scopes: Vec<Scope<'a>>,
    pub program: Program,
    pub fixed: HashMap<(Width, Fill), u32>,
    /// Rows with a fixed content, in the order of their creation.
    pub fixed_rows: Vec<(u32, Width, Fill)>,
    /// Rows that pass parameters to inlined calls. The key is the parameter, the offset in it, and the width.
    pub call_rows: HashMap<(u32, i64, Width), u32>,
    pub call_parameters: u32,
    pub dynamic_align: u64,
    /// Branches whose labels are not resolved yet: the instruction's index, the scope and the label.
    pub branches: Vec<(usize, usize, &'a str)>,
    /// Return instructions of inlined functions: the instruction's index and the number of the call.
    pub returns: Vec<(usize, u32)>,
    pub return_targets: HashMap<u32, u32>,
    pub calls: u32,
    pub depth: u32,
    pub at: Source,
}

/// The function that contains an instruction: `None` for the kernel, or the number of an inlined call.
pub(super) type Within = Option<u32>;

/// Returns offset, size in bytes and alignment of each of a kernel's parameters.
pub(crate) fn parameters(function: &Function<'_>) -> Vec<(u32, u32, u32)> {
    let mut top = 0;
    let of = |v: &VariableText<'_>| (place(&mut top, v.bytes, v.align), v.bytes as u32, v.align as u32);
    function.parameters.iter().map(of).collect()
}

/// Returns an instruction without operands.
pub(super) fn blank() -> Instruction {
    Instruction {
        run: ops::nothing,
        control: Control::Next,
        space: Space::Generic,
        wide_address: false,
        guard: NONE,
        guard_flip: 0,
        into: [NONE; 2],
        from: [NONE; 4],
        members: NONE,
        list: 0,
        list_into: 0,
        list_from: 0,
        detail: 0,
        offset: 0,
        target: 0,
    }
}

impl<'a> Lowering<'a> {
    pub fn virtual_register(&mut self, width: Width) -> u32 {
        self.widths.push(width);
        self.widths.len() as u32 - 1
    }

    /// Returns a row with a fixed content.
    pub fn fixed(&mut self, width: Width, fill: Fill) -> u32 {
        if let Some(&row) = self.fixed.get(&(width, fill)) {
            return row;
        }
        let row = self.virtual_register(width);
        self.fixed.insert((width, fill), row);
        self.fixed_rows.push((row, width, fill));
        row
    }

    pub fn open(&mut self, parent: Option<usize>) -> usize {
        self.scopes.push(Scope { parent, ..Scope::default() });
        self.scopes.len() - 1
    }

    pub fn emit(&mut self, instruction: Instruction) {
        self.program.instructions.push(instruction);
        self.program.sources.push(self.at);
    }

    /// Emits an instruction with lists of targets and sources.
    pub fn emit_list(&mut self, mut instruction: Instruction, into: &[u32], from: &[u32]) {
        instruction.list = self.program.lists.len() as u32;
        instruction.list_into = into.len() as u8;
        instruction.list_from = from.len() as u8;
        self.program.lists.extend_from_slice(into);
        self.program.lists.extend_from_slice(from);
        self.emit(instruction);
    }

    /// Returns the index of the next instruction.
    pub fn here(&self) -> u32 {
        self.program.instructions.len() as u32
    }

    fn fail<T>(&self, what: String) -> Result<T, DecodeError> {
        Err(DecodeError { line: self.at.ptx_line, what })
    }

    pub fn body(
        &mut self,
        statements: &'a [Statement<'a>],
        root: usize,
        within: Within,
    ) -> Result<(), DecodeError> {
        let mut scope = root;
        for statement in statements {
            match statement {
                Statement::Open => scope = self.open(Some(scope)),
                Statement::Close => scope = self.scopes[scope].parent.unwrap_or(root),
                Statement::Registers { ty, name, count } => {
                    if ty.bits > 64 {
                        return self.fail(format!("registers of {} bits are not supported", ty.bits));
                    }
                    let width =
                        if ty.kind == Kind::Predicate { Width::Predicate } else { Width::of_bits(ty.bits) };
                    let first = self.widths.len() as u32;
                    self.widths.extend(std::iter::repeat_n(width, count.unwrap_or(1) as usize));
                    match count {
                        Some(count) => drop(self.scopes[scope].ranges.insert(name, (first, *count))),
                        None => drop(self.scopes[scope].registers.insert(name, first)),
                    }
                }
                Statement::Variable(variable) => self.variable(scope, variable),
                Statement::Label(label) => {
                    let here = self.here();
                    self.scopes[scope].labels.insert(label, here);
                }
                Statement::Step(step) => {
                    self.at = step.source;
                    if let Err(what) = self.step(scope, step, within) {
                        return self.fail(what);
                    }
                }
            }
        }
        Ok(())
    }

    fn variable(&mut self, scope: usize, variable: &'a VariableText<'a>) {
        let (bytes, align) = (variable.bytes, variable.align);
        let symbol = match variable.space {
            ".shared" => Symbol::Shared(place(&mut self.program.shared_bytes, bytes, align)),
            ".local" => Symbol::Local(place(&mut self.program.local_bytes, bytes, align)),
            _ => {
                self.call_parameters += 1;
                Symbol::CallParameter(self.call_parameters)
            }
        };
        self.scopes[scope].symbols.insert(variable.name, symbol);
    }

    fn step(&mut self, scope: usize, step: &'a Step<'a>, within: Within) -> Result<(), String> {
        let mut draft = blank();
        if let Some((name, negated)) = step.guard {
            draft.guard = self.source(scope, &Operand::Name(name), Width::Predicate)?;
            draft.guard_flip = if negated { u32::MAX } else { 0 };
        }
        let mut mnemonic = Mnemonic::new(step.mnemonic);
        let operands = &step.operands[..];
        match mnemonic.name {
            "bra" | "ret" | "exit" | "trap" | "bar" | "barrier" | "membar" | "fence" | "call" => {
                self.control(scope, draft, &mut mnemonic, operands, within)?;
            }
            "ld" | "ldu" | "st" | "atom" | "red" | "cp" | "ldmatrix" | "prefetch" | "prefetchu" => {
                self.memory(scope, draft, &mut mnemonic, operands)?;
            }
            "mma" | "shfl" | "vote" | "match" | "redux" | "activemask" => {
                self.warp_wide(scope, draft, &mut mnemonic, operands)?;
            }
            "mov" | "cvta" | "cvt" | "setp" => self.conversion(scope, draft, &mut mnemonic, operands)?,
            _ => self.arithmetic(scope, draft, &mut mnemonic, operands)?,
        }
        mnemonic.finish()
    }

    /// Inlines the call of a function of the module.
    pub fn inline(
        &mut self,
        scope: usize,
        function: &'a Function<'a>,
        actual: &[(&'a [Operand<'a>], &'a [VariableText<'a>])],
    ) -> Result<(), String> {
        let Some(body) = &function.body else {
            return Err(format!("the function `{}` has no body in this module", function.name));
        };
        if let Some(error) = &function.error {
            return Err(format!("the function `{}`: {error}", function.name));
        }
        self.depth += 1;
        if self.depth > DEEPEST_CALL {
            return Err(format!("calls of `{}` are nested deeper than {DEEPEST_CALL}", function.name));
        }
        let inner = self.open(None);
        for (operands, formals) in actual {
            if operands.len() != formals.len() {
                let (n, m) = (operands.len(), formals.len());
                return Err(format!("a call of `{}` has {n} parameters, not {m}", function.name));
            }
            for (operand, formal) in operands.iter().zip(*formals) {
                let Operand::Name(name) = operand else { return Err(format!("{operand:?} is no parameter")) };
                let symbol = self.symbol(scope, name)?;
                self.scopes[inner].symbols.insert(formal.name, symbol);
            }
        }
        self.calls += 1;
        let call = self.calls;
        let at = self.at;
        self.body(body, inner, Some(call)).map_err(|e| format!("in `{}`: {e}", function.name))?;
        self.at = at;
        let here = self.here();
        self.return_targets.insert(call, here);
        self.depth -= 1;
        Ok(())
    }

    fn finish(mut self) -> Result<Program, DecodeError> {
        // This exit ends all lanes of a body that has no final return. A label at the end of the body points to this
        // exit.
        self.emit(Instruction { control: Control::Exit, ..blank() });
        for (index, scope, label) in std::mem::take(&mut self.branches) {
            let Some(target) = self.find(scope, |s| s.labels.get(label).copied()) else {
                self.at = self.program.sources[index];
                return self.fail(format!("the label `{label}` is not declared"));
            };
            self.program.instructions[index].target = target;
        }
        for (index, call) in std::mem::take(&mut self.returns) {
            self.program.instructions[index].target = self.return_targets.get(&call).copied().unwrap_or(0);
        }
        self.program.shared_bytes = self.program.shared_bytes.next_multiple_of(self.dynamic_align as u32);
        let dynamic = u64::from(self.program.shared_bytes);
        for (_, _, fill) in &mut self.fixed_rows {
            if *fill == Fill::DynamicShared {
                *fill = Fill::Constant(dynamic);
            }
        }
        self.program.files.clone_from(&self.text.files);
        super::registers::assign(&mut self.program, &self.widths, &self.fixed_rows);
        Ok(self.program)
    }
}

/// Lowers a kernel.
///
/// # Errors
///
/// The name of an instruction or a modifier that the emulator does not support.
pub(crate) fn lower<'a>(
    text: &'a Text<'a>,
    kernel: &'a Function<'a>,
    variable_names: &'a [&'a str],
) -> Result<Program, DecodeError> {
    if let Some(error) = &kernel.error {
        return Err(error.clone());
    }
    let mut lowering = Lowering {
        text,
        module_shared: text.variables.iter().filter(|v| v.space == ".shared").collect(),
        variable_names,
        widths: Vec::new(),
        scopes: Vec::new(),
        program: Program::default(),
        fixed: HashMap::new(),
        fixed_rows: Vec::new(),
        call_rows: HashMap::new(),
        call_parameters: 0,
        dynamic_align: 1,
        branches: Vec::new(),
        returns: Vec::new(),
        return_targets: HashMap::new(),
        calls: 0,
        depth: 0,
        at: Source::default(),
    };
    let top = lowering.open(None);
    for (variable, (offset, ..)) in kernel.parameters.iter().zip(parameters(kernel)) {
        lowering.scopes[top].symbols.insert(variable.name, Symbol::EntryParameter(offset));
    }
    let root = lowering.open(Some(top));
    lowering.body(kernel.body.as_deref().unwrap_or(&[]), root, None)?;
    lowering.finish()
}
