//! Lowers `mov`, `cvta`, `cvt` and `setp`.

use crate::ops::{self, Conversion, Number, Rounding};
use crate::program::{Instruction, LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW, Space, Width};
use crate::ptx::{Kind, Operand, Type};

use super::addresses::take_space;
use super::arithmetic::width;
use super::kernel::Lowering;
use super::mnemonic::Mnemonic;

impl<'a> Lowering<'a> {
    pub(super) fn conversion(
        &mut self,
        scope: usize,
        draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        match mnemonic.name {
            "mov" => self.mov(scope, draft, mnemonic, operands),
            "cvta" => self.cvta(scope, draft, mnemonic, operands),
            "cvt" => self.cvt(scope, draft, mnemonic, operands),
            _ => self.comparison(scope, draft, mnemonic, operands),
        }
    }

    fn mov(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        let (Some(ty), [target, source]) = (mnemonic.take_type(), operands) else {
            return mnemonic.unknown();
        };
        if ty.bits > 64 {
            return mnemonic.unknown();
        }
        let part = |parts: usize| Width::of_bits(ty.bits / parts as u32);
        match (target, source) {
            (Operand::List(targets), source) => {
                let Some(run) = ops::split(targets.len(), ty.bits) else { return mnemonic.unknown() };
                draft.run = run;
                draft.from[0] = self.source(scope, source, width(ty))?;
                let mut rows = Vec::new();
                for target in targets {
                    rows.push(self.target(scope, target, part(targets.len()))?);
                }
                self.emit_list(draft, &rows, &[]);
            }
            (target, Operand::List(sources)) => {
                let Some(run) = ops::join(sources.len(), ty.bits) else { return mnemonic.unknown() };
                draft.run = run;
                draft.into[0] = self.target(scope, target, width(ty))?;
                for (index, source) in sources.iter().enumerate() {
                    draft.from[index] = self.source(scope, source, part(sources.len()))?;
                }
                self.emit(draft);
            }
            (target, Operand::Name(name)) if name.starts_with("%clock") || *name == "%globaltimer" => {
                draft.into[0] = self.target(scope, target, width(ty))?;
                draft.run = ops::clock(width(ty));
                self.emit(draft);
            }
            (target, source) => {
                draft.run = ops::copy(width(ty));
                draft.into[0] = self.target(scope, target, width(ty))?;
                draft.from[0] = self.source(scope, source, width(ty))?;
                self.emit(draft);
            }
        }
        Ok(())
    }

    fn cvta(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        let (Some(ty), [target, source]) = (mnemonic.take_type(), operands) else {
            return mnemonic.unknown();
        };
        let to = mnemonic.take("to");
        let window = match take_space(mnemonic) {
            Space::Global => 0,
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Parameter => PARAMETER_WINDOW,
            Space::Generic => return mnemonic.unknown(),
        };
        if ty.bits != 64 {
            return mnemonic.unknown();
        }
        draft.into[0] = self.target(scope, target, Width::W64)?;
        draft.from[0] = self.source(scope, source, Width::W64)?;
        draft.offset = if to { (window as i64).wrapping_neg() } else { window as i64 };
        draft.run = if window == 0 { ops::copy(Width::W64) } else { ops::generic_address() };
        self.emit(draft);
        Ok(())
    }

    fn cvt(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
    ) -> Result<(), String> {
        const ROUNDINGS: [&str; 9] = ["rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna"];
        let (Some(from_type), Some(into_type)) = (mnemonic.take_type(), mnemonic.take_type()) else {
            return mnemonic.unknown();
        };
        if [into_type.kind, from_type.kind].contains(&Kind::E4m3) {
            return self.cvt_float8(scope, draft, mnemonic, operands, (into_type, from_type));
        }
        let (Some(into), Some(from)) = (Number::of(into_type), Number::of(from_type)) else {
            return mnemonic.unknown();
        };
        let packed = into_type.packed;
        if from_type.packed || packed && from != Number::F32 {
            return mnemonic.unknown();
        }
        let named = mnemonic.take_any(&ROUNDINGS).map(|i| ROUNDINGS[i]);
        let rounding = named.and_then(|n| Rounding::of_letter(n.as_bytes()[1])).unwrap_or_default();
        let plan = Conversion {
            into,
            from,
            rounding,
            integral: named.is_some_and(|n| n.len() == 3 && n != "rna"),
            away: named == Some("rna"),
            ftz: mnemonic.take("ftz"),
            sat: mnemonic.take("sat"),
            relu: mnemonic.take("relu"),
            packed,
        };
        if !permitted(plan, named) {
            return mnemonic.unknown();
        }
        let least = |number: Number| Width::of_bits(number.bits().max(16));
        let ([target, source] | [target, source, _]) = operands else { return mnemonic.unknown() };
        if (operands.len() == 3) != packed {
            return mnemonic.unknown();
        }
        if packed {
            draft.into[0] = self.target(scope, target, Width::W32)?;
            draft.from[0] = self.source(scope, source, Width::W32)?;
            draft.from[1] = self.source(scope, &operands[2], Width::W32)?;
        } else {
            draft.into[0] = self.wide_register(scope, target, least(into))?;
            draft.from[0] = self.wide_register(scope, source, least(from))?;
        }
        let compute =
            ops::conversion(plan, self.widths[draft.into[0] as usize], self.widths[draft.from[0] as usize]);
        draft.run = compute.run;
        draft.detail = compute.detail;
        self.emit(draft);
        Ok(())
    }
}

impl<'a> Lowering<'a> {
    /// Lowers a conversion from or to two e4m3.
    fn cvt_float8(
        &mut self,
        scope: usize,
        mut draft: Instruction,
        mnemonic: &mut Mnemonic<'_>,
        operands: &'a [Operand<'a>],
        (into, from): (Type, Type),
    ) -> Result<(), String> {
        let is_pair_of_halves = |ty: Type| ty.kind == Kind::Float && ty.packed;
        let is_float = from.kind == Kind::Float && from.bits == 32 && !from.packed;
        let compute = match into.kind {
            _ if !mnemonic.take("rn") => return mnemonic.unknown(),
            _ if is_pair_of_halves(into) => ops::to_halves(),
            Kind::E4m3 if !mnemonic.take("satfinite") => return mnemonic.unknown(),
            Kind::E4m3 if is_pair_of_halves(from) => ops::of_halves(),
            Kind::E4m3 if is_float => ops::of_floats(),
            _ => return mnemonic.unknown(),
        };
        let Some(([target], sources)) = operands.split_first_chunk() else { return mnemonic.unknown() };
        if sources.len() != compute.from.len() {
            return mnemonic.unknown();
        }
        draft.into[0] = self.target(scope, target, compute.into)?;
        for (index, source) in sources.iter().enumerate() {
            draft.from[index] = self.source(scope, source, compute.from[index])?;
        }
        draft.run = compute.run;
        self.emit(draft);
        Ok(())
    }
}

/// True if PTX has this conversion and the emulator supports it.
fn permitted(plan: Conversion, named: Option<&str>) -> bool {
    let integers = (plan.into.is_integer(), plan.from.is_integer());
    let half = matches!(plan.into, Number::F16 | Number::Bf16);
    let narrows = plan.into.bits() < plan.from.bits() || plan.into == Number::Tf32;
    let rounding = match integers {
        (true, true) => named.is_none(),
        (true, false) => plan.integral,
        (false, true) => named.is_some() && !plan.integral && !plan.away,
        // A conversion between equal float types may only round to an integral value. A conversion to a wider type is
        // exact and names no rounding.
        (false, false) if plan.into == plan.from => {
            plan.integral || named.is_none() && plan.into != Number::Tf32
        }
        (false, false) if narrows => {
            named.is_some() && !plan.integral && (plan.away == (named == Some("rna")))
        }
        (false, false) => named.is_none(),
    };
    let directed = matches!(plan.rounding, Rounding::Down | Rounding::Up);
    rounding
        && !(half && directed)
        && (!plan.away || plan.into == Number::Tf32)
        && (!plan.relu || matches!(plan.into, Number::F16 | Number::Bf16 | Number::Tf32))
        && (!plan.sat || plan.into != Number::F64 && plan.into != Number::Tf32)
        && (!plan.ftz || plan.into == Number::F32 || plan.from == Number::F32)
        && (plan.from != Number::F64 || plan.into != Number::Tf32)
        && plan.from != Number::Tf32
        && !(plan.into == Number::F64 && integers.1 && plan.rounding != Rounding::Nearest)
}
