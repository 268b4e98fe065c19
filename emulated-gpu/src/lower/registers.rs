//! Assigns rows to virtual registers. Registers that are not live at the same time share a row.
//!
//! An instruction writes only the lanes that run it. So two registers can share a row if they are never live at once on
//! the path of any one lane. A register is live from its first to its last instruction in text order, extended over the
//! blocks through which its value is live (linear scan; Poletto and Sarkar, "Linear scan register allocation", 1999).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::program::{Control, Fill, Instruction, NONE, Program, Width};

/// A basic block: the index of its first instruction, and the index after its last one.
struct Block {
    start: usize,
    end: usize,
    next: [Option<usize>; 2],
}

fn each_use(program: &Program, instruction: &Instruction, mut see: impl FnMut(u32)) {
    let single = instruction.from.iter().chain([&instruction.guard, &instruction.members]);
    for &row in single.chain(instruction.list_from(program)) {
        if row != NONE {
            see(row);
        }
    }
}

fn each_target(program: &Program, instruction: &Instruction, mut see: impl FnMut(u32)) {
    for &row in instruction.into.iter().chain(instruction.list_into(program)) {
        if row != NONE {
            see(row);
        }
    }
}

fn blocks(program: &Program) -> Vec<Block> {
    let code = &program.instructions;
    let mut starts = vec![false; code.len() + 1];
    starts[0] = true;
    starts[code.len()] = true;
    for (pc, instruction) in code.iter().enumerate() {
        if instruction.control == Control::Branch {
            starts[instruction.target as usize] = true;
            starts[pc + 1] = true;
        }
    }
    let edges: Vec<usize> = (0..=code.len()).filter(|&pc| starts[pc]).collect();
    let block_of = |pc: usize| edges.binary_search(&pc).ok().filter(|_| pc < code.len());
    let whole = |window: &[usize]| {
        let (start, end) = (window[0], window[1]);
        let last = &code[end - 1];
        let falls = match last.control {
            Control::Branch | Control::Exit => last.guard != NONE,
            _ => true,
        };
        let jumps = last.control == Control::Branch;
        let next =
            [falls.then(|| block_of(end)).flatten(), jumps.then(|| block_of(last.target as usize)).flatten()];
        Block { start, end, next }
    };
    edges.windows(2).map(whole).collect()
}

/// A set of registers.
#[derive(Clone, PartialEq)]
struct Set(Vec<u64>);

impl Set {
    fn new(registers: usize) -> Self {
        Set(vec![0; registers.div_ceil(64)])
    }

    fn insert(&mut self, register: u32) {
        self.0[register as usize / 64] |= 1 << (register % 64);
    }

    fn contains(&self, register: u32) -> bool {
        self.0[register as usize / 64] >> (register % 64) & 1 != 0
    }

    fn each(&self, mut see: impl FnMut(usize)) {
        for (index, &word) in self.0.iter().enumerate() {
            let mut left = word;
            while left != 0 {
                see(index * 64 + left.trailing_zeros() as usize);
                left &= left - 1;
            }
        }
    }
}

/// Returns the first and the last instruction for which each register is live.
fn lives(program: &Program, registers: usize) -> Vec<Option<(usize, usize)>> {
    let blocks = blocks(program);
    // Per block: registers that are read before they are written, and registers that are written without a guard.
    let mut read = vec![Set::new(registers); blocks.len()];
    let mut written = vec![Set::new(registers); blocks.len()];
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; registers];
    let extend = |lives: &mut Vec<Option<(usize, usize)>>, register: usize, pc: usize| {
        let life = lives[register].get_or_insert((pc, pc));
        *life = (life.0.min(pc), life.1.max(pc));
    };
    for (index, block) in blocks.iter().enumerate() {
        for pc in block.start..block.end {
            let instruction = &program.instructions[pc];
            each_use(program, instruction, |row| {
                extend(&mut lives, row as usize, pc);
                if !written[index].contains(row) {
                    read[index].insert(row);
                }
            });
            each_target(program, instruction, |row| {
                extend(&mut lives, row as usize, pc);
                if instruction.guard == NONE {
                    written[index].insert(row);
                } else if !written[index].contains(row) {
                    // A write with a guard counts as a read, too, because lanes whose guard is false keep the old
                    // value.
                    read[index].insert(row);
                }
            });
        }
    }
    let mut live_in = read;
    loop {
        let mut changed = false;
        for index in (0..blocks.len()).rev() {
            for next in blocks[index].next.into_iter().flatten() {
                for word in 0..live_in[index].0.len() {
                    let more = live_in[next].0[word] & !written[index].0[word];
                    let old = live_in[index].0[word];
                    changed |= more & !old != 0;
                    live_in[index].0[word] |= more;
                }
            }
        }
        if !changed {
            break;
        }
    }
    for (index, block) in blocks.iter().enumerate() {
        live_in[index].each(|register| extend(&mut lives, register, block.start));
        for next in block.next.into_iter().flatten() {
            live_in[next].each(|register| extend(&mut lives, register, block.end - 1));
        }
    }
    lives
}

/// Gives each register an offset in the register file, and replaces registers by offsets in the instructions.
pub(super) fn assign(program: &mut Program, widths: &[Width], fixed: &[(u32, Width, Fill)]) {
    let lives = lives(program, widths.len());
    let mut offsets = vec![NONE; widths.len()];
    let mut is_fixed = vec![false; widths.len()];
    for &(register, ..) in fixed {
        is_fixed[register as usize] = true;
    }
    let mut top = 0;
    // Wider rows come first, so that each row starts at a multiple of its size.
    for width in [Width::W64, Width::W32, Width::W16, Width::Predicate] {
        for &(register, ..) in fixed.iter().filter(|f| f.1 == width) {
            offsets[register as usize] = top;
            top += width.row_bytes();
        }
        let mut living: Vec<(usize, usize, usize)> = lives
            .iter()
            .enumerate()
            .filter(|&(register, _)| widths[register] == width && !is_fixed[register])
            .filter_map(|(register, life)| life.map(|(first, last)| (first, last, register)))
            .collect();
        living.sort_unstable();
        let mut free = Vec::new();
        let mut active = BinaryHeap::new();
        for (first, last, register) in living {
            while let Some(&Reverse((end, offset))) = active.peek()
                && end < first
            {
                active.pop();
                free.push(offset);
            }
            let offset = free.pop().unwrap_or_else(|| {
                top += width.row_bytes();
                top - width.row_bytes()
            });
            offsets[register] = offset;
            active.push(Reverse((last, offset)));
        }
    }
    let give_offset = |row: &mut u32| {
        if *row != NONE {
            *row = offsets[*row as usize];
        }
    };
    for instruction in &mut program.instructions {
        instruction.into.iter_mut().for_each(give_offset);
        instruction.from.iter_mut().for_each(give_offset);
        give_offset(&mut instruction.guard);
        give_offset(&mut instruction.members);
    }
    program.lists.iter_mut().for_each(give_offset);
    program.rows = fixed.iter().map(|&(row, width, fill)| (offsets[row as usize], width, fill)).collect();
    program.file_bytes = top.next_multiple_of(256);
}
