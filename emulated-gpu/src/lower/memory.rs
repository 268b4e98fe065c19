//! Lowers loads, stores, atomic operations and copies.

use crate::exec::copies;
use crate::ops;
use crate::program::{Control, Fill, Instruction, NONE, Space, Width};
use crate::ptx::{Kind, Operand, Type};

use super::addresses::take_space;
use super::kernel::Lowering;
use super::mnemonic::Mnemonic;
use super::names::Symbol;

/// Takes `.volatile`, or a memory order and its scope, from a mnemonic. Returns true if the access is strong.
fn take_order(mnemonic: &mut Mnemonic<'_>) -> bool {
    let strong = mnemonic.take_any(&["volatile", "relaxed", "acquire", "release"]).is_some();
    mnemonic.take("weak");
    if strong {
        mnemonic.take_any(&["cta", "gpu", "sys", "cluster"]);
    }
    strong
}

fn elements<'o, 'a>(operand: &'o Operand<'a>) -> &'o [Operand<'a>] {
    match operand {
        Operand::List(list) => list,
        one => std::slice::from_ref(one),
    }
}

impl<'a> Lowering<'a> {
    pub(super) fn memory(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        match mnemonic.name {
            "cp" => return self.copy(scope, draft, mnemonic, operands),
            "atom" | "red" => return self.atomic(scope, draft, mnemonic, operands),
            "ldmatrix" => return self.load_matrix(scope, draft, mnemonic, operands),
            "prefetch" | "prefetchu" => {
                // `prefetch` is a hint and has no effect. Its address is not checked.
                take_space(mnemonic);
                mnemonic.take_any(&["L1", "L2"]);
                mnemonic.take_hints();
                return Ok(());
            }
            _ => {}
        }
        let (store, Some(ty), [first, second]) = (mnemonic.name == "st", mnemonic.take_type(), operands)
        else {
            return mnemonic.unknown();
        };
        draft.space = take_space(mnemonic);
        draft.detail = if take_order(mnemonic) { ops::memory::STRONG } else { 0 };
        mnemonic.take_hints();
        let vector = mnemonic.take_any(&["v2", "v4"]);
        let (address, values) = if store { (first, second) } else { (second, first) };
        let values = elements(values);
        if values.len() != vector.map_or(1, |v| 2 << v) {
            return Err(format!("`{}` has {} values", mnemonic.text, values.len()));
        }
        if draft.space == Space::Parameter
            && let Some((symbol, offset)) = self.parameter_symbol(scope, address)
        {
            return self.parameter(scope, draft, ty, symbol, offset, store, values);
        }
        self.set_address(scope, &mut draft, address)?;
        let least = Width::of_bits(ty.bits.max(16));
        let mut rows = Vec::new();
        for value in values {
            rows.push(self.wide_register(scope, value, least)?);
        }
        let known = rows.iter().find(|&&row| row != NONE);
        let width = known.map_or(least, |&row| self.widths[row as usize]);
        if rows.iter().any(|&row| row != NONE && self.widths[row as usize] != width) {
            return Err(format!("`{}` has registers of several widths", mnemonic.text));
        }
        let run = if store { ops::store(ty, width) } else { ops::load(ty, width) };
        let Some(run) = run else { return mnemonic.unknown() };
        draft.run = run;
        match (store, &rows[..]) {
            (true, &[row]) => {
                draft.from[1] = row;
                self.emit(draft);
            }
            (false, &[row]) => {
                draft.into[0] = row;
                self.emit(draft);
            }
            (true, rows) => self.emit_list(draft, &[], rows),
            (false, rows) => self.emit_list(draft, rows, &[]),
        }
        Ok(())
    }

    /// Lowers an access to a parameter. A parameter of the kernel is a fixed row. A parameter of an inlined call is a
    /// register.
    #[allow(clippy::too_many_arguments)]
    fn parameter(
        &mut self,
        scope: usize,
        draft: Instruction,
        ty: Type,
        symbol: Symbol,
        offset: i64,
        store: bool,
        values: &[Operand<'a>],
    ) -> Result<(), String> {
        let least = Width::of_bits(ty.bits.max(16));
        for (index, value) in values.iter().enumerate() {
            let offset = offset + index as i64 * i64::from(ty.bytes());
            let register = self.wide_register(scope, value, least)?;
            if register == NONE {
                continue;
            }
            let width = self.widths[register as usize];
            let row = match symbol {
                Symbol::EntryParameter(base) if !store => {
                    let at = i64::from(base) + offset;
                    let signed = ty.kind == Kind::Signed;
                    self.fixed(width, Fill::Parameter { offset: at as u32, bytes: ty.bytes(), signed })
                }
                Symbol::CallParameter(parameter) => self.call_row(parameter, offset, width),
                _ => return Err("a store to a parameter of the kernel is not supported".to_owned()),
            };
            let (into, from) = if store { (row, register) } else { (register, row) };
            let mut copy = Instruction { run: ops::copy(width), ..draft.clone() };
            copy.space = Space::Generic;
            copy.detail = 0;
            copy.into[0] = into;
            copy.from[0] = from;
            self.emit(copy);
        }
        Ok(())
    }

    fn call_row(&mut self, parameter: u32, offset: i64, width: Width) -> u32 {
        if let Some(&row) = self.call_rows.get(&(parameter, offset, width)) {
            return row;
        }
        let row = self.virtual_register(width);
        self.call_rows.insert((parameter, offset, width), row);
        row
    }

    fn atomic(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        const NAMES: [&str; 10] = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"];
        let Some(ty) = mnemonic.take_type() else { return mnemonic.unknown() };
        draft.space = take_space(mnemonic);
        let release = mnemonic.take_any(&["acq_rel", "release"]).is_some();
        mnemonic.take_any(&["relaxed", "acquire"]);
        mnemonic.take_any(&["cta", "gpu", "sys", "cluster"]);
        mnemonic.take_hints();
        if ty.packed {
            mnemonic.take("noftz");
        }
        let name = mnemonic.take_any(&NAMES).map_or("", |i| NAMES[i]);
        let Some((run, detail)) = ops::atomic(name, ty) else { return mnemonic.unknown() };
        draft.run = run;
        draft.detail = detail | if release { ops::atomics::RELEASE } else { 0 };
        let width = Width::of_bits(ty.bits);
        let operands = if mnemonic.name == "atom" {
            let Some((target, rest)) = operands.split_first() else { return mnemonic.unknown() };
            draft.into[0] = self.target(scope, target, width)?;
            rest
        } else {
            operands
        };
        let (address, values) = match (name, operands) {
            ("cas", [address, values @ ..]) if values.len() == 2 => (address, values),
            (_, [address, values @ ..]) if values.len() == 1 && name != "cas" => (address, values),
            _ => return mnemonic.unknown(),
        };
        self.set_address(scope, &mut draft, address)?;
        for (index, value) in values.iter().enumerate() {
            draft.from[index + 1] = self.source(scope, value, width)?;
        }
        self.emit(draft);
        Ok(())
    }

    fn copy(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        if !mnemonic.take("async") {
            return mnemonic.unknown();
        }
        match mnemonic.take_any(&["commit_group", "wait_group", "wait_all"]) {
            Some(0) => draft.run = copies::commit,
            Some(1) => {
                let [Operand::Number(left)] = operands else { return mnemonic.unknown() };
                draft.run = copies::wait;
                draft.detail = *left as u32;
            }
            Some(_) => {
                draft.run = copies::wait;
                draft.detail = NONE;
            }
            None => return self.start_copy(scope, draft, mnemonic, operands),
        }
        self.emit(draft);
        Ok(())
    }

    fn start_copy(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        let small = mnemonic.take("ca");
        let shared = mnemonic.take("shared") || mnemonic.take("shared::cta");
        if !shared || !mnemonic.take("global") || !small && !mnemonic.take("cg") {
            return mnemonic.unknown();
        }
        mnemonic.take_hints();
        let (target, source, bytes, size) = match operands {
            [target, source, Operand::Number(bytes)] => (target, source, *bytes, None),
            [target, source, Operand::Number(bytes), size] => (target, source, *bytes, Some(size)),
            _ => return mnemonic.unknown(),
        };
        if !(bytes == 16 || small && matches!(bytes, 4 | 8)) {
            return Err(format!("`{}` of {bytes} bytes", mnemonic.text));
        }
        self.set_address(scope, &mut draft, target)?;
        let (row, wide, offset) = self.address_of(scope, source)?;
        let Ok(offset) = i32::try_from(offset) else {
            return Err(format!("the offset {offset} is too large"));
        };
        if !wide {
            return Err("a global address of 32 bits is not supported".to_owned());
        }
        draft.from[1] = row;
        draft.target = offset as u32;
        draft.detail = bytes as u32;
        if let Some(size) = size {
            draft.from[2] = self.source(scope, size, Width::W32)?;
        }
        draft.run = copies::start;
        self.emit(draft);
        Ok(())
    }

    fn load_matrix(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        let ty = mnemonic.take_type();
        let form = ["sync", "aligned", "m8n8"].iter().all(|m| mnemonic.take(m));
        let count = mnemonic.take_any(&["x1", "x2", "x4"]);
        let (true, Some(count), Some(16), [targets, address]) = (form, count, ty.map(|t| t.bits), operands)
        else {
            return mnemonic.unknown();
        };
        draft.detail = if mnemonic.take("trans") { ops::matrix::TRANSPOSED } else { 0 };
        draft.space = take_space(mnemonic);
        let targets = elements(targets);
        if targets.len() != 1 << count || !matches!(draft.space, Space::Shared | Space::Generic) {
            return mnemonic.unknown();
        }
        let mut rows = Vec::new();
        for target in targets {
            rows.push(self.target(scope, target, Width::W32)?);
        }
        self.set_address(scope, &mut draft, address)?;
        draft.control = Control::Converged;
        draft.run = ops::load_matrix;
        self.emit_list(draft, &rows, &[]);
        Ok(())
    }
}
